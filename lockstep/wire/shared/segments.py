"""Memory that several processes of one host can see: files without a name, and tensors over them."""

import os
import resource
from collections.abc import Collection
from contextlib import suppress
from typing import cast

import torch

from lockstep.errors import BadEnvironment


class SharedSegment:
    """Shared memory made by this worker: its bytes, and, until it is sent to all peers, a file without a name."""

    def __init__(self, number: int, num_bytes: int, peers: Collection[int]) -> None:
        self.number = number
        self.num_bytes = num_bytes
        self.file = allocate(num_bytes)
        self.bytes = mapped(self.file, num_bytes)
        if not peers:
            self.close()

    def close(self) -> None:
        """Closes this worker's file: only mappings keep the memory."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    @property
    def is_known(self) -> bool:
        return self.file < 0


def allocate(num_bytes: int) -> int:
    """A new file in memory, of full size: too little memory is an error now, not a bus error later."""
    try:
        file = os.memfd_create("lockstep", os.MFD_CLOEXEC)
    except OSError as error:
        raise BadEnvironment(_no_file(error)) from error
    try:
        os.posix_fallocate(file, 0, num_bytes)
    except OSError as error:
        os.close(file)
        raise BadEnvironment(
            f"{num_bytes / 2**20:.0f} MiB of shared memory cannot be had ({error.strerror}). Give the container or "
            'control group more memory (docker run --memory, ulimit -f unlimited), or start with wire="gloo".'
        ) from error
    return file


def mapped(file: int, num_bytes: int, *, private: bool = False) -> torch.Tensor:
    """The file's memory as bytes; it stays mapped as long as a tensor views it, and needs no open file for that.

    What is written to a `private` mapping is seen by this process only.
    """
    # By torch, not by Python's mmap, which keeps a copy of the open file as long as the mapping.
    try:
        storage = cast(
            torch.UntypedStorage, torch.UntypedStorage.from_file(f"/proc/self/fd/{file}", not private, num_bytes)
        )
    except RuntimeError as error:
        raise BadEnvironment(f"shared memory cannot be mapped: {str(error).splitlines()[0]}") from error
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


def allow_many_files() -> None:
    """Raises this process's limit of open files to the system's maximum, for memory in transit and loaders."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # some systems allow less than they report
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _no_file(error: OSError) -> str:
    return f"shared memory needs one more open file ({error.strerror}): raise the limit with ulimit -n"
