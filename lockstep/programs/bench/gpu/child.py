"""What a process of a benchmark on a GPU runs: one side, which executes commands one after the other.

    python -m lockstep.programs.bench.gpu.child PLAN SIDE FOLDER

It is alone, or one of several workers under `lockstep run`. It first sends which side and rank it is; after that it
only answers. Sides that need not be deterministic let cuDNN look for its fastest convolutions, as their users would.
"""

import gc
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.optim import AdamW

from lockstep.determinism.process import settle_process
from lockstep.errors import BadArgument, BadEnvironment
from lockstep.gradients.fingerprint import combined, fingerprints
from lockstep.programs.bench import sides
from lockstep.programs.bench.gpu import plan as gpu
from lockstep.programs.bench.gpu.children import SOCKET, JsonConnection, Words
from lockstep.programs.bench.machine import describe_machine, pss_bytes
from lockstep.programs.bench.sides import Evidence, Forward, TrainingKit, TrainingSide
from lockstep.programs.large_models import LARGE_WORKLOADS
from lockstep.programs.models import Workload, count_parameters
from lockstep.run.start import start
from lockstep.settings.device import choose, count_gpus
from lockstep.settings.environment import find_place, process_environment, take_environment
from lockstep.state.tensor_file import write_tensors
from lockstep.world import World

ORDINARY_STEPS = 3
"""Before a capture by hand, on a stream of their own: libraries set themselves up, the optimizer makes its state."""

WARM_STEPS = 12  # enough for everything that is learned or captured in the first steps
UNTIMED_STEPS = 3
"""At the beginning of a block. The memory that a block gave back at its end is taken again in the first of them."""


# -- sides ------------------------------------------------------------------------------------------------------


class AccumulationSide(TrainingSide):
    """The usual loop over `num_parts` parts of each batch, whose gradients torch adds up; fused AdamW."""

    def __init__(self, kit: TrainingKit, forward: Forward, num_parts: int) -> None:
        super().__init__(kit, AdamW(kit.model.parameters(), fused=True))
        self._forward, self._num_parts = forward, num_parts

    def compute(self, number: int) -> None:
        batch = self.batch(number)
        for place in range(self._num_parts):
            part = sides.part_of(batch, place, self._num_parts)
            (self._forward(part) * (len(part[0]) / len(batch[0]))).backward()


class GraphByHand(TrainingSide):
    """A whole step as one CUDA graph, as a careful user writes it without lockstep.

    Forward, backward and update are in one graph; a batch is copied to where the graph reads it.
    """

    def __init__(self, kit: TrainingKit) -> None:
        super().__init__(kit, AdamW(kit.model.parameters(), fused=True, capturable=True))
        self._forward = kit.forward(kit.model)
        self._static = (kit.batches[0][0].clone(), kit.batches[0][1].clone())
        self._graph = self._capture()

    def compute(self, number: int) -> None:
        for place, value in zip(self._static, self.batch(number), strict=True):
            place.copy_(value)
        self._graph.replay()

    def update(self) -> None:
        """Does nothing: the update is in the graph."""

    def _capture(self) -> torch.cuda.CUDAGraph:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(ORDINARY_STEPS):
                self._whole_step()
        torch.cuda.current_stream().wait_stream(aside)
        self.optimizer.zero_grad(set_to_none=True)  # every replay of the graph makes gradients of its own
        torch.cuda.empty_cache()  # what the ordinary steps used is of no use to the graph's own pool
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._whole_step()
        return graph

    def _whole_step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self._forward(self._static).backward()
        self.optimizer.step()


def is_exact(name: str) -> bool:
    """Whether the side has deterministic kernels only: as lockstep has them, with it or without."""
    return gpu.does(name, "deterministic") or (name in gpu.OF_LOCKSTEP and not gpu.does(name, "exact=False"))


def open_side(
    name: str, workload: Workload, plan: gpu.GpuStepPlan, world: World, folder: Path, stack: ExitStack
) -> TrainingSide:
    """The side of this name, on the plan's device; the stack closes what it holds.

    Collective: workers meet in `folder`.
    """
    device, exact = plan.device, is_exact(name)
    if device == "cpu" and name in gpu.NEEDS_CUDA:
        raise BadArgument(f"the side {name!r} is a CUDA graph, and there is none on the CPU: leave it out of --sides")
    torch.backends.cudnn.benchmark = not exact
    if plan.ranks_share_gpu:
        take_environment({"NCCL_HOSTID": f"bench-{world.rank}"})
    if name in gpu.OF_LOCKSTEP:
        wire, lanes, strategy = "nccl" if plan.ranks_share_gpu else None, plan.lanes * world.size, gpu.strategy_of(name)
        run = stack.enter_context(start(lanes=lanes, device=device, wire=wire, exact=exact, strategy=strategy))
        captured, compiled = gpu.does(name, "captured"), gpu.does(name, "compile")
        return sides.LockstepSide(sides.make_kit(workload, run.device), run, captured=captured, compiled=compiled)
    here = choose(device, world.local_rank, world.local_size, count_gpus())  # as lockstep places its workers
    if here.type == "cuda":
        torch.cuda.set_device(here)
    if exact:
        stack.enter_context(settle_process(1, True, here))  # as lockstep does
    kit = sides.make_kit(workload, here)
    if not gpu.does(name, "ddp") and name != gpu.FSDP:
        return _side_alone(name, kit, plan.lanes)
    return _side_in_group(name, kit, here, world, FileStore(str(folder / f"{name}.store"), world.size))


def _side_in_group(name: str, kit: TrainingKit, device: torch.device, world: World, store: FileStore) -> TrainingSide:
    """The side on torch's process group. Collective."""
    rank, size, over_nccl = world.rank, world.size, name != gpu.DDP_GLOO and device.type == "cuda"
    backend, device_id = ("nccl", device) if over_nccl else ("gloo", None)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, device_id=device_id)
    if name not in (gpu.ZERO, gpu.FSDP):
        return sides.ddp_side(kit, rank, size, compiled=gpu.does(name, "compile"))
    from lockstep.programs.bench.divided_sides import fsdp_side, zero_side

    return (zero_side if name == gpu.ZERO else fsdp_side)(kit, rank, size)


def _side_alone(name: str, kit: TrainingKit, lanes: int) -> TrainingSide:
    if name == gpu.BY_HAND:
        return GraphByHand(kit)
    forward, mode, begin = kit.forward(kit.model), None, None
    if name == gpu.REDUCED:
        mode, begin = "reduce-overhead", torch.compiler.cudagraph_mark_step_begin
    if gpu.does(name, "compile"):
        forward = torch.compile(forward, mode=mode)
    if name in gpu.OF_LANES:
        return AccumulationSide(kit, forward, lanes)
    optimizer = AdamW(kit.model.parameters(), fused=None if name == gpu.PLAIN else True)
    return sides.LoopSide(kit, forward, optimizer, begin)


# -- evidence ---------------------------------------------------------------------------------------------------


def train_from_start(side: TrainingSide) -> Evidence:
    """What the side computes in NUM_STEPS steps from the initial weights. Collective."""
    side.restart()
    for number in range(sides.NUM_STEPS):
        side.step(number)
    return evidence_now(side)


def evidence_now(side: TrainingSide) -> Evidence:
    """What it holds now. Collective where that is divided."""
    return Evidence(side.gradient_means(), side.movement())


def compare(actual: Evidence, expected: Evidence) -> dict[str, float]:
    """`gradients` and `movement`: the distance, relative to the expected length; `length`: of the movement.

    `length` is a quotient, 1 for equal ones. All are infinite where a parameter is missing or a number not finite.
    """
    movement, length = sides.distance(actual.movement, expected.movement)
    gradients, _ = sides.distance(actual.gradients, expected.gradients)
    return {"gradients": gradients, "movement": movement, "length": length}


def tensors_of(evidence: Evidence) -> dict[str, Tensor]:
    """All of it under names that `evidence_from` takes apart again."""
    return {f"{part} {name}": value for part, named in vars(evidence).items() for name, value in named.items()}


def evidence_from(tensors: Mapping[str, Tensor]) -> Evidence:
    found = Evidence({}, {})
    for key, value in tensors.items():
        part, _, name = key.partition(" ")
        vars(found)[part][name] = value
    return found


def digest(evidence: Evidence) -> str:
    """A fingerprint of the bits of all of it. It is made where the tensors are: they may be a gigabyte on a GPU."""
    return combined(fingerprints(tensors_of(evidence))).hex()


# -- the process ------------------------------------------------------------------------------------------------


class SideWorker:
    """One side, which executes commands; all members of a side get the same ones, `open` first."""

    def __init__(self, plan: gpu.GpuStepPlan, name: str, folder: Path, world: World, stack: ExitStack) -> None:
        self._plan, self._name, self._folder, self._world, self._stack = plan, name, folder, world, stack
        self._evidence_path = folder / "evidence.safetensors"
        self._on_gpu = plan.device != "cpu"  # a plan on the CPU is for trying things out
        self._side: Any = None

    def do(self, word: str, **options: Any) -> Words:
        tasks: list[Callable[..., Words]] = [self.open, self.prepare, self.write, self.compare, self.block]
        answer = {task.__name__: task for task in tasks}[word](**options)
        if self._on_gpu:  # while other sides run, it holds no more than its state and its graphs' memory
            torch.cuda.empty_cache()
        return answer

    def open(self) -> Words:
        """Makes the side. That is mostly the CPU's work, so all children do it at once."""
        workload = LARGE_WORKLOADS[self._plan.model](**self._plan.sizes)
        self._side = open_side(self._name, workload, self._plan, self._world, self._folder, self._stack)
        return {"coarse": workload.rounds_coarsely}

    def prepare(self) -> Words:
        """Warms the side up."""
        self._train(WARM_STEPS)
        if excuse := self._side.excuse():
            raise BadEnvironment(f"{self._name} cannot be measured here: {excuse}")
        return {"parameters": count_parameters(self._side.model), "machine": describe_machine(self._plan.device)}

    def write(self) -> Words:
        """Writes this side's evidence into the folder, as the reference for the others."""
        evidence = train_from_start(self._side)
        if self._world.rank == 0:
            write_tensors(self._evidence_path, tensors_of(evidence))
        return {**compare(evidence, evidence), **self._digest(evidence)}

    def compare(self) -> Words:
        """How far this side is from the evidence in the folder. Only the first worker compares."""
        actual, is_first = train_from_start(self._side), self._world.rank == 0
        apart = compare(actual, evidence_from(load_file(str(self._evidence_path)))) if is_first else {}
        return {**apart, **self._digest(actual)}

    def block(self, steps: int) -> Words:
        """The seconds of `steps` steps, and the process's memory: at most in this block, and of the host after it."""
        gc.collect()
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
        self._train(UNTIMED_STEPS)
        began_s = time.perf_counter()
        self._train(steps)
        seconds = time.perf_counter() - began_s
        peaks = {"reserved_bytes": torch.cuda.max_memory_reserved, "allocated_bytes": torch.cuda.max_memory_allocated}
        held = {name: peak() - self._side.initial_bytes if self._on_gpu else None for name, peak in peaks.items()}
        return {"seconds": seconds, **held, "host_bytes": pss_bytes(settled=True)}

    def _train(self, steps: int) -> None:
        """Returns when the device has done the steps."""
        for number in range(steps):
            self._side.step(number)
        if self._on_gpu:
            torch.cuda.synchronize()

    def _digest(self, evidence: Evidence) -> Words:
        """Only where bits are compared."""
        return {"digest": digest(evidence) if self._world.size > 1 or is_exact(self._name) else None}


def main(plan: gpu.GpuStepPlan, name: str, folder: Path) -> None:
    torch.set_num_threads(1)
    world = find_place(process_environment()).world
    connection = JsonConnection.to(folder / SOCKET)
    connection.send(side=name, rank=world.rank)
    with ExitStack() as stack:
        worker = SideWorker(plan, name, folder, world, stack)
        while (words := connection.receive()) is not None:
            connection.send(**worker.do(**words))


if __name__ == "__main__":
    main(gpu.GpuStepPlan.read(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
    sides.end_process()
