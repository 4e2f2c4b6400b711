"""The all-reduce benchmark of GPUs, on the CPU: the same worker, with memory that is not a GPU's."""

import io
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console
from workers import on_workers

from lockstep.errors import BadArgument
from lockstep.programs.bench.allreduce.plan import (
    SIDES,
    USUAL_SIZES,
    AllreducePlan,
    make_plans,
    make_row,
    show,
)
from lockstep.programs.bench.allreduce.sizes import GiB, KiB, MiB, parse_sizes
from lockstep.programs.bench.allreduce.worker import bytes_per_s, copy_side, floor_ms, main_on_gpu, time_together
from lockstep.programs.bench.launch import accept
from lockstep.programs.bench.plan import BenchResult
from lockstep.wire import in_process

MACHINE = {
    "gpu": "NVIDIA H200",
    "cuda": "13.0",
    "cores": 16,
    "cpu": "A Processor Of Some Length @ 2.00GHz",
    "torch": "2.11.0",
    "threads_per_worker": 1,
}


def test_sizes_on_a_gpu_go_from_a_small_bucket_to_the_gradients_of_a_model() -> None:
    sizes = parse_sizes(USUAL_SIZES["cuda"])
    assert (sizes[0], sizes[-1]) == (64 * KiB, 256 * MiB)


def test_a_schedule_over_gloo_is_refused_on_gpus() -> None:
    with pytest.raises(BadArgument, match="--algorithm ring is for the CPU: leave it out"):
        make_plans((2,), (8,), "ring", rounds=1, device="cuda")


def test_the_floor_reads_and_writes_every_workers_tensor_once() -> None:
    assert floor_ms(GiB, num_workers=4, bytes_per_s=8 * GiB) == 1000


class Counted:
    """An operation that only counts."""

    tensor = torch.zeros(1)

    def __init__(self, done: list[str]) -> None:
        self._done = done

    def operate(self) -> None:
        self._done.append("operate")


def test_a_block_waits_for_the_device_before_and_after_its_operations() -> None:
    done: list[str] = []
    clock: Iterator[float] = iter((10.0, 16.0))

    def read_clock() -> float:
        done.append("clock")
        return next(clock)

    times = time_together(Counted(done), in_process().transport, lambda: done.append("wait"), 3, read_clock)
    assert done == ["operate", "wait", "clock", "operate", "operate", "operate", "wait", "clock"]
    assert (times.mean_ms, times.each_ms) == (2000, [2000])


def test_memory_is_measured_in_bytes_read_and_written() -> None:
    copy = copy_side(KiB, torch.device("cpu"))
    assert 0 < bytes_per_s(copy, lambda: None) < math.inf


def test_two_workers_add_right_and_every_size_has_its_times(tmp_path: Path) -> None:
    plan = AllreducePlan(2, (4, 64 * KiB), "shared", rounds=2)
    on_workers(2, main_on_gpu, plan, tmp_path, copy_bytes=MiB)
    rows = accept(BenchResult.find(tmp_path)).rows
    assert [row["bytes"] for row in rows] == [4, 64 * KiB]
    assert all(math.isfinite(row[f"{side}_ms"]) and row[f"{side}_ms"] > 0 for row in rows for side in SIDES)


def test_the_table_of_a_gpu_names_it_and_fits_100_columns() -> None:
    plan = AllreducePlan(4, (64 * KiB, 256 * MiB), "shared", rounds=1, device="cuda")
    times = dict.fromkeys(SIDES, 0.0123)
    rows = [make_row(4, size, [times], dict.fromkeys(SIDES, 1.0), {}) for size in plan.sizes]
    shown = io.StringIO()
    show({"algorithm": "shared", "rows": rows, "machine": MACHINE}, Console(file=shown))
    assert "NVIDIA H200, CUDA 13.0" in shown.getvalue()
    assert "2·W·P bytes" in shown.getvalue()
    assert max(map(len, shown.getvalue().splitlines())) <= 100
