"""A `lockstep.start` that fails leaves the process as it was, and the next one succeeds."""

import os
import signal
import sys
import threading
from dataclasses import dataclass
from typing import Any, NoReturn

import pytest
import torch
from workers import on_workers

import lockstep
from lockstep.elastic.store.server import THREAD_NAME
from lockstep.errors import LockstepError
from lockstep.run import active


@dataclass(frozen=True)
class Broken:
    """A strategy that has no engine for any run."""

    def __str__(self) -> str:
        return "broken"

    def engine(self, *_: Any) -> NoReturn:
        raise ZeroDivisionError("this strategy has no engine")


def _settings() -> dict[str, Any]:
    """What a run changes of its process, and must give back."""
    profiles = torch._C._jit_set_profiling_executor(True)
    torch._C._jit_set_profiling_executor(profiles)
    handlers = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    return {
        "threads of torch": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warns only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fills memory": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        "profiles": profiles,
        "environment": dict(os.environ),
        # The store where all meet stays: see Note [One store for all runs] in elastic/rendezvous.py.
        "threads": sorted(thread.name for thread in threading.enumerate() if THREAD_NAME not in thread.name),
        "handlers": repr(handlers),
        "excepthook": repr(sys.excepthook),
        "randomness": torch.get_rng_state().tolist(),
        "is active": active.current() is not None,
    }


def _fails(where: str) -> list[Any]:
    """What the failed start said, what of the process it has changed, and the size of a run that is started then."""
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(False)
    before = _settings()
    seed = int(os.environ["RANK"]) if where == "the agreement" else 0
    try:
        lockstep.start(threads=1, seed=seed, strategy=Broken() if where == "the engine" else None)
    except (LockstepError, ZeroDivisionError) as error:
        said = str(error)
    after = _settings()
    changed = {name: [before[name], after[name]] for name in before if before[name] != after[name]}
    with lockstep.start(threads=1):
        inside = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    return [said, changed, inside]


@pytest.mark.parametrize(
    ("where", "num_workers", "reason"),
    [("the engine", 1, "has no engine"), ("the engine", 2, "has no engine"), ("the agreement", 2, "seed")],
)
def test_the_process_is_as_it_was_before_a_start_that_failed(where: str, num_workers: int, reason: str) -> None:
    for said, changed, inside in on_workers(num_workers, _fails, where):
        assert reason in said
        assert changed == {}
        assert inside == [1, True], "the start that succeeds sets all of it"
