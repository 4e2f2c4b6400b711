"""A deadline for waits for other workers, during which a watch may report that one is lost."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

LOOK_S = 0.1


def do_nothing() -> None:
    """The watch of a worker that cannot know whether others are lost."""


@dataclass
class Deadline:
    """Waits for at most `timeout_s` in all, and calls `watch` every LOOK_S, which raises if a worker is lost."""

    timeout_s: float
    watch: Callable[[], None] = do_nothing
    _until_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._until_s = time.monotonic() + self.timeout_s

    def until(self, reached: Callable[[], object]) -> None:
        """Returns when `reached()`, which may itself wait for up to LOOK_S, is true."""
        while not reached():
            if time.monotonic() > self._until_s:
                raise TimeoutError(f"nobody came within {self.timeout_s:g} s")
            self.watch()

    def await_key(self, store: Store, key: str) -> None:
        self.until(lambda: _is_there(store, key))


def _is_there(store: Store, key: str) -> bool:
    try:
        store.wait([key], timedelta(seconds=LOOK_S))
    except DistStoreError:  # a timeout; a store that is gone raises another error
        return False
    return True
