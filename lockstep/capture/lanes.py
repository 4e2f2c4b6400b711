"""A function that computes a lane, recorded once for each shape and replayed after.

# Note [When a lane is recorded]
# The first calls for each shape run as they are: cuBLAS, cuDNN and autograd set themselves up in them. They are lanes
# like others, so nothing is computed twice. Then the lane is recorded, once for each shape and each of this worker's
# places in the sum (a lane that is put on the stack and one that is added to it are different work), and replayed from
# then on. A new layout of the buckets, other workers, or a recording that breaks make all recordings void. Nothing is
# recorded before it is known in which order gradients arrive: the buckets will be laid out anew then.

# Note [The same bits]
# A graph replays the same kernels on the same values. Random numbers follow the generator as it stands at replay, which
# was set from (seed, step, lane). Its inputs stand as those that it was recorded with did, strides and alignment
# included, since kernels are chosen by them. So a lane may be replayed or run as it is, on every worker as it likes.

# Note [Nothing of autograd's is handed out]
# A loss with its graph keeps autograd's nodes of the parameters alive, which belong to the stream that they were made
# on; a recording, on another stream, would break at them. So what a lane gives back is detached, recorded or not.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lockstep.capture.graph import CannotCapture, capture, num_broken, watching_for_waits
from lockstep.chance import Generators
from lockstep.gradients.recorded_lane import Recording
from lockstep.gradients.recorder import LaneRecorder
from lockstep.strategies.protocol import StepEngine

WARM_UP = 3
"""How many lanes of each shape run as they are; the last of them is watched for waits."""

MOST_SHAPES = 64
"""A graph for each keeps its kernels in memory: data of ever new lengths are not for graphs."""

ALIGN_BYTES = 16
"""What kernels look at when they choose how to read."""

_PLAIN = (str, bytes, int, float, bool, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class CaptureContext:
    """What a captured lane needs of the run: its engine, the obstacles on its side, and a way to report them."""

    engine: StepEngine
    obstacle: Callable[[], str | None]
    modes: Callable[[], Hashable]
    """What changes the work besides its arguments: the models' training modes, and where their tensors are."""
    say: Callable[[str], None]
    device: torch.device


@dataclass
class LaneGraph:
    """A recorded lane."""

    graph: torch.cuda.CUDAGraph
    inputs: Sequence[torch.Tensor]
    result: Any
    recording: Recording

    def replay(self, recorder: LaneRecorder, given: Sequence[torch.Tensor]) -> Any:
        for place, value in zip(self.inputs, given, strict=True):
            place.copy_(value, non_blocking=True)
        self.graph.replay()
        recorder.take(self.recording)
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, self.result)


class CapturedLanes:
    """Calls `fn` for a lane, by a graph where it can. See Note [When a lane is recorded]."""

    def __init__(self, fn: Callable[..., Any], context: CaptureContext) -> None:
        self._fn = fn
        self._context = context
        self._name = getattr(fn, "__name__", type(fn).__name__)
        self._explained: set[str] = set()
        self._refused: str | None = None
        self._calls: dict[Hashable, int] = {}
        self._graphs: dict[Hashable, LaneGraph] = {}
        self._inputs: dict[Hashable, list[torch.Tensor]] = {}
        self._made_for: tuple[object, ...] = ()
        """The engine's recorder, its layout and the broken recordings before: recordings are void for others."""
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, form = pytree.tree_flatten((args, kwargs))
        obstacle = self._refused or self._context.obstacle() or unfit(leaves)
        if obstacle is not None:
            return self._as_it_is(obstacle, args, kwargs)
        engine = self._context.engine
        if engine.shows_lanes:  # for this step only
            return self._run(args, kwargs)
        if not engine.recorder.expects_whole_lane():
            return self._as_it_is("another backward pass of the lane ran before it", args, kwargs)
        shape = (form, *map(_trait, leaves), self._context.modes(), _precision())
        if shape not in self._calls and len(self._calls) == MOST_SHAPES:
            self._refused = f"it was given data of more than {MOST_SHAPES} shapes"
            self.close()
            return self._as_it_is(self._refused, args, kwargs)
        called = self._calls[shape] = self._calls.get(shape, 0) + 1
        if called <= WARM_UP:
            return self._warm_up(args, kwargs, watched=called == WARM_UP)
        return self._replayed(engine.recorder, shape, leaves, form, (args, kwargs))

    @property
    def num_graphs(self) -> int:
        """How many recordings are held."""
        return len(self._graphs)

    def close(self) -> None:
        """Gives back the graphs and their memory; a later call records anew."""
        self._graphs, self._inputs, self._pool = {}, {}, None

    def _replayed(
        self, recorder: LaneRecorder, shape: Hashable, leaves: list[Any], form: Any, call: tuple[Any, dict[str, Any]]
    ) -> Any:
        made_for = (recorder, recorder.layout_number, num_broken())
        if made_for != self._made_for:
            self.close()
            self._made_for = made_for
        if not recorder.is_settled:
            return self._run(*call)
        key, given = (shape, recorder.lane_place), [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        graph = self._graphs.get(key)
        if graph is None:
            before = Generators.now()
            try:
                graph = self._graphs[key] = self._record(recorder, shape, leaves, form)
            except CannotCapture as obstacle:
                before.restore()
                self._refused = obstacle.reason
                self.close()
                return self._as_it_is(obstacle.reason, *call)
        return graph.replay(recorder, given)

    def _record(self, recorder: LaneRecorder, shape: Hashable, leaves: list[Any], form: Any) -> LaneGraph:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = self._stream or torch.cuda.Stream(self._context.device)
        assert self._stream is not None
        inputs = self._inputs.setdefault(shape, [standing_like(x) for x in leaves if isinstance(x, torch.Tensor)])
        places = iter(inputs)
        args, kwargs = pytree.tree_unflatten(
            [next(places) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], form
        )
        before = Generators.now()
        recording = recorder.prepare()

        def work() -> Any:
            with recorder.record(recording):
                return self._fn(*args, **kwargs)

        graph, result = capture(work, self._pool, self._context.device, self._stream)
        if not Generators.now().equal_on_cpu(before):
            raise CannotCapture("it draws random numbers on the CPU, which a graph cannot")
        before.restore()
        return LaneGraph(graph, inputs, detached(result), recording)

    def _warm_up(self, args: Any, kwargs: Any, *, watched: bool) -> Any:
        """See Note [Work that cannot be recorded] in graph.py."""
        if not watched:
            return self._run(args, kwargs)
        with watching_for_waits(self._context.device) as waits:
            result = self._run(args, kwargs)
        if waits:
            self._refused = f"it waits for the GPU ({waits[0]})"
        return result

    def _as_it_is(self, obstacle: str, args: Any, kwargs: Any) -> Any:
        if obstacle not in self._explained:
            self._explained.add(obstacle)
            self._context.say(f"run.captured: {self._name} runs as it is, because {obstacle}")
        return self._run(args, kwargs)

    def _run(self, args: Any, kwargs: Any) -> Any:
        """See Note [Nothing of autograd's is handed out]."""
        return detached(self._fn(*args, **kwargs))


def unfit(leaves: Sequence[Any]) -> str | None:
    """Why these arguments cannot be those of a graph, if they cannot. Pure."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if not leaf.is_cuda:
                return f"it was given a tensor on {leaf.device}"
            if leaf.layout != torch.strided or leaf.requires_grad:
                return "it was given a tensor that is sparse or requires a gradient"
            if torch._debug_has_internal_overlap(leaf) == 1:
                return "it was given a tensor whose elements share memory (made by expand): give it .contiguous()"
        elif not isinstance(leaf, _PLAIN):
            return f"it was given {type(leaf).__name__}, and only tensors and plain values can be compared"
    return None


def standing_like(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides and the same alignment. See Note [The same bits]."""
    shift = tensor.data_ptr() % ALIGN_BYTES // tensor.element_size()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    room = tensor.new_empty(shift + (extent if tensor.numel() else 0))
    return room.as_strided(tensor.shape, tensor.stride(), shift).copy_(tensor)


def detached(result: Any) -> Any:
    """The same with tensors that autograd knows nothing of."""
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)


def _trait(leaf: Any) -> Hashable:
    """What of an argument is part of the recording: a tensor's values are not."""
    if isinstance(leaf, torch.Tensor):
        return (tuple(leaf.shape), leaf.stride(), leaf.data_ptr() % ALIGN_BYTES, leaf.dtype, leaf.device)
    return (type(leaf), leaf)


def _precision() -> Hashable:
    return torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"), torch.is_grad_enabled()
