"""When an update is recorded, replayed, or run as it is. The graph is played: it updates again, without hooks."""

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.capture import update as update_module
from lockstep.capture.graph import CannotCapture
from lockstep.capture.update import MOST_SEEN, CapturedUpdate, kept_on_host

CPU = torch.device("cpu")


class PlayedGraph:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters = optimizer.param_groups[0]["params"]
        self._gradients = [parameter.grad for parameter in self._parameters]
        self.replays = 0

    def replay(self) -> None:
        """It reads gradients where they were when it was recorded, whatever stands in `p.grad`."""
        self.replays += 1
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        hooks = self._optimizer._optimizer_step_pre_hooks
        self._optimizer._optimizer_step_pre_hooks = OrderedDict()
        type(self._optimizer).step(self._optimizer)
        self._optimizer._optimizer_step_pre_hooks = hooks


class Stage:
    """A model, its optimizer with a captured update, and all that happened."""

    def __init__(self, lr: Any = 0.1, own_hooks: Callable[[], set[int]] = set) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(4, 3)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)
        self.said: list[str] = []
        self.graphs: list[PlayedGraph] = []
        self.captured = CapturedUpdate(self.optimizer, CPU, self.said.append, own_hooks)
        self.gradients = [torch.randn_like(p) for p in self.model.parameters()]

    def step(self, *args: Any) -> Any:
        for parameter, gradient in zip(self.model.parameters(), self.gradients, strict=True):
            parameter.grad = gradient
        return self.optimizer.step(*args)

    @property
    def replays(self) -> int:
        return sum(graph.replays for graph in self.graphs)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Stage]:
    monkeypatch.setattr(CapturedUpdate, "_unfit", lambda self: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())

    def make(*args: Any, **options: Any) -> Stage:
        made = Stage(*args, **options)

        def captured(work: Callable[[], Any], *_: Any) -> tuple[PlayedGraph, None]:
            made.graphs.append(PlayedGraph(made.optimizer))
            return made.graphs[-1], None

        monkeypatch.setattr(update_module, "capture", captured)
        return made

    return make


def trained(steps: int, lr: Any = 0.1) -> list[torch.Tensor]:
    """What torch alone makes of the same gradients."""
    plain = Stage(lr)
    plain.captured.close()
    for _ in range(steps):
        plain.step()
    return list(plain.model.parameters())


def test_an_update_that_comes_again_is_recorded_once_and_replayed(stage: Callable[..., Stage]) -> None:
    made = stage()
    for _ in range(8):
        made.step()
    assert len(made.graphs) == 1
    assert made.replays == 5  # after two to warm up, and one that was seen for the first time
    assert all(torch.equal(a, b) for a, b in zip(made.model.parameters(), trained(8), strict=True))


def test_a_rate_that_changes_is_never_replayed_with_the_old_value(stage: Callable[..., Stage]) -> None:
    made = stage()
    for number in range(10):
        made.optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
        made.step()
    assert made.replays == 0


def test_a_rate_that_never_settles_is_told_once_with_what_to_write(stage: Callable[..., Stage]) -> None:
    made = stage()
    for number in range(MOST_SEEN + 10):
        made.optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
        made.step()
    assert len(made.said) == 1
    assert "Adam.step runs as it is, because its rates or gradients change from step to step" in made.said[0]
    assert "lr=torch.tensor(" in made.said[0]


def test_a_rate_in_a_tensor_on_the_cpu_counts_by_its_value(stage: Callable[..., Stage]) -> None:
    made = stage(lr=torch.tensor(0.1))
    made.optimizer.param_groups[0]["foreach"] = False
    for number in range(10):
        made.optimizer.param_groups[0]["lr"].fill_(0.1 / (1 + number))
        made.step()
    assert made.replays == 0


def test_state_that_was_loaded_is_not_updated_by_a_graph_of_the_old(stage: Callable[..., Stage]) -> None:
    made = stage()
    for _ in range(5):
        made.step()
    replays = made.replays
    made.optimizer.load_state_dict(copy.deepcopy(made.optimizer.state_dict()))
    made.step()
    assert made.replays == replays
    made.step()
    assert made.replays == replays + 1


def test_gradients_elsewhere_are_another_update(stage: Callable[..., Stage]) -> None:
    made = stage()
    for number in range(12):
        if number % 2:
            made.gradients = [gradient.clone() for gradient in made.gradients]
            for old in made.graphs:
                for gradient in old._gradients:
                    gradient.fill_(float("nan"))  # nobody may read them any more
        made.step()
    assert all(torch.equal(a, b) for a, b in zip(made.model.parameters(), trained(12), strict=True))


def test_the_runs_own_hook_is_called_before_every_update(stage: Callable[..., Stage]) -> None:
    own: set[int] = set()
    made = stage(own_hooks=lambda: own)
    called = []
    own.add(made.optimizer.register_step_pre_hook(lambda *_: called.append(True)).id)
    for _ in range(8):
        made.step()
    assert made.replays == 5
    assert len(called) == 8


def test_a_hook_of_the_user_keeps_the_update_as_it_is(stage: Callable[..., Stage]) -> None:
    made = stage()
    called = []
    made.optimizer.register_step_post_hook(lambda *_: called.append(True))
    for _ in range(6):
        made.step()
    assert (made.replays, len(called)) == (0, 6)
    assert "because it has hooks of its own" in made.said[0]


def test_a_closure_keeps_the_update_as_it_is(stage: Callable[..., Stage]) -> None:
    made = stage()
    assert [made.step(lambda: 7.0) for _ in range(6)] == [7.0] * 6
    assert made.replays == 0
    assert "because it is called with a closure" in made.said[0]


def test_what_cannot_be_recorded_is_told_and_runs_on(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = stage()

    def refused(*_: Any) -> None:
        raise CannotCapture("it is odd")

    monkeypatch.setattr(update_module, "capture", refused)
    for _ in range(8):
        made.step()
    assert "Adam.step runs as it is, because it is odd" in made.said[0]
    assert all(torch.equal(a, b) for a, b in zip(made.model.parameters(), trained(8), strict=True))


def test_a_scheduler_counts_captured_updates_and_close_gives_the_own_step_back(stage: Callable[..., Stage]) -> None:
    made = stage()
    scheduler = torch.optim.lr_scheduler.StepLR(made.optimizer, 100)
    for _ in range(6):
        made.step()
        scheduler.step()
    assert made.replays == 3
    made.captured.close()
    assert made.optimizer.step.__func__ is torch.optim.Adam.step  # type: ignore[attr-defined]


def test_an_optimizer_that_is_not_capturable_or_not_on_a_gpu_is_refused_at_once() -> None:
    plain = Stage()
    plain.step()
    assert "because it was not made with capturable=True" in plain.said[0]
    elsewhere = torch.optim.SGD(plain.model.parameters(), lr=0.1)
    assert CapturedUpdate(elsewhere, CPU, print, set)._refused == "it has parameters on the CPU"


def test_an_optimizer_that_counts_on_the_host_is_not_recorded(stage: Callable[..., Stage]) -> None:
    made = stage()
    made.step()
    for state in made.optimizer.state.values():
        state["seen"] = 3
    for _ in range(8):
        made.step()
    assert made.graphs == []
    assert "Adam.step runs as it is, because it keeps 'seen' on the host" in made.said[0]


def test_what_is_on_the_host_is_told_from_what_is_on_the_gpu() -> None:
    there, here = torch.empty(2, device="meta"), torch.zeros(())
    assert kept_on_host([{"momentum_buffer": there, "nothing": None}], there.device) is None
    assert "'step'" in str(kept_on_host([{"exp_avg": there, "step": here}], there.device))
    assert "'step'" in str(kept_on_host([{"step": 4}], there.device))


def test_recordings_from_before_another_one_broke_are_made_again(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = stage()
    for _ in range(6):
        made.step()
    assert len(made.graphs) == 1
    monkeypatch.setattr(update_module, "num_broken", lambda: 1000)
    for _ in range(2):
        made.step()
    assert len(made.graphs) == 2
    assert all(torch.equal(a, b) for a, b in zip(made.model.parameters(), trained(8), strict=True))
