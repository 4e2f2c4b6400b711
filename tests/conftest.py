"""What holds for every test: it leaves nothing behind."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

# Workers are forked from this process, and a process whose autograd has threads for a GPU cannot be forked from.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import psutil
import pytest
import torch
import torch._inductor.config  # loaded by start and by optimizers; sets a variable of its own, so before any test
from hypothesis import settings

from lockstep.run import active

settings.register_profile("lockstep", deadline=None)  # no test asserts a time
settings.load_profile("lockstep")

LASTING_THREADS = {"tqdm_monitor"}
"""torch.compile shows progress where tqdm is installed, whose thread stays for the process's life."""


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No process, thread, environment variable, shared-memory segment or active run stays after a test."""
    before = _what_exists()
    yield
    run = active.current()
    if run is not None:
        run.failed = True
        run.close()
    after = _what_exists()
    assert run is None, "the test left a run open"
    for kind, things in after.items():
        new = things - before[kind]
        assert not new, f"the test left {kind} behind: {sorted(map(str, new))}"


def _what_exists() -> dict[str, set[object]]:
    ours = psutil.Process()
    return {
        "processes": {child.pid for child in ours.children(recursive=True)} - _lasting_processes(ours),
        "threads": {thread.name for thread in threading.enumerate() if thread.is_alive()} - LASTING_THREADS,
        "environment variables": set(os.environ.items()) - {("PYTEST_CURRENT_TEST", _current_test())},
        "shared memory": {path.name for path in Path("/dev/shm").glob("*lockstep*")},
        "deterministic algorithms": {torch.are_deterministic_algorithms_enabled()},
    }


def _lasting_processes(ours: psutil.Process) -> set[int]:
    """Python's own resource tracker starts with the first shared-memory tensor and stays for the process's life."""
    children = ours.children(recursive=True)
    return {child.pid for child in children if "resource_tracker" in " ".join(_command(child))}


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []


def _current_test() -> str:
    return os.environ.get("PYTEST_CURRENT_TEST", "")
