"""LAMB: Adam whose rate is set tensor by tensor (You et al. 2019, arXiv:1904.00962)."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lockstep.optim.groups import FLAG, FLAG_OR_NONE, NOT_NEGATIVE, POSITIVE_OR_NONE, TWO_FRACTIONS
from lockstep.optim.trust import Norms, TrustRatioOptimizer, as_operands, at_most, measured, where_measured


class LAMB(TrustRatioOptimizer):
    """Layer-wise adaptive moments. For every tensor x with gradient g, rate η = `lr`, decay λ:

        m ← β1·m + (1 − β1)·g                  m̂ = m / (1 − β1^t)
        v ← β2·v + (1 − β2)·g²                 v̂ = v / (1 − β2^t)       `bias_correction=False`: m̂ = m, v̂ = v
        r = m̂ / (√v̂ + ε) + λ·x
        x ← x − η·(|x| / |r|)·r                the ratio is 1 where |x| or |r| is zero

    The state of a parameter is `step`, t, a tensor on the CPU as in torch's Adam; `exp_avg`, m; `exp_avg_sq`, v. A
    group with `adapt=False` has ratio 1, for biases and normalisation layers
    (`lockstep.optim.groups.exclude_biases_and_norms`): AdamW then, as long as m̂ and v̂ are corrected.

    `max_trust`: no ratio exceeds it. None, the default: no limit.
    `foreach`: False goes tensor by tensor; None and True take all tensors of a device and dtype together.
    `norms`: returns the 2-norms instead of torch's, for tensors of which this process holds a part. Called once
    with [*x, *r] for the tensors of one group, device and dtype, in the order of the groups; with `foreach=False`
    once for every tensor; not for groups with `adapt=False`.
    """

    allowed = {  # noqa: RUF012
        "lr": NOT_NEGATIVE,
        "betas": TWO_FRACTIONS,
        "eps": NOT_NEGATIVE,
        "weight_decay": NOT_NEGATIVE,
        "bias_correction": FLAG,
        "max_trust": POSITIVE_OR_NONE,
        "foreach": FLAG_OR_NONE,
        "adapt": FLAG,
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        *,
        max_trust: float | None = None,
        foreach: bool | None = None,
        norms: Norms | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "max_trust": max_trust,
            "foreach": foreach,
            "adapt": True,
        }
        super().__init__(params, defaults, norms)

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        states = [self._state(param) for param in params]
        if group["foreach"] is False:
            for param, grad, state in zip(params, grads, states, strict=True):
                update = _adam(group, param, grad, state)
                param.sub_(update * _rate(group, param, update, self._norms))
        else:
            updates = _adam_together(group, params, grads, states)
            torch._foreach_mul_(updates, _rates_together(group, params, updates, self._norms))
            torch._foreach_sub_(params, updates)

    def _state(self, param: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[param]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return state


def _scaled(group: dict[str, Any], weight_norm: Tensor, update_norm: Tensor) -> Tensor:
    """η·|x|/|r|, from norms of any shape."""
    ratio = where_measured(weight_norm / update_norm, weight_norm, update_norm, default=1.0)
    rate: Tensor = group["lr"] * at_most(ratio, group["max_trust"])
    return rate


def _rates_together(group: dict[str, Any], params: list[Tensor], updates: list[Tensor], norms: Norms) -> Any:
    """What each r is multiplied by."""
    if not group["adapt"]:
        return as_operands([group["lr"]] * len(params), params[0])
    return list(_scaled(group, *measured(norms, params, updates)).unbind())


def _rate(group: dict[str, Any], param: Tensor, update: Tensor, norms: Norms) -> Any:
    """What r is multiplied by."""
    return _scaled(group, *norms([param, update])) if group["adapt"] else group["lr"]


def _corrections(group: dict[str, Any], steps: list[Tensor]) -> tuple[list[float], list[float]]:
    """The factors c and d of every tensor with m̂ / (√v̂ + ε) = m / (c·√v + d).

    The steps are on the CPU: reading them waits for no device.
    """
    beta1, beta2 = group["betas"]
    factors = {}
    counts = torch.stack(steps).tolist()
    for t in set(counts):
        first = 1 - beta1**t if group["bias_correction"] else 1.0
        second = 1 - beta2**t if group["bias_correction"] else 1.0
        factors[t] = first / math.sqrt(second), group["eps"] * first
    return [factors[t][0] for t in counts], [factors[t][1] for t in counts]


def _adam_together(
    group: dict[str, Any], params: list[Tensor], grads: list[Tensor], states: list[dict[str, Tensor]]
) -> list[Tensor]:
    """r for every tensor, as new tensors; steps and moments are advanced."""
    steps, firsts, seconds = ([state[name] for state in states] for name in ("step", "exp_avg", "exp_avg_sq"))
    beta1, beta2 = group["betas"]
    torch._foreach_add_(steps, as_operands([1.0] * len(steps), steps[0]))
    torch._foreach_lerp_(firsts, grads, 1 - beta1)
    torch._foreach_mul_(seconds, as_operands([beta2] * len(seconds), params[0]))
    torch._foreach_addcmul_(seconds, grads, grads, 1 - beta2)
    scales, floors = _corrections(group, steps)
    divisors = torch._foreach_sqrt(seconds)
    torch._foreach_mul_(divisors, as_operands(scales, params[0]))
    torch._foreach_add_(divisors, as_operands(floors, params[0]))
    updates = list(torch._foreach_div(firsts, divisors))
    if group["weight_decay"]:
        torch._foreach_add_(updates, params, alpha=group["weight_decay"])
    return updates


def _adam(group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Tensor]) -> Tensor:
    """r for one tensor, as a new tensor; its step and moments are advanced."""
    beta1, beta2 = group["betas"]
    state["step"] += 1
    first = state["exp_avg"].lerp_(grad, 1 - beta1)
    second = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    (scale,), (floor,) = _corrections(group, [state["step"]])
    update = first / second.sqrt().mul_(scale).add_(floor)
    return update.add_(param, alpha=group["weight_decay"]) if group["weight_decay"] else update
