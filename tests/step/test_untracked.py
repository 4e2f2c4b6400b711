"""What a script may forget: to replicate a model, to give its optimizer, to have the same data everywhere."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from workers import on_workers

import lockstep
from lockstep.errors import BadArgument, Disagreement, Misuse

X = torch.linspace(-1, 1, 24).reshape(12, 2)


def test_an_optimizer_that_nobody_gave_is_refused_inside_of_lanes_all_the_same() -> None:
    with lockstep.start(lanes=2) as run:
        model = nn.Linear(2, 1)
        run.replicate(model)
        optimizer = SGD(model.parameters(), 0.1)
        before = model.weight.detach().clone()
        with pytest.raises(Misuse, match=r"optimizer\.step\(\) inside of run\.lanes"):
            for x in run.lanes(X):
                model(x).sum().backward()
                optimizer.step()
        assert torch.equal(model.weight, before)
        run.failed = True


def test_an_optimizer_of_a_model_that_nobody_replicated_is_told_once(capfd: pytest.CaptureFixture[str]) -> None:
    with lockstep.start(lanes=2) as run:
        model, forgotten = nn.Linear(2, 1), nn.Linear(2, 1)
        optimizers = [SGD(model.parameters(), 0.1), SGD(forgotten.parameters(), 0.1)]
        run.replicate(model, optimizers[0])
        for _ in range(3):
            for x in run.lanes(X):
                (model(x) + forgotten(x)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    assert capfd.readouterr().err.count("SGD.step() changes parameters of no model that run.replicate was given") == 1
    SGD(forgotten.parameters(), 0.1).step()
    assert capfd.readouterr().err == ""  # the run is over


def test_an_optimizer_of_something_else_may_step_inside_of_lanes() -> None:
    with lockstep.start(lanes=2) as run:
        model = nn.Linear(2, 1)
        run.replicate(model)
        model.requires_grad_(False)
        for x in run.lanes(X, train=False):
            image = x.clone().requires_grad_()
            model(image).sum().backward()
            SGD([image], 0.1).step()


def disagreement(what: str) -> str:
    """What a step says whose data or buffers are others on worker 1."""
    with lockstep.start(lanes=2) as run:
        model = nn.Linear(2, 1)
        run.replicate(model)
        is_odd = run.rank == 1
        if is_odd and what == "buffers":
            model.register_buffer("cache", torch.zeros(2))
        try:
            for x in run.lanes(X + 1 if is_odd and what == "data" else X):
                model(x).sum().backward()
        except Disagreement as error:
            run.failed = True
            return str(error)
        return ""


def test_a_batch_with_another_content_on_another_worker_is_refused_in_the_first_step() -> None:
    assert on_workers(3, disagreement, "nothing") == ["", "", ""]
    assert all("the batch" in result for result in on_workers(3, disagreement, "data"))


def test_models_with_different_numbers_of_buffers_are_told_so() -> None:
    assert all("number of buffers in the models" in result for result in on_workers(3, disagreement, "buffers"))


def test_two_global_batches_at_once_are_refused_with_what_to_write() -> None:
    with lockstep.start(lanes=2) as run:
        run.replicate(nn.Linear(2, 1))
        first, second = (next(iter(run.shard(DataLoader(TensorDataset(X), 4)))) for _ in range(2))
        with pytest.raises(Misuse, match=r"one loop over run\.lanes for each of them"):
            run.lanes((first, second))


def test_no_sync_inside_of_no_sync_ends_with_the_outer_one() -> None:
    with lockstep.start(lanes=2) as run:
        model = nn.Linear(2, 1)
        run.replicate(model)
        with run.no_sync():
            with run.no_sync():
                model(X).sum().backward()
            model(X).sum().backward()
        with pytest.raises(Misuse, match="outside of the lanes"):
            model(X).sum().backward()
        run.failed = True


def test_a_lane_that_counts_nothing_does_not_spoil_the_loss() -> None:
    with lockstep.start(lanes=2) as run:
        model = nn.Linear(2, 1)
        run.replicate(model)
        for number, x in enumerate(run.lanes(X)):
            loss = model(x).mean() if number == 0 else model(x[:0]).sum() / 0
            run.backward(torch.nan_to_num(loss) if number == 0 else loss, weight=6 if number == 0 else 0)
            if number == 0:
                wanted = float(loss.detach())
        assert run.loss == wanted
        run.failed = True


@pytest.mark.parametrize("number", [np.int64(3), np.float32(0.5), np.array(2)], ids=str)
def test_numbers_of_numpy_are_totalled(number: Any) -> None:
    with lockstep.start() as run:
        assert run.total(number) == number.item()


def test_a_tensor_that_no_checkpoint_can_hold_is_named(tmp_path: Path) -> None:
    with lockstep.start() as run:
        model = nn.Linear(2, 1)
        model.register_buffer("phase", torch.zeros(2, dtype=torch.complex128))
        run.replicate(model)
        with pytest.raises(BadArgument, match="phase is of dtype complex128, which a checkpoint cannot hold"):
            run.save(tmp_path / "saved")
        assert not (tmp_path / "saved").exists()


class Wrapper(torch.optim.Optimizer):
    """As Lookahead and SAM do: it has the groups of another optimizer, and calls its step."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step(closure)


class Holder:
    """Something of the script's own that saves an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])


@pytest.mark.parametrize("given", ["nothing", "its scheduler", "it", "its inner one", "its wrapper", "what saves it"])
def test_an_optimizer_that_nobody_gave_or_wraps_is_named_once(given: str, capfd: pytest.CaptureFixture[str]) -> None:
    with lockstep.start(lanes=2) as run:
        model = nn.Linear(2, 1)
        stepped = inner = SGD(model.parameters(), 0.1, momentum=0.9)
        if "inner" in given or "wrapper" in given:
            stepped = Wrapper(inner)
        optimizers = {"it": (inner,), "its inner one": (inner,), "its wrapper": (stepped,)}.get(given, ())
        tracked: dict[str, Any] = {
            "its scheduler": {"scheduler": StepLR(inner, 1)},
            "what saves it": {"holder": Holder(inner)},
        }.get(given, {})
        run.replicate(model, *optimizers, **tracked)
        for _ in range(2):
            for x in run.lanes(X):
                model(x).sum().backward()
            stepped.step()
    said = capfd.readouterr().err.count("SGD trains a replicated model, and run.replicate was not given it")
    assert said == (1 if given in ("nothing", "its scheduler") else 0)


def resumed_without(path: Path, momentum: float, *, restores: bool = False) -> None:
    """Two runs of two steps of an optimizer that nobody gave; the second goes on from the first."""
    with lockstep.start(lanes=2) as run:
        model = nn.Linear(2, 1)
        optimizer = SGD(model.parameters(), 0.1, momentum=momentum)
        run.replicate(model)
        if path.exists():
            run.resume(path)
            if restores:
                optimizer.load_state_dict(torch.load(path.with_suffix(".pt")))
        end = run.step + 2
        while run.step < end:
            for x in run.lanes(X):
                model(x).sum().backward()
            optimizer.step()
        run.save(path)
        torch.save(optimizer.state_dict(), path.with_suffix(".pt"))


def test_what_saves_an_optimizer_is_asked_for_its_state_once_and_not_at_every_update() -> None:
    class Wrapper:
        def __init__(self, optimizer: SGD) -> None:
            self.optimizer, self.asked = optimizer, 0

        def state_dict(self) -> dict[str, Any]:
            self.asked += 1
            return self.optimizer.state_dict()

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.optimizer.load_state_dict(state)

    with lockstep.start(lanes=2) as run:
        model = nn.Linear(2, 1)
        wrapper = Wrapper(SGD(model.parameters(), 0.1))
        run.replicate(model, wrapper=wrapper)
        asked = []
        for _ in range(4):
            for x in run.lanes(X):
                model(x).sum().backward()
            wrapper.optimizer.step()
            asked.append(wrapper.asked)
    assert asked == [asked[0]] * 4


def test_a_resume_without_the_state_of_a_forgotten_optimizer_is_refused(tmp_path: Path) -> None:
    resumed_without(tmp_path / "saved", momentum=0.9)
    with pytest.raises(Misuse, match=r"goes on from step 3, and SGD trains .* It had a state, which is lost"):
        resumed_without(tmp_path / "saved", momentum=0.9)


def test_one_that_has_no_state_or_is_restored_by_the_script_goes_on(tmp_path: Path) -> None:
    for _ in range(2):
        resumed_without(tmp_path / "plain", momentum=0.0)
        resumed_without(tmp_path / "by hand", momentum=0.9, restores=True)
