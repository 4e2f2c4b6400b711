"""Further lanes of a global batch that was already handed out.

# Note [The same batch again]
# When a worker is lost in the middle of a step, the others carry its lanes and need their data of the same
# batch. A batch therefore keeps what it was loaded by, its draw, and loads the lanes that are missing in the
# training process. As all keys name the epoch, the step, the lane and the sample, the data are those that
# the lost worker had. The loader's own processes, and where the loader stands, are not touched.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader

from lockstep.data.fetch import Fetch, InLoaderProcess, Loaded, as_loaded
from lockstep.data.moving import Moving
from lockstep.data.order import Draw
from lockstep.data.pinning import to_be_pinned, unpacked
from lockstep.errors import BadArgument
from lockstep.lanes import present_lanes


@dataclass(frozen=True)
class Again:
    """Called with lanes, loads their shares of the batch that `draw` stands for. May be called at any time."""

    loader: "DataLoader[Any]"
    fetch: Fetch
    draw: Draw
    num_samples: int
    moving: Moving = field(default_factory=Moving)
    least: int = 1

    def __call__(self, lanes: Sequence[int]) -> dict[int, Any]:
        """The shares of those of `lanes` that are not empty; nothing is read where all of them are."""
        present = present_lanes(self.num_samples, self.fetch.source.num_lanes, self.least)
        filled = [lane for lane in lanes if lane in present]
        if not filled:
            return {}
        request = self.fetch.request(self.draw, filled, self.least)
        loaded = load_once(self.loader, self.fetch, request, self.moving.pins)
        if self.loader.num_workers > 0:
            self.fetch.close()  # what it opened is not read on here, for the loader reads in processes of its own
        shares: dict[int, Any] = self.moving(self._checked(loaded))
        return shares

    def _checked(self, loaded: Loaded | None) -> dict[int, Any]:
        num_samples, shares = loaded if loaded is not None else (0, {})
        if num_samples != self.num_samples:
            where = self.draw.position
            raise BadArgument(
                f"batch {where.step} of epoch {where.epoch} held {self.num_samples} samples and holds {num_samples} "
                f"when it is read again: the data set {type(self.fetch.source.dataset).__name__} does not repeat "
                "itself, so lanes cannot move to other workers within a step. Its data must depend only on the "
                "index, or for a stream on where reading began, and on the global generators."
            )
        return shares


def load_once(loader: "DataLoader[Any]", fetch: Fetch, request: Any, pins: bool = False) -> Loaded | None:
    """One request, loaded in this process; pinned if `pins`, or as the user set it.

    Where the user sets up loader processes (`worker_init_fn`), only such a process has the data set as it was
    meant, so one is started for this request and ends with it.
    """
    num_processes = 1 if loader.num_workers > 0 and loader.worker_init_fn is not None else 0
    once: DataLoader[Any] = DataLoader(
        fetch,
        batch_size=None,
        sampler=[request],
        num_workers=num_processes,
        collate_fn=to_be_pinned if pins else as_loaded,
        pin_memory=pins or loader.pin_memory,
        worker_init_fn=InLoaderProcess(loader.worker_init_fn),
        multiprocessing_context=loader.multiprocessing_context if num_processes else None,
        generator=torch.Generator(),
        pin_memory_device=loader.pin_memory_device,
    )
    (given,) = once
    return unpacked(given)
