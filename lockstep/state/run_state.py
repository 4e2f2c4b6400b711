"""How a run is captured in a snapshot, and restored from one."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from lockstep.chance import Generators
from lockstep.determinism.hardware import difference, recorded
from lockstep.errors import BadCheckpoint
from lockstep.settings.options import Settings
from lockstep.state.exact_state import load_exactly
from lockstep.state.models import Models, has_state
from lockstep.state.progress import DataProgress, places
from lockstep.state.script_optimizers import Made, other_class, without_effect
from lockstep.state.snapshot import Json, Snapshot, Tensors, pack, pack_generators, unpack, unpack_generators

GRADIENT = "grad/"
"""What the names of kept gradients begin with."""

_LABEL = re.compile(r"model\d*/")


@dataclass
class StepState:
    """How far the run has come, and what the keys of its random numbers are made from."""

    seed: int
    num_lanes: int
    step: int = 0
    loss: float | None = None
    """That of the last step."""
    num_logged: int = 0
    """How often the script has called run.log since then."""


class StatePart(Protocol):
    """A part of a run that packs itself into a snapshot: JSON, and tensors that go into `tensors`."""

    def state(self, tensors: Tensors) -> Json: ...

    def load(self, state: Json, tensors: Tensors) -> None: ...


class ScriptState(Protocol):
    """The user's script as a part of a snapshot."""

    @property
    def keeps_gradients(self) -> bool:
        """Whether the gradients in `p.grad` now belong to the run."""

    def state(self) -> dict[str, Any]: ...

    def load(self, state: Mapping[str, Any]) -> None: ...

    def joined(self) -> None:
        """Called where the snapshot that was loaded is one of a step under way, with its epoch's head done."""

    def before_batch(self, number: int) -> None:
        """Called before a loader loads its next batch, and before the run is saved there."""

    def asked(self, number: int) -> bool:
        """Called where a loader is about to load its next batch. Whether an epoch goes on behind the last one."""

    def generators(self) -> Generators:
        """The generators outside of lanes where a run that is resumed from now goes on."""

    @property
    def changes_at_head(self) -> bool:
        """Whether a run that is resumed inside the epoch under way would change some state, or rates, twice."""

    @property
    def changed_at_head(self) -> str | None:
        """The state among that, in words: such a run would be refused."""

    @property
    def head(self) -> Generators | None:
        """The generators outside of lanes where the body of the epoch under way began."""

    def epoch_begins(self) -> None:
        """Called where the body of an epoch is about to begin."""

    def epochs_are_over(self) -> None:
        """Called where the script has had all its epochs."""

    def generators_loaded(self, head: Generators | None) -> None:
        """Called after the generators outside of lanes were set to the snapshot's states. `head`: what they were where
        the body of the epoch began that is about to run again."""


@dataclass(frozen=True)
class RunState:
    """All of a run that the next step depends on: what a snapshot holds."""

    models: Models
    progress: DataProgress
    steps: StepState
    noise: Any
    carried: StatePart
    places: ScriptState
    engine: StatePart
    device: torch.device

    def capture(self) -> Snapshot:
        """A snapshot of now. Its tensors are the live ones, which the next step changes."""
        models = self.models
        tensors = {f"model/{name}": tensor for name, tensor in models.tensors().items()}
        if self.places.keeps_gradients:
            tensors |= {f"{GRADIENT}{name}": gradient for name, gradient in models.gradients().items()}
        state = {
            **self.progress.state(),
            "step": self.steps.step,
            "logged": self.steps.num_logged,
            "num_lanes": self.steps.num_lanes,
            "seed": self.steps.seed,
            "loss": pack(self.steps.loss, "loss", tensors),
            "noise": self.noise.state_dict(),
            "hardware": recorded(self.device),
            "carried": self.carried.state(tensors),
            "script": self.places.state(),
            "generators": pack_generators(self.places.generators(), "generators", tensors),
            "optimizers": {
                label: pack(optimizer.state_dict(), label, tensors) for label, optimizer in models.optimizers.items()
            },
            "optimizers_made": {label: pack(models.made[label], label, tensors) for label in models.optimizers},
            "forgotten": sorted(models.lost.union(type(one).__name__ for one in models.forgotten if has_state(one))),
            "tracked": {
                name: pack(thing.state_dict(), f"tracked/{name}", tensors) for name, thing in models.tracked.items()
            },
        }
        if self.progress.in_epoch and self.places.head is not None:
            head = pack_generators(self.places.head, "generators_at_head", tensors)
            state["generators_at_head"] = {"epoch": self.progress.epoch, "states": head}
        of_strategy = self.engine.state(tensors)
        return Snapshot(tensors, {**state, "strategy": of_strategy} if of_strategy else state)

    def install(self, snapshot: Snapshot) -> None:
        """Restores the run from the snapshot, which shares no memory with it afterwards.

        Nothing is checked and nothing is exchanged. The number of lanes may have changed: the caller assigns them.
        """
        state, steps = snapshot.state, self.steps
        load_models(self.models, snapshot)
        self.models.made |= _made(snapshot)
        self.models.lost = frozenset(state.get("forgotten", ()))
        steps.step, steps.seed, steps.num_lanes = state["step"], state["seed"], state["num_lanes"]
        steps.num_logged = state.get("logged", 0)
        steps.loss = unpack(state["loss"], snapshot.tensors)
        self.noise.load_state_dict(state.get("noise", ()))
        self.carried.load(state.get("carried", {}), snapshot.tensors)
        self.places.load(state.get("script", {}))
        self.engine.load(state.get("strategy", {}), snapshot.tensors)
        self.progress.load(state, lambda loader: loader.rekey(steps.seed, steps.num_lanes))
        _install_gradients(self.models, snapshot.tensors)
        unpack_generators(state["generators"], snapshot.tensors).restore()
        self.places.generators_loaded(_head(snapshot))


def _head(snapshot: Snapshot) -> Generators | None:
    """The generators where the body of the epoch began in which the run goes on; None where it begins a new one. Older
    snapshots do not have them."""
    saved = snapshot.state.get("generators_at_head")
    if saved is None or saved["epoch"] != snapshot.state["epoch"]:
        return None
    return unpack_generators(saved["states"], snapshot.tensors)


def resume_notes(models: Models, snapshot: Snapshot, settings: Settings) -> list[str]:
    """What is said of a snapshot before it is installed: it was taken on another kind of device, or by a script that
    made its optimizers otherwise."""
    notes = [difference(snapshot.state.get("hardware", {}), recorded(settings.device))]
    for label, saved in _made(snapshot).items():
        groups = unpack(snapshot.state["optimizers"][label], snapshot.tensors)["param_groups"]
        notes.append(without_effect(label, models.made[label], saved, groups))
    return list(filter(None, notes))


def _made(snapshot: Snapshot) -> dict[str, Made]:
    """The optimizers of the snapshot as a script had made them; older snapshots do not say."""
    packed = snapshot.state.get("optimizers_made", {})
    return {label: unpack(packed[label], snapshot.tensors) for label in snapshot.state["optimizers"] if label in packed}


def check(run: RunState, snapshot: Snapshot, path: Path, settings: Settings) -> None:
    """Refuses a snapshot of another model, of another number of lanes or seed than this run was started with, or
    whose positions do not fit the loaders of this run.
    """
    check_fits(run.models, snapshot, path)
    _check_settings(settings, snapshot.state, path)
    positions = places(snapshot.state)
    for number, loader in run.progress.loaders.items():
        if number in positions:
            positions[number].check(number, loader)


def _check_settings(settings: Settings, state: dict[str, Any], path: Path) -> None:
    settings_given = (
        ("lanes", settings.lanes_given, settings.assignment.num_lanes, state["num_lanes"]),
        ("seed", settings.seed_given, settings.seed, state["seed"]),
    )
    for name, is_given, ours, theirs in settings_given:
        if is_given and ours != theirs:
            raise BadCheckpoint(
                f"checkpoint {path} belongs to a run with {name} {theirs}, but this run was started with {name} {ours}."
                f" A resumed run keeps its {name}: leave the option out, or say {theirs}."
            )


def check_fits(models: Models, snapshot: Snapshot, path: Path) -> None:
    """Names the first way in which the checkpoint is another model's."""
    saved = {name.removeprefix("model/"): t for name, t in snapshot.tensors.items() if name.startswith("model/")}
    here = models.tensors()
    num_saved, num_here = _num_models(saved), len(models.modules)
    if num_saved > num_here:
        raise BadCheckpoint(
            f"checkpoint {path} has {num_saved} models, and the script has given {num_here} to run.replicate so far: "
            "give it all of them before the run is resumed"
        )
    for name in [*here, *(name for name in saved if name not in here)]:
        mine, theirs = _form(here.get(name)), _form(saved.get(name))
        if mine != theirs:
            raise BadCheckpoint(f"checkpoint {path} is of another model: {name} is {theirs} there and {mine} here")
    for kind, ours in (("optimizers", models.optimizers), ("tracked", models.tracked)):
        theirs_kind = snapshot.state[kind]
        if set(ours) != set(theirs_kind):
            raise BadCheckpoint(f"checkpoint {path} has {kind} {sorted(theirs_kind)}, this run has {sorted(ours)}")
    for label, saved_one in _made(snapshot).items():
        if other := other_class(label, models.made[label], saved_one):
            raise BadCheckpoint(f"checkpoint {path} {other}")
    for label, optimizer in models.optimizers.items():
        groups = unpack(snapshot.state["optimizers"][label], snapshot.tensors)["param_groups"]
        sizes = [len(group["params"]) for group in groups]
        if sizes != [len(group["params"]) for group in optimizer.param_groups]:
            raise BadCheckpoint(
                f"checkpoint {path}: {label} has parameter groups of {sizes}, another model's. If the script calls "
                "add_param_group as it trains: make all groups at first, and freeze what is not to be trained yet "
                "(requires_grad_(False)), or set its rate to 0."
            )


def _num_models(names: Iterable[str]) -> int:
    """Names of tensors begin with the label of their model where there are several."""
    return max(1, len({found[0] for name in names if (found := _LABEL.match(name))}))


def _form(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "absent"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


@torch.no_grad()
def load_models(models: Models, snapshot: Snapshot) -> None:
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
