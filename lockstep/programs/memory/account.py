"""What each part of a training takes: of each worker, or of its GPU, and once on the host. Pure arithmetic.

# Note [What is not in an account]
# Temporary memory inside of operators, what an update needs besides its state (torch's foreach updates make copies),
# what the C library, or torch's allocator for GPUs, keeps of freed memory, and what CUDA itself takes in each process.
# Data loaders have processes of their own. The snapshots that are kept for a loss in an evaluation take at most a part
# of the free memory (Note [Lost outside of steps] in state/checkpoints/in_memory.py). Activations are those of one lane
# at the end of its forward pass, where the inputs are known.

# Note [Parameters beside activations]
# Under "sharded:parameters" a GPU has all parameters when a lane begins, and all activations when its forward pass
# ends, but not both (Note [Away during the forward pass] in strategies/sharded/offload.py). Its account has the
# activations, and of the parameters what goes beyond them.
"""

from dataclasses import dataclass
from itertools import accumulate

from lockstep.errors import BadArgument
from lockstep.gradients.layout import Layout, Spec, make_layout
from lockstep.lanes import Assignment, reduction
from lockstep.strategies.sharded import plan
from lockstep.strategies.sharded.lent_buffers import NUM_BUFFERS
from lockstep.strategies.sharded.marks import MARKING_BYTES
from lockstep.strategies.sharded.offload import GROUP_BYTES
from lockstep.strategies.sharded.rounds import buffer_bytes

REPLICATED = "replicated"
SHARDED = ("sharded:optimizer", "sharded:gradients", "sharded:parameters")
STRATEGIES = (REPLICATED, *SHARDED)

WRITTEN_BYTES = 30 * 2**20
"""How much a worker that was forked has written, after a few steps, of what was loaded before. Measured."""


@dataclass(frozen=True)
class ModelSizes:
    """A model as an account needs it. `state_widths`: bytes of optimizer state for an element of each parameter.

    `sample_bytes`: activations of one sample; None if nobody knows.
    """

    specs: tuple[Spec, ...]
    state_widths: tuple[int, ...]
    batch_size: int | None = None
    sample_bytes: float | None = None

    @property
    def parameter_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.specs)

    @property
    def state_bytes(self) -> int:
        return sum(spec.num_elements * width for spec, width in zip(self.specs, self.state_widths, strict=True))


@dataclass(frozen=True)
class BaseMemory:
    """What a process takes that has loaded Python, torch and lockstep: its own, and files that all processes share."""

    own_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class WorkersOnHost:
    """How many workers and lanes there are."""

    num_workers: int
    num_lanes: int

    def __post_init__(self) -> None:
        if self.num_lanes < 1 or self.num_workers < 1:
            raise BadArgument(
                f"there are {self.num_workers} workers and {self.num_lanes} lanes: each must be 1 or more"
            )

    @property
    def most_lanes(self) -> int:
        """Of the worker that has the most."""
        return Assignment.even(self.num_lanes, self.num_workers).most_lanes

    @property
    def depth(self) -> int:
        """How many buffers of a bucket the worker with the most needs to fold its lanes."""
        folds = reduction(Assignment.even(self.num_lanes, self.num_workers), tuple(range(self.num_lanes))).folds
        # A lane that is merged at once is added to the topmost entry of the fold's stack.
        return max(1, *(height for fold in folds for height in accumulate(1 - merges for merges in fold.merges)))


@dataclass(frozen=True)
class MemoryPart:
    """One line of an account: bytes that each worker has, and bytes that stand once on the host. None: not known."""

    name: str
    each: int | None
    once: int = 0

    def on_host(self, num_workers: int) -> int | None:
        return None if self.each is None else self.each * num_workers + self.once


@dataclass(frozen=True)
class MemoryAccount:
    """All parts of a training under one strategy."""

    strategy: str
    num_workers: int
    parts: tuple[MemoryPart, ...]

    @property
    def host_bytes(self) -> int:
        """Without what is not known."""
        return sum(part.on_host(self.num_workers) or 0 for part in self.parts)

    @property
    def worker_bytes(self) -> float:
        return self.host_bytes / self.num_workers

    def shares(self, part: MemoryPart) -> tuple[float | None, float | None]:
        """What a worker, with its share of what stands once, and the host hold of a part: what PSS counts."""
        on_host = part.on_host(self.num_workers)
        return None if on_host is None else on_host / self.num_workers, on_host


class GpuMemoryAccount(MemoryAccount):
    """The same for workers on GPUs: a part is, for each worker, on its GPU, and once in the memory of the host."""

    @property
    def host_bytes(self) -> int:
        return sum(part.once for part in self.parts)

    @property
    def worker_bytes(self) -> float:
        return sum(part.each or 0 for part in self.parts)

    def shares(self, part: MemoryPart) -> tuple[float | None, float | None]:
        return part.each, part.once


def make_account(sizes: ModelSizes, workers: WorkersOnHost, strategy: str, base: BaseMemory) -> MemoryAccount:
    """What a training takes under the strategy, all workers on one host. Raises for a strategy that is not there."""
    _check(strategy)
    is_once = strategy != REPLICATED
    loaded = MemoryPart("Python and torch", base.own_bytes, base.shared_bytes)
    if is_once and workers.num_workers > 1:  # see Note [Loaded once] in launch/worker/load_once.py
        loaded = MemoryPart(loaded.name, WRITTEN_BYTES, base.shared_bytes + base.own_bytes)
    parts = (
        loaded,
        _held("parameters", sizes.parameter_bytes, is_once),
        *_gradients(make_layout(sizes.specs), workers, strategy in SHARDED[1:] and workers.num_workers > 1),
        _held("optimizer state", sizes.state_bytes, is_once),
        MemoryPart("journal of the update", _journal_bytes(sizes, workers.num_workers) if is_once else 0),
        MemoryPart("activations of a lane", _activations(sizes, workers)),
    )
    return MemoryAccount(strategy, workers.num_workers, parts)


def make_gpu_account(sizes: ModelSizes, workers: WorkersOnHost, strategy: str) -> GpuMemoryAccount:
    """What a training takes on the GPU of each worker, and in the memory of the host that they share."""
    _check(strategy)
    count, held, state = workers.num_workers, sizes.parameter_bytes, sizes.state_bytes
    is_divided = strategy != REPLICATED and count > 1
    layout, is_on_host = make_layout(sizes.specs), is_divided and strategy in SHARDED[1:]
    fetched = sum(bucket.num_bytes for bucket in layout.buckets) // count if is_on_host else 0
    leave = is_divided and strategy == SHARDED[2]
    parts = (
        MemoryPart("parameters", _beside_activations(sizes, workers) if leave else held, held if is_divided else 0),
        *_gradients(layout, workers, is_on_host),
        MemoryPart("gradients for the update", fetched),
        MemoryPart("optimizer state", -(-state // count) if is_divided else state, 2 * state if is_divided else 0),
        MemoryPart("buffer for parameters", buffer_bytes(held) if is_divided else 0),
        MemoryPart("marks of parameters", MARKING_BYTES if leave else 0),
        MemoryPart("activations of a lane", _activations(sizes, workers)),
    )
    return GpuMemoryAccount(strategy, count, parts)


def _check(strategy: str) -> None:
    if strategy not in STRATEGIES:
        raise BadArgument(f"a strategy is one of {', '.join(STRATEGIES)}, not {strategy!r:.60}")


def _beside_activations(sizes: ModelSizes, workers: WorkersOnHost) -> int:
    """See Note [Parameters beside activations]. Those of the last modules have not left when the forward pass ends."""
    held = sizes.parameter_bytes
    return max(held - (_activations(sizes, workers) or 0), min(held, GROUP_BYTES))


def _held(name: str, num_bytes: int, is_once: bool) -> MemoryPart:
    return MemoryPart(name, 0, num_bytes) if is_once else MemoryPart(name, num_bytes)


def _gradients(layout: Layout, workers: WorkersOnHost, is_once: bool) -> list[MemoryPart]:
    """The sum; what a worker's lanes need until they are added; and what autograd has made when a bucket is full."""
    sizes = [bucket.num_bytes for bucket in layout.buckets] or [0]
    whole, is_single = sum(sizes), workers.most_lanes == 1
    each, once, lanes, arriving = whole, 0, whole * workers.depth - whole, max(sizes) if is_single else whole
    if workers.num_workers == workers.num_lanes == 1:  # Note [Nothing to add] in gradients/plan.py
        each, lanes, arriving = 0, 0, whole
    elif is_once:
        turns = sum(max(sizes[turn::NUM_BUFFERS], default=0) for turn in range(NUM_BUFFERS))
        each, once, lanes = 0, whole, turns if is_single else whole * workers.depth
    return [
        MemoryPart("sum of the gradients", each, once),
        MemoryPart("gradients of lanes", lanes),
        MemoryPart("gradients that arrive", arriving),
    ]


def _journal_bytes(sizes: ModelSizes, num_workers: int) -> int:
    """See Note [The journal] in strategies/sharded/ledger.py."""
    widths = [spec.dtype.itemsize + width for spec, width in zip(sizes.specs, sizes.state_widths, strict=True)]
    batches = [batch for own in plan.cut([spec.num_elements for spec in sizes.specs], num_workers) for batch in own]
    return max((sum(chunk.num_elements * widths[chunk.parameter] for chunk in batch) for batch in batches), default=0)


def _activations(sizes: ModelSizes, workers: WorkersOnHost) -> int | None:
    if sizes.sample_bytes is None or sizes.batch_size is None:
        return None
    return int(sizes.sample_bytes * -(-sizes.batch_size // workers.num_lanes))
