"""A gradient of a parameter on a GPU whose values stand in the memory of the host: what is read of it is fetched.

# Note [A gradient without memory]
# A script finds the step's gradient in `p.grad`, on the parameter's device, and may do anything with it. The values are
# in the memory of the host, once for all workers, so here `p.grad` is a tensor without memory. An operation that only
# reads it works on a copy, which lives as long as the operation. One that multiplies, divides or clamps every element
# alike is put off: the copies that are made from then on go through it. Any other write, and whatever makes a view,
# gives the gradient memory of its own on this worker until the next step. torch's schemas say which operations write
# or make views. So a script has the bits that it would have of a gradient with memory.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_leaves, tree_map

from lockstep.errors import Misuse
from lockstep.strategies.sharded.once import Form, flat

aten: Any = torch.ops.aten

GROUP_BYTES = 64 << 20
"""So many bytes of gradients, or one gradient, are copied at a time where an operation takes many of them."""

PUT_OFF = {
    aten.mul_.Tensor, aten.mul_.Scalar, aten.div_.Tensor, aten.div_.Scalar, aten.clamp_.default,
    aten.clamp_min_.default, aten.clamp_max_.default,
}  # fmt: skip
PUT_OFF_FOR_MANY = {
    aten._foreach_mul_.Tensor, aten._foreach_mul_.Scalar, aten._foreach_div_.Tensor, aten._foreach_div_.Scalar,
    aten._foreach_clamp_min_.Scalar, aten._foreach_clamp_max_.Scalar,
}  # fmt: skip
UNSCALE = aten._amp_foreach_non_finite_check_and_unscale_.default
"""GradScaler's: it multiplies, and notes whether it has seen a number that is not finite."""

Elementwise = Callable[[torch.Tensor], object]
"""Changes every element of a tensor alike, in place."""


class HostGradient(torch.Tensor):
    """See Note [A gradient without memory]. `read` copies elements, in the order in which `form` stands in memory."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, form: Form, read: Callable[[int, int], torch.Tensor]) -> "HostGradient":
        _go_with_many(cls)
        tensor: HostGradient = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, form.shape, strides=form.stride, dtype=form.dtype, device=form.device
        )
        return tensor

    def __init__(self, form: Form, read: Callable[[int, int], torch.Tensor]) -> None:
        self._form, self._read = form, read
        self.renew()

    def renew(self) -> None:
        """The host has other values: what a script has done to those before is forgotten."""
        self._own: torch.Tensor | None = None
        self._put_off: list[Elementwise] = []

    @property
    def is_as_added(self) -> bool:
        """Whether a script has done nothing to it."""
        return self._own is None and not self._put_off

    @torch.no_grad()
    def part(self, start: int, stop: int) -> torch.Tensor:
        """Elements in the order of `form`; a copy, or perhaps a view if the gradient has memory of its own."""
        if self._own is not None:
            return flat(self._dense(self._own))[start:stop]
        copy = self._read(start, stop)
        for change in self._put_off:
            change(copy)
        return copy

    def whole(self) -> torch.Tensor:
        """All of it: a copy, or the memory of its own."""
        if self._own is not None:
            return self._own
        return self.part(0, self.numel()).as_strided(self._form.shape, self._form.stride)

    def owned(self) -> torch.Tensor:
        """All of it, in memory of its own from now on."""
        if self._own is None:
            self._own, self._put_off = self.whole(), []
        return self._own

    def put_off(self, change: Elementwise) -> None:
        """Changes every element, now or when it is copied."""
        if self._own is None:
            self._put_off.append(change)
        else:
            change(self._own)

    def _dense(self, own: torch.Tensor) -> torch.Tensor:
        """A script may have put memory of another order there: p.grad.data = ..."""
        if own.stride() == self._form.stride:
            return own
        return torch.empty_strided(self._form.shape, self._form.stride, dtype=own.dtype, device=own.device).copy_(own)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in PUT_OFF and isinstance(args[0], cls) and not _has_elements((args[1:], kwargs)):
            args[0].put_off(_change(func, args[1:], kwargs))
            return args[0]
        if func in PUT_OFF_FOR_MANY and not _has_elements((args[1:], kwargs)):
            return _change_many(func, *args, **kwargs)
        if func is UNSCALE:
            return _unscale(*args)
        if func is aten._foreach_norm.Scalar:
            return [norm for group in _groups(args[0]) for norm in func(group, *args[1:], **kwargs)]
        given = zip(func._schema.arguments, args, strict=False)
        by_name = {argument.name: argument for argument in func._schema.arguments}
        return func(
            *(_plain(value, argument) for argument, value in given),
            **{name: _plain(value, by_name[name]) for name, value in kwargs.items()},
        )

    # What torch does without an operation, and would do to a tensor without memory.

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self.owned().detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if (value.shape, value.dtype, value.device) != (self.shape, self.dtype, self.device):
            raise Misuse("p.grad.data = ... under a sharded strategy: give a tensor like p, or write p.grad = ...")
        self.owned().data = value

    def data_ptr(self) -> int:
        return self.owned().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.owned().untyped_storage()

    def numpy(self, *, force: bool = False) -> Any:
        return self.owned().numpy(force=force)

    def tolist(self) -> Any:
        return self.whole().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.whole())

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:  # type: ignore[override]
        copy: torch.Tensor = memo.setdefault(id(self), self.whole().clone())
        return copy

    def __reduce_ex__(self, proto: Any) -> Any:
        return self.whole().__reduce_ex__(proto)


def _go_with_many(kind: type) -> None:
    """torch's clipping takes its path for many tensors at once by their type, and another path has other bits."""
    kinds = cast(list[type], _foreach_utils._foreach_supported_types)
    if kind not in kinds:
        kinds.append(kind)


def _plain(value: Any, argument: Any) -> Any:
    """An argument with plain tensors in the places of gradients: with their own memory if it is written or viewed."""
    is_read = argument.alias_info is None

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, HostGradient):
            return leaf
        return leaf.whole() if is_read else leaf.owned()

    return tree_map(one, value)


def _has_elements(arguments: Any) -> bool:
    """Whether a tensor with a dimension is among them: it has other values for other elements."""
    return any(isinstance(leaf, torch.Tensor) and leaf.dim() > 0 for leaf in tree_leaves(arguments))


def _kept(arguments: Any) -> Any:
    """The same numbers, whatever a script does to their tensors later."""
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, arguments)


def _change(func: Any, args: Any, kwargs: Any) -> Elementwise:
    args, kwargs = _kept(args), _kept(kwargs)
    return lambda tensor: func(tensor, *args, **kwargs)


def _change_many(func: Any, tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> None:
    others = [one for one in tensors if not isinstance(one, HostGradient)]
    if others:
        func(others, *args, **kwargs)
    kept = _kept(args), _kept(kwargs)
    for one in tensors:
        if isinstance(one, HostGradient):
            one.put_off(lambda tensor: func([tensor], *kept[0], **kept[1]))


def _unscale(tensors: Sequence[torch.Tensor], found: torch.Tensor, inverse: torch.Tensor) -> None:
    for group in _groups(tensors):
        UNSCALE(group, found, inverse)
    again, inverse = torch.zeros_like(found), inverse.clone()
    for one in tensors:
        if isinstance(one, HostGradient) and one._own is None:
            one.put_off(lambda tensor: UNSCALE([tensor], again, inverse))


def _groups(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The same tensors, plain, in groups that fit into GROUP_BYTES."""
    group, room = list[torch.Tensor](), 0
    for tensor in tensors:
        if group and room < tensor.nbytes:
            yield group
            group = []
        room = (room if group else GROUP_BYTES) - tensor.nbytes
        group.append(tensor.whole() if isinstance(tensor, HostGradient) else tensor)
    if group:
        yield group
