"""The processes behind a pass of torch's DataLoader, seen from the process that reads from them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter


def processes_of(loading: Iterator[Any]) -> list[int]:
    """Their numbers; none where the data are loaded in this process."""
    if not isinstance(loading, _MultiProcessingDataLoaderIter):
        return []
    return [process.pid for process in loading._workers if process.pid is not None]


def leave_processes(loading: Iterator[Any]) -> None:
    """This process is a copy of the one that reads from them: it must neither end them nor wait for them."""
    if isinstance(loading, _MultiProcessingDataLoaderIter):
        loading._shutdown = True  # it is taken apart without a word to its processes
        loading._workers = []
        torch._C._remove_worker_pids(id(loading))  # type: ignore[attr-defined]
