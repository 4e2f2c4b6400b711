"""The settings of a process with which the same computation gives the same bits."""

import warnings
from contextlib import ExitStack
from typing import Any

import torch

from lockstep.determinism.attention import deterministic_attention
from lockstep.determinism.compiler import settled_compiler
from lockstep.settings.device import CPU
from lockstep.settings.environment import with_variable

CUBLAS_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""With buffers of one size for each stream, cuBLAS chooses the same kernels every time."""

CUBLAS_WARNING = ".*CuBLAS.*"


def settle_process(threads: int, exact: bool, device: torch.device = CPU) -> ExitStack:
    """Sets threads, the device and, if `exact`, deterministic kernels; closing the result restores all of it."""
    undo = ExitStack()
    undo.callback(torch.set_num_threads, torch.get_num_threads())
    torch.set_num_threads(threads)
    if exact:
        _settle_kernels(undo)
    if device.type == "cuda":
        _settle_gpu(undo, device, exact)
    return undo


def _settle_kernels(undo: ExitStack) -> None:
    """An operator without a deterministic kernel is not refused: torch warns. See operators.py."""
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
    # TorchScript profiles the first calls of a function and then runs another program for it, with other bits: how many
    # calls a process makes depends on the number of its lanes.
    undo.callback(torch._C._jit_set_profiling_executor, torch._C._jit_set_profiling_executor(False))
    undo.enter_context(settled_compiler())


def _settle_gpu(undo: ExitStack, device: torch.device, exact: bool) -> None:
    undo.callback(torch.cuda.set_device, torch.cuda.current_device())
    torch.cuda.set_device(device)
    if exact:
        undo.enter_context(deterministic_attention(device))
        undo.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
        torch.backends.cudnn.benchmark = False  # it times kernels and takes the fastest, which changes from run to run
        _settle_cublas(undo, device)


def _settle_cublas(undo: ExitStack, device: torch.device) -> None:
    """Makes cuBLAS deterministic, and lets torch know it.

    # Note [A variable that costs]
    # torch gives cuBLAS buffers of its own, one for each stream, so cuBLAS is deterministic. But torch assumes it only
    # if the variable was set when it made its first product; and as long as the variable is set, torch parses it again
    # for every product, which takes longer than starting the product. So it is set for a first product, and removed
    # again, unless torch then warns. In a process that has made products before, nothing helps: they are reported.
    """
    with with_variable(*CUBLAS_WORKSPACE):
        with_it = _product_is_trusted(device)
    if with_it and not _product_is_trusted(device):
        undo.enter_context(with_variable(*CUBLAS_WORKSPACE))


def _product_is_trusted(device: torch.device) -> bool:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", CUBLAS_WARNING)
        one = torch.ones(1, 1, device=device)
        try:
            torch.mm(one, one)
        except UserWarning:
            return False
    return True
