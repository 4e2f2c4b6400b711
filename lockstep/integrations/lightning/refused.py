"""What of Lightning cannot be under lockstep what it is elsewhere, by name; and which private names are used."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from lockstep.errors import BadArgument

PRIVATE = {
    "Trainer": ("_accelerator_connector", "_logger_connector", "_val_check_time_interval"),
    "Trainer._accelerator_connector": ("_devices_flag", "_num_nodes_flag", "_layer_sync"),
    "Trainer._logger_connector": ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics"),
    "Trainer.fit_loop": ("_skip_backward", "_restarting", "_resuming_from_checkpoint", "_loaded_from_state_dict"),
    "Trainer.fit_loop.epoch_loop": ("_results", "_batches_that_stepped"),
    "Trainer.fit_loop.epoch_loop.automatic_optimization": ("_on_before_zero_grad", "_optimizer_zero_grad"),
    "Trainer.strategy.precision_plugin": ("_after_closure",),
    "torchmetrics.Metric": ("_update_count",),
    "Trainer.checkpoint_callback": ("_enable_version_counter",),
}
"""By where they are found on a Trainer, or elsewhere; a test says which of them has moved. The Trainer calls
`strategy.barrier("run-stage")` when all is restored and nothing is trained: a fit without that call is refused."""

_ONE_WORKER_EACH = "start one worker for each device, and more workers by `lockstep run -n`"

_OPTIONS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "devices": (
        lambda trainer: _num_devices(trainer) not in (1, trainer.accelerator.auto_device_count()),
        _ONE_WORKER_EACH,
    ),
    "num_nodes": (lambda trainer: trainer._accelerator_connector._num_nodes_flag > 1, _ONE_WORKER_EACH),
    "sync_batchnorm": (
        lambda trainer: trainer._accelerator_connector._layer_sync is not None,
        "statistics are those of a lane, and are averaged over lanes; see the example of synchronized BatchNorm",
    ),
    "max_time": (lambda trainer: _has(trainer, "Timer"), "workers' clocks differ: say max_steps or max_epochs"),
    "val_check_interval": (
        lambda trainer: trainer._val_check_time_interval is not None,
        "workers' clocks differ: count it in batches",
    ),
    "reload_dataloaders_every_n_epochs": (
        lambda trainer: trainer.reload_dataloaders_every_n_epochs > 0,
        "a loader that is made again is another one, whose place a worker that joins cannot find",
    ),
    "benchmark": (lambda trainer: _benchmarks(), "kernels that are chosen by their speed differ between workers"),
}  # fmt: skip
"""Options of the Trainer, whether they are used, and why they cannot be."""

_CALLBACKS = {
    "StochasticWeightAveraging": "it reads an epoch without training on it. Use WeightAveraging",
    "BatchSizeFinder": "a batch that changes by itself is another training: choose one, and more lanes",
    "LearningRateFinder": "it makes several trainings of one run: find the rate in a script of its own",
    "GradientAccumulationScheduler": "say accumulate_grad_batches, or more lanes",
    "ModelPruning": "it replaces parameters that the run knows",
    "SpikeDetection": "it sees the loss of one worker",
}


def check_trainer(trainer: Any) -> None:
    """Raises BadArgument for what cannot work, by its name."""
    for name, (is_used, why) in _OPTIONS.items():
        if is_used(trainer):
            raise BadArgument(f"Trainer({name}=...) cannot be used under lockstep: {why}")
    for name, why in _CALLBACKS.items():
        if _has(trainer, name):
            raise BadArgument(f"the callback {name} cannot be used under lockstep: {why}")


def check_module(module: Any, base: type) -> None:
    """Raises BadArgument for hooks of a LightningModule that cannot work; `base` is Lightning's own class."""
    if type(module).on_before_batch_transfer is not base.on_before_batch_transfer:  # type: ignore[attr-defined]
        raise BadArgument(
            "on_before_batch_transfer cannot be used under lockstep: it would see a batch of which every worker has "
            "its own lanes. Use on_after_batch_transfer, which is called for each lane, or the data set"
        )
    if "dataloader_iter" in type(module).training_step.__code__.co_varnames:
        raise BadArgument(
            "training_step(dataloader_iter) cannot be used under lockstep: a lost worker's lanes are computed again, "
            "from a batch. Take `batch`"
        )


def check_optimizers(optimizers: list[Any], configs: list[Any]) -> None:
    """Raises BadArgument for optimizers and schedulers that cannot work."""
    for name, why in (
        ("LBFGS", "it computes a batch several times in one step"),
        ("_MockOptimizer", "configure_optimizers has returned None, so there is nothing to train"),
    ):
        if any(type(optimizer).__name__ == name for optimizer in optimizers):
            raise BadArgument(f"the optimizer {name.strip('_')} cannot be used under lockstep: {why}")
    if any(config.reduce_on_plateau and config.interval == "step" for config in configs):
        raise BadArgument(
            'a ReduceLROnPlateau with interval="step" cannot be used under lockstep: a worker that joins has not seen '
            'what it monitors. Say interval="epoch"'
        )


def _has(trainer: Any, name: str) -> bool:
    return any(kind.__name__ == name for callback in trainer.callbacks for kind in type(callback).__mro__)


def _num_devices(trainer: Any) -> int:
    flag = trainer._accelerator_connector._devices_flag
    return flag if isinstance(flag, int) else len(flag)


def _benchmarks() -> bool:
    return torch.backends.cudnn.benchmark
