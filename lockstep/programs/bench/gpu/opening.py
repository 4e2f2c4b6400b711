"""Makes a side by its name: its kernels, its process group or run, its model and its optimizer."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from lockstep.chance import drawing_from, fold
from lockstep.determinism.process import settle_process
from lockstep.errors import BadArgument
from lockstep.lanes import share
from lockstep.programs.bench.gpu import plan
from lockstep.programs.bench.gpu.graph import ByHand
from lockstep.programs.bench.gpu.sides import Kit, Lockstep, Loop, Side
from lockstep.programs.models import Batch, Workload
from lockstep.run.start import start
from lockstep.settings.device import choose, count_gpus
from lockstep.world import World

NUM_BATCHES = 4

OPTIONS: dict[str, dict[str, Any]] = {
    plan.LOCKSTEP: {},
    plan.NOT_EXACT: {"exact": False},
    plan.CAPTURED: {},
    plan.FLAT: {"flat": True},
}
"""What each of lockstep's sides says to `lockstep.start`."""

MODES = {plan.COMPILED: None, plan.REDUCED: "reduce-overhead"}
"""The modes of torch.compile."""

EXACT = (plan.DETERMINISTIC, plan.DDP_DETERMINISTIC, plan.LOCKSTEP, plan.CAPTURED, plan.FLAT)
"""Sides with deterministic kernels only."""


def open_side(name: str, workload: Workload, device: str, world: World, folder: Path, stack: ExitStack) -> Side:
    """The side of this name, on `device`; the stack closes what it holds. Collective: workers meet in `folder`."""
    if device == "cpu" and name in plan.NEEDS_CUDA:
        raise BadArgument(f"the side {name!r} is a CUDA graph, and there is none on the CPU: leave it out of --sides")
    torch.backends.cudnn.benchmark = name not in EXACT
    if name in OPTIONS:
        return _lockstep(name, workload, device, stack)
    here = choose(device, world.local_rank, world.local_size, count_gpus())  # as lockstep places its workers
    if here.type == "cuda":
        torch.cuda.set_device(here)
    if name in (plan.DETERMINISTIC, plan.DDP_DETERMINISTIC):
        stack.enter_context(settle_process(1, True, here))  # as lockstep does
    if name in (plan.DDP, plan.DDP_DETERMINISTIC, plan.DDP_GLOO):
        return _ddp(name, workload, here, world, folder / f"{name}.store")
    return _alone(name, make_kit(workload, here))


def make_kit(workload: Workload, device: torch.device) -> Kit:
    """See Note [The same for all on a GPU]."""
    with drawing_from(fold(0, "bench", "weights")):
        model = workload.make_model()
    generator = torch.Generator().manual_seed(fold(0, "bench", "data"))
    batches = [workload.make_batch(generator) for _ in range(NUM_BATCHES)]
    return Kit(workload, model.to(device), [(x.to(device), y.to(device)) for x, y in batches])


def _lockstep(name: str, workload: Workload, device: str, stack: ExitStack) -> Side:
    run = stack.enter_context(start(seed=0, device=device, **OPTIONS[name]))
    return Lockstep(make_kit(workload, run.device), run, captured=name in (plan.CAPTURED, plan.FLAT))


def _ddp(name: str, workload: Workload, device: torch.device, world: World, meeting: Path) -> Side:
    """DistributedDataParallel at its best: bucket views for gradients, a static graph, shares cut before."""
    over_nccl = name != plan.DDP_GLOO and device.type == "cuda"
    dist.init_process_group(
        "nccl" if over_nccl else "gloo",
        store=FileStore(str(meeting), world.size),
        rank=world.rank,
        world_size=world.size,
        device_id=device if over_nccl else None,
    )
    whole = make_kit(workload, device)
    kit = Kit(workload, whole.model, [_cut(batch, world) for batch in whole.batches])
    ids = [device] if device.type == "cuda" else None
    wrapped = DistributedDataParallel(kit.model, device_ids=ids, gradient_as_bucket_view=True, static_graph=True)
    return Loop(kit, kit.forward(wrapped), AdamW(kit.model.parameters(), fused=True), before=None)


def _alone(name: str, kit: Kit) -> Side:
    forward, parameters = kit.forward(kit.model), list(kit.model.parameters())
    if name == plan.BY_HAND:
        return ByHand(kit)
    if name == plan.PLAIN:
        return Loop(kit, forward, AdamW(parameters), before=None)
    if name in MODES:
        forward = torch.compile(forward, mode=MODES[name])
    begin = torch.compiler.cudagraph_mark_step_begin if name == plan.REDUCED else None
    return Loop(kit, forward, AdamW(parameters, fused=True), before=begin)


def _cut(batch: Batch, world: World) -> Batch:
    own = share(len(batch[0]), world.rank, world.size)
    return batch[0][own.start : own.stop], batch[1][own.start : own.stop]
