"""NCCL's collectives, in a group of one generation.

# Note [When NCCL waits for ever]
# NCCL notices a dead peer at once, late or never, and torch's watchdog would end this process then. So that watchdog
# only looks on (lockstep/run sets TORCH_NCCL_ASYNC_ERROR_HANDLING=0) and its own limit of time never comes, the
# connections for messages notice a lost peer, lockstep's watchdog one that is silent (gpu.py), and the group is
# aborted: all that waits in its stream ends. An abort first frees the kernels, and then closes connections, for which
# it may wait if a peer is stopped: so it has a thread of its own, which is waited for a moment, and no longer. That
# thread lets go of the group too, which waits for torch's watchdog: and this one, if NCCL has told it of the loss
# first, would sleep for a minute to let all workers write down what they did, and another thread of torch's end the
# process after that. So nothing is written down (TORCH_NCCL_DUMP_ON_TIMEOUT), the time for it is none
# (TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC; the watchdog takes it in any case), and the other thread ends nothing
# (TORCH_NCCL_ENABLE_MONITORING).

# Note [A communicator is made on a thread]
# NCCL makes a communicator in a call that returns when all workers have come, and nothing ends it: not an abort, since
# there is no communicator yet, and not the death of a worker that others do not wait for directly. So a thread of its
# own makes it, before the wire counts as open. Where a worker is lost meanwhile the thread is left behind, and holds
# nothing that a later generation uses: the worker with rank 0 hands out NCCL's identifier by the wire's messages, and
# torch finds it in a store that is in this process alone. If the call returns after all, the thread aborts what it has
# made.
"""

import json
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lockstep.errors import BadEnvironment, LockstepError, PeerGone, WireError
from lockstep.wire.cuda.gpu import Gpu, GpuWait
from lockstep.wire.exchange import exchange_texts
from lockstep.wire.network.gloo import means_lost_peer
from lockstep.wire.transport import Transport
from lockstep.world import World

MOST_WORDS = 500
"""NCCL's messages have the cause last, after a file and line: so many characters of it are shown."""

NEVER = timedelta(days=365)
ABORT_S = 5.0
"""How long an abort may take. See Note [When NCCL waits for ever]."""

LOOK_S = 0.005
"""How often rank 0 looks whether NCCL has made its identifier, which takes a moment."""


class NcclGroup:
    """A Group by NCCL, of one generation: nothing global is touched. Its owner calls `connect`, then `abort`."""

    def __init__(self, world: World, device: torch.device) -> None:
        self.world, self.gpu = world, Gpu(device)
        self._store: Any = dist.HashStore()  # type: ignore[attr-defined]
        self._lock = threading.Lock()
        self._settled = threading.Event()
        """The communicator is made, or could not be, or is not wanted any more."""
        self._connected = False
        self._error: RuntimeError | None = None
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = NEVER
        with torch.cuda.device(device):
            self._group: Any = dist.ProcessGroupNCCL(self._store, world.rank, world.size, options)

    def connect(self, transport: Transport, waiting: GpuWait) -> None:
        """Collective. Makes the communicator; raises PeerGone if a worker is lost meanwhile.

        See Note [A communicator is made on a thread].
        """
        making = threading.Thread(target=self._make, args=(self._group,), name="lockstep-nccl", daemon=True)
        is_first = self.world.rank == 0
        if is_first:
            making.start()
        identifier = json.loads(exchange_texts(transport, json.dumps(self._identifier() if is_first else {}))[0])
        if identifier and not is_first:
            for key, value in identifier.items():
                self._store.set(key, bytes.fromhex(value))
            making.start()
        waiting.wait(self)
        if self._error is not None:
            raise self._failure("making of a communicator", self._error) from self._error

    def synchronize(self) -> None:
        """Returns when the communicator is made, or is not wanted any more."""
        self._settled.wait()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        self._do("all-reduce", lambda group: group.allreduce([numbers]))

    def all_to_all(self, out: torch.Tensor, given: torch.Tensor, out_sizes: list[int], sizes: list[int]) -> None:
        cuts = [[number * out.element_size() for number in numbers] for numbers in (out_sizes, sizes)]
        self._do("all-to-all", lambda group: group.alltoall_base(_bytes(out), _bytes(given), *cuts))

    def all_gather(self, out: torch.Tensor, given: torch.Tensor) -> None:
        self._do("all-gather", lambda group: group._allgather_base(_bytes(out), _bytes(given)))

    def abort(self) -> None:
        with self._lock:
            group, self._group = self._group, None
            is_made = self._connected
        self._settled.set()
        if group is not None and is_made:
            held = [group]
            del group
            aborting = threading.Thread(target=_let_go, args=(held,), name="lockstep-nccl-abort", daemon=True)
            aborting.start()
            aborting.join(ABORT_S)

    def _make(self, group: Any) -> None:
        """The first collective makes the communicator. It must not begin before all have a part in the wire."""
        error: RuntimeError | None = None
        device = self.gpu.device
        try:
            with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
                group.allreduce([torch.zeros(1, device=device)]).wait()
        except RuntimeError as failure:
            error = failure
        with self._lock:
            self._error, self._connected = error, error is None
            is_unwanted = self._group is None
        if is_unwanted and error is None:
            group.abort()
        self._settled.set()

    def _identifier(self) -> dict[str, str]:
        """What torch has put into the store for the other workers; nothing if the communicator could not be made."""
        while not (keys := self._store.list_keys()) and not self._settled.wait(LOOK_S):
            pass
        return {key: bytes(self._store.get(key)).hex() for key in keys}

    def _do(self, what: str, collective: Any) -> None:
        group = self._group
        if group is None:
            raise PeerGone(self.world.rank, "the connection was closed here")
        try:
            with torch.cuda.device(self.gpu.device):
                collective(group).wait()  # the stream waits, not this thread
        except RuntimeError as error:
            raise self._failure(what, error) from error

    def _failure(self, what: str, error: RuntimeError) -> LockstepError:
        """See Note [Lost or refused] in gloo.py."""
        if self._group is not None and not means_lost_peer(error):
            words = " ".join(str(error).split())
            return WireError(f"NCCL's {what} on worker {self.world.rank}", words[:MOST_WORDS])
        suspect = self.world.peers[0] if self.world.peers else self.world.rank
        return PeerGone(suspect, f"NCCL failed: {str(error).splitlines()[0]}")


def _let_go(held: list[Any]) -> None:
    """Aborts the one group that is held, and lets go of it. See Note [When NCCL waits for ever]."""
    held.pop().abort()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """NCCL does not know every dtype, and need not where it only moves."""
    return tensor.view(torch.uint8)


def check_available() -> None:
    """Raises unless this process can use NCCL."""
    if not dist.is_nccl_available():
        raise BadEnvironment("this torch was built without NCCL: install a CUDA build of torch, or use Gloo")
    if not torch.cuda.is_available():
        raise BadEnvironment("NCCL needs a GPU, and torch finds none here: check the driver, or use Gloo")
