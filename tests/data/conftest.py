"""Every test here must leave the machine as it found it."""

import gc
import multiprocessing
import threading
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_loader_process_is_left_behind() -> Iterator[None]:
    yield
    if multiprocessing.active_children():
        gc.collect()  # torch ends them with the iterator, which the traceback of an error may still hold
    assert multiprocessing.active_children() == []
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(timeout=5)  # torch closes the queues to its processes and lets these run out
            assert not thread.is_alive()
