"""LARS: momentum SGD whose rate is set tensor by tensor (You, Gitman, Ginsburg 2017, arXiv:1708.03888)."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lockstep.errors import BadArgument
from lockstep.optim.groups import FLAG, FLAG_OR_NONE, FRACTION, NOT_NEGATIVE, POSITIVE, POSITIVE_OR_NONE
from lockstep.optim.trust import Norms, TrustRatioOptimizer, as_operands, at_most, measured, where_measured


class LARS(TrustRatioOptimizer):
    """Layer-wise adaptive rate scaling. For every tensor w with gradient g, rate γ = `lr`, momentum m, decay β:

        λ = η·|w| / (|g| + β·|w| + ε)          η = `trust_coefficient`, ε = `eps`; λ = 1 where |w| or |g| is zero
        v ← m·v + γ·λ·(g + β·w)
        w ← w − v                              `nesterov`: w ← w − (m·v + γ·λ·(g + β·w))

    The state of a parameter is `velocity`, v. A group with `adapt=False` has λ = 1: plain momentum SGD, for biases
    and normalisation layers (`lockstep.optim.groups.exclude_biases_and_norms`).

    `joint_norm`: λ = η·|w| / (|g + β·w| + ε), as in TensorFlow and optax, and λ = 1 where |w| or |g + β·w| is zero.
    `clip`: LARC, min(λ/γ, 1) in the place of λ: the rate of a tensor is min(λ, γ), never above `lr`.
    `max_trust`: no λ exceeds it.
    `momentum_correction`: when `lr` changes from a to b, every v of the group is first multiplied by b/a (Goyal et
    al. 2017, remark 2), because the rate is inside v. torch's SGD needs none: its rate is outside the velocity.
    From a = 0 nothing is multiplied: no v then holds anything of a rate.
    `foreach`: False goes tensor by tensor; None and True take all tensors of a device and dtype together.
    `norms`: returns the 2-norms instead of torch's, for tensors of which this process holds a part. Called once
    with [*w, *g] for the tensors of one group, device and dtype, in the order of the groups; with `foreach=False`
    once for every tensor; not for groups with `adapt=False`.
    """

    allowed = {  # noqa: RUF012
        "lr": NOT_NEGATIVE,
        "momentum": FRACTION,
        "weight_decay": NOT_NEGATIVE,
        "trust_coefficient": POSITIVE,
        "eps": NOT_NEGATIVE,
        "nesterov": FLAG,
        "joint_norm": FLAG,
        "clip": FLAG,
        "max_trust": POSITIVE_OR_NONE,
        "momentum_correction": FLAG,
        "foreach": FLAG_OR_NONE,
        "adapt": FLAG,
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        eps: float = 1e-8,
        nesterov: bool = False,
        *,
        joint_norm: bool = False,
        clip: bool = False,
        max_trust: float | None = None,
        momentum_correction: bool = False,
        foreach: bool | None = None,
        norms: Norms | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "nesterov": nesterov,
            "joint_norm": joint_norm,
            "clip": clip,
            "max_trust": max_trust,
            "momentum_correction": momentum_correction,
            "foreach": foreach,
            "adapt": True,
            "velocity_lr": None,
        }
        super().__init__(params, defaults, norms)

    def _check(self, whose: str, options: Any) -> None:
        super()._check(whose, options)
        if options["nesterov"] and not options["momentum"]:
            raise BadArgument(f"{whose}: nesterov needs a momentum; write one greater than 0, or nesterov=False")
        if options["clip"] and options["max_trust"] is not None:
            raise BadArgument(f"{whose}: clip and max_trust both limit the ratio; leave one of them out")

    def _before_group(self, group: dict[str, Any]) -> None:
        """Brings the velocities to the group's rate, and keeps in the group which rate that is."""
        before, now = group["velocity_lr"], group["lr"]
        if group["momentum_correction"] and before and before != now:
            states = [self.state[param] for param in group["params"] if param in self.state]
            if velocities := [state["velocity"] for state in states if "velocity" in state]:
                torch._foreach_mul_(velocities, now / before)
        group["velocity_lr"] = now

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        velocities = [self._velocity(param) for param in params] if group["momentum"] else []
        if group["foreach"] is False:
            for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
                _move(group, param, _push(group, param, grad, self._norms), velocities[index : index + 1])
        else:
            _move_together(group, params, _push_together(group, params, grads, self._norms), velocities)

    def _velocity(self, param: Tensor) -> Tensor:
        state = self.state[param]
        if "velocity" not in state:
            state["velocity"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        velocity: Tensor = state["velocity"]
        return velocity


def _rates(group: dict[str, Any], weight_norm: Tensor, grad_norm: Tensor) -> Tensor:
    """γ·λ, from norms of any shape."""
    decay = 0.0 if group["joint_norm"] else group["weight_decay"]
    trust: Tensor = group["trust_coefficient"] * weight_norm / (grad_norm + decay * weight_norm + group["eps"])
    if group["clip"]:  # γ·min(λ/γ, 1) without the division, which γ = 0 does not survive
        return where_measured(trust.clamp(max=group["lr"]), weight_norm, grad_norm, default=group["lr"])
    ratio = at_most(where_measured(trust, weight_norm, grad_norm, default=1.0), group["max_trust"])
    rate: Tensor = group["lr"] * ratio
    return rate


def _push_together(group: dict[str, Any], params: list[Tensor], grads: list[Tensor], norms: Norms) -> list[Tensor]:
    """γ·λ·(g + β·w) for every tensor, as new tensors."""
    decay = group["weight_decay"]
    decayed = list(torch._foreach_add(grads, params, alpha=decay)) if decay else grads
    if not group["adapt"]:
        return list(torch._foreach_mul(decayed, as_operands([group["lr"]] * len(params), params[0])))
    rates = _rates(group, *measured(norms, params, decayed if group["joint_norm"] else grads))
    return list(torch._foreach_mul(decayed, list(rates.unbind())))


def _push(group: dict[str, Any], param: Tensor, grad: Tensor, norms: Norms) -> Tensor:
    """γ·λ·(g + β·w), as a new tensor."""
    decayed = grad.add(param, alpha=group["weight_decay"]) if group["weight_decay"] else grad
    if not group["adapt"]:
        return decayed.mul(group["lr"])
    rate = _rates(group, *norms([param, decayed if group["joint_norm"] else grad]))
    return decayed.mul(rate)


def _move_together(group: dict[str, Any], params: list[Tensor], pushes: list[Tensor], velocities: list[Tensor]) -> None:
    """v ← m·v + push and w ← w − v for every tensor; without momentum w ← w − push. The pushes are used up."""
    if velocities:
        torch._foreach_mul_(velocities, as_operands([group["momentum"]] * len(velocities), params[0]))
        torch._foreach_add_(velocities, pushes)
        if group["nesterov"]:
            torch._foreach_add_(pushes, velocities, alpha=group["momentum"])
    torch._foreach_sub_(params, velocities if velocities and not group["nesterov"] else pushes)


def _move(group: dict[str, Any], param: Tensor, push: Tensor, velocity: list[Tensor]) -> None:
    """The same for one tensor, whose velocity is in a list, empty without momentum."""
    for v in velocity:
        v.mul_(group["momentum"]).add_(push)
        push = push.add(v, alpha=group["momentum"]) if group["nesterov"] else v
    param.sub_(push)
