"""What holds for every test: it leaves nothing behind."""

import ctypes
import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

# Workers are forked from this process, and a process whose autograd has threads for a GPU cannot be forked from. Nor
# can one in which a library below torch has made threads: on Arm, OpenBLAS and Arm's own do whatever torch is told.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ["OMP_NUM_THREADS"] = "1"

import psutil
import pytest
import torch
import torch._inductor.config  # loaded by start and by optimizers; sets a variable of its own, so before any test
from huge_pages import gather_pages
from hypothesis import settings
from seldom import long_files_first, mark_seldom

from lockstep.run import active
from lockstep.script.lanes import marks

del os.environ["OMP_NUM_THREADS"]  # it has been read; what tests start decides for itself

settings.register_profile("lockstep", deadline=None, max_examples=50)  # no test asserts a time; each run has others
settings.load_profile("lockstep")

PR_GET_CHILD_SUBREAPER = 37

LASTING_THREADS = {"tqdm_monitor"}
"""torch.compile shows progress where tqdm is installed, whose thread stays for the process's life."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before those with the mark of `make soak` are left out."""
    mark_seldom(items)
    long_files_first(items)
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        _TEST_FILES[module.__name__] = sys.modules.pop(module.__name__)


_TEST_FILES: dict[str, ModuleType] = {}
"""Those that are loaded, by name. A run looks at the variables of all files of its script (marks.py), for which it
would take these. So only the file of the test, and those that it imports, are among Python's modules."""


def pytest_collection_finish() -> None:
    """What is loaded by now stays. Workers that look through all objects need not look through these."""
    gc.collect()
    gc.freeze()
    gather_pages()


@pytest.fixture(scope="module", autouse=True)
def no_memory_left_behind() -> Iterator[None]:
    """To fork a process costs time for all that it holds."""
    yield
    gather_pages()


@pytest.fixture(scope="module", autouse=True)
def only_its_own_files(request: pytest.FixtureRequest) -> Iterator[None]:
    """The test file, and those that it imports, are among Python's modules."""
    files = _with_imported(request.module.__name__)
    sys.modules.update({name: _TEST_FILES[name] for name in files})
    marks.users_modules.cache_clear()  # it goes by the number of modules
    yield
    for name in files:
        del sys.modules[name]


def _with_imported(name: str) -> set[str]:
    found, new = set[str](), {name}
    while new:
        found |= new
        used = {getattr(thing, "__module__", "") for one in new for thing in vars(_TEST_FILES[one]).values()}
        new = (used & _TEST_FILES.keys()) - found
    return found


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No process, thread, environment variable, shared-memory segment or active run stays after a test."""
    before = _what_exists()
    yield
    torch._C._set_mkldnn_enabled(True)  # a product in bfloat16 turns it off for the process where the CPU has none
    run = active.current()
    if run is not None:
        run.failed = True
        run.close()
    if _mapped() - before["mapped memory"]:
        gc.collect()
    after = _what_exists()
    assert run is None, "the test left a run open"
    for kind, things in after.items():
        new = things - before[kind]
        assert not new, f"the test left {kind} behind: {sorted(map(str, new))}"


def _what_exists() -> dict[str, set[object]]:
    """What there is of this process; other processes may run other tests at the same time."""
    return {
        "processes": _descendants(),
        "threads": {thread.name for thread in threading.enumerate() if _may_end(thread)} - LASTING_THREADS,
        "environment variables": set(os.environ.items()) - {("PYTEST_CURRENT_TEST", _current_test())},
        "shared memory": set(_shared_memory()),
        "mapped memory": _mapped(),
        "adoption of orphans": {_adopts_orphans()},
        "deterministic algorithms": {torch.are_deterministic_algorithms_enabled()},
    }


def _descendants() -> set[int]:
    """The processes that this one and those it started have started. Mostly there are none, which is known at once."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return set()
    return {child.pid for child in psutil.Process().children(recursive=True) if not _is_resource_tracker(child)}


def _is_resource_tracker(process: psutil.Process) -> bool:
    """Python's own, which starts with the first shared-memory tensor and stays for the process's life."""
    with suppress(psutil.NoSuchProcess):
        return "resource_tracker" in " ".join(process.cmdline())
    return False


def _may_end(thread: threading.Thread) -> bool:
    """Not so a thread that Python did not start: torch's for backward passes on a GPU, known once Python ran in it."""
    return thread.is_alive() and not isinstance(thread, threading._DummyThread)


def _adopts_orphans() -> int:
    """Whether processes whose parent has ended fall to this one, as to a launcher."""
    flag = ctypes.c_int()
    ctypes.CDLL(None).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(flag), 0, 0, 0)
    return flag.value


def _shared_memory() -> Iterator[str]:
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if "memfd:lockstep" in (link := os.readlink(f"/proc/self/fd/{descriptor}")):
                yield f"{descriptor}: {link}"


def _mapped() -> set[object]:
    """By its number, the memory of lockstep that this process maps: it stays as long as an object that nobody frees."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:lockstep" in line}


def _current_test() -> str:
    return os.environ.get("PYTEST_CURRENT_TEST", "")
