"""NCCL's collectives, in a group of our own.

# Note [When NCCL waits for ever]
# NCCL notices a dead peer late or never, and torch's watchdog would end this process then. So the watchdog is told to
# leave it to us (lockstep/run sets TORCH_NCCL_ASYNC_ERROR_HANDLING=0), the connections for small talk notice
# who is gone, and the group is aborted: all that waits in its stream ends.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from lockstep.errors import BadEnvironment, PeerGone, WireError
from lockstep.wire.cuda.gpu import Gpu
from lockstep.wire.network.process_group import tells_of_loss
from lockstep.world import World

MOST_WORDS = 500
"""NCCL tells the cause last, after the file and line where it was noticed: so many characters of it are told."""


class NcclGroup:
    """A Group (see slices.py) by NCCL, of one generation: nothing global is touched. It connects when first used."""

    def __init__(self, world: World, store: Store, timeout_s: float, device: torch.device) -> None:
        _check_available(world)
        self.world, self.gpu = world, Gpu(device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        with torch.cuda.device(device):
            self._group: Any = dist.ProcessGroupNCCL(store, world.rank, world.size, options)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._do("all-reduce", lambda group: group.allreduce([tensor]))

    def all_to_all(self, out: torch.Tensor, given: torch.Tensor, out_sizes: list[int], sizes: list[int]) -> None:
        self._do("all-to-all", lambda group: group.alltoall_base(out, given, out_sizes, sizes))

    def all_gather(self, out: torch.Tensor, given: torch.Tensor) -> None:
        self._do("all-gather", lambda group: group._allgather_base(out, given))

    def abort(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _do(self, what: str, collective: Any) -> None:
        group = self._group
        if group is None:
            raise PeerGone(self.world.rank, "the connection was closed here")
        try:
            with torch.cuda.device(self.gpu.device):
                collective(group).wait()  # the stream waits, not this thread
        except RuntimeError as error:
            if self._group is not None and not tells_of_loss(error):  # see Note [Lost or refused] in process_group.py
                words = " ".join(str(error).split())
                raise WireError(f"NCCL's {what} on worker {self.world.rank}", words[:MOST_WORDS]) from error
            suspect = self.world.peers[0] if self.world.peers else self.world.rank
            raise PeerGone(suspect, f"NCCL failed: {str(error).splitlines()[0]}") from error


def _check_available(world: World) -> None:
    if not dist.is_nccl_available():
        raise BadEnvironment("this torch was built without NCCL: install a CUDA build of torch, or use Gloo")
    if not torch.cuda.is_available():
        raise BadEnvironment("NCCL needs a GPU, and torch finds none here: check the driver, or use Gloo")
    if torch.cuda.device_count() < world.local_size:
        raise BadEnvironment(
            f"NCCL needs a GPU for each of the {world.local_size} workers on this host, and torch finds "
            f'{torch.cuda.device_count()}: start fewer workers, or say wire="gpu", where workers may share one'
        )
