"""The ways to train that are measured against each other. Each has its own copy of the same model.

# Note [The same for all]
# Every side has the same initial weights, the same batches in memory, the same fused AdamW, and one update
# for each global batch. lockstep asks for deterministic kernels in its process; the other sides run as torch
# comes, so that is taken back around their blocks.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from lockstep.chance import drawing_from, fold
from lockstep.lanes import share
from lockstep.programs.bench import plan
from lockstep.programs.models import Batch, Workload
from lockstep.run.run import Run

NUM_BATCHES = 4


class Side(ABC):
    """One way to train `workload`. `alone`: only worker 0 computes, the others wait."""

    name: str
    alone = False

    def __init__(self, workload: Workload, model: nn.Module, batches: Sequence[Batch]) -> None:
        self.workload = workload
        self.model = model
        self.batches = batches
        self.optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        self._initial = copy.deepcopy(model.state_dict())

    @abstractmethod
    def compute(self, number: int) -> None:
        """Leaves the gradient of the whole batch `number` in `p.grad`. Collective, unless `alone`."""

    def conditions(self) -> AbstractContextManager[None]:
        """The process inside is as this side's user would have it."""
        return as_torch_comes(threads=1)

    def step(self, number: int) -> None:
        self.compute(number)
        self.update()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def restart(self) -> None:
        """The weights are the initial ones, the optimizer has seen nothing: every block computes the same."""
        self.model.load_state_dict(self._initial)
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()

    def gradients(self) -> dict[str, Tensor]:
        """Copies of the gradients that stand in `p.grad`, by name."""
        found = ((name, parameter.grad) for name, parameter in self.model.named_parameters())
        return {name: gradient.clone() for name, gradient in found if gradient is not None}

    def movement(self) -> dict[str, Tensor]:
        """How far each parameter is from its initial value, by name."""
        parameters = self.model.named_parameters()
        return {name: parameter.detach() - self._initial[name] for name, parameter in parameters}


class LockstepSide(Side):
    """What the README shows."""

    name = plan.LOCKSTEP

    def __init__(self, workload: Workload, model: nn.Module, batches: Sequence[Batch], run: Run) -> None:
        super().__init__(workload, model, batches)
        self.run = run
        run.replicate(self.model, self.optimizer)

    def conditions(self) -> AbstractContextManager[None]:
        return nullcontext()  # as lockstep.start left it

    def compute(self, number: int) -> None:
        for lane_batch in self.run.lanes(self.batches[number % len(self.batches)]):
            self.workload.loss(self.model, lane_batch).backward()


class DdpSide(Side):
    """DistributedDataParallel at its best: bucket views for gradients, a static graph, shares cut before."""

    def __init__(self, name: str, workload: Workload, model: nn.Module, batches: Sequence[Batch], run: Run) -> None:
        shares = [_cut(batch, run.rank, run.size) for batch in batches]
        super().__init__(workload, model, shares)
        self.name = name
        backend = {plan.DDP: "gloo", plan.ON_BACKEND: "lockstep"}[name]
        group = dist.new_group(backend=backend)
        self.wrapped = DDP(model, process_group=group, gradient_as_bucket_view=True, static_graph=True)

    def compute(self, number: int) -> None:
        self.workload.loss(self.wrapped, self.batches[number % len(self.batches)]).backward()


class PlainSide(Side):
    """The loop without any data parallelism, on the whole batch, in worker 0."""

    alone = True

    def __init__(self, name: str, threads: int, workload: Workload, model: nn.Module, batches: Sequence[Batch]) -> None:
        super().__init__(workload, model, batches)
        self.name = name
        self.threads = threads

    def conditions(self) -> AbstractContextManager[None]:
        return as_torch_comes(self.threads)

    def compute(self, number: int) -> None:
        self.workload.loss(self.model, self.batches[number % len(self.batches)]).backward()


def make_sides(workload: Workload, run: Run, all_threads: int) -> dict[str, Side]:
    """Collective. All sides by name, with equal weights and data. See Note [The same for all]."""
    with drawing_from(fold(0, "bench", "weights")):
        model = workload.make_model()
    generator = torch.Generator().manual_seed(fold(0, "bench", "data"))
    batches = [workload.make_batch(generator) for _ in range(NUM_BATCHES)]
    sides: list[Side] = [
        LockstepSide(workload, copy.deepcopy(model), batches, run),
        DdpSide(plan.DDP, workload, copy.deepcopy(model), batches, run),
        DdpSide(plan.ON_BACKEND, workload, copy.deepcopy(model), batches, run),
        PlainSide(plan.ONE_THREAD, 1, workload, copy.deepcopy(model), batches),
        PlainSide(plan.ALL_THREADS, all_threads, workload, copy.deepcopy(model), batches),
    ]
    return {side.name: side for side in sides}


@contextmanager
def as_torch_comes(threads: int) -> Iterator[None]:
    """Inside, torch may choose any kernel, as it does by default, and uses `threads` threads."""
    threads_before = torch.get_num_threads()
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads_before)
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def _cut(batch: Batch, rank: int, size: int) -> Batch:
    own = share(len(batch[0]), rank, size)
    return batch[0][own.start : own.stop], batch[1][own.start : own.stop]
