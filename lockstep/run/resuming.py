"""How a run is saved and found again."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep.chance import Generators
from lockstep.data import Position, ShardedLoader
from lockstep.errors import BadCheckpoint
from lockstep.lanes import Assignment
from lockstep.run import checkpoint
from lockstep.run.exact_state import load_exactly
from lockstep.run.hardware import difference, recorded
from lockstep.run.models import Models
from lockstep.run.progress import Progress, places
from lockstep.run.schema import read_state
from lockstep.run.settings import Settings
from lockstep.run.state import pack, unpack
from lockstep.run.stepping import Stepping
from lockstep.wire import Agreement, Plan, Wire


@dataclass(frozen=True)
class Parts:
    """All of a run that a snapshot holds. The loaders are the run's own list, which grows."""

    models: Models
    stepping: Stepping
    progress: Progress
    loaders: Sequence[ShardedLoader]

    def capture(self) -> checkpoint.Snapshot:
        """Everything that the next step depends on. Its tensors are the live ones, which the next step changes."""
        models = self.models
        tensors = {f"model/{name}": tensor for name, tensor in models.tensors().items()}
        state = {
            "step": self.stepping.step,
            "epoch": self.progress.epoch_to_resume(self.loaders),
            "num_lanes": self.stepping.assignment.num_lanes,
            "seed": self.stepping.seed,
            "loss": pack(self.stepping.loss, "loss", tensors),
            "noise": self.stepping.noise.state_dict(),
            "hardware": recorded(self.stepping.moving.device),
            "loaders": [[loader.position.epoch, loader.position.step] for loader in self.loaders],
            "batches": [list(loader.batches) for loader in self.loaders],
            "generators": _pack_generators(tensors),
            "optimizers": {
                label: pack(optimizer.state_dict(), label, tensors)
                for label, optimizer in self.models.optimizers.items()
            },
            "tracked": {
                name: pack(thing.state_dict(), f"tracked/{name}", tensors)
                for name, thing in self.models.tracked.items()
            },
        }
        return checkpoint.Snapshot(tensors, state)

    def install(self, snapshot: checkpoint.Snapshot, num_workers: int) -> None:
        """Afterwards the run stands where the snapshot was taken; the snapshot itself shares no memory with the run.

        Nothing is checked and nothing is exchanged. The lanes are dealt out anew only if their number changes.
        """
        state = snapshot.state
        load_models(self.models, snapshot)
        self.stepping.step, self.stepping.seed = state["step"], state["seed"]
        self.stepping.loss = unpack(state["loss"], snapshot.tensors)
        self.stepping.noise.load_state_dict(state.get("noise", ()))
        if state["num_lanes"] != self.stepping.assignment.num_lanes:
            self.stepping.assignment = Assignment.even(state["num_lanes"], num_workers)
        self.progress.epoch = state["epoch"]
        self.progress.waiting = dict(enumerate(places(state)))
        for index, loader in enumerate(self.loaders):
            loader.rekey(self.stepping.seed, self.stepping.assignment.num_lanes)
            self.progress.place_loader(index, loader)
        _unpack_generators(state["generators"], snapshot.tensors)


def in_this_epoch(parts: Parts) -> checkpoint.Snapshot:
    """A snapshot from which the body of the epoch under way is done again, without the batches it has trained on.

    An evaluation that was cut short is then done again, from its beginning.
    """
    snapshot, progress = parts.capture(), parts.progress
    if progress.in_epoch:
        snapshot.state["epoch"] = progress.epoch
        for index, (loader, passes) in enumerate(zip(parts.loaders, progress.passes_before, strict=False)):
            place = Position(passes, 0) if index not in progress.trained_on else loader.position
            if index in progress.trained_on and loader.position.epoch > passes:
                place = loader.ended_at
            snapshot.state["loaders"][index] = [place.epoch, place.step]
    return snapshot


def restore(parts: Parts, path: Path, settings: Settings, wire: Wire) -> str:
    """Collective. Nothing is touched unless the whole checkpoint is good, fits, and is the same on all workers.

    Gives what `told_elsewhere` says of it.
    """
    Agreement(wire.transport, Plan({"operation": "run.resume", "path": path})).check()
    snapshot = read_state(path)
    state = snapshot.state
    Agreement(
        wire.transport,
        Plan({"operation": "run.resume", "checkpoint": state["step"], "epoch": state["epoch"]}),
    ).check()
    check(parts, snapshot, path, settings)
    parts.install(snapshot, wire.world.size)
    return told_elsewhere(snapshot, settings)


def told_elsewhere(snapshot: checkpoint.Snapshot, settings: Settings) -> str:
    """What to tell if the snapshot was taken on another kind of device or with other switches; else nothing."""
    return difference(snapshot.state.get("hardware", {}), recorded(settings.device))


def check(parts: Parts, snapshot: checkpoint.Snapshot, path: Path, settings: Settings) -> None:
    """Refuses a snapshot of another model, of a run with other lanes or another seed than this one was told, or of
    loaders whose place cannot be found with those of this run.
    """
    check_fits(parts.models, snapshot, path)
    _check_told(settings, snapshot.state, path)
    for index, (place, loader) in enumerate(zip(places(snapshot.state), parts.loaders, strict=False)):
        place.check(index, loader)


def _check_told(settings: Settings, state: dict[str, Any], path: Path) -> None:
    told = (
        ("lanes", settings.lanes_told, settings.assignment.num_lanes, state["num_lanes"]),
        ("seed", settings.seed_told, settings.seed, state["seed"]),
    )
    for name, was_told, ours, theirs in told:
        if was_told and ours != theirs:
            raise BadCheckpoint(
                f"checkpoint {path} belongs to a run with {name} {theirs}, but this run was told {name} {ours}. "
                f"A resumed run keeps its {name}: leave the option out, or say {theirs}."
            )


def check_fits(models: Models, snapshot: checkpoint.Snapshot, path: Path) -> None:
    """Names the first way in which the checkpoint is another model's."""
    saved = {name.removeprefix("model/"): t for name, t in snapshot.tensors.items() if name.startswith("model/")}
    here = models.tensors()
    for name in [*here, *(name for name in saved if name not in here)]:
        mine, theirs = _form(here.get(name)), _form(saved.get(name))
        if mine != theirs:
            raise BadCheckpoint(f"checkpoint {path} is of another model: {name} is {theirs} there and {mine} here")
    for kind, ours in (("optimizers", models.optimizers), ("tracked", models.tracked)):
        theirs_kind = snapshot.state[kind]
        if set(ours) != set(theirs_kind):
            raise BadCheckpoint(f"checkpoint {path} has {kind} {sorted(theirs_kind)}, this run has {sorted(ours)}")
    for label, optimizer in models.optimizers.items():
        groups = unpack(snapshot.state["optimizers"][label], snapshot.tensors)["param_groups"]
        sizes = [len(group["params"]) for group in groups]
        if sizes != [len(group["params"]) for group in optimizer.param_groups]:
            raise BadCheckpoint(f"checkpoint {path}: {label} has parameter groups of {sizes}, another model's")


def _form(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "absent"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


@torch.no_grad()
def load_models(models: Models, snapshot: checkpoint.Snapshot) -> None:
    """Models, optimizers and what is tracked hold the snapshot's bits; BadCheckpoint if one of them cannot."""
    for name, tensor in models.tensors().items():
        tensor.copy_(snapshot.tensors[f"model/{name}"])
    tracked, saved = snapshot.state["tracked"], snapshot.state["optimizers"]
    load_exactly(
        {**models.optimizers, **{f"tracked/{name}": thing for name, thing in models.tracked.items()}},
        {**saved, **{f"tracked/{name}": packed for name, packed in tracked.items()}},
        snapshot.tensors,
    )


def _pack_generators(tensors: dict[str, torch.Tensor]) -> Any:
    now = Generators.now()
    numpy = None
    if now.numpy is not None:
        name, keys, *rest = now.numpy
        numpy = [name, [int(key) for key in keys], *rest]
    return pack(
        {"torch": now.torch_cpu, "cuda": now.torch_cuda, "python": now.python, "numpy": numpy},
        "generators",
        tensors,
    )


def _unpack_generators(packed: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Those that are not in use here, or were not in use there, go on as they are."""
    saved = unpack(packed, tensors)
    numpy = None if saved["numpy"] is None else tuple(saved["numpy"])
    cuda = saved["cuda"] if torch.cuda.is_initialized() else None
    Generators(saved["torch"], cuda, saved["python"], numpy).restore()
