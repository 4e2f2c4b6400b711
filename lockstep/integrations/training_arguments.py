"""Which of Hugging Face's `TrainingArguments` work under lockstep. Each is listed.

One that is not is new: it is taken as long as it is not asked for (its default, nothing, or `False` where the default
says nothing), and else refused.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from lockstep.errors import BadArgument

_LEAVE = "lockstep does what it is for; leave it out"
_SHARDED = 'use lockstep.start(strategy="sharded:optimizer")'

REFUSED: Mapping[str, str] = {
    "deepspeed": "lockstep does what it would do",
    "fsdp": _SHARDED,
    "fsdp_config": _SHARDED,
    "parallelism_config": "lockstep is data parallel",
    "accelerator_config": _LEAVE,
    "auto_find_batch_size": "a batch that changes by itself is another training: choose one, and more lanes",
    "train_sampling_strategy": "the order of samples is that of the run's seed",
    "include_num_input_tokens_seen": "a worker sees the tokens of its own lanes only",
    "torch_empty_cache_steps": "lanes are computed one after the other: more lanes need less memory",
    "eval_use_gather_object": _LEAVE,
    "enable_jit_checkpoint": "on SIGTERM lockstep saves the run itself; `lockstep run --resume auto` goes on",
    "save_on_each_node": "the present first worker saves",
    "ignore_data_skip": "a resumed run goes on after the batches that were trained on",
    "restore_callback_states_from_checkpoint": "give the callback to run.replicate(..., name=callback)",
    "dataloader_in_order": "batches come in order, the same on every worker",
    "ddp_find_unused_parameters": _LEAVE,
    "ddp_bucket_cap_mb": "say lockstep.start(bucket_bytes=...)",
    "ddp_broadcast_buffers": _LEAVE,
    "ddp_static_graph": _LEAVE,
    "ddp_backend": "say lockstep.start(wire=...)",
    "ddp_timeout": "say lockstep.start(timeout_s=...)",
    "local_rank": _LEAVE,
}
"""Those that cannot be what they are elsewhere, and what to do."""

WORK = {
    "output_dir", "per_device_train_batch_size", "num_train_epochs", "max_steps", "learning_rate",
    "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim", "optim_args", "weight_decay", "adam_beta1",
    "adam_beta2", "adam_epsilon", "optim_target_modules", "gradient_accumulation_steps",
    "average_tokens_across_devices", "max_grad_norm", "label_smoothing_factor", "bf16", "fp16", "bf16_full_eval",
    "fp16_full_eval", "tf32", "gradient_checkpointing", "gradient_checkpointing_kwargs",
    "activation_checkpointing", "activation_checkpointing_kwargs", "torch_compile", "torch_compile_backend",
    "torch_compile_mode", "use_liger_kernel", "liger_kernel_config", "use_cache",
    "neftune_noise_alpha", "logging_strategy", "logging_steps", "logging_first_step", "log_on_each_node",
    "logging_nan_inf_filter", "log_level", "log_level_replica", "disable_tqdm", "report_to", "run_name", "project",
    "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "eval_strategy", "eval_steps", "eval_delay",
    "per_device_eval_batch_size", "prediction_loss_only", "eval_on_start", "eval_do_concat_batches",
    "eval_accumulation_steps", "include_for_metrics", "batch_eval_metrics", "save_only_model", "save_strategy",
    "save_steps", "save_total_limit", "push_to_hub", "hub_token", "hub_private_repo", "hub_model_id",
    "hub_strategy", "hub_always_push", "hub_revision", "load_best_model_at_end", "metric_for_best_model",
    "greater_is_better", "full_determinism", "seed", "data_seed", "use_cpu", "dataloader_drop_last",
    "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers",
    "dataloader_prefetch_factor", "dataloader_multiprocessing_context", "remove_unused_columns", "label_names",
    "length_column_name", "debug", "skip_memory_metrics", "do_train", "do_eval", "do_predict",
    "resume_from_checkpoint",
}  # fmt: skip

_IN_BACKWARD = ("lomo", "layerwise")
"""What the names of optimizers contain that make their updates in the backward pass."""


def check_arguments(args: Any) -> None:
    """Raises BadArgument for an argument that cannot work, or is not known here, by its name."""
    for field in fields(args):
        value = getattr(args, field.name)
        value = getattr(value, "value", value)  # of an enumeration
        is_off = value is False and field.default is None and field.name not in REFUSED  # a new one, filled in
        if field.name not in WORK and not is_off and not _is_unused(value, field.default):
            advice = REFUSED.get(field.name, "this version of lockstep does not know it")
            raise BadArgument(f"TrainingArguments({field.name}={value!r}) cannot be used under lockstep: {advice}")
    optimizer = str(getattr(args.optim, "value", args.optim))
    if any(word in optimizer for word in _IN_BACKWARD):
        raise BadArgument(
            f"TrainingArguments(optim={optimizer!r}) cannot be used under lockstep: it updates in the backward pass, "
            "before the gradient of the batch is known"
        )


def _is_unused(value: Any, default: Any) -> bool:
    if is_dataclass(value):
        return value == type(value)()  # type: ignore[misc, no-any-return]
    return value in (default, None, "", [], {}) or (isinstance(value, dict) and not any(value.values()))
