"""Schedules carried out for real: over Gloo between processes, and over queues between threads."""

import os
import queue
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from threading import Event, Lock
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from workers import on_workers

from lockstep.elastic.rendezvous import open_store
from lockstep.errors import BadArgument
from lockstep.lanes import Assignment, Branch, Reduction, Root, Tree, reduction
from lockstep.programs.explain.schedules.catalogue import CATALOGUE, Algorithm, Setting
from lockstep.programs.explain.schedules.ring import ring
from lockstep.settings.environment import find_place
from lockstep.wire.network.gloo import GlooTransport
from lockstep.wire.schedules import AddPart, Schedule, ScheduleRound, SendPart, direct, one_root_each, slices
from lockstep.wire.schedules.executor import Cut, Executor, Stages
from lockstep.wire.schedules.program import program
from lockstep.wire.transport import InProcess, Pending, Transport
from lockstep.world import World

WHOLE = 4 * 1024 * 1024
EVERY = [(collective, name) for collective, ways in CATALOGUE.items() for name in ways]

# -- workers as threads ----------------------------------------------------------------------------------------


@dataclass
class Letter:
    """A message on its way. It is read when its receiver waits for it, so who changes it before that is found out."""

    tensor: torch.Tensor
    taken: Event = field(default_factory=Event)

    def wait(self) -> None:
        assert self.taken.wait(20), "nobody received a message"


@dataclass
class Channel:
    """Messages from one worker to another with one tag, and the receives posted for them, both in order."""

    letters: "queue.SimpleQueue[Letter]" = field(default_factory=queue.SimpleQueue)
    expected: "deque[Expected]" = field(default_factory=deque)


@dataclass
class Expected:
    tensor: torch.Tensor
    channel: Channel
    arrived: bool = False

    def wait(self) -> None:
        while not self.arrived:
            letter, first = self.channel.letters.get(timeout=20), self.channel.expected.popleft()
            assert letter.tensor.shape == first.tensor.shape, "messages were posted in another order than awaited"
            first.tensor.copy_(letter.tensor)
            first.arrived = True
            letter.taken.set()


@dataclass
class Between:
    """A Transport between the threads of one process."""

    world: World
    channels: dict[tuple[int, int, int], Channel]
    lock: Any

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> Pending:
        letter = Letter(tensor)
        self._channel(self.world.rank, target, tag).letters.put(letter)
        return letter

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Pending:
        channel = self._channel(source, self.world.rank, tag)
        channel.expected.append(Expected(tensor, channel))
        return channel.expected[-1]

    def awaited(self) -> list[int]:
        return []

    def close(self) -> None:
        pass

    def _channel(self, source: int, target: int, tag: int) -> Channel:
        with self.lock:
            return self.channels.setdefault((source, target, tag), Channel())


def on_threads(num_workers: int, job: Callable[[Transport], Any]) -> list[Any]:
    """What `job` gives on each of so many workers."""
    channels: dict[tuple[int, int, int], Channel] = {}
    lock = Lock()
    transports = [Between(World(rank, num_workers, rank, num_workers), channels, lock) for rank in range(num_workers)]
    with ThreadPoolExecutor(num_workers) as pool:
        return list(pool.map(job, transports, timeout=60))


# -- what is right ---------------------------------------------------------------------------------------------


def setting_of(num_workers: int) -> Setting:
    """Two hosts of uneven size, and a broadcast from the last worker."""
    split = (num_workers + 2) // 3
    ranks = tuple(range(num_workers))
    hosts = tuple(host for host in (ranks[:split], ranks[split:]) if host)
    return Setting(num_workers, hosts=hosts, source=num_workers - 1)


def contribution(rank: int, num_elements: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    chance = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point:
        return torch.randn(num_elements, generator=chance, dtype=dtype)
    return torch.randint(0, 50, (num_elements,), generator=chance).to(dtype)


def tree_sum(tree: Tree, roots: dict[Root, torch.Tensor]) -> torch.Tensor:
    if isinstance(tree, Branch):
        return tree_sum(tree.left, roots) + tree_sum(tree.right, roots)
    assert isinstance(tree, Root)
    return roots[tree]


def is_right(schedule: Schedule, rank: int, found: torch.Tensor) -> bool:
    """Whether a worker that contributed `contribution(rank)` has the result that the collective promises."""
    num_workers, size = schedule.num_workers, found.numel()
    given = [contribution(peer, size, found.dtype) for peer in range(num_workers)]
    own = slices(size, num_workers)
    if schedule.collective == "broadcast":
        return torch.equal(found, given[schedule.source])
    if schedule.collective == "all_gather":
        return torch.equal(found, torch.cat([given[p][own[p].start : own[p].stop] for p in range(num_workers)]))
    total = tree_sum(one_root_each(num_workers).tree, {Root(peer, 0): value for peer, value in enumerate(given)})
    if schedule.collective == "all_reduce":
        return torch.equal(found, total)
    mine = slice(own[rank].start, own[rank].stop)
    return torch.equal(found[mine], total[mine])


def carry_out(transport: Transport, algorithm: Algorithm, size: int, dtype: torch.dtype, segment_bytes: int) -> bool:
    rank, num_workers = transport.world.rank, transport.world.size
    schedule = algorithm.schedule(setting_of(num_workers))
    value = contribution(rank, size, dtype)
    Executor(transport, segment_bytes=segment_bytes).run(schedule, value)
    return is_right(schedule, rank, value)


# -- every schedule --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("collective", "name"), EVERY)
@pytest.mark.parametrize("segment_bytes", [48, WHOLE], ids=["segments", "whole"])
def test_every_schedule_gives_the_right_result_for_any_number_of_workers(
    collective: Any, name: str, segment_bytes: int
) -> None:
    algorithm = CATALOGUE[collective][name]
    for num_workers in range(1, 9):
        found = on_threads(num_workers, lambda t: carry_out(t, algorithm, 331, torch.int64, segment_bytes))
        assert found == [True] * num_workers


@pytest.mark.parametrize(("collective", "name"), EVERY)
def test_every_schedule_copes_with_fewer_elements_than_parts(collective: Any, name: str) -> None:
    algorithm = CATALOGUE[collective][name]
    for size in (0, 1, 3):
        assert on_threads(5, lambda t, size=size: carry_out(t, algorithm, size, torch.int64, 8)) == [True] * 5


def open_gloo() -> GlooTransport:
    place = find_place(os.environ)
    return GlooTransport(place.world, open_store(place, 20.0), 20.0)


def _wrong_over_gloo() -> list[str]:
    """Every schedule, whole and in segments, in whole numbers; the exact ones in floats too. Names what is wrong."""
    wrong = []
    with closing(open_gloo()) as transport:
        for collective, name in EVERY:
            algorithm = CATALOGUE[collective][name]
            for dtype in (torch.int64, torch.float32) if algorithm.exact else (torch.int64,):
                for segment_bytes in (256, WHOLE):
                    if not carry_out(transport, algorithm, 1003, dtype, segment_bytes):
                        wrong.append(f"{collective} {name} {dtype} {segment_bytes}")
    return wrong


@pytest.mark.parametrize("num_workers", [*(pytest.param(number, marks=pytest.mark.soak) for number in (2, 5)), 3, 4])
def test_every_schedule_gives_the_right_result_between_processes(num_workers: int) -> None:
    assert on_workers(num_workers, _wrong_over_gloo) == [[]] * num_workers


DTYPES = ("bool", "uint8", "int16", "int64", "float16", "bfloat16", "float64", "complex64", "complex128")


def _wrong_dtypes() -> list[str]:
    wrong = []
    with closing(open_gloo()) as transport:
        for name in DTYPES:
            for schedule in (direct(one_root_each(3)), ring(3)):
                value = torch.tensor([1, 0, 1, 0, 1]).to(getattr(torch, name)) * (transport.world.rank == 1)
                Executor(transport, segment_bytes=2).run(schedule, value)
                if value.tolist() != torch.tensor([1, 0, 1, 0, 1]).to(value.dtype).tolist():
                    wrong.append(name)
    return wrong


def test_every_dtype_is_moved_and_added() -> None:
    assert on_workers(3, _wrong_dtypes) == [[]] * 3


# -- exact sums ------------------------------------------------------------------------------------------------

EXACT = {name: way for name, way in CATALOGUE["all_reduce"].items() if way.exact}


@st.composite
def reductions(draw: st.DrawFn) -> Reduction:
    """Any lanes on any workers: uneven, scattered, none at all, and some without samples."""
    num_workers, num_lanes = draw(st.integers(1, 8)), draw(st.integers(1, 12))
    carrier = draw(st.lists(st.integers(0, num_workers - 1), min_size=num_lanes, max_size=num_lanes))
    lanes_of = [[lane for lane in range(num_lanes) if carrier[lane] == rank] for rank in range(num_workers)]
    present = draw(st.sets(st.integers(0, num_lanes - 1), min_size=1))
    return reduction(Assignment.explicit(lanes_of), tuple(sorted(present)))


def hosts_of(num_workers: int, num_hosts: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(num_workers))[host::num_hosts] for host in range(min(num_hosts, num_workers)))


@settings(max_examples=60)
@given(reductions(), st.sampled_from(sorted(EXACT)), st.integers(0, 40), st.integers(1, 200), st.integers(1, 3))
def test_an_exact_reduction_has_the_bits_of_the_tree(
    whole: Reduction, name: str, size: int, segment_bytes: int, num_hosts: int
) -> None:
    num_workers = len(whole.folds)
    setting = Setting(num_workers, reduction=whole, hosts=hosts_of(num_workers, num_hosts))
    given = {
        Root(rank, index): contribution(100 * rank + index, size, torch.float32)
        for rank, num_roots in enumerate(whole.roots_of)
        for index in range(num_roots)
    }

    def job(transport: Transport, in_place: bool) -> torch.Tensor:
        roots = [value.clone() for root, value in given.items() if root.rank == transport.world.rank]
        total = roots[0] if in_place and roots else torch.full((size,), torch.nan)
        chosen = EXACT[name].schedule(setting)
        Executor(transport, lambda *_: chosen, segment_bytes).reduce(whole, roots, total)
        return total

    for in_place in (True, False):
        for total in on_threads(num_workers, lambda t, in_place=in_place: job(t, in_place)):
            assert torch.equal(total, tree_sum(whole.tree, given))


@settings(max_examples=30)
@given(reductions(), st.sampled_from(sorted(EXACT)), st.integers(0, 40), st.integers(1, 200))
def test_elements_are_made_before_they_are_sent_and_passed_on_when_they_hold_the_sum(
    whole: Reduction, name: str, size: int, segment_bytes: int
) -> None:
    num_workers = len(whole.folds)
    chosen = EXACT[name].schedule(Setting(num_workers, reduction=whole, hosts=hosts_of(num_workers, 2)))
    given = {
        Root(rank, index): contribution(100 * rank + index, size, torch.float32)
        for rank, num_roots in enumerate(whole.roots_of)
        for index in range(num_roots)
    }

    def job(transport: Transport) -> torch.Tensor:
        mine = [value for root, value in given.items() if root.rank == transport.world.rank]
        roots = [torch.full_like(value, torch.nan) for value in mine]
        total = roots[0] if roots else torch.full((size,), torch.nan)
        passed_on = torch.full((size,), torch.nan)

        def make(part: range) -> None:
            for root, value in zip(roots, mine, strict=True):
                root[part.start : part.stop] = value[part.start : part.stop]

        def pass_on(part: range) -> None:
            passed_on[part.start : part.stop] = total[part.start : part.stop]

        executor = Executor(transport, lambda *_: chosen, segment_bytes)
        executor.reduce(whole, roots, total, Stages(make, pass_on))
        return passed_on

    for passed_on in on_threads(num_workers, job):
        assert torch.equal(passed_on, tree_sum(whole.tree, given))


def test_the_choice_is_asked_with_the_reduction_and_its_bytes() -> None:
    asked: list[Any] = []

    def choose(whole: Reduction, num_bytes: int) -> Schedule:
        asked.append((whole, num_bytes))
        return direct(whole)

    value = torch.ones(6, dtype=torch.float64)
    Executor(InProcess(), choose).reduce(one_root_each(1), [value], value)
    assert asked == [(one_root_each(1), 48)]


# -- what a round means ----------------------------------------------------------------------------------------


def run_on_threads(schedule: Schedule) -> list[list[int]]:
    def job(transport: Transport) -> list[int]:
        value = torch.tensor([transport.world.rank + 1] * 5)
        Executor(transport, segment_bytes=16).run(schedule, value)
        return list(value.tolist())

    return on_threads(schedule.num_workers, job)


def test_all_sends_of_a_round_carry_what_was_held_when_it_began() -> None:
    swap = ScheduleRound((SendPart(0, 1, part=0), SendPart(1, 0, part=0)))
    assert run_on_threads(Schedule(2, (swap,), "broadcast", 1)) == [[2] * 5, [1] * 5]


def test_a_root_that_is_needed_later_outlives_a_sum_in_its_place() -> None:
    whole = one_root_each(2)
    first = ScheduleRound((SendPart(1, 0, 0, Root(1, 0)),), (AddPart(0, 0, whole.tree),))
    then = ScheduleRound((SendPart(0, 1, 0, Root(0, 0)),), (AddPart(1, 0, whole.tree),))
    assert run_on_threads(Schedule(2, (first, then), "all_reduce", 1, whole)) == [[3] * 5] * 2


def test_a_root_may_be_sent_in_the_round_whose_message_replaces_it() -> None:
    whole = one_root_each(2)
    first = ScheduleRound((SendPart(1, 0, 0, Root(1, 0)),), (AddPart(0, 0, whole.tree),))
    both = ScheduleRound((SendPart(0, 1, 0), SendPart(1, 0, 0, Root(1, 0))))
    assert run_on_threads(Schedule(2, (first, both), "all_reduce", 1, whole)) == [[3] * 5] * 2


# -- memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [2, 3, 8, 16])
def test_a_ring_needs_memory_for_one_message_and_direct_slices_for_one_from_each(num_workers: int) -> None:
    whole = one_root_each(num_workers)
    assert program(ring(num_workers), 0, in_place=True).num_cells == 1
    assert program(direct(whole), 0, in_place=True).num_cells <= num_workers


def test_segments_are_never_longer_than_asked_and_cover_every_part() -> None:
    cut = Cut.of(slices(1003, 4), 50)
    spans = [cut.spans(number) for number in range(cut.num_segments)]
    assert max(len(span) for each in spans for span in each) == cut.longest <= 50
    assert sorted(i for each in spans for span in each for i in span) == list(range(1003))


# -- refusals --------------------------------------------------------------------------------------------------


def test_a_schedule_for_another_number_of_workers_is_refused() -> None:
    with pytest.raises(BadArgument, match="for 3 workers, but there are 1"):
        Executor(InProcess()).run(ring(3), torch.zeros(3))


def test_a_choice_that_is_not_exact_is_refused() -> None:
    with pytest.raises(BadArgument, match="exact schedule"):
        Executor(InProcess(), lambda *_: ring(1)).reduce(one_root_each(1), [torch.zeros(3)], torch.zeros(3))


def test_a_schedule_of_several_roots_from_a_worker_is_refused_for_one_value() -> None:
    two_roots = reduction(Assignment.explicit([[0, 2], [1, 3]]), (0, 1, 2, 3))
    with pytest.raises(BadArgument, match="one value from each"):
        Executor(InProcess()).run(direct(two_roots), torch.zeros(3))


def test_a_schedule_that_needs_what_is_not_there_is_refused() -> None:
    lonely = Schedule(1, (ScheduleRound((), (AddPart(0, 0, Root(0, 1)),)),), "all_reduce", 1, one_root_each(1))
    with pytest.raises(BadArgument, match="worker 0 needs part 0 of root 1"):
        program(lonely, 0, in_place=True)


def test_segments_without_bytes_are_refused() -> None:
    with pytest.raises(BadArgument, match="at least 1"):
        Executor(InProcess(), segment_bytes=0)
