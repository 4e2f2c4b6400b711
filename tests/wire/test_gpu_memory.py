"""The reducer in GPU memory, without a GPU: memory that processes open to each other stands in for that of a GPU.

Everything is as on a GPU but the driver: `cuMemAlloc` gives a file in memory, a handle names it, and a stream does at
once what is put into it. So streams that wait for each other are processes that wait for each other. On a real GPU the
same is tested in tests/gpu.
"""

import ctypes
import mmap
import os
import signal
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from sums_by_hand import CPU, PlayedGpu, by_hand, random_roots
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from workers import on_workers, outcomes

from lockstep.elastic.rendezvous import open_store
from lockstep.errors import BadArgument, Disagreement, PeerGone
from lockstep.lanes import Assignment, Root, reduction
from lockstep.settings.environment import find_place, process_environment
from lockstep.wire.cuda import driver
from lockstep.wire.cuda.counters import ARRIVED, DONE, FREE, StreamCounters, open_counters
from lockstep.wire.cuda.driver import HANDLE_BYTES, StreamBatch
from lockstep.wire.cuda.gpu import Gpu, GpuWatchdog, refuse_another_gpu
from lockstep.wire.cuda.ipc import GpuMemoryReducer
from lockstep.wire.exchange import exchange
from lockstep.wire.schedules.executor import Executor
from lockstep.wire.shared.mailbox import open_mailbox
from lockstep.wire.shared.memory import HostMemory
from lockstep.wire.shared.neighbours import connect

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
SIZES = (1, 7, 300)


class PlayedDriver:
    """What this process has allocated and opened; put in the place of the driver's functions."""

    def __init__(self) -> None:
        self.files: dict[int, int] = {}
        self.mappings: dict[int, mmap.mmap] = {}
        self.num_opened = 0

    def install(self) -> "PlayedDriver":
        for name in (
            "on",
            "allocate",
            "free",
            "handle_of",
            "open_handle",
            "close_handle",
            "register",
            "unregister",
            "copy",
        ):
            setattr(driver, name, getattr(self, name))
        driver.StreamBatch.put = self.put
        return self

    def on(self, device: torch.device) -> AbstractContextManager[None]:
        return nullcontext()

    def allocate(self, num_bytes: int) -> int:
        file = os.memfd_create("played-gpu")
        os.ftruncate(file, num_bytes)
        address = self._mapped(file, num_bytes)
        self.files[address] = file
        return address

    def free(self, address: int) -> None:
        os.close(self.files.pop(address))

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        ctypes.memmove(target, source, num_bytes)

    def handle_of(self, address: int) -> bytes:
        return f"/proc/{os.getpid()}/fd/{self.files[address]}".encode().ljust(HANDLE_BYTES, b"\0")

    def open_handle(self, handle: bytes) -> int:
        self.num_opened += 1
        file = os.open(handle.rstrip(b"\0").decode(), os.O_RDWR)
        try:
            return self._mapped(file, os.fstat(file).st_size)
        finally:
            os.close(file)

    def close_handle(self, address: int) -> None:
        self.num_opened -= 1

    def register(self, address: int, num_bytes: int) -> int:
        return address

    def unregister(self, address: int) -> None:
        pass

    @staticmethod
    def put(batch: StreamBatch, stream: int, value: int) -> None:
        """At once: write, then wait for each."""
        ctypes.c_uint32.from_address(batch.write).value = value
        for address in batch.waits:
            number = ctypes.c_uint32.from_address(address)
            while ctypes.c_int32(number.value - value).value < 0:
                time.sleep(0)

    def _mapped(self, file: int, num_bytes: int) -> int:
        mapping = mmap.mmap(file, num_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self.mappings[address] = mapping
        return address


class Opened:
    """One worker's side of the wire."""

    def __init__(self, timeout_s: float = 20.0) -> None:
        self.driver = PlayedDriver().install()
        place = find_place(process_environment())
        self.world = place.world
        store = PrefixStore("gpu-memory", open_store(place, 20.0))
        neighbours = connect(self.world, range(self.world.size), store, timeout_s)
        memory = HostMemory(neighbours)
        self.transport = open_mailbox(memory, self.world)
        self.counters: StreamCounters = open_counters(memory, CPU)
        self.watchdog = GpuWatchdog(neighbours, self.counters.release, self.counters.behind)
        cpu_reducer = Executor(self.transport)
        cpu_reducer.close = neighbours.close  # type: ignore[method-assign]
        self.reducer = GpuMemoryReducer(PlayedGpu(CPU), self.counters, self.transport, self.watchdog, cpu_reducer)

    def close(self) -> None:
        self.transport.close()
        self.reducer.close()

    def end(self) -> None:
        """Collective. As a run ends: nobody hangs up before all are done."""
        exchange(self.transport, torch.zeros(1, dtype=torch.uint8))
        self.close()


def add(lanes: list[int], present: list[int] | None = None) -> dict[str, Any]:
    """Sums of all kinds, three times each in the same memory."""
    opened, wrong, asked = Opened(), [], []
    rank = opened.world.rank
    for num_lanes in lanes:
        whole = reduction(Assignment.even(num_lanes, opened.world.size), tuple(present or range(num_lanes)))
        for dtype in DTYPES:
            for size in SIZES:
                for made_here in (True, False):
                    number = max(1, whole.roots_of[rank])
                    memory = [_memory(opened, size, dtype, made_here) for _ in range(number)]
                    for turn in range(3):
                        roots = random_roots(whole, size, dtype, turn)
                        mine = memory[: whole.roots_of[rank]]
                        for index, root in enumerate(mine):
                            root.copy_(roots[Root(rank, index)])
                        before = len(opened.reducer._works)
                        opened.reducer.reduce(whole, mine, memory[0])
                        opened.reducer.synchronize()
                        asked.append(len(opened.reducer._works) - before)
                        if not torch.equal(memory[0], by_hand(whole.tree, roots)):
                            wrong.append(f"{num_lanes} lanes, {dtype}, {size} elements, {made_here}, turn {turn}")
                    for tensor in memory:
                        opened.reducer.release(tensor)
    opened.end()
    return {"wrong": wrong, "asked": asked, "open": opened.driver.num_opened}


def _memory(opened: Opened, size: int, dtype: torch.dtype, made_here: bool) -> torch.Tensor:
    return opened.reducer.allocate(size, dtype, CPU) if made_here else torch.empty(size, dtype=dtype)


@pytest.mark.parametrize("num_workers", [2, 3])
def test_sums_in_opened_memory_have_the_brackets_of_the_tree(num_workers: int) -> None:
    for result in on_workers(num_workers, add, [num_workers, 7]):
        assert result["wrong"] == []
        assert result["open"] == 0


def test_a_worker_without_lanes_is_given_the_sum_too() -> None:
    assert [result["wrong"] for result in on_workers(3, add, [6], [0, 1, 5])] == [[], [], []]


def test_places_of_memory_that_was_allocated_here_are_asked_for_once() -> None:
    for result in on_workers(2, add, [2]):
        assert result["asked"][:3] == [1, 0, 0]


def add_in_grown_memory() -> list[bool]:
    """Tensors from elsewhere: for the third sum only worker 1 needs more room; the fourth is like the second."""
    opened = Opened()
    rank = opened.world.rank
    one_and_two = reduction(Assignment.explicit(((0,), (1, 2))), (0, 1, 2))
    two_and_one = reduction(Assignment.explicit(((1, 2), (0,))), (0, 1, 2))
    assert (one_and_two.roots_of, two_and_one.roots_of) == ((1, 2), (2, 1))
    right = []
    for turn, (whole, size) in enumerate([(two_and_one, 20), (one_and_two, 10), (one_and_two, 15), (one_and_two, 10)]):
        roots = random_roots(whole, size, torch.float32, turn)
        mine = [roots[Root(rank, index)].clone() for index in range(whole.roots_of[rank])]
        opened.reducer.reduce(whole, mine, mine[0])
        opened.reducer.synchronize()
        right.append(torch.equal(mine[0], by_hand(whole.tree, roots)))
    opened.end()
    return right


def test_memory_that_grows_on_one_worker_only_is_told_to_the_others() -> None:
    assert on_workers(2, add_in_grown_memory) == [[True] * 4] * 2


def lose() -> dict[str, Any]:
    opened = Opened()
    size = opened.world.size
    whole = reduction(Assignment.even(size, size), tuple(range(size)))
    value = opened.reducer.allocate(100, torch.float32, CPU).zero_()
    try:  # a worker that is behind may learn of the loss in the first one
        opened.reducer.reduce(whole, [value], value)
        opened.reducer.synchronize()
        if opened.world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        opened.reducer.reduce(whole, [value], value)  # the stream that waits is this very process
        opened.reducer.synchronize()
    except PeerGone as gone:
        return {"gone": gone.rank}
    finally:
        opened.close()
    return {}


def test_a_stream_that_waits_for_a_dead_worker_is_freed_and_the_dead_is_named() -> None:
    first, killed, third = outcomes(3, lose)
    assert killed.killed_by == signal.SIGKILL
    assert [first.value["gone"], third.value["gone"]] == [1, 1]


def disagree() -> str:
    opened = Opened()
    size = opened.world.size
    whole = reduction(Assignment.even(size, size), tuple(range(size)))
    value = opened.reducer.allocate(100 + opened.world.rank, torch.float32, CPU)
    try:
        opened.reducer.reduce(whole, [value], value)
    except Disagreement as difference:
        return str(difference)
    finally:
        opened.close()
    return "agreed"


def test_buckets_of_different_sizes_are_refused_before_anything_is_added() -> None:
    for result in on_workers(2, disagree):
        assert "the bucket to reduce" in result
        assert "100 elements of float32" in result
        assert "101 elements of float32" in result


def after_closing() -> str:
    opened = Opened()
    whole = reduction(Assignment.even(opened.world.size, opened.world.size), tuple(range(opened.world.size)))
    value = opened.reducer.allocate(10, torch.float32, CPU)
    opened.close()
    try:
        opened.reducer.reduce(whole, [value], value)
    except PeerGone as gone:
        return gone.cause
    return "reduced"


def test_what_comes_after_closing_is_refused() -> None:
    assert on_workers(2, after_closing) == ["the connection was closed here"] * 2


def memory_is_given_again() -> list[bool]:
    opened = Opened()
    first = opened.reducer.allocate(100, torch.float32, CPU)
    place = first.data_ptr()
    opened.reducer.release(first)
    opened.reducer.release(first)
    again, other = (opened.reducer.allocate(80, torch.float32, CPU) for _ in range(2))
    small = opened.reducer.allocate(10, torch.float32, CPU)
    found = [again.data_ptr() == place, other.data_ptr() != place, small.data_ptr() != place]
    opened.end()
    return found


def test_memory_that_was_released_is_given_to_one_that_fits_and_only_once() -> None:
    assert on_workers(2, memory_is_given_again) == [[True, True, True]] * 2


def test_those_are_late_who_have_not_come_before_those_who_wait_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("on", "register"):
        monkeypatch.setattr(driver, name, getattr(PlayedDriver(), name))
    page = torch.zeros(4096, dtype=torch.uint8)
    counters = StreamCounters(page, [0, 1, 2], 2, CPU)
    counters.begin()
    numbers = page.view(torch.int32)
    numbers[counters._place(0, ARRIVED)] = 1
    assert counters.behind() == [1]
    numbers[counters._place(1, ARRIVED)] = 1
    assert counters.behind() == [0, 1]
    numbers[counters._place(0, DONE)] = 1
    assert counters.behind() == [1]
    assert not counters.released
    counters.release()
    assert counters.released
    assert counters.behind() == []


@pytest.mark.parametrize("number", [0, FREE - 1, FREE, 2 * FREE - 1, 2 * FREE, 3 * FREE + 5])
def test_all_are_let_go_however_many_rounds_there_were(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    for name in ("on", "register"):
        monkeypatch.setattr(driver, name, getattr(PlayedDriver(), name))
    counters = StreamCounters(torch.zeros(4096, dtype=torch.uint8), [0, 1], 0, CPU)
    counters._round = number
    counters.release()
    assert counters.released
    assert counters.behind() == []


def test_a_parameter_on_another_gpu_is_refused_by_name() -> None:
    refuse_another_gpu(torch.device("cuda:1"), torch.device("cuda:1"))
    with pytest.raises(BadArgument, match="on cuda:1 and this worker's GPU is cuda:0"):
        refuse_another_gpu(torch.device("cuda:1"), torch.device("cuda:0"))


class SlowGpu(Gpu):
    """Is done when a peer's counter, which was written after all were let go, is let go again."""

    def __init__(self, counters: StreamCounters) -> None:
        super().__init__(CPU)
        self._counters = counters

    def finish(self) -> None:
        place = self._counters._place(1, DONE)
        self._counters._numbers[place] = 0
        while int(self._counters._numbers[place]) == 0:
            time.sleep(0.001)


def test_a_counter_that_is_written_after_all_were_let_go_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("on", "register", "unregister"):
        monkeypatch.setattr(driver, name, getattr(PlayedDriver(), name))
    counters = StreamCounters(torch.zeros(4096, dtype=torch.uint8), [0, 1], 0, CPU)
    counters._round = 6
    reducer = GpuMemoryReducer(SlowGpu(counters), counters, Mock(), Mock(), Mock())
    reducer.close()
    assert counters.behind() == []
