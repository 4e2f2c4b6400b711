"""The sizes of a model, found without its memory: on torch's meta device, where tensors have shapes alone."""

import runpy
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.errors import BadArgument
from lockstep.gradients.layout import Spec
from lockstep.optim import LAMB, LARS
from lockstep.programs.memory.account import BaseMemory, ModelSizes
from lockstep.programs.models import WORKLOADS, Workload, gpt50m

MODELS: dict[str, Callable[[], Workload]] = {**WORKLOADS, "gpt50m": gpt50m}

MakeOptimizer = Callable[[list[Tensor]], Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": lambda tensors: torch.optim.AdamW(tensors),
    "adam": lambda tensors: torch.optim.Adam(tensors),
    "sgd": lambda tensors: torch.optim.SGD(tensors, 0.1),
    "momentum": lambda tensors: torch.optim.SGD(tensors, 0.1, momentum=0.9),
    "rmsprop": lambda tensors: torch.optim.RMSprop(tensors),
    "adagrad": lambda tensors: torch.optim.Adagrad(tensors),
    "lars": lambda tensors: LARS(tensors, 0.1),
    "lamb": lambda tensors: LAMB(tensors, 0.1),
}

_ROLLUP = Path("/proc/self/smaps_rollup")


def base_memory() -> BaseMemory:
    """Of this process, which has loaded what a worker loads: torch, lockstep, and what an optimizer needs."""
    import lockstep.run.start  # noqa: F401 - what a worker loads

    OPTIMIZERS["adamw"]([torch.zeros(1)])
    lines = dict(line.split(":", 1) for line in _ROLLUP.read_text(encoding="utf-8").splitlines()[1:])
    resident, own = (1024 * int(lines[name].split()[0]) for name in ("Rss", "Anonymous"))
    return BaseMemory(own, resident - own)


def sizes_of(model: str, optimizer: str) -> ModelSizes:
    """`model` names a reference model, or is FILE.py:NAME, a function that makes a module."""
    make = OPTIMIZERS.get(optimizer)
    if make is None:
        raise BadArgument(f"--optimizer is one of {', '.join(OPTIMIZERS)}, not {optimizer!r:.60}")
    workload = MODELS[model]() if model in MODELS else None
    module = _on_meta(workload.make_model if workload else _function(model), model)
    specs = tuple(Spec.of(name, parameter) for name, parameter in module.named_parameters())
    widths = {dtype: _state_width(make, dtype) for dtype in {spec.dtype for spec in specs}}
    per_element = tuple(widths[spec.dtype] if spec.trainable else 0 for spec in specs)
    if workload is None:
        return ModelSizes(specs, per_element)
    return ModelSizes(specs, per_element, workload.batch_size, _saved_bytes(workload, module) / workload.batch_size)


def _on_meta(make: Callable[[], nn.Module], name: str) -> nn.Module:
    with torch.device("meta"):
        module = make()
    if not isinstance(module, nn.Module):
        raise BadArgument(f"--model {name} gave a {type(module).__name__}: it must make a torch.nn.Module")
    return module


def _function(model: str) -> Callable[[], nn.Module]:
    path, _, name = model.rpartition(":")
    if not path or not Path(path).is_file():
        raise BadArgument(
            f"--model is one of {', '.join(MODELS)}, or FILE.py:NAME, a function that makes a module, not {model!r:.60}"
        )
    found = runpy.run_path(path, run_name="lockstep_explain").get(name)
    if not callable(found):
        raise BadArgument(f"there is no function {name} in {path}")
    made: Callable[[], nn.Module] = found
    return made


def _state_width(make: MakeOptimizer, dtype: torch.dtype) -> int:
    """How many bytes an optimizer keeps for an element: found by an update of a small tensor."""
    tensor = torch.zeros(2, 3, dtype=dtype)
    tensor.grad = torch.zeros_like(tensor)
    optimizer = make([tensor])
    optimizer.step()
    values = [value for value in optimizer.state[tensor].values() if isinstance(value, Tensor)]
    return sum(value.dtype.itemsize for value in values if value.shape == tensor.shape)


def _saved_bytes(workload: Workload, module: nn.Module) -> int:
    """What autograd keeps of a forward pass over the whole batch, without parameters."""
    parameters = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
    saved: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        saved.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    inputs, targets = workload.make_batch(torch.Generator())
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = workload.loss(module, (inputs.to("meta"), targets.to("meta")))
    assert loss.grad_fn is not None
    return sum(tensor.untyped_storage().nbytes() for key, tensor in saved.items() if key not in parameters)
