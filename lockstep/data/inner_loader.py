"""torch's DataLoader inside ours: how requests are loaded, in a pass or once, and the processes behind it.

See Note [One request, one global batch] in fetch.py.

# Note [The same batch again]
# When a worker is lost in the middle of a step, the others carry its lanes and need their data of the same
# batch. A batch therefore keeps what it was loaded by, its draw, and loads the lanes that are missing in the
# training process. As all keys name the epoch, the step, the lane and the sample, the data are those that
# the lost worker had. The loader's own processes, and its position, are not touched.

# Note [Pinned by themselves]
# torch's loader pins what it loads, in a thread of its own, and calls `pin_memory` of an object that has that method.
# It gets such an object, because its own way leaves dataclasses out and does not keep every type of container.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from lockstep.data.device import DeviceMover, pinned, unchanged
from lockstep.data.fetch import Fetch, Loaded
from lockstep.data.order import Draw
from lockstep.data.user_loader import is_stream
from lockstep.errors import BadArgument
from lockstep.lanes import present_lanes


class Feed:
    """The sampler of torch's loader: yields the requests that were last put into it."""

    def __init__(self) -> None:
        self.requests: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.requests


@dataclass(frozen=True)
class Pinnable:
    """What was loaded, as it passes through torch's loader. See Note [Pinned by themselves]."""

    loaded: Loaded | None

    def pin_memory(self) -> "Pinnable":
        return self if self.loaded is None else Pinnable(self.loaded._replace(shares=pinned(self.loaded.shares)))


def unpacked(given: Any) -> Loaded | None:
    """What was loaded, whether it had to be pinned or not."""
    loaded: Loaded | None = given.loaded if isinstance(given, Pinnable) else given
    return loaded


@dataclass(frozen=True)
class InLoaderProcess:
    """Runs in a new loader process: there `get_worker_info` returns the user's data set, not ours."""

    worker_init_fn: Callable[[int], Any] | None

    def __call__(self, worker_id: int) -> None:
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.source.dataset)  # frozen to users, and must stay so
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker_id)


def inner_loader(loader: "DataLoader[Any]", fetch: Fetch, feed: Feed, pins: bool = False) -> "DataLoader[Any]":
    """torch's loader over our data set, as the user set it; with `pins` it pins all the same."""
    return _torch_loader(
        loader,
        fetch,
        feed,
        pins,
        num_processes=min(loader.num_workers, 1) if is_stream(loader) else loader.num_workers,
        timeout=loader.timeout,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def load_once(loader: "DataLoader[Any]", fetch: Fetch, request: Any, pins: bool = False) -> Loaded | None:
    """One request, loaded in this process; pinned if `pins`, or as the user set it.

    Where the user sets up loader processes (`worker_init_fn`), only such a process has the data set as it was
    meant, so one is started for this request and ends with it.
    """
    num_processes = 1 if loader.num_workers > 0 and loader.worker_init_fn is not None else 0
    (given,) = _torch_loader(loader, fetch, [request], pins, num_processes)
    return unpacked(given)


def _torch_loader(
    loader: "DataLoader[Any]", fetch: Fetch, requests: Iterable[Any], pins: bool, num_processes: int, **options: Any
) -> "DataLoader[Any]":
    collate: Any = Pinnable if pins else unchanged  # our data set collates by itself
    return DataLoader(
        fetch,
        batch_size=None,
        sampler=requests,
        num_workers=num_processes,
        collate_fn=collate,
        pin_memory=pins or loader.pin_memory,
        worker_init_fn=InLoaderProcess(loader.worker_init_fn),
        multiprocessing_context=loader.multiprocessing_context if num_processes else None,
        generator=torch.Generator(),
        pin_memory_device=loader.pin_memory_device,
        **options,
    )


@dataclass(frozen=True)
class LaneReload:
    """Called with lanes, loads their shares of the batch of `draw`. May be called at any time.

    See Note [The same batch again].
    """

    loader: "DataLoader[Any]"
    fetch: Fetch
    draw: Draw
    num_samples: int
    mover: DeviceMover = field(default_factory=DeviceMover)
    least: int = 1

    def __call__(self, lanes: Sequence[int]) -> dict[int, Any]:
        """The shares of those of `lanes` that are not empty; nothing is read where all of them are."""
        present = present_lanes(self.num_samples, self.fetch.source.num_lanes, self.least)
        filled = [lane for lane in lanes if lane in present]
        if not filled:
            return {}
        request = self.fetch.request(self.draw, filled, self.least)
        loaded = load_once(self.loader, self.fetch, request, self.mover.pins)
        if self.loader.num_workers > 0:
            self.fetch.close()  # this process reads no further: the loader reads in processes of its own
        shares: dict[int, Any] = self.mover(self._checked(loaded))
        return shares

    def _checked(self, loaded: Loaded | None) -> dict[int, Any]:
        num_samples, shares, _ = loaded if loaded is not None else (0, {}, None)
        if num_samples != self.num_samples:
            where = self.draw.position
            raise BadArgument(
                f"batch {where.step} of epoch {where.epoch} held {self.num_samples} samples and holds {num_samples} "
                f"when it is read again: the data set {type(self.fetch.source.dataset).__name__} does not repeat "
                "itself, so lanes cannot move to other workers within a step. Its data must depend only on the "
                "index, or for a stream on where reading began, and on the global generators."
            )
        return shares


def process_ids(loading: Iterator[Any]) -> list[int]:
    """Those of the processes behind a pass of torch's loader; none where the data are loaded in this process."""
    if not isinstance(loading, _MultiProcessingDataLoaderIter):
        return []
    return [process.pid for process in loading._workers if process.pid is not None]


def disown_processes(loading: Iterator[Any]) -> None:
    """This process is a copy of the one that reads from them: it must neither end them nor wait for them."""
    if isinstance(loading, _MultiProcessingDataLoaderIter):
        loading._shutdown = True  # it is closed without a message to its processes
        loading._workers = []
        torch._C._remove_worker_pids(id(loading))  # type: ignore[attr-defined]
