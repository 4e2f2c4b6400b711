"""Reduction over several hosts: in shared memory inside each, over the network between them.

# Note [Two levels]
# The workers of a host meet on their board, as in Note [Direct slices in shared memory]. A bucket has as many columns
# as the largest host has workers. The c-th worker of a host represents its host in column c; on a smaller host, a
# worker represents it in several. It adds the host's sums of a column, which are the largest subtrees that the host has
# whole, reduces them with the workers of that column on the other hosts, over the network, and writes the result to
# every worker of its host. So a byte crosses the network once for all workers of a host, and the brackets are still
# those of the lane tree. All workers take the columns in the same order, so there is no deadlock.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import torch

from lockstep.errors import PeerGone
from lockstep.lanes import Fold, Reduction, Root, Tree
from lockstep.wire.network.gloo import GlooTransport
from lockstep.wire.network.hosts import HostReduction, host_reduction
from lockstep.wire.reducer import Reducer, Slices
from lockstep.wire.schedules import slices as even_slices
from lockstep.wire.schedules.executor import Choose, Executor, Stages
from lockstep.wire.shared.board import MAX_TENSORS, Board
from lockstep.wire.shared.kernels import summation
from lockstep.wire.shared.memory import Staging
from lockstep.wire.shared.reducer import facts_of, facts_of_place, refuse_difference, roots_shown
from lockstep.wire.transport import Hosts, Pending, Transport, each_alone
from lockstep.world import World


class Column:
    """The network between the workers of one column: one worker for each host, under the host's number."""

    def __init__(self, transport: Transport, ranks: Sequence[int], host: int) -> None:
        self.world = World(rank=host, size=len(ranks))
        self.hosts = each_alone(len(ranks))
        self._transport = transport
        self._ranks = ranks

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> Pending:
        return self._transport.send(tensor, self._ranks[target], tag)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Pending:
        return self._transport.receive(tensor, self._ranks[source], tag)

    def awaited(self) -> list[int]:
        ranks = self._transport.awaited()
        return [host for host, rank in enumerate(self._ranks) if rank in ranks]

    def close(self) -> None:
        """Does nothing: the owner of the network closes it."""


class HierarchicalReducer(Reducer):
    """A Reducer for workers on several hosts. The `executor` sends what is not on the CPU over the network."""

    def __init__(
        self, board: Board, transport: GlooTransport, hosts: Hosts, choose: Choose, executor: Executor
    ) -> None:
        self._board = board
        self._transport = transport
        self._staging = Staging(board.memory)
        self._executor = executor
        self._hosts = hosts
        self._rank = rank = transport.world.rank
        self._host = next(number for number, ranks in enumerate(hosts) if rank in ranks)
        self._columns = {
            column: Executor(Column(transport, [_stand_in(ranks, column) for ranks in hosts], self._host), choose)
            for column in range(max(map(len, hosts)))
            if _stand_in(hosts[self._host], column) == rank
        }

    def allocate(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._staging.allocate(num_elements, dtype, device)

    def release(self, tensor: torch.Tensor) -> None:
        self._staging.release(tensor)

    def awaited(self) -> list[int]:
        return self._board.awaited()

    def close(self) -> None:
        for executor in (*self._columns.values(), self._executor):
            executor.close()
        self._board.memory.neighbours.close()
        self._board.memory.close()

    def reduce(self, reduction: Reduction, roots: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        """Collective. See Note [Two levels]. Has the cost of the schedule `hierarchical` of `lockstep explain`.

        A reduce-scatter does the whole of it: that sends less over the network than slices from worker to worker.
        """
        if total.device.type != "cpu" or max(reduction.roots_of) >= MAX_TENSORS:
            self._executor.reduce(reduction, roots, total)
        elif total.numel() > 0:
            with self._reporting_loss():
                self._reduce(reduction, roots, total)

    def reduce_once(
        self, reduction: Reduction, roots: Sequence[torch.Tensor], total: torch.Tensor, *, closes: bool
    ) -> None:
        """Collective. As `reduce`, where `total` is memory that all workers of this host see: each writes `own_parts`.

        The barrier of the host closes it, with `closes` or without.
        """
        if max(reduction.roots_of) >= MAX_TENSORS:
            self._executor.reduce(reduction, roots, whole := torch.empty_like(total))
            for part in self.own_parts(total.numel()):
                total[part] = whole[part]
            return
        with self._reporting_loss():
            shared = [self._staging.shared(root, slot, filled=True) for slot, root in enumerate(roots)]
            meeting = self._board.meet(facts_of_place(total.nbytes, total.dtype, total.storage_offset()), shared)
            refuse_difference(meeting, self._rank)
            self._reduce_columns(reduction, roots_shown(meeting, total.dtype), [total])

    def own_parts(self, num_elements: int) -> list[slice]:
        """The elements that this worker writes where a sum stands once on its host: those of its columns."""
        spans = even_slices(num_elements, max(map(len, self._hosts)))
        return [slice(spans[column].start, spans[column].stop) for column in self._columns]

    def all_gather(self, total: torch.Tensor, slices: Slices) -> None:
        """Collective. Every worker sends its slice to every other over the network, those of its host included."""
        with self._reporting_loss():
            self._executor.all_gather(total, slices)

    @contextmanager
    def _reporting_loss(self) -> Iterator[None]:
        """Reports a lost worker to this host's workers, on their shared page, and to the others in the store."""
        try:
            yield
        except PeerGone as gone:
            self._board.memory.neighbours.accuse(gone.rank)
            self._transport.missed(gone.rank)
            raise

    def _reduce(self, reduction: Reduction, roots: Sequence[torch.Tensor], total: torch.Tensor) -> None:
        shared, place = self._staging.roots_and_place(roots, total)
        meeting = self._board.meet(facts_of(total.nbytes, total.dtype), [*shared, place])
        refuse_difference(meeting, self._rank)
        own_first = sorted(meeting.memory, key=lambda rank: rank != self._rank)
        places = [meeting.memory[rank][-1].view(total.dtype) for rank in own_first]
        self._reduce_columns(reduction, roots_shown(meeting, total.dtype, num_places=1), places)
        if place.data_ptr() != total.data_ptr():
            total.copy_(place)

    def _reduce_columns(
        self, reduction: Reduction, values: dict[Root, torch.Tensor], places: Sequence[torch.Tensor]
    ) -> None:
        """Adds this worker's columns of the host's values and writes them to all places, with those of all columns."""
        for executor, span in zip(self._columns.values(), self.own_parts(places[0].numel()), strict=True):
            cut = {root: value[span] for root, value in values.items()}
            self._reduce_column(reduction, executor, cut, [place[span] for place in places])
        self._board.closing_barrier()

    def _reduce_column(
        self, reduction: Reduction, executor: Executor, values: dict[Root, torch.Tensor], places: Sequence[torch.Tensor]
    ) -> None:
        """Adds one column over this host, over all hosts, and writes it to all places.

        See Note [Stages around a segment] in schedules/executor.py.
        """
        cut = host_reduction(reduction, self._hosts)
        total, *others = places
        sums = [total, *(torch.empty_like(total) for _ in cut.sums_of[self._host][1:])]
        # The first sum is written last: its place may hold a root that another sum still needs.
        pairs = list(zip(cut.sums_of[self._host], sums, strict=False))[::-1]

        def add_over_host(part: range) -> None:
            here = {root: value[part.start : part.stop] for root, value in values.items()}
            for tree, place in pairs:
                if not _is_there(tree, values, place):
                    summation(tree, here, [place[part.start : part.stop]])()

        def copy_to_host(part: range) -> None:
            for other in others:
                other[part.start : part.stop].copy_(total[part.start : part.stop])

        executor.reduce(_over_hosts(cut), sums[: len(pairs)], total, Stages(add_over_host, copy_to_host))


def _is_there(tree: Tree, values: dict[Root, torch.Tensor], place: torch.Tensor) -> bool:
    """Whether the sum is one value alone, which is in its place already."""
    return isinstance(tree, Root) and values[tree].data_ptr() == place.data_ptr()


def _stand_in(ranks: Sequence[int], column: int) -> int:
    """The worker that represents its host in a column. See Note [Two levels]."""
    return ranks[column % len(ranks)]


@lru_cache(maxsize=256)
def _over_hosts(cut: HostReduction) -> Reduction:
    """The reduction in which each host is one worker, whose roots are the host's sums."""
    folds = (Fold(tuple(range(len(sums))), (0,) * len(sums)) for sums in cut.sums_of)
    return Reduction(tuple(folds), cut.tree)
