"""Parameters that leave their GPU while the lanes of a step need the memory for activations.

# Note [Away during the forward pass]
# Activations grow in the forward pass and shrink in the backward pass. So a parameter gives its memory on the GPU back
# when its module has been computed, and is fetched from the memory of the host when the backward pass needs it. Then it
# stays: after the lanes, every worker has all parameters again, where scripts expect them. No worker waits for another
# one in this, so workers may have different lanes.

# Note [What a script may see of it]
# - A parameter that is away is a view of the host's memory. Whoever reads it outside of its module reads what is right,
#   slowly; if autograd keeps it then, it does not leave again.
# - Memory is given back only while nobody else refers to it. A view that a script has kept, or that another hook for
#   saved tensors has, makes its parameter stay. Saved tensors of autograd are kept by name here, not by memory.
# - Only what the host knows may leave: a parameter that a script has changed since the last update stays until the
#   next. `marks` find that, and whether a parameter is the same when it leaves, and when all are back: a script that
#   writes to one by p.data inside of a lane is refused by name.
"""

import sys
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import module as hooks

from lockstep.errors import Misuse
from lockstep.strategies.protocol import Replicas
from lockstep.strategies.sharded.marks import marks
from lockstep.strategies.sharded.once import Form, OnceTensors, flat, map_once
from lockstep.wire import Wire
from lockstep.wire.cuda.memory import tensor_at
from lockstep.wire.cuda.pinned import pin

GROUP_BYTES = 16 << 20
"""Parameters leave together, when there is as much of them: what they are is looked at in a few calls."""
MARKS = ""
"""The name of the marks among the tensors that the host holds: no parameter has it."""


class Offloadable:
    """One parameter in one step: `home` is its memory on the GPU, `held` what the host has of it.

    While it is away, the home has no memory, and the parameter shows `remote`: the host's memory as the GPU sees it.
    """

    def __init__(
        self, parameter: nn.Parameter, held: torch.Tensor, remote: torch.Tensor, stream: torch.cuda.Stream | None
    ) -> None:
        """It is fetched in `stream`, so that what is computed can go on."""
        self.parameter, self._held, self._remote, self._stream = parameter, held, remote, stream
        self._storage = parameter.untyped_storage()
        self._num_bytes = self._storage.nbytes()
        self._home = self.view(parameter.dtype, parameter.shape, parameter.stride(), int(parameter.storage_offset()))
        self._arrival: torch.cuda.Event | None = None
        self.is_away, self.must_stay = False, False

    @property
    def storage(self) -> int:
        return int(self._storage._cdata)

    @property
    def remote_address(self) -> int:
        return self._remote.data_ptr()

    @property
    def is_at_home(self) -> bool:
        """Whether the parameter still stands where it was, and all of that memory is its own."""
        return self.parameter.untyped_storage()._cdata == self.storage and self._num_bytes == self.parameter.nbytes > 0

    def may_leave(self, num_views: int) -> bool:
        """Whether nobody refers to its memory but the parameter, this object, and `num_views` of this strategy."""
        return self.is_at_home and _num_references(self.storage) == num_views + 3

    def leave(self) -> None:
        if self._home.is_cuda:
            self._home.record_stream(torch.cuda.current_stream(self._home.device))
        self.parameter.data, self.is_away, self._arrival = self._remote, True, None
        self._storage.resize_(0)

    def fetch(self) -> None:
        """What this thread's current stream is given from now on finds the parameter at home.

        If the script has given it other memory since, that stays: the lane is refused for it (gradients/rules.py).
        """
        if self.is_away:
            self.begin_fetch()
            self.is_away = False
            if self.parameter.data_ptr() == self.remote_address:
                self.parameter.data = self._home
        if self._arrival is not None:
            self._arrival.wait()

    @torch.no_grad()
    def begin_fetch(self) -> None:
        """`fetch` waits for it."""
        if self._storage.nbytes():
            return
        self._storage.resize_(self._num_bytes)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._home.device))
        with torch.cuda.stream(self._stream):
            flat(self._home).copy_(flat(self._held), non_blocking=True)
        self._arrival = None if self._stream is None else self._stream.record_event()

    def view(self, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
        """Of its home; a tensor whose writes do not count as writes to the parameter."""
        empty = torch.empty(0, dtype=dtype, device=self.parameter.device)
        return empty.set_(self._storage, offset, tuple(size), tuple(stride))


@dataclass(frozen=True)
class SavedView:
    """A parameter, or a view of it, that autograd needs in the backward pass."""

    of: Offloadable
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    version: int


class ParameterOffload:
    """The parameters of all models, in the memory of the host and, between steps, on this worker's GPU.

    The order of calls is: `hold` in each generation; for each step `begin`, for each lane `enter` and `leave`, then
    `finish`. `check` precedes an update, `take_updated` follows it. Only `hold` is collective.
    """

    once: OnceTensors
    """The parameters as the last update has left them, by name."""

    def __init__(self, replicas: Replicas) -> None:
        self._names = [named.name for named in replicas.parameters]
        self._parameters = [named.parameter for named in replicas.parameters]
        self.wire: Wire | None = None
        self.is_pinned = True
        self._own_views: Mapping[int, int] = {}
        self._known: dict[int, Offloadable] = {}
        self._in_step: dict[int, Offloadable] = {}
        """By the number that Python has for a parameter, as all dictionaries here."""
        self._by_storage: dict[int, Offloadable] = {}
        self._by_address: list[Offloadable] = []
        """In the order in which the host holds them."""
        self._waiting: dict[int, Offloadable] = {}
        """Those whose modules have been computed."""
        self._fetched: list[Offloadable] = []
        """In the backward pass of the lane under way."""
        self._following: dict[Offloadable, Offloadable] = {}
        """Which one was fetched after which in the lane before."""
        device = self._parameters[0].device if self._parameters else torch.device("cpu")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._lane, self._saving, self._closely = ExitStack(), ExitStack(), False
        self._depth = 0
        """How many modules are being computed, one inside of the other. Autograd is watched in the outermost."""
        self._before = self._after = torch.empty(0)
        self._left: list[tuple[list[int], torch.Tensor]] = []
        """The marks of parameters that have left, with their numbers."""

    def hold(self, wire: Wire) -> None:
        """Collective on each host. The host holds the parameters, as its first worker has them, and their marks."""
        self.finish()
        forms = {name: Form.of(parameter) for name, parameter in zip(self._names, self._parameters, strict=True)}
        forms[MARKS] = Form((len(forms),), (1,), torch.int64)
        tensors: dict[str, torch.Tensor] = dict(zip(self._names, self._parameters, strict=True))
        with torch.no_grad():
            self.once = map_once(wire, forms, {**tensors, MARKS: marks(self._parameters)})
        self._marks = self.once.shared[MARKS].to(self._parameters[0].device)
        self._remote = self._seen_from_gpu()
        self._remote_storage = self._remote[MARKS].untyped_storage()._cdata if self._remote else 0
        self._known, self._following = {}, {}
        self.wire = wire

    def holds(self, wire: Wire) -> bool:
        """Whether `hold` need not be called: a script may have given parameters another shape since."""
        return self.wire is wire and all(map(self._has_form, self._names, self._parameters))

    def _has_form(self, name: str, parameter: torch.Tensor) -> bool:
        held = self.once.shared[name]
        return (parameter.shape, parameter.stride(), parameter.dtype) == (held.shape, held.stride(), held.dtype)

    def _seen_from_gpu(self) -> dict[str, torch.Tensor]:
        """The host's memory; empty if it could not be pinned: then all parameters stay."""
        memory, device = self.once.memory.shared, self._parameters[0].device
        if device.type == "cpu":
            return self.once.shared
        seen = memory
        if pin(memory):
            seen = tensor_at(memory.data_ptr(), memory.numel(), torch.uint8, device, partial(_let_go, memory))
        self.is_pinned = seen.is_cuda and seen.data_ptr() == memory.data_ptr()
        return self.once.placed(seen) if self.is_pinned else {}

    # -- a step ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def begin(self, own_views: Mapping[int, int], closely: bool) -> None:
        """Looks which parameters the host knows: they may leave in this step.

        `own_views` says how many views of each storage this strategy itself has. `closely`: whether parameters are
        looked at when they leave, and when they are back.
        """
        self.check()
        self._own_views, self._closely = own_views, closely
        self._before = marks(self._parameters)
        is_known = (self._before == self._marks).tolist()
        for name, parameter, is_same in zip(self._names, self._parameters, is_known, strict=True):
            one = self._offloadable(name, parameter) if is_same and self._remote else None
            if one is not None:
                self._in_step[id(parameter)] = self._by_storage[one.storage] = one
        self._by_address = sorted(self._in_step.values(), key=lambda one: one.remote_address)

    def _offloadable(self, name: str, parameter: nn.Parameter) -> Offloadable | None:
        if not self._has_form(name, parameter):
            return None
        one = self._known.get(id(parameter))
        if one is None or not one.is_at_home:
            one = self._known[id(parameter)] = Offloadable(
                parameter, self.once.shared[name], self._remote[name], self._stream
            )
        return one if one.is_at_home and not one.must_stay else None

    def enter(self) -> None:
        """Before a lane."""
        if self._in_step:
            self._depth = 0
            self._lane.enter_context(self._saving)
            self._lane.enter_context(hooks.register_module_forward_pre_hook(self._before_module))
            self._lane.enter_context(hooks.register_module_forward_hook(self._after_module, always_call=True))

    def leave(self) -> None:
        """After a lane, or after what ended it: this worker has all parameters."""
        self._lane.close()
        self._waiting = {}
        for one in self._in_step.values():
            one.fetch()
        self._following, self._fetched = dict(pairwise(self._fetched)) or self._following, []

    def finish(self) -> None:
        """After the lanes, or after what ended them."""
        self.leave()
        if self._in_step and self._left:
            with torch.no_grad():
                self._after = marks(self._parameters)
        self._in_step, self._by_storage = {}, {}

    def check(self) -> None:
        """Raises if a parameter that has left was not the same when it did, or when it was back."""
        left, self._left = self._left, []
        changed = {
            number
            for numbers, found in left
            for looked_at in (found, self._after[numbers])
            for number, is_same in zip(numbers, (looked_at == self._before[numbers]).tolist(), strict=True)
            if not is_same
        }
        if changed:
            name = self._names[min(changed)]
            raise Misuse(
                f'parameter {name} was written inside of a lane. With strategy="sharded:parameters" on GPUs a '
                "parameter leaves the GPU when its module has been computed, and what was written by p.data is lost. "
                'Write it outside of run.lanes, or start with strategy="sharded:gradients".'
            )

    @torch.no_grad()
    def take_updated(self, names: Iterable[str]) -> None:
        """The host and this worker have new values of these parameters."""
        wanted = set(names)
        numbers = [number for number, name in enumerate(self._names) if name in wanted]
        if len(numbers) == len(self._names):
            self._marks = marks(self._parameters)
        elif numbers:
            self._marks[numbers] = marks([self._parameters[number] for number in numbers])

    # -- in a lane ------------------------------------------------------------------------------------------

    def _before_module(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if not _is_computed_again():
            if self._depth == 0 and _hooks_may_be_set():
                self._saving.enter_context(saved_tensors_hooks(self._pack, self._unpack))
            self._depth += 1
        for parameter in module._parameters.values():
            one = self._in_step.get(id(parameter))
            if one is not None:
                one.fetch()
                self._waiting.pop(id(parameter), None)

    def _after_module(self, module: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling() or _is_computed_again():
            return
        self._depth -= 1
        if self._depth == 0:
            self._saving.close()
        for parameter in module._parameters.values():
            one = self._in_step.get(id(parameter))
            if one is not None and not one.is_away:
                self._waiting[id(parameter)] = one
        if sum(one.parameter.nbytes for one in self._waiting.values()) >= GROUP_BYTES:
            self._let_leave()

    @torch.no_grad()
    def _let_leave(self) -> None:
        waiting, self._waiting = self._waiting, {}
        leaving = [one for one in waiting.values() if one.may_leave(self._own_views.get(one.storage, 0))]
        if leaving and self._closely:
            numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}
            found = [numbers[id(one.parameter)] for one in leaving]
            self._left.append((found, marks([one.parameter for one in leaving])))
        for one in leaving:
            one.leave()

    def _pack(self, tensor: torch.Tensor) -> Any:
        storage = _storage(tensor)
        one = self._by_storage.get(storage)
        if one is not None:
            offset = int(tensor.storage_offset())
        elif storage == self._remote_storage:
            address = tensor.data_ptr()
            one = self._by_address[bisect_right(self._by_address, address, key=lambda one: one.remote_address) - 1]
            offset = (address - one.remote_address) // tensor.itemsize
            one.must_stay |= one.is_away
        else:
            return tensor.detach(), tensor._version  # a function that keeps its own result would keep itself
        return SavedView(one, tensor.dtype, tuple(tensor.shape), tensor.stride(), offset, one.parameter._version)

    def _unpack(self, saved: Any) -> torch.Tensor:
        """Whether a tensor was written since, autograd looks itself where there is no hook."""
        if isinstance(saved, SavedView):
            self._fetch(saved.of)
            _refuse_written(saved.of.parameter, saved.version)
            return saved.of.view(saved.dtype, saved.size, saved.stride, saved.offset)
        tensor, version = saved
        _refuse_written(tensor, version)
        return tensor  # type: ignore[no-any-return]

    def _fetch(self, one: Offloadable) -> None:
        """And begins with those that were needed next in the lane before."""
        if one.is_away:
            one.fetch()
            self._fetched.append(one)
            self._begin_following(one)

    def _begin_following(self, one: Offloadable) -> None:
        room = GROUP_BYTES
        while one in self._following and room > 0:
            one = self._following[one]
            one.begin_fetch()
            room -= one.parameter.nbytes


def _refuse_written(tensor: torch.Tensor, version: int) -> None:
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{tensor.type()} {list(tensor.shape)} is at version {tensor._version}; expected version {version} instead."
        )


def _storage(tensor: torch.Tensor) -> int:
    """Where its memory is managed; 0 if it has none, or if its elements are not simply what stands there."""
    if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, nn.Parameter):
        return 0
    return 0 if tensor.is_conj() or tensor.is_neg() else tensor.untyped_storage()._cdata


def _let_go(memory: torch.Tensor, address: int) -> None:
    """No tensor views it any more, also none that a script has kept: until now this call has held it."""


def _num_references(storage: int) -> int:
    """How many tensors and other objects hold the memory."""
    count: int = torch._C._storage_Use_Count(storage)
    return count


def _is_computed_again() -> bool:
    """Whether this is a backward pass, in which a checkpoint computes modules again."""
    return torch._C._current_graph_task_id() != -1


def _hooks_may_be_set() -> bool:
    """Whether no other hooks for saved tensors are set, and none of them are forbidden, as by torch.func.grad."""
    autograd: Any = torch._C._autograd
    return autograd._saved_tensors_hooks_is_enabled() and autograd._top_saved_tensors_default_hooks(False) is None


def has_compiled_code() -> bool:
    """Whether this process has called torch.compile. Compiled code is not told where a parameter stands."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and any(backend is not None for backend in frames.cached_backends.values())
