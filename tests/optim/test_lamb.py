"""LAMB does what its equations say, step by step."""

from typing import Any

import numpy as np
import pytest
import torch
from optax_cases import LAMB_SETTINGS, NUM_STEPS, Array, assert_close, gradients, start
from optax_reference import needs_optax, optax_says

from lockstep.errors import BadArgument
from lockstep.optim.lamb import LAMB


def by_the_paper(ws: list[Array], seed: int, lr: float, count: int, options: dict[str, Any]) -> list[Array]:
    xs, ms, vs = [w.copy() for w in ws], [np.zeros_like(w) for w in ws], [np.zeros_like(w) for w in ws]
    beta1, beta2 = options.get("betas", (0.9, 0.999))
    for t, gs in enumerate(gradients(seed, count), start=1):
        for i, g in enumerate(gs):
            ms[i] = beta1 * ms[i] + (1 - beta1) * g
            vs[i] = beta2 * vs[i] + (1 - beta2) * g**2
            corrected = options.get("bias_correction", True)
            m, v = (ms[i] / (1 - beta1**t), vs[i] / (1 - beta2**t)) if corrected else (ms[i], vs[i])
            r = m / (np.sqrt(v) + options.get("eps", 1e-6)) + options.get("weight_decay", 0.0) * xs[i]
            xs[i] = xs[i] - lr * ratio(xs[i], r, options) * r
    return xs


def ratio(x: Array, r: Array, options: dict[str, Any]) -> float:
    x_norm, r_norm = np.sqrt(np.sum(x**2)), np.sqrt(np.sum(r**2))
    if not options.get("adapt", True) or x_norm == 0 or r_norm == 0:
        return 1.0
    return float(min(x_norm / r_norm, options.get("max_trust", np.inf)))


def by_lamb(ws: list[Array], seed: int, lr: float, count: int, options: dict[str, Any]) -> list[Array]:
    params = [torch.tensor(w, requires_grad=True) for w in ws]
    group = {"params": params, "adapt": options.get("adapt", True)}
    optimizer = LAMB([group], lr, **{key: value for key, value in options.items() if key != "adapt"})
    take_steps(optimizer, params, seed, count)
    return [param.detach().numpy() for param in params]


def take_steps(optimizer: torch.optim.Optimizer, params: list[torch.Tensor], seed: int, count: int) -> None:
    for gs in gradients(seed, count):
        for param, g in zip(params, gs, strict=True):
            param.grad = torch.as_tensor(g)
        optimizer.step()


VARIANTS: dict[str, dict[str, Any]] = {
    "the defaults": {},
    "weight decay": {"weight_decay": 0.05},
    "other betas and eps": {"betas": (0.5, 0.9), "eps": 0.1},
    "no bias correction": {"bias_correction": False, "weight_decay": 0.05},
    "a limit on the ratio": {"max_trust": 0.9, "weight_decay": 0.05},
    "an excluded group": {"adapt": False, "weight_decay": 0.05},
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_200_steps_follow_the_equations(options: dict[str, Any]) -> None:
    assert_close(by_lamb(start(1), 1, 0.01, 200, options), by_the_paper(start(1), 1, 0.01, 200, options))


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_tensor_by_tensor_gives_the_same_bits_as_all_together(options: dict[str, Any]) -> None:
    loop, together = (by_lamb(start(1), 1, 0.01, 25, {**options, "foreach": foreach}) for foreach in (False, True))
    assert [one.tobytes() for one in loop] == [other.tobytes() for other in together]


def test_the_limit_on_the_ratio_makes_a_difference() -> None:
    free, limited = (by_lamb(start(1), 1, 0.01, 5, {"max_trust": limit}) for limit in (None, 0.9))
    assert not np.array_equal(free[0], limited[0])


@pytest.mark.soak
@needs_optax
def test_optax_agrees() -> None:
    options = {**LAMB_SETTINGS, "betas": (0.8, 0.95)}
    assert_close(by_lamb(start(0), 0, 0.01, NUM_STEPS, options), optax_says("lamb"))


@pytest.mark.soak
@needs_optax
def test_optax_agrees_on_the_defaults() -> None:
    assert_close(by_lamb(start(0), 0, 0.01, NUM_STEPS, {}), optax_says("lamb without decay"))


def test_an_excluded_group_is_torchs_adamw() -> None:
    params = [torch.tensor(w, requires_grad=True) for w in start(2)]
    take_steps(torch.optim.AdamW(params, 0.01, eps=1e-6, weight_decay=0.05), params, 2, 60)
    wanted = [param.detach().numpy() for param in params]
    assert_close(by_lamb(start(2), 2, 0.01, 60, {"adapt": False, "weight_decay": 0.05}), wanted)


def test_a_parameter_that_joins_late_counts_its_own_steps() -> None:
    early, late = (torch.ones(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    optimizer = LAMB([{"params": [early, late], "adapt": False}], eps=0.0)
    for number in range(3):
        early.grad, late.grad = torch.ones(2).double(), torch.ones(2).double() if number == 2 else None
        optimizer.step()
    assert [optimizer.state[param]["step"].item() for param in (early, late)] == [3.0, 1.0]
    np.testing.assert_allclose(late.detach().numpy(), 1 - 1e-3, rtol=1e-12)


def test_the_step_is_counted_on_the_cpu_as_in_torchs_adam() -> None:
    param = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    param.grad = torch.ones_like(param)
    states = []
    for kind in (LAMB, torch.optim.Adam):
        optimizer = kind([param])
        optimizer.step()
        states.append(optimizer.state[param]["step"])
    assert [(step.dtype, step.device.type, step.shape, step.item()) for step in states] == [
        (torch.float32, "cpu", torch.Size([]), 1.0)
    ] * 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lr": -1.0}, "lr is -1.0; write a number that is 0 or more"),
        ({"betas": 0.9}, "betas is 0.9; write two numbers from 0 up to but not including 1"),
        ({"betas": (0.9, 1.0)}, "betas is (0.9, 1.0)"),
        ({"betas": (0.9, 0.99, 0.999)}, "betas is (0.9, 0.99, 0.999)"),
        ({"eps": -1e-6}, "eps is -1e-06"),
        ({"weight_decay": None}, "weight_decay is None"),
        ({"bias_correction": "no"}, "bias_correction is 'no'; write True or False"),
        ({"max_trust": float("nan")}, "max_trust is nan"),
    ],
)
def test_nonsense_is_refused_with_what_to_write(options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadArgument) as refusal:
        LAMB([torch.ones(2, requires_grad=True)], **options)
    assert str(refusal.value).startswith(f"LAMB: {said}")
