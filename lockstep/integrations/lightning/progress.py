"""How far Lightning's Trainer has come, as something that a run tracks: a worker that joins, or resumes, has it too.

# Note [Joining a fit]
# A worker that joins in the middle of an epoch makes the Trainer's calls from the beginning of that epoch, and is put
# at its batch when it asks for its first one: the Trainer sets its counters to zero when an epoch begins. It does not
# go the way of a checkpoint of Lightning's, whose restart depends on the hook in which it was saved.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lockstep.integrations.callbacks import CallbackAttributes

_METRICS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_FLAGS = ("_restarting", "_resuming_from_checkpoint", "_loaded_from_state_dict")


class FitProgress:
    """The counters of a Trainer's fit, the state of its callbacks, and what was logged in the epoch under way.

    `note` says what begins anew.
    """

    def __init__(self, trainer: Any, note: Callable[[str], None]) -> None:
        self._trainer = trainer
        known = (trainer, trainer.lightning_module)
        self._attributes = CallbackAttributes(trainer.callbacks, known, _keeps_itself, note)
        self._to_put: Sequence[Mapping[str, Any]] | None = None
        self._loaded: dict[str, Any] | None = None
        self._logged: dict[str, Any] = {}
        self.is_by_checkpoint = False
        """Whether the Trainer itself has restored all this from a checkpoint of its own."""

    def state_dict(self) -> dict[str, Any]:
        if self._loaded is not None:
            return self._loaded
        trainer, epoch_loop = self._trainer, self._trainer.fit_loop.epoch_loop
        return {
            "counters": {name: _completed(counter.state_dict()) for name, counter in self._counters().items()},
            "stepped": epoch_loop._batches_that_stepped,
            "callbacks": {callback.state_key: callback.state_dict() for callback in trainer.callbacks},
            "attributes": self._attributes.state() if self._to_put is None else list(self._to_put),
            "metrics": {name: dict(getattr(trainer._logger_connector, name)) for name in _METRICS},
            "logged": self._logged_in_epoch(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        trainer, self._loaded = self._trainer, dict(state)
        self._logged = dict(state["logged"])
        self._to_put = state["attributes"]
        self._attributes.put(self._to_put, says=True)
        if self.is_by_checkpoint:
            return
        self._count_on()
        for callback in trainer.callbacks:
            callback.load_state_dict(state["callbacks"].get(callback.state_key, {}))
        for name, metrics in state["metrics"].items():
            getattr(trainer._logger_connector, name).update(metrics)
        for loop in _loops(trainer.fit_loop):
            for flag in _FLAGS:
                setattr(loop, flag, False)
        trainer.num_sanity_val_steps = 0

    def take_up(self) -> None:
        """The first batch is asked for. See Note [Joining a fit]."""
        if self._loaded is not None and not self.is_by_checkpoint:
            counters = self._count_on()
            started = self._trainer.fit_loop.epoch_progress
            for count in (started.total, started.current):
                count.ready = count.started = count.completed + 1
            self._trainer.fit_loop._data_fetcher.fetched = counters["batch_progress"].current.ready
        if self._to_put is not None and self._trainer.fit_loop.epoch_loop.batch_progress.current.ready > 0:
            self._attributes.put(self._to_put)  # hooks at the beginning of a fit or an epoch may have begun anew
        self._loaded = None

    def lanes_begin(self) -> None:
        """The batch that a worker joins in was begun by the others' callbacks too."""
        if self._to_put is not None and not self.is_by_checkpoint:
            self._attributes.put(self._to_put)
        self._to_put = None

    def log_on(self) -> None:
        """After what lanes have logged was logged: what was logged in this epoch before this worker came counts too."""
        fit = self._trainer.fit_loop
        results = fit.epoch_loop._results
        if self._logged.pop("epoch", None) not in (None, fit.epoch_progress.current.processed):
            self._logged = {}
        for key in [key for key in self._logged if key in results]:
            metric, before = results[key], self._logged.pop(key)
            if metric.meta.is_mean_reduction:
                metric.cumulated_batch_size = metric.cumulated_batch_size + before["size"]
            if metric.meta.is_max_reduction or metric.meta.is_min_reduction:
                metric.value = metric.meta.reduce_fx(metric.value, before["value"])
            else:
                metric.value = metric.value + before["value"]

    def _counters(self) -> dict[str, Any]:
        fit = self._trainer.fit_loop
        loop = fit.epoch_loop
        return {
            "epoch_progress": fit.epoch_progress,
            "batch_progress": loop.batch_progress,
            "scheduler_progress": loop.scheduler_progress,
            "optim_progress": loop.automatic_optimization.optim_progress.optimizer.step,
            "optim_step_progress": loop.manual_optimization.optim_step_progress,
            "validation": loop.val_loop.batch_progress,
        }

    def _count_on(self) -> dict[str, Any]:
        assert self._loaded is not None
        counters = self._counters()
        for name, counter in counters.items():
            counter.load_state_dict(self._loaded["counters"][name])
        self._trainer.fit_loop.epoch_loop._batches_that_stepped = self._loaded["stepped"]
        return counters

    def _logged_in_epoch(self) -> dict[str, Any]:
        """The sums of what was logged since the epoch began; those of the epoch before stand there until then."""
        epoch, loop = self._trainer.fit_loop.epoch_progress.current, self._trainer.fit_loop.epoch_loop
        if epoch.started == epoch.processed or loop.batch_progress.current.processed == 0:
            return {}
        counted = {key: metric for key, metric in loop._results.items() if metric.is_tensor and metric.meta.on_epoch}
        sizes = {key: getattr(metric, "cumulated_batch_size", torch.tensor(0)) for key, metric in counted.items()}
        logged = {key: {"value": metric.value, "size": sizes[key]} for key, metric in counted.items()}
        return {"epoch": epoch.processed, **self._logged, **logged}


def _keeps_itself(callback: Any) -> bool:
    """Whether its class has a state_dict of its own, by which Lightning keeps it."""
    base = next(kind for kind in type(callback).__mro__ if kind.__name__ == "Callback")
    return type(callback).state_dict is not base.state_dict  # type: ignore[attr-defined]


def _completed(state: dict[str, Any]) -> dict[str, Any]:
    """The counters of a batch that is under way are those from before it."""
    if "completed" in state:
        return dict.fromkeys(state, state["completed"])
    return {name: _completed(value) if isinstance(value, dict) else value for name, value in state.items()}


def _loops(loop: Any) -> list[Any]:
    """A loop of Lightning's, and those inside of it."""
    inner = [part for part in vars(loop).values() if hasattr(part, "_restarting")]
    return [loop, *(found for part in inner for found in _loops(part))]
