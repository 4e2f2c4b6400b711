"""Messages between GPUs by torch's NCCL.

# Note [NCCL in batches]
# All messages of an NCCL group run on one stream, in turn. If two workers each started to receive before they send,
# both would wait for ever. So the messages of a round are started as one batch, which NCCL moves at once; every worker
# starts its batches in the order of the schedule.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from lockstep.errors import BadEnvironment, PeerGone
from lockstep.wire.processgroup import ProcessGroupTransport
from lockstep.wire.transport import Pending
from lockstep.world import World


@dataclass
class Batch:
    """Messages started together; `work` is theirs, once they have started."""

    work: Any = None


@dataclass
class BatchPending:
    """A message of a batch. `wait` makes the current CUDA stream wait, not the caller."""

    batch: Batch
    tensor: torch.Tensor
    peer: int
    gone: Callable[[int, RuntimeError], PeerGone]

    def wait(self) -> None:
        try:
            self.batch.work.wait()
        except RuntimeError as error:
            raise self.gone(self.peer, error) from error


class Nccl(ProcessGroupTransport):
    """A Transport for CUDA tensors, one GPU for each worker. It carries one stream of messages: tags are ignored.

    Small talk, and the notice that a peer died, belong to a transport for CPU tensors beside it: NCCL itself notices
    a dead peer only after the timeout, and then ends this process.
    """

    def __init__(self, world: World, store: Store, timeout_s: float) -> None:
        _check_available(world)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        here = PrefixStore(f"lockstep/nccl/{world.generation}", store)
        super().__init__(world, dist.ProcessGroupNCCL(here, world.rank, world.size, options), store)
        self._batch: Batch | None = None

    @contextmanager
    def together(self) -> Iterator[None]:
        """See Note [NCCL in batches]."""
        group = self._open_group(self.world.rank)
        batch = self._batch = Batch()
        group._start_coalescing()
        try:
            yield
        finally:
            self._batch = None
            batch.work = group._end_coalescing()

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> Pending:
        return self._in_batch(super().send(tensor, target, 0), tensor, target)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Pending:
        return self._in_batch(super().receive(tensor, source, 0), tensor, source)

    def _in_batch(self, alone: Pending, tensor: torch.Tensor, peer: int) -> Pending:
        return alone if self._batch is None else BatchPending(self._batch, tensor, peer, self._gone)

    def _is_broken(self, peer: int) -> bool:
        return False  # a probe would only wait on the stream


def _check_available(world: World) -> None:
    if not dist.is_nccl_available():
        raise BadEnvironment("this torch was built without NCCL: install a CUDA build of torch, or use Gloo")
    if not torch.cuda.is_available():
        raise BadEnvironment("NCCL needs a GPU, and torch finds none here: check the driver, or use Gloo")
    if torch.cuda.device_count() < world.local_size:
        raise BadEnvironment(
            f"NCCL needs a GPU for each of the {world.local_size} workers on this host, and torch finds "
            f"{torch.cuda.device_count()}: start fewer workers, or use Gloo"
        )
