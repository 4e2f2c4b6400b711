"""Records work into a CUDA graph, or says why it cannot be.

# Note [Work that cannot be recorded]
# Work that waits for the GPU (`loss.item()`, `x.cpu()`, shapes that depend on values) cannot be recorded, and torch is
# hard to bring back to order after a recording that broke. So before anything is recorded the work is run once as it
# is, with torch set to warn when it waits. What breaks all the same is cleaned up after: torch's generator
# believes it is still in a recording, and so does the allocator; and the stream of the recording may be the current one
# still. The generator is given another state for that, while graphs draw from the one that they were recorded with: so
# all recordings made before are void (`num_broken`), and are made again.

# Note [Casts are not kept]
# Inside `torch.autocast` a parameter is cast once, and the cast is kept for the next use. A graph must not read one
# that was made outside of it, since no replay would make it anew. So none is there when a recording begins, nor after.

# Note [No garbage while recording]
# Python may collect garbage at any moment, and garbage may hold tensors, events and memory of the wire. Letting go of
# those means talking to CUDA, which a recording does not survive. So nothing is collected until it has ended.
"""

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")

WAITS = "called a synchronizing"
PROTOTYPE = "debug mode is a prototype"
"""Words of torch's warnings: of a wait, and of the looking itself."""


_num_broken = 0


class CannotCapture(Exception):  # noqa: N818
    """The work cannot be recorded; `reason` completes "it runs as it is, because ..."."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def capture(
    work: Callable[[], Result], pool: Any, device: torch.device, stream: torch.cuda.Stream
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A graph of the work, which has not run yet, and what the work gave back. Raises CannotCapture."""
    global _num_broken
    graph = torch.cuda.CUDAGraph()
    outside = torch.cuda.current_stream(device)
    generator = torch.cuda.default_generators[device.index]
    healthy = generator.clone_state()
    torch.clear_autocast_cache()  # see Note [Casts are not kept]
    try:
        # Other threads go on: pinning, the wire, the lookout.
        with (
            without_collecting(),
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            result = work()
    except RuntimeError as error:  # see Note [Work that cannot be recorded]
        _num_broken += 1
        torch.cuda.set_stream(outside)
        generator.graphsafe_set_state(healthy)
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(device.index, pool)
        raise CannotCapture(_in_words(error)) from error
    finally:
        torch.clear_autocast_cache()
    return graph, result


def num_broken() -> int:
    """How many recordings have broken in this process: those made before are void."""
    return _num_broken


@contextmanager
def watching_for_waits(device: torch.device) -> Iterator[list[str]]:
    """Afterwards the list says, in words, where the work inside has waited for the GPU."""
    found: list[str] = []
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught, torch.cuda.device(device):
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    for warning in caught:
        if WAITS in str(warning.message):
            found.append(f"{warning.filename}:{warning.lineno}")
        elif PROTOTYPE not in str(warning.message):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


@contextmanager
def without_collecting() -> Iterator[None]:
    """See Note [No garbage while recording]."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _in_words(error: BaseException) -> str:
    """The first cause: what torch says of the broken recording comes after it."""
    while error.__context__ is not None:
        error = error.__context__
    return str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
