"""How a run is saved and found again."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep.chance import Generators
from lockstep.data import ShardedLoader
from lockstep.determinism.hardware import difference, recorded
from lockstep.errors import BadCheckpoint
from lockstep.lanes import Assignment
from lockstep.settings.options import Settings
from lockstep.state.checkpoints import file as checkpoint
from lockstep.state.exact_state import load_exactly
from lockstep.state.generators import pack_generators, unpack_generators
from lockstep.state.models import Models
from lockstep.state.packed import pack, unpack
from lockstep.state.progress import Progress, places
from lockstep.state.schema import read_state
from lockstep.wire import Agreement, Proposal, Wire

GRADIENT = "grad/"
"""What the names of kept gradients begin with."""


@dataclass(frozen=True)
class Parts:
    """All of a run that a snapshot holds."""

    models: Models
    stepping: Any
    progress: Progress

    def capture(self) -> checkpoint.Snapshot:
        """Everything that the next step depends on. Its tensors are the live ones, which the next step changes."""
        models = self.models
        tensors = {f"model/{name}": tensor for name, tensor in models.tensors().items()}
        if self.stepping.places.keeps_gradients:
            tensors |= {f"{GRADIENT}{name}": gradient for name, gradient in models.gradients().items()}
        state = {
            **self.progress.state(),
            "step": self.stepping.step,
            "num_lanes": self.stepping.assignment.num_lanes,
            "seed": self.stepping.seed,
            "loss": pack(self.stepping.loss, "loss", tensors),
            "noise": self.stepping.noise.state_dict(),
            "hardware": recorded(self.stepping.moving.device),
            "carried": self.stepping.carried.state(tensors),
            "script": self.stepping.places.state(),
            "generators": pack_generators(tensors),
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
        self.stepping.carried.load(state.get("carried", {}), snapshot.tensors)
        self.stepping.places.load(state.get("script", {}))
        if state["num_lanes"] != self.stepping.assignment.num_lanes:
            self.stepping.assignment = Assignment.even(state["num_lanes"], num_workers)
        self.progress.load(state, self._rekey)
        _install_gradients(self.models, snapshot.tensors)
        unpack_generators(state["generators"], snapshot.tensors)
        self.stepping.places.streams.look(Generators.now())

    def _rekey(self, loader: ShardedLoader) -> None:
        loader.rekey(self.stepping.seed, self.stepping.assignment.num_lanes)


def in_this_epoch(parts: Parts) -> checkpoint.Snapshot:
    """A snapshot from which the body of the epoch under way is done again, without the batches it has trained on.

    An evaluation that was cut short is then done again, from its beginning.
    """
    snapshot, progress = parts.capture(), parts.progress
    if progress.in_epoch:
        loaders, spent = snapshot.state["loaders"], {}
        for number, loader in progress.loaders.items():
            passes = progress.passes_before.get(number, 0)
            if number in progress.trained_on:
                spent[str(number)] = loader.position.epoch - passes
            else:
                loaders[str(number)] = [passes, 0]
        snapshot.state.update(epoch=progress.epoch, spent=spent)
        snapshot.state["made"]["total"] = progress.made.before_epoch
    return snapshot


def restore(parts: Parts, path: Path, settings: Settings, wire: Wire) -> str:
    """Collective. Nothing is touched unless the whole checkpoint is good, fits, and is the same on all workers.

    Gives what `told_elsewhere` says of it.
    """
    Agreement(wire.transport, Proposal({"operation": "run.resume", "path": path})).check()
    snapshot = read_state(path)
    state = snapshot.state
    Agreement(
        wire.transport,
        Proposal({"operation": "run.resume", "checkpoint": state["step"], "epoch": state["epoch"]}),
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
    found = places(snapshot.state)
    for number, loader in parts.progress.loaders.items():
        if number in found:
            found[number].check(number, loader)


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


def _install_gradients(models: Models, tensors: Mapping[str, torch.Tensor]) -> None:
    for named in models.parameters():
        kept = tensors.get(GRADIENT + named.name)
        named.parameter.grad = None if kept is None else kept.clone().to(named.parameter.device)
