"""What a run replicates: models, optimizers, and whatever else has a state_dict.

# Note [Forgotten optimizers]
# An optimizer that trains a replicated model may not have been given to `run.replicate`. Nothing of it is saved, and
# after a resume, or on a newcomer, its momentum begins anew. So a snapshot names the classes of those that have state.
# Where one of such a class makes its first update without state, after that snapshot was loaded, it was lost.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch.nn.modules import module as torch_module
from torch.optim import Optimizer

from lockstep.errors import BadArgument, Misuse
from lockstep.gradients.bucket_set import NamedParameter
from lockstep.state.script_optimizers import Made, made


class Stateful(Protocol):
    """A scheduler, a GradScaler, an average of weights: anything that can be saved and loaded."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


@dataclass
class Models:
    """The arguments of `replicate`, by name. The first model is `model`, the second `model2`, and so on."""

    modules: dict[str, torch.nn.Module] = field(default_factory=dict)
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    tracked: dict[str, Stateful] = field(default_factory=dict)
    forgotten: WeakSet[Optimizer] = field(default_factory=WeakSet)
    """Those that train these modules, and were not given. See Note [Forgotten optimizers]."""
    lost: frozenset[str] = frozenset()
    """The classes of those whose state was not in the snapshot from which the run goes on."""
    made: dict[str, Made] = field(default_factory=dict)
    """The optimizers as the script that began the run has made them."""
    _num_held: dict[int, int] = field(default_factory=dict)
    """How many tensors each optimizer had at the last look, by its id."""

    def add(self, module: torch.nn.Module, optimizers: Sequence[Optimizer], tracked: dict[str, Stateful]) -> None:
        """Adds a model (again, if it has changed) and what belongs to it; refuses what cannot be replicated."""
        _check_module(module)
        _check_optimizers(optimizers)
        _check_tracked(tracked, self.tracked)
        if not any(known is module for known in self.modules.values()):
            self.modules[_numbered("model", len(self.modules))] = module
        for optimizer in optimizers:
            if not any(known is optimizer for known in self.optimizers.values()):
                label = _numbered("optimizer", len(self.optimizers))
                self.optimizers[label], self.made[label] = optimizer, made(optimizer)
                self.forgotten.discard(optimizer)
        self.tracked.update(tracked)

    def require(self, what: str) -> None:
        """Raises if there is no model yet, which `what` needs."""
        if not self.modules:
            raise Misuse(f"{what} needs a model: call run.replicate(model, optimizer) first")

    def parameters(self) -> list[NamedParameter]:
        """Every parameter once, under its first name, in order of registration."""
        seen: set[int] = set()
        named = []
        for number, (label, module) in enumerate(self.modules.items()):
            for path, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    named.append(NamedParameter(self._full_name(label, path), parameter, number))
        return named

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for label, module in self.modules.items():
            for path, buffer in module.named_buffers():
                yield self._full_name(label, path), buffer

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers, by name."""
        return {named.name: named.parameter.detach() for named in self.parameters()} | dict(self.buffers())

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients in `p.grad`, by name."""
        gradients = ((named.name, named.parameter.grad) for named in self.parameters())
        return {name: gradient.detach() for name, gradient in gradients if gradient is not None}

    def optimizer_state(self) -> dict[str, Any]:
        """What every optimizer keeps per parameter, as `optimizer/<parameter>/<key>`."""
        names = {id(named.parameter): named.name for named in self.parameters()}
        return {
            f"{label}/{names.get(id(parameter), f'parameter {number}')}/{key}": value
            for label, optimizer in self.optimizers.items()
            for number, parameter in enumerate(_parameters_of(optimizer))
            for key, value in optimizer.state.get(parameter, {}).items()
        }

    def rates(self) -> dict[str, float]:
        """The learning rate of every group that has one, as `<optimizer>, group <number>`."""
        return {
            f"{label}, group {number}": rate
            for label, optimizer in self.optimizers.items()
            for number, group in enumerate(optimizer.param_groups)
            if (rate := _as_number(group.get("lr"))) is not None
        }

    def everything(self) -> dict[str, Any]:
        """What `run.digest()` is taken over."""
        return {**self.tensors(), **self.optimizer_state()}

    def held(self) -> dict[str, Any]:
        """All that the next step depends on: what is trained, the gradients in `p.grad`, and what is tracked."""
        gradients = {f"gradient of {name}": gradient for name, gradient in self.gradients().items()}
        return {**self.everything(), **gradients, **{name: thing.state_dict() for name, thing in self.tracked.items()}}

    def name_prefixes(self) -> list[str]:
        return [self._full_name(label, "") for label in self.modules]

    def check_optimizers_cover_known_parameters(self) -> None:
        """Refuses an optimizer that would update something no model of this run holds."""
        known = {id(named.parameter) for named in self.parameters()}
        for label, optimizer in self.optimizers.items():
            strangers = [p for p in _parameters_of(optimizer) if id(p) not in known]
            if strangers:
                raise Misuse(
                    f"{label} updates {len(strangers)} tensor(s) that belong to no replicated model (the first has "
                    f"shape {list(strangers[0].shape)}). Those of a model that run.replicate was not given: write "
                    "run.replicate(that_model) before they are trained. Those that were added to a replicated model: "
                    "call run.replicate(model, optimizer) again once it is complete."
                )

    def look_at(self, optimizer: Optimizer) -> None:
        """Called before an update: an optimizer that has got more tensors may have some that no model holds."""
        num_held = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._num_held.get(id(optimizer)) != num_held:
            self.check_optimizers_cover_known_parameters()
            self._num_held[id(optimizer)] = num_held

    def _full_name(self, label: str, path: str) -> str:
        clean = path.replace("_orig_mod.", "")  # the same name whether or not the model is compiled
        return clean if len(self.modules) == 1 else f"{label}/{clean}"


class RegistrationWatch:
    """Notices that any module has got a parameter, buffer or submodule. Its owner calls `close`.

    Walking a model at every step would cost more than a small step; torch calls a hook when something is registered.
    """

    def __init__(self) -> None:
        self.noticed = False
        self._handles = [
            torch_module.register_module_parameter_registration_hook(self._notice),
            torch_module.register_module_buffer_registration_hook(self._notice),
            torch_module.register_module_module_registration_hook(self._notice),
        ]

    def _notice(self, *_: Any) -> None:
        self.noticed = True

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def refuse_new_parameters(models: Models, known: Sequence[NamedParameter]) -> None:
    """Raises if a replicated model has parameters that it did not have at `replicate`."""
    ids = {id(named.parameter) for named in known}
    new = [named.name for named in models.parameters() if id(named.parameter) not in ids]
    if new:
        raise Misuse(
            f"parameters were added after run.replicate: {', '.join(new[:3])}{' ...' if len(new) > 3 else ''}. They "
            "would not be reduced. Call run.replicate(model, optimizer) again after changing the model."
        )


def has_state(optimizer: Optimizer) -> bool:
    """Whether it keeps anything from update to update, besides its settings."""
    return any(optimizer.state.values())


def _parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _as_number(rate: Any) -> float | None:
    """None for a rate that is none: an optimizer may find its rates itself."""
    try:
        return float(rate)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def _numbered(word: str, already: int) -> str:
    return word if already == 0 else f"{word}{already + 1}"


def _check_module(module: torch.nn.Module) -> None:
    if not isinstance(module, torch.nn.Module):
        raise BadArgument(f"run.replicate takes a torch.nn.Module first, not {type(module).__name__}")
    parameters = list(module.named_parameters())
    if not parameters and not list(module.buffers()):
        kind = type(module).__name__
        raise BadArgument(f"{kind} has no parameters and no buffers, so there is nothing to train or to replicate")
    kinds = (("parameter", parameters), ("buffer", module.named_buffers()))
    obstacles = (f"{kind} {name} {why}" for kind, tensors in kinds for name, one in tensors if (why := _obstacle(one)))
    if first := next(obstacles, ""):
        raise BadArgument(first)


def _obstacle(tensor: torch.Tensor) -> str:
    """Why the tensor cannot be given the values of another worker, or of a checkpoint; empty if it can."""
    if torch.nn.parameter.is_lazy(tensor):
        return "is not initialised yet: run one forward pass on the lazy model before run.replicate"
    if tensor.device.type == "meta":
        return "is on the meta device: materialise the model before run.replicate"
    if tensor.layout is not torch.strided:
        return f"is {str(tensor.layout).removeprefix('torch.')}, and only dense ones are replicated: give it to_dense()"
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return "is expanded, so that several of its elements are one in memory: register expand(...).clone()"
    return ""


def _check_optimizers(optimizers: Sequence[Optimizer]) -> None:
    for optimizer in optimizers:
        if isinstance(optimizer, torch.nn.Module):
            raise BadArgument(
                "run.replicate takes one model: call it once for each, run.replicate(generator, optimizer_g) and "
                "run.replicate(discriminator, optimizer_d)"
            )
        if not isinstance(optimizer, Optimizer):
            raise BadArgument(
                f"run.replicate takes torch.optim.Optimizers after the model, not {type(optimizer).__name__}; give "
                "schedulers and other things with state_dict by name: run.replicate(model, optimizer, scheduler=s)"
            )


def _check_tracked(new: dict[str, Stateful], known: dict[str, Stateful]) -> None:
    for name, thing in new.items():
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise BadArgument(f"{name}={type(thing).__name__} has no state_dict and load_state_dict to track")
        if name in known and known[name] is not thing:
            raise BadArgument(f"{name!r} is tracked already; give the second one another name")
