"""The reducer that sends: runs any schedule over any transport.

# Note [Segments]
# A long part is cut into segments, each of which goes through all rounds of the schedule by itself. UNDER_WAY of them
# are under way at a time, in turn: while one is waited for and added, the others move. All workers cut alike and post
# messages in the same order (segments in groups, round by round, as the schedule lists them), so the n-th message from
# one worker to another is the same on both sides, and every wait is for something that will be posted. A segment
# without elements is skipped on both sides. Gloo sends a message when the other side has said that it waits for it, and
# says so behind what it sends itself: with two under way the network was idle for a tenth of the time.

# Note [Stages around a segment]
# Between hosts a bucket has two more stages: it is added over the workers of a host before it is sent, and copied to
# them afterwards. Both are done segment by segment, while others are on the network. So their time is that of the first
# and of the last segment, and a bucket is cut into LEAST_SEGMENTS at least, if these are not too small for a message.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from lockstep.errors import BadArgument
from lockstep.lanes import Reduction
from lockstep.wire.reducer import Reducer, Slices, check_slices
from lockstep.wire.schedules import Schedule, direct, direct_all_gather, direct_reduce_scatter
from lockstep.wire.schedules import slices as even_slices
from lockstep.wire.schedules.program import Addition, Step, ValuePlace, WorkerProgram, program
from lockstep.wire.transport import DATA, Pending, Transport

SEGMENT_BYTES = 4 * 1024 * 1024
"""How much of a part moves at a time: large enough for a network, small enough that adding it hides behind the next."""

NOTHING = Step((), (), ())
"""The one step of a worker that is alone."""

UNDER_WAY = 4
LEAST_SEGMENTS, LEAST_SEGMENT_BYTES = 8, 1024 * 1024
"""See Note [Stages around a segment]."""
KEPT_PROGRAMS = 64

Choose = Callable[[Reduction, int], Schedule]
"""Returns the exact schedule for a reduction of so many bytes; must return the same on every worker."""


def by_direct_slices(reduction: Reduction, num_bytes: int) -> Schedule:
    """The default choice."""
    return direct(reduction)


@dataclass(frozen=True)
class Stages:
    """What is done to elements before they are first sent, and when they hold the result."""

    before: Callable[[range], None]
    after: Callable[[range], None]


class Executor(Reducer):
    """A Reducer, and a way to run any schedule, over any transport. Keeps the memory for what it receives."""

    def __init__(
        self, transport: Transport, choose: Choose = by_direct_slices, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        if segment_bytes < 1:
            raise BadArgument(f"segment_bytes must be at least 1, not {segment_bytes}")
        self._transport = transport
        self._choose = choose
        self._segment_bytes = segment_bytes
        self._scratch: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self._programs: dict[tuple[int, bool], tuple[Schedule, WorkerProgram]] = {}

    def allocate(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(num_elements, dtype=dtype, device=device)

    def release(self, tensor: torch.Tensor) -> None:
        pass

    def close(self) -> None:
        """Frees the scratch memory. The owner of the transport closes that."""
        self._scratch.clear()

    def reduce(
        self,
        reduction: Reduction,
        roots: Sequence[torch.Tensor],
        total: torch.Tensor,
        stages: Stages | None = None,
    ) -> None:
        """Collective. See Reducer. Has the cost of the chosen schedule. See Note [Stages around a segment]."""
        schedule = self._choose(reduction, total.nbytes)
        if not schedule.exact:
            raise BadArgument("a reduction needs an exact schedule, one that was made from the reduction")
        self._carry_out(schedule, roots, total, even_slices(total.numel(), schedule.num_parts), stages)

    def reduce_scatter(
        self, reduction: Reduction, roots: Sequence[torch.Tensor], total: torch.Tensor, slices: Slices
    ) -> None:
        """Collective. See Reducer. One round; a worker sends each peer that peer's slice of each of its roots."""
        check_slices(slices, total.numel(), self._transport.world.size)
        self._carry_out(direct_reduce_scatter(reduction), roots, total, slices)

    def all_gather(self, total: torch.Tensor, slices: Slices) -> None:
        """Collective. See Reducer. One round; a worker sends its slice to each peer."""
        check_slices(slices, total.numel(), self._transport.world.size)
        self._carry_out(direct_all_gather(self._transport.world.size), [], total, slices)

    def run(self, schedule: Schedule, value: torch.Tensor) -> None:
        """Collective. Runs any schedule on one flat tensor, in place. Has the cost of the schedule.

        Parts are `slices(value.numel(), schedule.num_parts)`. Before it, `value` is this worker's contribution (in an
        all-gather its own part, in a broadcast only the source's counts); afterwards it is the result. In a
        reduce-scatter only this worker's own part is; the rest is undefined.
        """
        if schedule.reduction is not None and set(schedule.reduction.roots_of) != {1}:
            raise BadArgument("run takes one value from each worker; a schedule with other roots goes through reduce")
        self._carry_out(schedule, [value], value, even_slices(value.numel(), schedule.num_parts))

    def _carry_out(
        self,
        schedule: Schedule,
        roots: Sequence[torch.Tensor],
        running: torch.Tensor,
        parts: Slices,
        stages: Stages | None = None,
    ) -> None:
        """See Note [Segments]."""
        plan = self._program(schedule, bool(roots) and roots[0].data_ptr() == running.data_ptr())
        if not plan.steps and stages is None:
            return
        cut = Cut.of(parts, self._segment_elements(running.element_size(), parts, stages))
        slots = self._slots(plan.num_cells, cut.longest, running)
        under_way: deque[UnderWay] = deque()
        for numbers in _in_groups(cut.num_segments):
            group = [PartSegment(cut.spans(n), roots, running, cells) for n, cells in zip(numbers, slots, strict=False)]
            for number, step in enumerate(plan.steps or (NOTHING,), start=1):
                for segment in group:
                    if stages is not None and number == 1:
                        segment.pass_through(stages.before)
                    while len(under_way) >= len(group):
                        under_way.popleft().finish()
                    after = stages.after if stages is not None and number >= len(plan.steps) else None
                    under_way.append(self._post(step, segment, after))
        for last in under_way:
            last.finish()

    def _segment_elements(self, element_bytes: int, parts: Slices, stages: Stages | None) -> int:
        """How long a segment of a part is at most."""
        segment_bytes = self._segment_bytes
        if stages is not None:
            least = max(LEAST_SEGMENT_BYTES, max(map(len, parts)) * element_bytes // LEAST_SEGMENTS)
            segment_bytes = min(segment_bytes, least)
        return segment_bytes // element_bytes

    def _post(self, step: Step, segment: "PartSegment", after: Callable[[range], None] | None) -> "UnderWay":
        pending: list[Pending] = []
        for message in step.receives:
            if segment.spans[message.part]:
                place = segment.at(message.place, message.part)
                pending.append(self._transport.receive(place, message.peer, DATA))
        for message in step.sends:
            if segment.spans[message.part]:
                value = segment.at(message.place, message.part)
                pending.append(self._transport.send(value, message.peer, DATA))
        return UnderWay(step, segment, pending, after)

    def _program(self, schedule: Schedule, in_place: bool) -> WorkerProgram:
        """Cached by identity: comparing schedules would cost more than a small reduction."""
        if (known := self._programs.get((id(schedule), in_place))) is not None:
            return known[1]
        if schedule.num_workers != self._transport.world.size:
            raise BadArgument(
                f"the schedule is for {schedule.num_workers} workers, but there are {self._transport.world.size}"
            )
        if len(self._programs) >= KEPT_PROGRAMS:
            self._programs.clear()
        made = program(schedule, self._transport.world.rank, in_place)
        self._programs[id(schedule), in_place] = (schedule, made)  # with its schedule, so that the id stays its own
        return made

    def _slots(self, num_cells: int, cell_elements: int, like: torch.Tensor) -> torch.Tensor:
        """Scratch memory for the segments under way: slots of cells of elements."""
        needed = UNDER_WAY * num_cells * cell_elements
        kept = self._scratch.get((like.dtype, like.device))
        if kept is None or kept.numel() < needed:
            kept = self._scratch[like.dtype, like.device] = torch.empty(needed, dtype=like.dtype, device=like.device)
        return kept[:needed].view(UNDER_WAY, num_cells, cell_elements)


@dataclass(frozen=True)
class Cut:
    """How a flat tensor is cut: into parts, and each part into the same number of segments."""

    parts: Slices
    num_segments: int

    @classmethod
    def of(cls, parts: Slices, segment_elements: int) -> "Cut":
        return cls(parts, max(1, -(-max(map(len, parts)) // max(1, segment_elements))))

    @property
    def longest(self) -> int:
        """The most elements that a segment of a part has."""
        return -(-max(map(len, self.parts)) // self.num_segments)

    def spans(self, number: int) -> list[range]:
        """The elements of segment `number` of each part."""
        return [part[slice(*_bounds(len(part), number, self.num_segments))] for part in self.parts]


@dataclass(frozen=True)
class PartSegment:
    """One segment of all parts, and the places of its values on this worker."""

    spans: Sequence[range]
    roots: Sequence[torch.Tensor]
    running: torch.Tensor
    cells: torch.Tensor

    def at(self, place: ValuePlace, part: int) -> torch.Tensor:
        span = self.spans[part]
        if place.kind == "cell":
            return self.cells[place.index, : len(span)]
        flat = self.running if place.kind == "running" else self.roots[place.index]
        return flat[span.start : span.stop]

    def pass_through(self, stage: Callable[[range], None]) -> None:
        for span in self.spans:
            if span:
                stage(span)

    def add(self, addition: Addition) -> None:
        part, into = addition.part, self.at(addition.into, addition.part)
        if addition.right is None:
            into.copy_(self.at(addition.left, part))
        else:
            torch.add(self.at(addition.left, part), self.at(addition.right, part), out=into)


@dataclass(frozen=True)
class UnderWay:
    """One round of one segment, posted; in its last round with what is done `after` it."""

    step: Step
    segment: PartSegment
    pending: Sequence[Pending]
    after: Callable[[range], None] | None

    def finish(self) -> None:
        """Waits for all its messages, then does its additions."""
        for transfer in self.pending:
            transfer.wait()
        for addition in self.step.additions:
            if self.segment.spans[addition.part]:
                self.segment.add(addition)
        if self.after is not None:
            self.segment.pass_through(self.after)


def _in_groups(num_segments: int) -> list[list[int]]:
    numbers = iter(range(num_segments))
    return [*iter(lambda: list(islice(numbers, UNDER_WAY)), [])]


def _bounds(num_elements: int, number: int, num_pieces: int) -> tuple[int, int]:
    return num_elements * number // num_pieces, num_elements * (number + 1) // num_pieces
