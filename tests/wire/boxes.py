"""Mailboxes of real workers of one host, what they send, and threads that wait for it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from typing import Any

import torch

from lockstep.elastic.rendezvous import open_store
from lockstep.settings.environment import find_place, process_environment
from lockstep.wire.shared.channel import MAX_SLOT_BYTES, NUM_SLOTS
from lockstep.wire.shared.mailbox import Mailbox, open_mailbox
from lockstep.wire.shared.memory import HostMemory
from lockstep.wire.shared.neighbours import connect
from lockstep.world import World

RING_BYTES = NUM_SLOTS * MAX_SLOT_BYTES
"""What two workers can have on the way in one direction while nobody takes it."""

LONG = 3 * RING_BYTES + 5


@contextmanager
def open_memory(timeout_s: float = 20.0) -> Iterator[tuple[HostMemory, World]]:
    place = find_place(process_environment())
    world = place.world
    memory = HostMemory(connect(world, range(world.size), open_store(place, 20.0), timeout_s))
    with closing(memory), closing(memory.neighbours):
        yield memory, world


@contextmanager
def open_box(timeout_s: float = 20.0) -> Iterator[Mailbox]:
    with open_memory(timeout_s) as (memory, world), closing(open_mailbox(memory, world)) as box:
        yield box


def barrier(num_workers: int) -> Barrier:
    return get_context("fork").Barrier(num_workers)


NOISE = torch.randint(0, 256, (20 * 2**20 + 2**16,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def content(num_bytes: int, *key: int) -> torch.Tensor:
    """Bytes that differ from those of a message with another key, also if they are short of a chunk or out of order."""
    start = hash(key) % 2**16
    return NOISE[start : start + num_bytes]


def in_thread(job: Callable[[], Any]) -> Callable[[], Any]:
    """Starts `job` on a thread of its own; gives a function that waits for what it returned or raised."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(job())
        except Exception as error:  # noqa: BLE001 - told to the test
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def result() -> Any:
        thread.join(30)
        return found[0]

    return result
