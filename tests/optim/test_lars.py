"""LARS does what its equations say, step by step."""

from typing import Any

import numpy as np
import pytest
import torch
from optax_cases import LARS_SETTINGS, NUM_STEPS, Array, assert_close, gradients, start
from optax_reference import needs_optax, optax_says

from lockstep.errors import BadArgument
from lockstep.optim.lars import LARS


def rates(count: int) -> list[float]:
    return [0.5 * (1 + step // 20) / (1 + step / 50) for step in range(count)]


def ratio(w: Array, g: Array, lr: float, o: dict[str, Any]) -> float:
    """The paper's λ, and its variants."""
    beta, eta = o.get("weight_decay", 0.0), o.get("trust_coefficient", 0.001)
    w_norm, g_norm = np.sqrt(np.sum(w**2)), np.sqrt(np.sum(g**2))
    if o.get("joint_norm"):
        below = g_norm = np.sqrt(np.sum((g + beta * w) ** 2))
    else:
        below = g_norm + beta * w_norm
    if not o.get("adapt", True) or w_norm == 0 or g_norm == 0:
        return 1.0
    local = eta * w_norm / (below + o.get("eps", 1e-8))
    if o.get("clip"):
        return float(min(local / lr, 1.0))
    return float(min(local, o.get("max_trust", np.inf)))


def by_the_paper(ws: list[Array], seed: int, lrs: list[float], options: dict[str, Any]) -> list[Array]:
    ws, vs, before = [w.copy() for w in ws], [np.zeros_like(w) for w in ws], lrs[0]
    m, beta = options.get("momentum", 0.9), options.get("weight_decay", 0.0)
    for lr, gs in zip(lrs, gradients(seed, len(lrs)), strict=True):
        for i, g in enumerate(gs):
            push = lr * ratio(ws[i], g, lr, options) * (g + beta * ws[i])
            vs[i] = m * vs[i] * (lr / before if options.get("momentum_correction") else 1.0) + push
            ws[i] = ws[i] - (m * vs[i] + push if options.get("nesterov") else vs[i])
        before = lr
    return ws


def by_lars(ws: list[Array], seed: int, lrs: list[float], options: dict[str, Any]) -> list[Array]:
    params = [torch.tensor(w, requires_grad=True) for w in ws]
    group = {"params": params, "adapt": options.get("adapt", True)}
    optimizer = LARS([group], lr=lrs[0], **{key: value for key, value in options.items() if key != "adapt"})
    for lr, gs in zip(lrs, gradients(seed, len(lrs)), strict=True):
        optimizer.param_groups[0]["lr"] = lr
        for param, g in zip(params, gs, strict=True):
            param.grad = torch.as_tensor(g)
        optimizer.step()
    return [param.detach().numpy() for param in params]


VARIANTS: dict[str, dict[str, Any]] = {
    "the defaults": {},
    "weight decay": {"weight_decay": 1e-2},
    "nesterov": {"weight_decay": 1e-2, "nesterov": True},
    "no momentum": {"momentum": 0.0, "weight_decay": 1e-2},
    "the joint norm": {"weight_decay": 0.1, "joint_norm": True},
    "LARC": {"weight_decay": 1e-2, "clip": True, "trust_coefficient": 0.5},
    "a limit on the ratio": {"trust_coefficient": 0.5, "max_trust": 0.3},
    "momentum correction": {"weight_decay": 1e-2, "momentum_correction": True},
    "nesterov with momentum correction": {"nesterov": True, "momentum_correction": True},
    "an eps that counts": {"eps": 0.5},
    "an excluded group": {"weight_decay": 1e-3, "adapt": False},
}


def lrs_for(options: dict[str, Any], count: int) -> list[float]:
    """Rates that change; small ones where no ratio makes them small."""
    return [lr / 1000 for lr in rates(count)] if options.get("adapt") is False else rates(count)


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_200_steps_follow_the_equations(options: dict[str, Any]) -> None:
    lrs = lrs_for(options, 200)
    assert_close(by_lars(start(1), 1, lrs, options), by_the_paper(start(1), 1, lrs, options))


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_tensor_by_tensor_gives_the_same_bits_as_all_together(options: dict[str, Any]) -> None:
    lrs = lrs_for(options, 25)
    loop, together = (by_lars(start(1), 1, lrs, {**options, "foreach": foreach}) for foreach in (False, True))
    assert [one.tobytes() for one in loop] == [other.tobytes() for other in together]


@pytest.mark.parametrize("variant", ["LARC", "a limit on the ratio"])
def test_the_limit_binds_for_some_tensors_and_not_for_others(variant: str) -> None:
    limit = 1.0 if variant == "LARC" else 0.3
    ratios = [ratio(w, g, 0.5, VARIANTS[variant]) for gs in gradients(1, 20) for w, g in zip(start(1), gs, strict=True)]
    assert any(found == limit for found in ratios)
    assert any(found < limit for found in ratios)


def test_groups_have_options_of_their_own() -> None:
    (a, b), (g, h) = (np.ones(3), np.full(2, 2.0)), (np.array([1.0, 0.0, 2.0]), np.array([0.5, 1.0]))
    params = [torch.tensor(w, requires_grad=True) for w in (a, b)]
    for param, grad in zip(params, (g, h), strict=True):
        param.grad = torch.tensor(grad)
    excluded = {"params": [params[1]], "adapt": False, "weight_decay": 0.0, "lr": 0.25}
    LARS([{"params": [params[0]]}, excluded], lr=2.0, weight_decay=0.1).step()
    first = a - 2.0 * 0.001 * np.sqrt(3) / (np.sqrt(5) + 0.1 * np.sqrt(3) + 1e-8) * (g + 0.1 * a)
    assert_close([param.detach().numpy() for param in params], [first, b - 0.25 * h])


@pytest.mark.soak
@needs_optax
@pytest.mark.parametrize("case", ["lars", "lars with nesterov"])
def test_optax_agrees_by_the_joint_norm(case: str) -> None:
    options = {**LARS_SETTINGS, "joint_norm": True, "nesterov": case == "lars with nesterov"}
    assert_close(by_lars(start(0), 0, [0.3] * NUM_STEPS, options), optax_says(case))


@pytest.mark.soak
@needs_optax
def test_optax_agrees_by_default_where_nothing_decays() -> None:
    assert_close(by_lars(start(0), 0, [0.3] * NUM_STEPS, {}), optax_says("lars without decay"))


def after_sgd(lrs: list[float], nesterov: bool) -> list[Array]:
    params = [torch.tensor(w, requires_grad=True) for w in start(4)]
    optimizer = torch.optim.SGD(params, lrs[0], momentum=0.9, weight_decay=1e-2, nesterov=nesterov)
    for lr, gs in zip(lrs, gradients(4, len(lrs)), strict=True):
        optimizer.param_groups[0]["lr"] = lr
        for param, g in zip(params, gs, strict=True):
            param.grad = torch.as_tensor(g)
        optimizer.step()
    return [param.detach().numpy() for param in params]


@pytest.mark.parametrize("nesterov", [False, True])
def test_an_excluded_group_with_momentum_correction_is_torchs_sgd_at_any_rate(nesterov: bool) -> None:
    lrs = [lr / 1000 for lr in rates(60)]
    options = {"adapt": False, "momentum_correction": True, "weight_decay": 1e-2, "nesterov": nesterov}
    assert_close(by_lars(start(4), 4, lrs, options), after_sgd(lrs, nesterov))


def test_momentum_correction_reaches_parameters_without_a_gradient_at_the_change() -> None:
    params = [torch.ones(2, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    optimizer = LARS([{"params": params, "adapt": False}], lr=1.0, momentum_correction=True)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.param_groups[0]["lr"], params[1].grad = 0.5, None
    optimizer.step()
    assert optimizer.state[params[1]]["velocity"].tolist() == [0.5, 0.5]


def test_momentum_correction_survives_a_warm_up_from_zero() -> None:
    param = torch.ones(2, requires_grad=True)
    optimizer = LARS([param], lr=0.0, momentum_correction=True)
    for lr in (0.0, 0.1, 0.2):
        optimizer.param_groups[0]["lr"], param.grad = lr, torch.ones(2)
        optimizer.step()
    assert bool(param.isfinite().all())
    assert bool((param < 1).all())


def test_larc_with_rate_zero_moves_nothing() -> None:
    param = torch.ones(2, requires_grad=True)
    param.grad = torch.ones(2)
    LARS([param], lr=0.0, clip=True).step()
    assert param.tolist() == [1.0, 1.0]


def test_larc_gives_a_parameter_that_is_zero_the_whole_rate() -> None:
    param = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    param.grad = torch.ones_like(param)
    LARS([param], lr=0.25, clip=True).step()
    assert param.tolist() == [-0.25, -0.25]


def test_nothing_is_kept_without_momentum() -> None:
    param = torch.ones(2, requires_grad=True)
    param.grad = torch.ones(2)
    optimizer = LARS([param], lr=0.1, momentum=0.0)
    optimizer.step()
    assert not optimizer.state_dict()["state"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lr": -0.1}, "lr is -0.1; write a number that is 0 or more"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"lr": "0.1"}, "lr is '0.1'"),
        ({"lr": True}, "lr is True"),
        ({"momentum": 1.0}, "momentum is 1.0; write a number from 0 up to but not including 1"),
        ({"weight_decay": -1}, "weight_decay is -1"),
        ({"trust_coefficient": 0.0}, "trust_coefficient is 0.0; write a number greater than 0"),
        ({"eps": float("inf")}, "eps is inf"),
        ({"nesterov": 1}, "nesterov is 1; write True or False"),
        ({"nesterov": True, "momentum": 0.0}, "nesterov needs a momentum"),
        ({"clip": True, "max_trust": 2.0}, "clip and max_trust both limit the ratio"),
        ({"max_trust": 0.0}, "max_trust is 0.0; write a number greater than 0, or None"),
        ({"foreach": "yes"}, "foreach is 'yes'; write True, False or None"),
        ({"norms": 2}, "norms is 2; write a function"),
    ],
)
def test_nonsense_is_refused_with_what_to_write(options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadArgument) as refusal:
        LARS([torch.ones(2, requires_grad=True)], **{"lr": 0.1, **options})
    assert str(refusal.value).startswith(f"LARS: {said}")
