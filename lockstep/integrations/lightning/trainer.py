"""The strategy of Lightning's Trainer: its steps are those of a run. See Note [Lightning is alone] in __init__.py.

# Note [Lanes before the update]
# Lightning gives an optimizer a closure that computes the batch. The run must have committed the step before an
# optimizer updates anything, and clipping must see the committed gradient: so the closure is called first, and the
# optimizer has none. In the closure `training_step` goes through the lanes, with their backward passes, and the loop of
# Lightning is told that it has no backward pass to make.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lockstep.data import GlobalBatch, ShardedLoader, num_samples
from lockstep.errors import BadArgument, Misuse
from lockstep.integrations.lane_attributes import LaneAttributes
from lockstep.integrations.lightning.logged import LaneLog
from lockstep.integrations.lightning.progress import FitProgress
from lockstep.integrations.lightning.refused import check_module, check_optimizers, check_trainer
from lockstep.integrations.passes import NextPass
from lockstep.run import active
from lockstep.run.run import Run

SUFFIX = ".lockstep"
"""What follows the name of a Lightning checkpoint in the name of the run's checkpoint beside it."""


class HeldBatch:
    """A global batch that Lightning hands on unopened: it moves and converts what it can look into."""

    def __init__(self, batch: GlobalBatch) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(self.batch)


class LaneLoader:
    """The training data: a run's loader, one pass after the other."""

    def __init__(self, loader: ShardedLoader, progress: FitProgress) -> None:
        self.loader, self._progress = loader, progress
        self.dataset, self.sampler, self.batch_sampler = loader.dataset, loader.sampler, loader.batch_sampler
        self.batch_size, self.num_workers = loader.batch_size, loader.num_workers

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[HeldBatch]:
        self._progress.take_up()
        for batch in NextPass(self.loader):
            yield HeldBatch(batch)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the run knows where its loader is."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class HookedBackward:
    """What `run.backward` calls instead of the loss's own backward: Lightning's, with its hooks and its precision."""

    def __init__(self, backward: Callable[[torch.Tensor], Any]) -> None:
        self._backward = backward

    def scale(self, loss: torch.Tensor) -> "HookedBackward":
        self._loss = loss
        return self

    def backward(self) -> None:
        self._backward(self._loss)


def active_run() -> Run:
    """The run of `lockstep.start()`."""
    run = active.current()
    if not isinstance(run, Run):
        raise Misuse('strategy="lockstep" needs a run: call lockstep.start() before the Trainer or the Fabric is made')
    return run


class ShownPlace:
    """What Lightning asks a strategy about its place: the present first worker is the one that logs and saves."""

    run: Run

    @property
    def is_global_zero(self) -> bool:
        return self.run.is_first

    @property
    def global_rank(self) -> int:
        return 0 if self.run.is_first else 1

    @global_rank.setter
    def global_rank(self, _: int) -> None:
        """Lightning's own classes set it."""

    local_rank = global_rank

    def show_place(self) -> None:
        """Lightning's loggers and notes look here."""
        from lightning_utilities.core.rank_zero import rank_zero_only

        rank_zero_only.rank = self.global_rank


class TrainerLanes(ShownPlace):
    """Stands before `SingleDeviceStrategy` of the installed Lightning."""

    precision_plugin: Any
    lightning_module: Any
    optimizers: list[Any]
    lr_scheduler_configs: list[Any]

    def __init__(self) -> None:
        self.run = active_run()
        super().__init__(device=self.run.device)  # type: ignore[call-arg]
        self._progress: FitProgress | None = None
        self._log: LaneLog | None = None
        self._loader: LaneLoader | None = None
        self._attributes: LaneAttributes | None = None
        self.show_place()

    # -- before the training --------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        trainer, module = self._trainer, self.lightning_module
        check_trainer(trainer)
        if trainer.training:
            check_module(module, lightning_class(module))
        super().setup_environment()  # type: ignore[misc]

    def barrier(self, name: str | None = None) -> None:
        """Where the Trainer has restored all that it restores, the model becomes the run's."""
        if name == "run-stage" and self._trainer.training:
            self._replicate()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Before the training: the first worker's text (where checkpoints go). Later all workers have the same."""
        members = self.run.guard
        if self._progress is not None or not isinstance(obj, str) or not members.is_member:
            return obj
        return members.exchange(obj.encode(), "a name from the first worker")[0].decode()

    def _replicate(self) -> None:
        if self._progress is not None:
            raise Misuse("a run has one fit: start another script, or another run, for a second one")
        trainer, run = self._trainer, self.run
        check_optimizers(self.optimizers, self.lr_scheduler_configs)
        self._progress, self._log = FitProgress(trainer, run.guard.note), LaneLog(run, self.lightning_module)
        of_lightning = vars(lightning_class(self.lightning_module)())
        self._attributes = LaneAttributes(self.lightning_module, "training_step", _LOG, of_lightning)
        trainer.fit_loop._skip_backward = self.lightning_module.automatic_optimization
        for callback in trainer.checkpoint_callbacks:
            callback._enable_version_counter = False  # what a worker sees on the disk depends on its moment
        run.replicate(self.lightning_module, *self.optimizers, **self._tracked(), lightning=self._progress)
        if trainer.ckpt_path is not None:
            self._progress.is_by_checkpoint = run.guard.is_member
            run.resume(_beside(trainer.ckpt_path))
        _ = run.step  # a worker that joins is admitted here
        self.show_place()

    def _tracked(self) -> dict[str, Any]:
        """What else has a state: schedulers, the scaler of gradients, and the models that callbacks keep."""
        tracked = {f"scheduler{n}": config.scheduler for n, config in enumerate(self.lr_scheduler_configs)}
        if getattr(self.precision_plugin, "scaler", None) is not None:
            tracked["scaler"] = self.precision_plugin.scaler
        for number, callback in enumerate(self._trainer.callbacks):
            kept = {name: value for name, value in vars(callback).items() if isinstance(value, nn.Module)}
            tracked |= {f"callback{number}{name}": value for name, value in kept.items()}
        return tracked

    def process_dataloader(self, dataloader: Any) -> Any:
        """Training data is read by lanes; each worker evaluates on all of the other data."""
        if not self._trainer.training:
            return dataloader
        if self._progress is None:
            raise Misuse(
                "this version of Lightning did not announce the beginning of a fit: use a version that is tested"
            )
        if self._loader is not None:
            raise BadArgument("several training loaders cannot be used under lockstep: make one data set of them")
        self._loader = LaneLoader(self.run.shard(dataloader), self._progress)
        return self._loader

    # -- the training ---------------------------------------------------------------------------------------

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        if isinstance(batch, HeldBatch):
            return batch
        return super().batch_to_device(batch, device, dataloader_idx)  # type: ignore[misc]

    def lanes(self, batch: GlobalBatch) -> Iterator[Any]:
        """The lanes of a training batch, for manual optimization; `self.log` works inside, and comes together after."""
        assert self._log is not None
        assert self._progress is not None
        self._progress.lanes_begin()
        before = _num_metric_updates(self.lightning_module)
        for lane in self.run.lanes(batch):
            with self._in_lanes(), self._log.lane(num_samples(lane)):
                yield self.batch_to_device(self.precision_plugin.convert_input(lane))
            if _num_metric_updates(self.lightning_module) != before:
                raise Misuse(
                    "a metric of torchmetrics is updated in training_step: it sees the lanes of one worker only. Log "
                    "the value for the batch, by torchmetrics.functional; in validation metrics are as they were"
                )
        self.show_place()
        self._log.give()
        self._progress.log_on()

    @contextmanager
    def _in_lanes(self) -> Iterator[None]:
        """See Note [Kept in a lane] in lane_attributes.py."""
        assert self._attributes is not None
        before = self._attributes.now()
        yield
        self._attributes.check(before)

    def training_step(self, batch: HeldBatch, *args: Any) -> Any:
        """All lanes of the batch, forward and backward; gives the loss of the batch."""
        if not self.lightning_module.automatic_optimization:
            return super().training_step(batch.batch, *args)  # type: ignore[misc]
        self._zero_grad()
        for lane in self.lanes(batch.batch):
            output = super().training_step(lane, *args)  # type: ignore[misc]
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if loss is None:
                raise Misuse("training_step has returned no loss, and lockstep cannot leave out a lane of a batch")
            weight = output.get("lane_weight") if isinstance(output, Mapping) else None
            self.run.backward(loss, weight=weight, scaler=HookedBackward(self._backward))
        return torch.tensor(self.run.loss, device=self.run.device)

    def _backward(self, loss: torch.Tensor) -> None:
        super().backward(loss / self._trainer.accumulate_grad_batches, self.optimizers[0])  # type: ignore[misc]

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """By `manual_backward`."""
        hooked = HookedBackward(lambda loss: super(TrainerLanes, self).backward(loss, optimizer, *args, **kwargs))  # type: ignore[misc]
        self.run.backward(closure_loss, scaler=hooked)
        return closure_loss.detach()

    def _zero_grad(self) -> None:
        loop = self._trainer.fit_loop.epoch_loop
        if loop.batch_idx % self._trainer.accumulate_grad_batches == 0:
            loop.automatic_optimization._on_before_zero_grad(self.optimizers[0])
            loop.automatic_optimization._optimizer_zero_grad(loop.batch_idx, self.optimizers[0])

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """See Note [Lanes before the update]."""
        result = closure()
        if getattr(self.precision_plugin, "scaler", None) is not None:
            super().optimizer_step(optimizer, lambda: result, model, **kwargs)  # type: ignore[misc]
        else:
            self.precision_plugin._after_closure(model or self.lightning_module, optimizer)
            optimizer.step(**kwargs)
        return result

    def on_train_end(self) -> None:
        self.run.total(0)  # all are here: what the first worker has saved can be read

    # -- saving ---------------------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """By the present first worker, with a checkpoint of the run beside Lightning's."""
        if self._progress is not None and self._trainer.training and self.run.is_first:
            os.makedirs(os.path.dirname(os.path.abspath(filepath)), exist_ok=True)
            self.run.save(f"{filepath}{SUFFIX}")
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)  # type: ignore[misc]

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)  # type: ignore[misc]
        if self.run.is_first:
            shutil.rmtree(f"{filepath}{SUFFIX}", ignore_errors=True)

    @property
    def _trainer(self) -> Any:
        return self.lightning_module.trainer


_LOG = "Use self.log, whose values come together over all lanes, or on_train_batch_end"


def lightning_class(module: Any) -> Any:
    """Lightning's own class, of which the user's is one."""
    return next(kind for kind in type(module).__mro__ if kind.__name__ == "LightningModule")


def _num_metric_updates(module: nn.Module) -> int:
    """How often metrics of torchmetrics that the module holds were updated."""
    return sum(getattr(part, "_update_count", 0) for part in module.modules())


def _beside(path: str) -> str:
    found = f"{os.path.realpath(path)}{SUFFIX}"
    if not os.path.exists(found):
        raise BadArgument(
            f"{path} has no checkpoint of lockstep beside it ({os.path.basename(found)}), so its data and random "
            "numbers cannot go on exactly: resume from a checkpoint that was saved under lockstep"
        )
    return found
