"""Common mistakes with a large batch, found in the model and the optimizer."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LinearLR, LRScheduler, OneCycleLR

from lockstep.errors import BadArgument
from lockstep.optim.groups import exclude_biases_and_norms
from lockstep.optim.rules import require_count, require_optimizer
from lockstep.optim.warmup import WarmUp

FEW_SAMPLES = 16
"""From here downwards BatchNorm's error grows (Wu and He 2018, "Group normalization", figure 1)."""

Group = dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """One probable mistake. `text` describes it, and what to write instead."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


class MeasuredNoise(Protocol):
    """A measured noise scale: the batch beyond which more samples hardly help, and whether it is known well."""

    @property
    def critical_batch(self) -> float: ...

    @property
    def sure(self) -> bool: ...


def check(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    num_lanes: int | None = None,
    batch: int | None = None,
    noise: MeasuredNoise | None = None,
    scheduler: LRScheduler | None = None,
) -> list[Finding]:
    """What is probably wrong; an empty list when nothing is. Changes nothing, prints nothing.

    What needs `num_lanes`, `batch` or `noise` is left out where they are not given.
    """
    _refuse_nonsense(model, optimizer, noise, scheduler)
    for name, value in (("num_lanes", num_lanes), ("batch", batch)):
        if value is not None:
            require_count(name, value)
    findings: list[Finding] = []
    if num_lanes is not None and batch is not None:
        findings += _few_samples(model, num_lanes, batch)
    findings += _small_parameters(model, optimizer)
    findings += _no_warm_up(optimizer, scheduler)
    if batch is not None and noise is not None:
        findings += _beyond_critical(batch, noise)
    return findings


def _few_samples(model: nn.Module, num_lanes: int, batch: int) -> Iterator[Finding]:
    names = list(_lane_norms(model))
    if names and batch // num_lanes < FEW_SAMPLES:
        yield Finding(
            "batch norm",
            f"the statistics are those of one lane, and batch {batch} over {num_lanes} lanes leaves "
            f"{max(1, batch // num_lanes)} samples there, fewer than {FEW_SAMPLES} ({_counted(names)}). "
            "Call lockstep.sync_batchnorm(model), or use fewer lanes or a larger batch.",
        )


def _lane_norms(model: nn.Module) -> Iterator[str]:
    """Names of BatchNorm layers with statistics of their own lane; torch's and lockstep's SyncBatchNorm have not.

    A layer in evaluation inside a model in training is frozen and takes no statistics.
    """
    for name, layer in model.named_modules():
        synchronised = any(kind.__name__ == "SyncBatchNorm" for kind in type(layer).__mro__)
        frozen = model.training and not layer.training
        if isinstance(layer, _BatchNorm) and not synchronised and not frozen:
            yield name or type(layer).__name__


def _small_parameters(model: nn.Module, optimizer: Optimizer) -> Iterator[Finding]:
    small = _biases_and_norms(model)
    decayed = _held(optimizer, small, lambda group: bool(group.get("weight_decay")))
    adapted = _held(optimizer, small, lambda group: bool(group.get("adapt")))
    advice = "Give the optimizer exclude_biases_and_norms(model, weight_decay) instead of model.parameters()."
    if decayed:
        yield Finding("weight decay", f"biases or norms are pulled towards 0 ({_counted(decayed)}). {advice}")
    if adapted:
        yield Finding(
            "adaptation",
            f"biases or norms have a rate adapted to their own norm, which says little ({_counted(adapted)}). {advice}",
        )


def _biases_and_norms(model: nn.Module) -> dict[int, str]:
    """Names, by identity, of the trainable parameters that `exclude_biases_and_norms` would set apart."""
    apart = {id(parameter) for parameter in exclude_biases_and_norms(model, 0.0)[1]["params"]}
    named = ((id(parameter), name) for name, parameter in model.named_parameters() if parameter.requires_grad)
    return {identity: name for identity, name in named if identity in apart}


def _held(optimizer: Optimizer, names: dict[int, str], selects: Callable[[Group], bool]) -> list[str]:
    """Of the parameters with `names`, those in a group that `selects` accepts, in the optimizer's order."""
    held = (id(parameter) for group in optimizer.param_groups if selects(group) for parameter in group["params"])
    return [names[identity] for identity in held if identity in names]


def _no_warm_up(optimizer: Optimizer, scheduler: LRScheduler | None) -> Iterator[Finding]:
    raised = [group for group in optimizer.param_groups if _full_rate(group) > group.get("scaled_from", float("inf"))]
    if raised and not any(map(_warms_up, _all_schedulers(scheduler))):
        group = raised[0]
        yield Finding(
            "warm-up",
            f"the rate was scaled from {group['scaled_from']:.6g} to {_full_rate(group):.6g} and starts there at once. "
            "Make a WarmUp(optimizer, steps=...) and give it to check(..., scheduler=...).",
        )


def _full_rate(group: Group) -> float:
    return float(group["initial_lr" if "initial_lr" in group else "lr"])


def _all_schedulers(scheduler: LRScheduler | None) -> Iterator[LRScheduler]:
    """The scheduler and those inside it (SequentialLR and ChainedScheduler hold others)."""
    if scheduler is not None:
        yield scheduler
        inner: Iterable[LRScheduler] = getattr(scheduler, "_schedulers", ())
        for one in inner:
            yield from _all_schedulers(one)


def _warms_up(scheduler: LRScheduler) -> bool:
    if isinstance(scheduler, LinearLR):
        return bool(scheduler.start_factor < scheduler.end_factor)
    if isinstance(scheduler, LambdaLR):
        return any(factor(0) < factor(1) for factor in scheduler.lr_lambdas)
    return isinstance(scheduler, (WarmUp, OneCycleLR))


def _beyond_critical(batch: int, noise: MeasuredNoise) -> Iterator[Finding]:
    if noise.sure and batch > noise.critical_batch:
        yield Finding(
            "critical batch",
            f"batch {batch} is beyond the critical batch of about {noise.critical_batch:.0f}: more samples per step "
            "hardly save steps there. Use a smaller batch, or split this one over more workers instead of growing it.",
        )


def _refuse_nonsense(
    model: nn.Module, optimizer: Optimizer, noise: MeasuredNoise | None, scheduler: LRScheduler | None
) -> None:
    require_optimizer(optimizer)
    if not isinstance(model, nn.Module):
        raise BadArgument(f"{type(model).__name__} is not a model; give a torch.nn.Module")
    if noise is not None and not (hasattr(noise, "critical_batch") and hasattr(noise, "sure")):
        raise BadArgument(f"noise={noise!r} is not a measured noise scale; it needs critical_batch and sure")
    if scheduler is not None and getattr(scheduler, "optimizer", None) is not optimizer:
        raise BadArgument(f"{type(scheduler).__name__} is not a scheduler of this optimizer; give the one you step")


def _counted(names: list[str]) -> str:
    return f"{len(names)}, first: {names[0]}"
