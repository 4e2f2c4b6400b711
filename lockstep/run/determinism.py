"""What must hold in a process so that the same computation gives the same bits."""

from contextlib import ExitStack
from typing import Any

import torch


def settle_process(threads: int, exact: bool) -> ExitStack:
    """Sets threads and, if `exact`, deterministic kernels; closing what is returned puts everything back."""
    undo = ExitStack()
    undo.callback(torch.set_num_threads, torch.get_num_threads())
    torch.set_num_threads(threads)
    if exact:
        _settle_kernels(undo)
    return undo


def _settle_kernels(undo: ExitStack) -> None:
    """An operator without a deterministic kernel is not refused: torch names it once, by a warning."""
    undo.callback(
        torch.use_deterministic_algorithms,
        torch.are_deterministic_algorithms_enabled(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    # In this mode torch also fills fresh memory with NaN: a pass over every tensor that changes no result.
    deterministic: Any = torch.utils.deterministic
    undo.callback(setattr, deterministic, "fill_uninitialized_memory", deterministic.fill_uninitialized_memory)
    deterministic.fill_uninitialized_memory = False
