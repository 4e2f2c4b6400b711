"""The factor by which an adaptive optimizer multiplies each element of a gradient, and squares weighted by it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from lockstep.errors import BadArgument
from lockstep.optim.lamb import LAMB
from lockstep.optim.lars import LARS
from lockstep.optim.trust import at_most, where_measured


def preconditioner(optimizer: Optimizer, parameter: Tensor) -> Tensor | None:
    """The p of a parameter: what its optimizer multiplies each element's gradient by, apart from the rate.

    Adam's update is x ← x − lr·P·ĝ with P = diag(p), p = 1/(√v̂ + eps). In the coordinates y = P^(−1/2)·x that is plain
    SGD, y ← y − lr·P^(1/2)·ĝ, and the gradient by y is P^(1/2)·g. The noise scale of Adam is therefore the plain one in
    these coordinates: its squares are Σ p_i·g_i², with p_i and not p_i².

    Known are torch's Adam, AdamW, NAdam, RAdam, Adamax, RMSprop, and LAMB, whose p has the layer's trust ratio in it.
    None for any other optimizer, and before the parameter's first update. A factor common to all parameters (RAdam's
    rectifier, the rate) is left out: it cancels. Groups with different rates are the caller's: multiply p by lr.

    Take p before the step's update and use the same p for all lanes and the whole. It then knows only earlier samples.
    A v̂ that has this step's gradient in it is large where the gradient happens to be large; such a p is no constant
    in the expectations of Note [Two squares, two unknowns] in estimate.py, and hides part of the noise. No host
    synchronisation.
    """
    if not isinstance(optimizer, Optimizer) or not isinstance(parameter, Tensor):
        raise BadArgument(
            f"give a torch optimizer and a tensor of its, not {optimizer!r} and {type(parameter).__name__}"
        )
    kind, state = _kind(optimizer), optimizer.state.get(parameter)
    groups = [group for group in optimizer.param_groups if any(held is parameter for held in group["params"])]
    if kind is None or not state or not groups:
        return None
    with torch.no_grad():
        sight = kind(groups[0], state, parameter)
        return sight.scale / sight.denominator(*sight.moments)


def family(optimizers: Iterable[Optimizer]) -> str:
    """How the optimizers use gradients: "sgd" as they are, "adam" preconditioned; "" if not alike, or not known."""
    kinds = {"adam" if _kind(one) is not None else "sgd" if isinstance(one, SGD | LARS) else "" for one in optimizers}
    return kinds.pop() if len(kinds) == 1 else ""


def weighted_square(gradient: Tensor, p: Tensor | None) -> Tensor:
    """Σ p_i·g_i², or |g|² where p is None: a float64 scalar on the gradient's device. No host synchronisation."""
    if gradient.is_complex() or gradient.layout != torch.strided:
        raise BadArgument(f"the gradient must be dense and real, not {gradient.dtype}, {gradient.layout}")
    gradient = gradient.detach()
    if p is None:
        norm: Tensor = torch.linalg.vector_norm(_wide(gradient))
        return norm.double().square()
    if p.shape != gradient.shape:
        raise BadArgument(
            f"p has shape {list(p.shape)}, the gradient {list(gradient.shape)}: give the same parameter's"
        )
    # p·g is near 1 for Adam, so multiplying by p first neither overflows nor vanishes in float32, as g² may.
    wide = _wide(gradient).reshape(-1)
    return torch.dot(wide * p.reshape(-1), wide).double()


class Preconditioners:
    """The preconditioners of a model's optimizers. It keeps their groups, so each step makes a new one.

    Where groups have different rates, p is multiplied by the group's share of the largest of them.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._places = {
            id(parameter): _Place(kind, group, optimizer.state, parameter)
            for optimizer in optimizers
            if (kind := _kind(optimizer)) is not None
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        rates = {id(place.group): float(place.group["lr"]) for place in self._places.values()}
        largest = max(rates.values(), default=0.0)
        self._shares = {group: rate / largest if largest > 0 else 1.0 for group, rate in rates.items()}

    @torch.no_grad()
    def square(self, parameter: Tensor, gradient: Tensor) -> Tensor | None:
        """Σ p_i·g_i² as a float64 scalar, see `preconditioner`; None where p is not known. No host synchronisation."""
        place = self._places.get(id(parameter))
        if place is None or not place.state.get(parameter):
            return None
        return place.square(gradient.detach()) * self._shares[id(place.group)]


PIECE = 64 * 1024
"""So many elements at a time on a CPU: their temporaries stay in its cache, which makes this several times faster."""


@dataclass(frozen=True)
class _Sight:
    """p = scale / denominator(moments), element by element; the scale is one number for the whole tensor."""

    moments: tuple[Tensor, ...]
    denominator: Callable[..., Tensor]
    scale: Tensor

    def square(self, gradient: Tensor) -> Tensor:
        """Σ p_i·g_i², piece by piece."""
        flat = gradient.reshape(-1)
        moments = [moment.reshape(-1) for moment in self.moments]
        size = PIECE if gradient.device.type == "cpu" else flat.numel()
        parts = [
            _by_denominator(flat[start : start + size], self.denominator(*(m[start : start + size] for m in moments)))
            for start in range(0, flat.numel(), max(1, size))
        ]
        total = torch.stack(parts).double().sum() if parts else torch.zeros((), dtype=torch.float64)
        return total * self.scale


def _by_denominator(gradient: Tensor, denominator: Tensor) -> Tensor:
    """Σ g²/d. What is divided first is near 1 for Adam, so it neither overflows nor vanishes in float32, as g² may."""
    wide = _wide(gradient)
    return torch.dot(torch.div(wide, denominator), wide)


_Kind = Callable[[dict[str, Any], dict[str, Any], Tensor], _Sight]


@dataclass(frozen=True)
class _Place:
    """Where a parameter is optimized."""

    kind: _Kind
    group: dict[str, Any]
    state: Mapping[Tensor, dict[str, Any]]
    parameter: Tensor

    def square(self, gradient: Tensor) -> Tensor:
        """A complex number is two real ones, as torch's optimizers have it. Divided state is on the host: read here."""
        device = gradient.device
        state = {
            name: _as_real(value.to(device) if isinstance(value, Tensor) and value.dim() else value)
            for name, value in self.state[self.parameter].items()
        }
        return self.kind(self.group, state, _as_real(self.parameter.detach())).square(_as_real(gradient))


def _as_real(value: Any) -> Any:
    return torch.view_as_real(value) if isinstance(value, Tensor) and value.is_complex() else value


def _kind(optimizer: Optimizer) -> _Kind | None:
    return next((kind for known, kind in _KINDS if isinstance(optimizer, known)), None)


def _adam(group: dict[str, Any], state: dict[str, Any], parameter: Tensor) -> _Sight:
    """1/(√(v/c) + eps) = √c/(√v + eps·√c) with the bias correction c."""
    square = state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"]
    return _rooted(square, group["eps"], _correction(group["betas"][1], state, square).sqrt())


def _rooted(square: Tensor, eps: float, root: Tensor) -> _Sight:
    added = eps * root
    return _Sight((square,), lambda piece: _wide(piece).sqrt().add_(added), root)


def _radam(group: dict[str, Any], state: dict[str, Any], parameter: Tensor) -> _Sight:
    """RAdam adds eps before it corrects, and does not precondition while its ρ_t is at most 5."""
    square, beta, eps = state["exp_avg_sq"], group["betas"][1], group["eps"]
    root = _correction(beta, state, square).sqrt()
    step = torch.as_tensor(state["step"], dtype=torch.float64)
    length = 2 / (1 - beta) - 1 - 2 * step * beta**step / (1 - beta**step)
    adapts = (length > 5).to(square.device)
    return _Sight(
        (square,),
        lambda piece: torch.where(adapts, _wide(piece).sqrt().add_(eps), 1.0),
        torch.where(adapts, root, 1.0),
    )


def _adamax(group: dict[str, Any], state: dict[str, Any], parameter: Tensor) -> _Sight:
    return _Sight((state["exp_inf"],), _wide, _one(state["exp_inf"]))


def _rmsprop(group: dict[str, Any], state: dict[str, Any], parameter: Tensor) -> _Sight:
    square, eps = state["square_avg"], group["eps"]
    if not group["centered"]:
        return _rooted(square, eps, _one(square))

    def denominator(square: Tensor, mean: Tensor) -> Tensor:
        return (_wide(square) - _wide(mean).square()).sqrt_().add_(eps)

    return _Sight((square, state["grad_avg"]), denominator, _one(square))


def _lamb(group: dict[str, Any], state: dict[str, Any], parameter: Tensor) -> _Sight:
    """Adam's p times |w|/|r|, with the r that LAMB's state gives before the step."""
    square, corrected = state["exp_avg_sq"], group["bias_correction"]
    root = _correction(group["betas"][1], state, square).sqrt() if corrected else _one(square)
    plain = _rooted(square, group["eps"], root)
    if not group["adapt"]:
        return plain
    first = _correction(group["betas"][0], state, square) if corrected else _one(square)
    weight = _wide(parameter.detach())
    update = _wide(state["exp_avg"]) / first * (root / plain.denominator(square)) + group["weight_decay"] * weight
    norms = torch.linalg.vector_norm(weight), torch.linalg.vector_norm(update)
    trust = at_most(where_measured(norms[0] / norms[1], *norms, default=1.0), group["max_trust"])
    return replace(plain, scale=root * trust)


def _wide(value: Tensor) -> Tensor:
    """The value in float32 or wider: half precision has too few bits for a second moment's root."""
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _one(like: Tensor) -> Tensor:
    return torch.ones((), dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)


def _correction(beta: float | Tensor, state: dict[str, Any], like: Tensor) -> Tensor:
    """1 − β^t with the t of the state, in float64 until the end; a tensor, since t may live on the device."""
    correction = 1 - beta ** torch.as_tensor(state["step"], dtype=torch.float64)
    return correction.to(device=like.device, dtype=torch.promote_types(like.dtype, torch.float32))


_KINDS: tuple[tuple[type[Optimizer], _Kind], ...] = (
    (Adam, _adam),
    (AdamW, _adam),
    (NAdam, _adam),
    (RAdam, _radam),
    (Adamax, _adamax),
    (RMSprop, _rmsprop),
    (LAMB, _lamb),
)
