"""An optimizer's update, recorded once and replayed after.

# Note [What an update is recorded for]
# A recorded update reads and writes the same memory with the same numbers each time: parameters, gradients and state
# where they stood, and the rates of the param groups as they were. Numbers that are tensors (lr=torch.tensor(0.1)) are
# read anew by each replay. An update that differs in anything else from those recorded runs as it is; when it comes
# again, it is recorded too. The hooks of the run are called each time. What an optimizer keeps on the host, such as a
# number of updates, a graph cannot change: with such a state nothing is recorded.
"""

import types
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from lockstep.capture.graph import CannotCapture, capture, num_broken

WARM_UP = 2
"""How many updates run as they are before one is recorded: the first one makes the optimizer's state."""
MOST_GRAPHS = 8
MOST_SEEN = 64
"""How many updates may differ from all before until they are taken to differ each time."""


class CapturedUpdate:
    """`optimizer.step()` is replayed from now on where it can be; `close` gives the optimizer's own back."""

    def __init__(
        self, optimizer: Optimizer, device: torch.device, say: Callable[[str], None], own_hooks: Callable[[], set[int]]
    ) -> None:
        """`own_hooks` are the numbers of the hooks that the run itself has on the optimizer."""
        self._optimizer, self._device, self._say, self._own_hooks = optimizer, device, say, own_hooks
        self._own = optimizer.step
        self._calls = 0
        self._seen: set[Hashable] = set()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._broken_before = num_broken()
        self._refused = self._unfit()
        self._explained: set[str] = set()
        optimizer.step = types.MethodType(lambda _, *args, **kwargs: self._step(*args, **kwargs), optimizer)  # type: ignore[method-assign]

    def close(self) -> None:
        self._optimizer.step = self._own  # type: ignore[method-assign]
        self._graphs = {}

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        self._calls += 1
        obstacle = self._refused or self._obstacle(args, kwargs)
        if obstacle is not None:
            self._explain(obstacle)
            return self._own(*args, **kwargs)
        if self._calls <= WARM_UP:
            return self._own()
        if num_broken() != self._broken_before:
            self._graphs, self._broken_before = {}, num_broken()
        key = self._state()
        if key not in self._graphs and not self._record(key):
            return self._own()
        return self._replay(self._graphs[key])

    def _record(self, key: Hashable) -> bool:
        """Whether the update is recorded now. What was never seen before may never be seen again."""
        if key not in self._seen:
            self._seen.add(key)
            if len(self._seen) == MOST_SEEN:
                self._refused = (
                    "its rates or gradients change from step to step: make the rate a tensor on the GPU "
                    "(lr=torch.tensor(0.1, device=run.device))"
                )
            return False
        self._refused = kept_on_host(self._optimizer.state.values(), self._device)
        if self._refused is not None:
            return False
        if len(self._graphs) == MOST_GRAPHS:
            self._graphs.pop(next(iter(self._graphs)))
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self._device)
        hooks = self._pre_hooks()
        try:
            self._graphs[key], _ = capture(self._own, pool, self._device, stream)
        except CannotCapture as obstacle:
            self._refused = obstacle.reason
        finally:
            self._optimizer._optimizer_step_pre_hooks = hooks
        return key in self._graphs

    def _pre_hooks(self) -> dict[int, Any]:
        """Takes the hooks before an update away while it is recorded: they run before every replay."""
        hooks = self._optimizer._optimizer_step_pre_hooks
        self._optimizer._optimizer_step_pre_hooks = OrderedDict()
        return hooks

    def _replay(self, graph: torch.cuda.CUDAGraph) -> None:
        for hook in list(self._optimizer._optimizer_step_pre_hooks.values()):
            hook(self._optimizer, (self._optimizer,), {})  # those after it are part of the graph
        graph.replay()

    def _state(self) -> Hashable:
        """See Note [What an update is recorded for]."""
        found: list[Hashable] = []
        for group in self._optimizer.param_groups:
            for name, value in group.items():
                if name != "params":
                    found.append((name, _rate(value)))
            for parameter in group["params"]:
                found += [parameter.data_ptr(), None if parameter.grad is None else parameter.grad.data_ptr()]
                found += [
                    v.data_ptr() for v in self._optimizer.state[parameter].values() if isinstance(v, torch.Tensor)
                ]
        return tuple(found)

    def _obstacle(self, args: Any, kwargs: Any) -> str | None:
        if args or kwargs:
            return "it is called with a closure"
        if getattr(self._optimizer, "grad_scale", None) is not None:
            return "a GradScaler hands its scale to it"
        hooks = {*self._optimizer._optimizer_step_pre_hooks, *self._optimizer._optimizer_step_post_hooks}
        if not hooks <= self._own_hooks():
            return "it has hooks of its own"
        gradients = (parameter.grad for group in self._optimizer.param_groups for parameter in group["params"])
        if any(type(gradient) is not torch.Tensor for gradient in gradients if gradient is not None):
            return "its gradients stand in the memory of the host"
        return None

    def _unfit(self) -> str | None:
        for group in self._optimizer.param_groups:
            if "capturable" in group and not group["capturable"]:
                return "it was not made with capturable=True"
            if not all(parameter.is_cuda for parameter in group["params"]):
                return "it has parameters on the CPU"
        return None

    def _explain(self, obstacle: str) -> None:
        if obstacle not in self._explained:
            self._explained.add(obstacle)
            self._say(f"run.captured: {type(self._optimizer).__name__}.step runs as it is, because {obstacle}")


def kept_on_host(states: Iterable[Mapping[str, Any]], device: torch.device) -> str | None:
    """Why an optimizer with such a state cannot be recorded, if it cannot. Pure."""
    for state in states:
        for name, value in state.items():
            on_device = isinstance(value, torch.Tensor) and value.device.type == device.type
            if not on_device and value is not None:
                return f"it keeps {name!r} on the host, which a graph cannot change"
    return None


def _rate(value: Any) -> Hashable:
    """A tensor on a GPU by its place, since it is read at each replay; anything else by its value."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr() if value.is_cuda else float(value)
    return tuple(map(_rate, value)) if isinstance(value, list | tuple) else value
