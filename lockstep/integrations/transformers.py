"""Hugging Face's Trainer on lockstep: the same arguments, the same bits on any number of workers.

# Note [The Trainer is alone]
# On every worker the Trainer believes that it is one process on one device: it makes no process group, and its
# arguments keep the meaning that they have there. `per_device_train_batch_size` times `gradient_accumulation_steps` is
# the global batch, on any number of workers; lanes are what is computed at a time. The present first worker logs and
# saves.

# Note [Methods that are replaced]
# PRIVATE names the methods of Trainer that are not meant for others and that are replaced here, or called; a test
# says which of them has moved when transformers changes. `skip_first_batches` is replaced for the time of an epoch: the
# run's loader knows itself which batches were trained on.
"""

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lockstep.data import GlobalBatch, ShardedLoader
from lockstep.errors import BadArgument, BadEnvironment, Misuse
from lockstep.integrations.callbacks import CallbackAttributes
from lockstep.integrations.evaluation import Division
from lockstep.integrations.lane_attributes import LaneAttributes
from lockstep.integrations.passes import NextPass
from lockstep.integrations.training_arguments import check_arguments
from lockstep.run.run import Run

try:
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_callback import ExportableState
    from transformers.trainer_pt_utils import find_batch_size
except ImportError as error:
    raise BadEnvironment(
        f'transformers cannot be used ({error}): pip install "torch-lockstep[transformers]"'
    ) from error

CHECKPOINT = "lockstep"
"""What a checkpoint of the run is called in the folder of a checkpoint of the Trainer."""

PRIVATE = (
    "_get_num_items_in_batch", "_init_training_state", "_prepare_for_training", "_run_epoch", "_finalize_training",
    "_save_checkpoint", "_load_rng_state", "_track_num_input_tokens", "_get_collator_with_removed_columns",
    "_get_train_sampler",
)  # fmt: skip


class TrainerProgress:
    """How far the Trainer has come, as something that a run tracks: a worker that joins, or resumes, has it too.

    `state` are fields of the Trainer's state, `loss` what it has added up since it last logged. Its inner loop sets
    `loss` anew when it begins, so what was loaded is put there in the first step after that. `callbacks` are what the
    callbacks keep: see Note [Attributes of callbacks] in callbacks.py. A callback may begin anew in `on_train_begin`
    and `on_epoch_begin`, so what was loaded is put there after these too.
    """

    def __init__(self, trainer: "LockstepTrainer") -> None:
        self._trainer = trainer
        self._loaded: dict[str, Any] | None = None
        self._has_joined = not trainer.run.guard.is_member
        self._stateful = [one for one in trainer.callback_handler.callbacks if _keeps_itself(one)]
        known = (trainer, trainer.model, trainer.args, trainer.run)
        callbacks = trainer.callback_handler.callbacks
        self._attributes = CallbackAttributes(callbacks, known, _keeps_itself, trainer.run.guard.note)
        self._loaded_callbacks: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        state, trainer = self._trainer.state, self._trainer
        kept = {name: getattr(state, name) for name in _STATE}
        kept["log_history"] = [_without_times(entry) for entry in state.log_history]
        loss = self._loaded or {name: float(getattr(trainer, name, 0.0)) for name in _LOSS}
        return {"state": json.dumps(kept), "loss": loss, "callbacks": self._loaded_callbacks or self._of_callbacks()}

    def _of_callbacks(self) -> dict[str, Any]:
        return {"stateful": [_kept_state(one) for one in self._stateful], "attributes": self._attributes.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in json.loads(state["state"]).items():
            setattr(self._trainer.state, name, value)
        self._loaded = dict(state["loss"])
        self._loaded_callbacks = dict(state["callbacks"])
        self.put_callbacks(says=True)

    def put_callbacks(self, *, says: bool = False) -> None:
        """The callbacks have what was loaded, until the first step."""
        if self._loaded_callbacks is not None:
            for callback, state in zip(self._stateful, self._loaded_callbacks["stateful"], strict=False):
                _put_state(callback, state)
            self._attributes.put(self._loaded_callbacks["attributes"], says=says)

    def take_up(self) -> None:
        """The inner loop has begun. The step that a worker joins in was begun by the others' callbacks too."""
        if self._loaded is not None:
            trainer, loaded = self._trainer, self._loaded
            if self._has_joined:
                self.put_callbacks()
            self._loaded_callbacks = None
            trainer._tr_loss.fill_(loaded["_tr_loss"])
            trainer._total_loss_scalar = loaded["_total_loss_scalar"]
            trainer._globalstep_last_logged = int(loaded["_globalstep_last_logged"])
            trainer._initial_global_step = int(loaded["_initial_global_step"])
            self._loaded = None


class AfterTrainBegin(TrainerCallback):  # type: ignore[misc]
    """Stands after the user's callbacks."""

    def __init__(self, progress: TrainerProgress) -> None:
        self._progress = progress

    def on_train_begin(self, *args: Any, **options: Any) -> None:
        self._progress.put_callbacks()


def _keeps_itself(callback: Any) -> bool:
    return isinstance(callback, ExportableState) or callable(getattr(callback, "load_state_dict", None))


def _kept_state(callback: Any) -> Any:
    return callback.state()["attributes"] if isinstance(callback, ExportableState) else callback.state_dict()


def _put_state(callback: Any, state: Mapping[str, Any]) -> None:
    if not isinstance(callback, ExportableState):
        callback.load_state_dict(state)
        return
    for name, value in state.items():
        setattr(callback, name, value)


_STATE = ("global_step", "epoch", "best_metric", "best_global_step", "best_model_checkpoint")
_LOSS = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step")


_KEEP = (
    "Keep a lane's value in self.run.carried, and add up those of self.run.carried_by_lane after the step, in "
    "on_step_end of a callback"
)


def _without_times(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What was logged, but for what differs between workers."""
    return {name: value for name, value in entry.items() if not name.endswith(("_runtime", "_per_second"))}


class LockstepTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose steps are those of `run`. See Note [The Trainer is alone].

    Make it after `lockstep.start()`: `LockstepTrainer(run, model=model, args=args, train_dataset=...)`.
    """

    def __init__(self, run: Run, *args: Any, **options: Any) -> None:
        if not isinstance(run, Run):
            raise BadArgument(f"LockstepTrainer takes the run of lockstep.start() first, not {type(run).__name__}")
        self.run = run
        super().__init__(*args, **options)
        _check(self.args)
        self._accumulated = self.args.gradient_accumulation_steps
        self._train_batch_size = self.args.train_batch_size * self._accumulated
        self.args.gradient_accumulation_steps = 1
        self._loader: ShardedLoader | None = None
        self._prepared: tuple[nn.Module, Any] | None = None
        self._division = Division(run)
        self._in_lanes = LaneAttributes(self, "compute_loss", _KEEP)

    # -- data -----------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> ShardedLoader:
        """The training data, read by lanes."""
        if self.train_dataset is None:
            raise ValueError("Trainer: training requires a train_dataset.")
        dataset, args = self.train_dataset, self.args
        collator = self._get_collator_with_removed_columns(self.data_collator, description="Training")
        sampler = self._own_sampler()
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=self._train_batch_size,
            shuffle=None if isinstance(dataset, IterableDataset) or sampler is not None else True,
            sampler=sampler,
            collate_fn=collator,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and torch.cuda.is_available(),
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            drop_last=args.dataloader_drop_last,
        )
        self._loader = self.run.shard(loader)
        return self._loader

    def _own_sampler(self) -> Any:
        """That of a subclass; the Trainer's own would draw from a seed of its own."""
        is_own = type(self)._get_train_sampler is not Trainer._get_train_sampler
        return self._get_train_sampler() if is_own else None

    def num_examples(self, dataloader: Any) -> int:
        if isinstance(dataloader, ShardedLoader):
            return len(dataloader.dataset)
        return int(super().num_examples(dataloader))

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> torch.Tensor | None:
        """By what the loss of a lane, or of a batch that is evaluated, is divided: a global batch has its lanes."""
        if not batch_samples or isinstance(batch_samples[0], GlobalBatch):
            return None
        counted: torch.Tensor | None = super()._get_num_items_in_batch(batch_samples, device)
        return counted

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """A worker sees the tokens of its own lanes only."""

    def floating_point_ops(self, inputs: Any) -> int:
        """Those of this worker's lanes are not those of the step: none are counted."""
        return 0

    # -- training -------------------------------------------------------------------------------------------

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, resume_from_checkpoint: Any,
        trial: Any,
    ) -> tuple[int, int]:  # fmt: skip
        """Model, optimizer and scheduler are the run's; a worker that joins has its state when this returns."""
        if self._loader is None:
            raise Misuse(
                "get_train_dataloader has made a loader that the run does not know: give the Trainer a train_dataset "
                "and a data_collator; a sampler comes from _get_train_sampler"
            )
        super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, None, trial)
        self._prepared = super()._prepare_for_training(max_steps, self._loader, None)
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)  # Accelerate's wrapper has the real one
        self._progress = TrainerProgress(self)
        self.add_callback(AfterTrainBegin(self._progress))
        tracked = {"scheduler": self.lr_scheduler, "trainer": self._progress}
        if self.accelerator.scaler is not None:
            tracked["scaler"] = self.accelerator.scaler
        self.run.replicate(self.model, optimizer, **tracked)
        if resume_from_checkpoint is not None:
            self.run.resume(_checked_checkpoint(resume_from_checkpoint))
        self._began_at = step = self.run.step  # a worker that joins is admitted here
        self._show_place()
        if step and isinstance(self.train_dataset, IterableDataset):
            self.run.guard.note(
                "the data have no length, so the epochs that the Trainer logs from here on count max_steps as one "
                "epoch, and differ from those of a training that was not resumed; losses and weights do not"
            )
        return divmod(step, num_update_steps_per_epoch)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        assert self._prepared is not None
        return self._prepared

    def _run_epoch(self, **options: Any) -> None:
        """The loader goes on by itself after the batches that were trained on."""
        if options["steps_trained_in_current_epoch"]:
            if options["resume_from_checkpoint"] is None:
                options["resume_from_checkpoint"] = CHECKPOINT  # a worker that has joined counts on like a resumed one
            self._progress.put_callbacks()
        options["train_dataloader"] = NextPass(options["train_dataloader"])
        with patch("transformers.trainer.skip_first_batches", lambda loader, num_batches: loader):
            super()._run_epoch(**options)

    def training_step(self, model: nn.Module, inputs: GlobalBatch, num_items_in_batch: Any = None) -> torch.Tensor:
        """The gradient of a global batch; gives its mean loss."""
        self._progress.take_up()
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        for lane in self.run.lanes(inputs):
            before = self._in_lanes.now()
            prepared = self._prepare_inputs(lane)
            tokens = self._get_num_items_in_batch([prepared], self.args.device)
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, prepared, num_items_in_batch=tokens if tokens else None)
            self._in_lanes.check(before)
            weight = None if tokens is None else float(tokens)
            self.run.backward(loss, weight=weight, scaler=self.accelerator.scaler)
        self._show_place()
        return torch.tensor(self.run.loss, device=self.args.device)

    def _show_place(self) -> None:
        """Callbacks print and log on the present first worker."""
        self.state.is_world_process_zero = self.state.is_local_process_zero = self.run.is_first

    def is_world_process_zero(self) -> bool:
        return self.run.is_first

    def is_local_process_zero(self) -> bool:
        return self.run.is_first

    # -- evaluation -----------------------------------------------------------------------------------------

    def evaluation_loop(
        self, dataloader: Any, description: str, prediction_loss_only: bool | None = None, ignore_keys: Any = None,
        metric_key_prefix: str = "eval",
    ) -> Any:  # fmt: skip
        """Collective, over the workers: see Note [Divided evaluation] in evaluation.py. Prediction is one too.

        Batches that are only known when they are read, or whose metrics are computed as they come, are all computed by
        every worker.
        """
        options = (prediction_loss_only, ignore_keys, metric_key_prefix)
        has_no_length = isinstance(dataloader.dataset, IterableDataset) or dataloader.batch_sampler is None
        if has_no_length or self.args.batch_eval_metrics:
            return super().evaluation_loop(dataloader, description, *options)
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        self.model.eval()
        outcomes = self._division.over_workers(dataloader, lambda batch: self._outcome(batch, loss_only, ignore_keys))
        with (
            patch.object(self, "prediction_step", lambda model, inputs, *_, **__: inputs.outcome["step"]),
            patch.object(self, "preprocess_logits_for_metrics", None),
        ):
            evaluated = EvaluatedBatches(list(map(_OfSize, outcomes)), dataloader)
            return super().evaluation_loop(evaluated, description, *options)

    def _outcome(self, inputs: Any, loss_only: bool, ignore_keys: Any) -> dict[str, Any]:
        loss, logits, labels = self.prediction_step(self.model, inputs, loss_only, ignore_keys=ignore_keys)
        if logits is not None and self.preprocess_logits_for_metrics is not None:
            logits = self.preprocess_logits_for_metrics(logits, labels)
        name = getattr(self.model, "main_input_name", "input_ids")
        shown = inputs[name] if "inputs" in self.args.include_for_metrics else None
        return {"step": (loss, logits, labels), "name": name, "size": find_batch_size(inputs), "inputs": shown}

    # -- saving ---------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """By the present first worker, with a checkpoint of the run beside the Trainer's files."""
        folder = os.path.join(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
        if self.run.is_first:
            os.makedirs(folder, exist_ok=True)
            self.run.save(os.path.join(folder, CHECKPOINT))
            super()._save_checkpoint(model, trial)
        if self.state.best_global_step and self.state.best_global_step > self._began_at:
            best = os.path.join(self._get_output_dir(trial=trial), f"checkpoint-{self.state.best_global_step}")
            self.state.best_model_checkpoint = best

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self.run.is_first:
            super().save_model(output_dir, _internal_call)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """The run has its own."""

    def _finalize_training(self, *args: Any, **options: Any) -> Any:
        self.run.total(0)  # all are here: what the first worker has saved can be read
        return super()._finalize_training(*args, **options)

    def hyperparameter_search(self, *args: Any, **options: Any) -> Any:
        raise Misuse("hyperparameter_search makes several trainings of one run: start one script for each trial")


class _OfSize(dict[str, torch.Tensor]):
    """A batch of which only its size, and what metrics ask for, is left."""

    def __init__(self, outcome: Mapping[str, Any]) -> None:
        shown = outcome["inputs"]
        super().__init__({outcome["name"]: torch.empty(outcome["size"], 0) if shown is None else shown})
        self.outcome = outcome


class EvaluatedBatches:
    """Stands for the loader of batches that were computed; Accelerate asks that loader where it is."""

    def __init__(self, batches: list[_OfSize], loader: Any) -> None:
        self._batches, self._loader, self.dataset = batches, loader, loader.dataset

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[_OfSize]:
        is_followed = hasattr(self._loader, "end_of_dataloader")
        if is_followed:
            self._loader.begin()
        for number, batch in enumerate(self._batches, 1):
            self._loader.end_of_dataloader = number == len(self)
            yield batch
        if is_followed:
            self._loader.end()


def _check(args: TrainingArguments) -> None:
    """Refuses arguments that cannot be what they are elsewhere, by their names."""
    if args.world_size > 1:
        raise Misuse(
            f"TrainingArguments has made a process group of {args.world_size} workers, which ends when one of them is "
            "lost. Start the script by `lockstep run`, or unset RANK, WORLD_SIZE and LOCAL_RANK after lockstep.start()."
        )
    check_arguments(args)
    if args.n_gpu > 1:
        raise BadArgument("the Trainer sees several GPUs and would use DataParallel: start one worker for each GPU")


def _checked_checkpoint(path: str) -> str:
    found = os.path.join(path, CHECKPOINT)
    if not os.path.exists(found):
        raise BadArgument(
            f"{path} has no checkpoint of lockstep in it, so its data and random numbers cannot go on exactly: resume "
            "from a checkpoint that LockstepTrainer has saved"
        )
    return found
