"""Every test here must leave the machine as it found it."""

import gc
import multiprocessing
import threading
import time
from collections.abc import Iterator

import pytest

ENDING_S = 10.0
"""How long a loader process may take to end on a busy machine."""


@pytest.fixture(autouse=True)
def no_loader_process_is_left_behind(nothing_left_behind: None) -> Iterator[None]:
    yield
    last_s = time.monotonic() + ENDING_S
    while multiprocessing.active_children() and time.monotonic() < last_s:
        gc.collect()  # torch ends them with the iterator, which the traceback of an error may still hold
        time.sleep(0.02)
    assert multiprocessing.active_children() == []
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(timeout=5)  # torch closes the queues to its processes and lets these run out
            assert not thread.is_alive()
