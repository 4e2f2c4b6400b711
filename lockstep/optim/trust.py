"""Trust ratios: how far a tensor may move in one step, measured against how large it is.

What LARS and LAMB share: 2-norms, the ratio where a norm is zero, and an optimizer that passes tensors of one
kind to its update.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from lockstep.errors import BadArgument
from lockstep.optim.groups import Allowed, check_options

# Returns the 2-norm of every tensor, each as a tensor without dimensions on the tensor's device.
Norms = Callable[[list[Tensor]], list[Tensor]]


def two_norms(tensors: list[Tensor]) -> list[Tensor]:
    """The 2-norm of every tensor; all are of one dtype. Those of 16-bit tensors are float32."""
    return list(torch._foreach_norm(tensors, 2, dtype=_at_least_float32(tensors[0].dtype)))


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < 4 else dtype


def measured(norms: Norms, weights: list[Tensor], updates: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The norms of the weights and of their updates, as two vectors; `norms` is called once."""
    given = norms([*weights, *updates])
    if len(given) != len(weights) + len(updates):
        raise BadArgument(
            f"norms gave {len(given)} norms for {len(weights) + len(updates)} tensors; give one for each, in order"
        )
    together = torch.stack(given)
    return together[: len(weights)], together[len(weights) :]


def where_measured(value: Tensor, weight_norm: Tensor, update_norm: Tensor, default: float) -> Tensor:
    """`value`, and `default` where one of the norms is zero. A NaN stays one.

    Decided on the device: the host never waits for a norm.
    """
    return torch.where((weight_norm == 0) | (update_norm == 0), default, value)


def as_operands(values: list[float], like: Tensor) -> Any:
    """The numbers in the form in which torch multiplies or adds them fastest to a list of tensors like this one.

    On the CPU torch takes a list tensor by tensor and makes a tensor of a Python number each time, at three times the
    cost of the arithmetic on a small tensor; here that is done once for every different number.
    """
    if like.device.type != "cpu":
        return values
    dtype = _at_least_float32(like.dtype)
    made = {value: torch.tensor(value, dtype=dtype) for value in set(values)}
    return [made[value] for value in values]


def at_most(ratio: Tensor, limit: float | None) -> Tensor:
    """The ratio, cut off at the limit if there is one."""
    return ratio if limit is None else ratio.clamp(max=limit)


class TrustRatioOptimizer(Optimizer):
    """An optimizer whose update is scaled tensor by tensor.

    A subclass defines `allowed`, the allowed options of a group, and `_update`.
    """

    allowed: ClassVar[Mapping[str, Allowed]]

    def __init__(self, params: ParamsT, defaults: dict[str, Any], norms: Norms | None) -> None:
        if norms is not None and not callable(norms):
            raise BadArgument(
                f"{self._name}: norms is {norms!r}; write a function from tensors to their 2-norms, or None"
            )
        self._norms: Norms = norms or two_norms
        self._check(self._name, defaults)
        super().__init__(params, defaults)

    def _update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        """Moves the parameters, which are of one device and dtype."""
        raise NotImplementedError

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _check(self, whose: str, options: Mapping[str, Any]) -> None:
        check_options(whose, options, self.allowed)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_norms": self._norms}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; raises BadArgument if this optimizer cannot use its options or its parameters."""
        super().add_param_group(param_group)
        number = len(self.param_groups) - 1
        try:
            self._check(f"{self._name}, parameter group {number}", self.param_groups[number])
            for index, param in enumerate(self.param_groups[number]["params"]):
                self._refuse_sparse_or_complex(param, "parameter", number, index)
        except BadArgument:
            self.param_groups.pop()
            raise

    def _refuse_sparse_or_complex(self, tensor: Tensor, what: str, group: int, index: int) -> None:
        kind = "complex" if tensor.is_complex() else "sparse" if tensor.layout is not torch.strided else None
        if kind is not None:
            names = self.param_groups[group].get("param_names")
            name = f" ({names[index]})" if names else ""
            raise BadArgument(
                f"{self._name}: the {what} of group {group}, index {index}{name}, is {kind}, and its norm would "
                f"mean something else; give such parameters to an optimizer of their own"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates every parameter with a gradient once. Returns the loss of the closure, which is called first.

        A gradient that cannot be used is refused before any parameter moves.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        kinds = [self._by_kind(number) for number in range(len(self.param_groups))]
        for group, by_kind in zip(self.param_groups, kinds, strict=True):
            self._before_group(group)
            for params in by_kind:
                self._update(group, params, [param.grad for param in params if param.grad is not None])
        return loss

    def _before_group(self, group: dict[str, Any]) -> None:
        """Called once for every group and step, before its first update."""

    def _by_kind(self, number: int) -> list[list[Tensor]]:
        """The group's parameters that have a gradient, apart by device and dtype, in the order of their first."""
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for index, param in enumerate(self.param_groups[number]["params"]):
            if param.grad is not None:
                self._refuse_sparse_or_complex(param.grad, "gradient of the parameter", number, index)
                kinds[param.device, param.dtype].append(param)
        return list(kinds.values())
