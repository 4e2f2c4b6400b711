"""Optimizers, schedulers and whatever else is tracked come back bit for bit, or are refused by name."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

import lockstep
from lockstep.errors import BadCheckpoint
from lockstep.run.run import Run
from lockstep.state.run_state import load_models
from lockstep.state.snapshot import pack
from lockstep.verify.digest import digest, digest_of


class MasterWeights(torch.optim.Optimizer):
    """SGD with momentum on float32 copies of parameters that are less exact, kept in all kinds of containers."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["master"] = p.float()
                    state["moments"] = [torch.zeros_like(state["master"]), (torch.zeros(2, dtype=torch.float64),)]
                    state["inner"] = {"count": torch.tensor(0), "scale": 0.1}
                state["moments"][0].mul_(0.9).add_(p.grad.float(), alpha=1 / 3)
                state["moments"][1][0].add_(1 / 3)
                state["inner"]["count"] += 1
                state["master"].sub_(state["moments"][0], alpha=group["lr"])
                p.copy_(state["master"])


def train(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for number in range(3):

        def closure(number: int = number) -> torch.Tensor:
            optimizer.zero_grad()
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(number)).to(next(model.parameters()))
            loss = model(x).square().mean()
            with run.no_sync():
                loss.backward()
            return loss

        closure()
        optimizer.step(closure if isinstance(optimizer, torch.optim.LBFGS) else None)


def module(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "master weights": MasterWeights,
    "adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
    "adam with a rate that is a tensor": lambda p: torch.optim.Adam(p, torch.tensor(0.01)),
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "asgd": lambda p: torch.optim.ASGD(p, 0.1),
    "nadam": lambda p: torch.optim.NAdam(p, 0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=3, line_search_fn="strong_wolfe"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_holds_after_a_resume_what_it_held_before(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    def began(run: Run) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = module(dtype)
        optimizer = OPTIMIZERS[name](model.parameters())
        run.replicate(model, optimizer)
        return model, optimizer

    with lockstep.start() as run:
        model, optimizer = began(run)
        train(run, model, optimizer)
        run.save(tmp_path / "c")
        saved = digest_of(optimizer.state_dict())
        train(run, model, optimizer)
        wanted = run.digest(), digest_of(optimizer.state_dict())
    with lockstep.start() as run:
        model, optimizer = began(run)
        run.resume(tmp_path / "c")
        assert digest_of(optimizer.state_dict()) == saved
        train(run, model, optimizer)
        assert (run.digest(), digest_of(optimizer.state_dict())) == wanted


class Average:
    """An exponential moving average of one's own, in float64, that keeps the very tensors it is given."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.shadow = {name: p.detach().double().clone() for name, p in model.named_parameters()}

    def step(self) -> None:
        for name, p in self.model.named_parameters():
            self.shadow[name].mul_(0.9).add_(p.detach(), alpha=0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "decay": 0.9}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


class Rounding(Average):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = {name: tensor.float() for name, tensor in state["shadow"].items()}


class Forgetting(Average):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, tensor in state["shadow"].items():
            if "bias" not in name:
                self.shadow[name].copy_(tensor)


class Losing(Average):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = {name: tensor for name, tensor in state["shadow"].items() if "bias" not in name}


class Raising(Average):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("shadows")


class Scaler(torch.amp.GradScaler):
    def step(self) -> None:  # type: ignore[override]
        self.scale(torch.ones(1))
        self._growth_tracker += 1


class Averaged(torch.optim.swa_utils.AveragedModel):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._of = [model]

    def step(self) -> None:
        self.update_parameters(self._of[0])


class Growing:
    """A rule that is an object: LambdaLR saves what is in it."""

    def __init__(self) -> None:
        self.rate = 1.0

    def __call__(self, step: int) -> float:
        self.rate *= 1.1
        return self.rate


TRACKED: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Any]] = {
    "lambda": lambda m, o: schedules.LambdaLR(o, Growing()),
    "lambda by a function": lambda m, o: schedules.LambdaLR(o, lambda step: 0.9**step),
    "one cycle": lambda m, o: schedules.OneCycleLR(o, 0.1, total_steps=40),
    "warm restarts": lambda m, o: schedules.CosineAnnealingWarmRestarts(o, 2, 2),
    "plateau": lambda m, o: schedules.ReduceLROnPlateau(o, patience=1),
    "sequential": lambda m, o: schedules.SequentialLR(o, [schedules.LinearLR(o), schedules.StepLR(o, 2)], [4]),
    "chained": lambda m, o: schedules.ChainedScheduler([schedules.LinearLR(o), schedules.ExponentialLR(o, 0.9)]),
    "grad scaler": lambda m, o: Scaler("cpu", growth_interval=3),
    "grad scaler, not enabled": lambda m, o: torch.amp.GradScaler("cpu", enabled=False),
    "averaged model": lambda m, o: Averaged(m),
    "own average": lambda m, o: Average(m),
    "model": lambda m, o: deepcopy(m),
}


def steps_of(thing: Any, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        optimizer.step()
        if isinstance(thing, schedules.ReduceLROnPlateau):
            thing.step(1.0)
        elif hasattr(thing, "step") and getattr(thing, "_enabled", True):
            thing.step()


@pytest.mark.parametrize("name", TRACKED)
def test_what_is_tracked_holds_after_a_resume_what_it_held_before(name: str, tmp_path: Path) -> None:
    def began(run: Run) -> tuple[Any, torch.optim.Optimizer]:
        model = module(torch.float32)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        thing = TRACKED[name](model, optimizer)
        run.replicate(model, optimizer, thing=thing)
        return thing, optimizer

    with lockstep.start() as run:
        thing, optimizer = began(run)
        steps_of(thing, optimizer)
        run.save(tmp_path / "c")
        saved = digest_of(thing.state_dict())
        steps_of(thing, optimizer)
        wanted = digest_of(thing.state_dict())
    with lockstep.start() as run:
        thing, optimizer = began(run)
        run.resume(tmp_path / "c")
        assert digest_of(thing.state_dict()) == saved
        steps_of(thing, optimizer)
        assert digest_of(thing.state_dict()) == wanted


LOSSY = [
    (Rounding, r"tracked/thing \(Rounding\) .*: tracked/thing/shadow/0.weight is float32 \[5, 6\] .* was float64"),
    (Forgetting, r"tracked/thing \(Forgetting\) .*: tracked/thing/shadow/0.bias is float64 .* and was float64 "),
    (Losing, r"tracked/thing \(Losing\) .*: tracked/thing/shadow/0.bias is gone"),
    (Raising, r"tracked/thing \(Raising\) does not take the state that was saved: KeyError: 'shadows'"),
]


@pytest.mark.parametrize(("kind", "told"), LOSSY, ids=[kind.__name__ for kind, _ in LOSSY])
def test_what_does_not_take_back_its_state_is_refused_by_name(kind: Any, told: str, tmp_path: Path) -> None:
    with lockstep.start() as run:
        model = module(torch.float32)
        thing = kind(model)
        run.replicate(model, torch.optim.SGD(model.parameters(), 0.1), thing=thing)
        for shadow in thing.shadow.values():
            shadow += 1 / 3
        run.save(tmp_path / "c")
    with lockstep.start() as run:
        run.replicate(model, torch.optim.SGD(model.parameters(), 0.1), thing=kind(model))
        with pytest.raises(BadCheckpoint, match=told):
            run.resume(tmp_path / "c")


class LossyAdam(torch.optim.Adam):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for entries in self.state.values():
            entries["exp_avg"] = entries["exp_avg"].half().float()


def test_an_optimizer_that_rounds_what_it_loads_is_refused_by_name(tmp_path: Path) -> None:
    with lockstep.start() as run:
        model = module(torch.float32)
        optimizer = LossyAdam(model.parameters())
        run.replicate(model, optimizer)
        train(run, model, optimizer)
        run.save(tmp_path / "c")
        with pytest.raises(BadCheckpoint, match=r"optimizer \(LossyAdam\) .*: optimizer/state/0/exp_avg is float32"):
            run.resume(tmp_path / "c")


def test_a_setting_that_was_not_saved_may_be_there(tmp_path: Path) -> None:
    with lockstep.start() as run:
        model = module(torch.float32)
        optimizer = torch.optim.Adam(model.parameters())
        run.replicate(model, optimizer)
        train(run, model, optimizer)
        snapshot = run._state.capture()
        state = optimizer.state_dict()
        del state["param_groups"][0]["decoupled_weight_decay"]  # as an older torch has it
        snapshot.state["optimizers"]["optimizer"] = pack(state, "optimizer", {})
        load_models(run._models, snapshot)
        assert optimizer.param_groups[0]["decoupled_weight_decay"] is False


def test_the_run_shares_no_memory_with_the_snapshot_that_it_took(tmp_path: Path) -> None:
    with lockstep.start() as run:
        model = module(torch.bfloat16)
        optimizer, average = MasterWeights(model.parameters()), Average(model)
        run.replicate(model, optimizer, average=average)
        train(run, model, optimizer)
        taken = run._state.capture()
        tensors = {name: tensor.clone() for name, tensor in taken.tensors.items()}
        before = digest(tensors)
        load_models(run._models, type(taken)(tensors, taken.state))
        train(run, model, optimizer)
        average.step()
        assert digest(tensors) == before


ON_GPU: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "master weights": MasterWeights,
    "adamw fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "adam with a rate that is a tensor": lambda p: torch.optim.Adam(p, torch.tensor(0.01), capturable=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
}


@pytest.mark.cuda
@pytest.mark.parametrize("name", ON_GPU)
def test_state_on_a_gpu_comes_back_there(name: str, tmp_path: Path) -> None:
    def placed(optimizer: torch.optim.Optimizer, average: Average) -> set[str]:
        """What is on the GPU. Whatever else is in an optimizer's state follows its parameter there, as torch has it."""
        tensors: dict[str, torch.Tensor] = {}
        pack([optimizer.state_dict(), average.state_dict()], "", tensors)
        return {key for key, tensor in tensors.items() if tensor.is_cuda}

    def began(run: Run) -> tuple[nn.Module, torch.optim.Optimizer, Average]:
        model = module(torch.bfloat16).to(run.device)
        optimizer, average = ON_GPU[name](model.parameters()), Average(model)
        run.replicate(model, optimizer, average=average)
        return model, optimizer, average

    with lockstep.start(device="cuda") as run:
        model, optimizer, average = began(run)
        train(run, model, optimizer)
        average.step()
        run.save(tmp_path / "c")
        saved, on_gpu = digest_of([optimizer.state_dict(), average.state_dict()]), placed(optimizer, average)
        train(run, model, optimizer)
        wanted = run.digest()
    with lockstep.start(device="cuda") as run:
        model, optimizer, average = began(run)
        run.resume(tmp_path / "c")
        assert digest_of([optimizer.state_dict(), average.state_dict()]) == saved
        assert on_gpu <= placed(optimizer, average)
        train(run, model, optimizer)
        assert run.digest() == wanted
