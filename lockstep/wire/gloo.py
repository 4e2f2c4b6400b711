"""Messages over TCP by torch's Gloo process group, in a group of our own: nothing global is touched."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, Work  # type: ignore[attr-defined]

from lockstep.errors import PeerGone
from lockstep.world import World


@dataclass
class GlooPending:
    """A Gloo send or receive, and the tensor it uses, which must stay alive until it is done."""

    work: Work
    tensor: torch.Tensor
    peer: int

    def wait(self) -> None:
        try:
            self.work.wait()
        except RuntimeError as error:
            raise PeerGone(self.peer, _reason(error)) from error


class Gloo:
    """Point-to-point messages between processes on one host (loopback) or several."""

    def __init__(self, world: World, store: Store, timeout_s: float) -> None:
        self.world = world
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [_device(world)]
        prefix = f"lockstep/gloo/{world.generation}"
        # The pairs are connected at once, all to all: the store must outlive this call only.
        self._group: ProcessGroupGloo | None = ProcessGroupGloo(
            PrefixStore(prefix, store), world.rank, world.size, options
        )

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> GlooPending:
        return self._post(target, lambda group: group.send([tensor], target, tag), tensor)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> GlooPending:
        return self._post(source, lambda group: group.recv([tensor], source, tag), tensor)

    def close(self) -> None:
        if self._group is not None:
            self._group.abort()
            self._group = None

    def _post(self, peer: int, start: Callable[[Any], Work], tensor: torch.Tensor) -> GlooPending:
        if self._group is None:
            raise PeerGone(peer, "the connection was closed here")
        try:
            return GlooPending(start(self._group), tensor, peer)
        except RuntimeError as error:
            raise PeerGone(peer, _reason(error)) from error


def _device(world: World) -> object:
    """Loopback when all workers are on one host; else what torch finds, which GLOO_SOCKET_IFNAME can direct."""
    if world.on_one_host:
        return ProcessGroupGloo.create_device(hostname="127.0.0.1")
    return ProcessGroupGloo.create_default_device()


def _reason(error: RuntimeError) -> str:
    """Gloo's own words, without the C++ file name in front and the general advice behind."""
    return str(error).split("\n")[0].split(". This is typically")[0].rsplit("] ", 1)[-1]
