"""What a lane may not change, and what a run that has ended still does: said by name, on any number of workers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from workers import on_workers

import lockstep
from lockstep.errors import BadArgument, LockstepError, Misuse
from lockstep.gradients import buffers

LANES = 6


class Rescaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.99)
        return super().forward(x)


class Replaced(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data * 0.99
        return super().forward(x)


class Renormed(nn.Module):
    def __init__(self, *_: int) -> None:
        super().__init__()
        self.rows = nn.Embedding(8, 4, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.rows(torch.arange(len(x)))


class Late(nn.Linear):
    """Makes its buffer when it first computes."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(4))
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return super().forward(x - self.mean)


class NoneAtFirst(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = x.mean(0) if self.mean is None else 0.9 * self.mean + 0.1 * x.mean(0)
        return super().forward(x - self.mean)


class TakenAway(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = None
        return super().forward(x)


class ActNorm(nn.Module):
    """Sets itself up from the first data it sees, past autograd and the version counter."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.linear, self.loc = nn.Linear(*sizes), nn.Parameter(torch.zeros(sizes[0]))
        self.is_set_up = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_set_up:
            self.loc.data.copy_(-x.mean(0))
            self.is_set_up = True
        return self.linear(x + self.loc)


class LargeBank(nn.Module):
    """A large buffer that is written past autograd and the version counter."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(*sizes)
        self.register_buffer("bank", torch.zeros(buffers.MOST_COMPARED // 4 + 1, sizes[0]))

    def forward(self, x: Tensor) -> Tensor:
        self.bank.data.mul_(0.9).add_(0.1 * x.mean(0))
        return self.linear(x - self.bank[-1])


def trained(make: Callable[..., nn.Module], lanes: int = LANES, warm: bool = False) -> str:
    torch.manual_seed(1)
    with lockstep.start(lanes=lanes, seed=0) as run:
        model = make(4, 2)
        x = torch.randn(13, 4, generator=torch.Generator().manual_seed(5))
        if warm:
            model(x)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run.replicate(model, optimizer)
        for _ in range(3):
            for part in run.lanes(x):
                run.backward(model(part).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return run.digest()


def refused(make: Callable[..., nn.Module], lanes: int = LANES) -> str:
    try:
        return trained(make, lanes)
    except LockstepError as error:
        return str(error)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (Rescaled, "parameter weight was changed inside a lane of step 0"),
        (Renormed, "parameter rows.weight was changed inside a lane of step 0"),
        (Late, "buffer mean was first made inside run.lanes"),
        (NoneAtFirst, "buffer mean was first made inside run.lanes"),
        (TakenAway, "buffer mean was taken away"),
        (Replaced, "parameter weight was changed inside a lane of step 0"),
        (ActNorm, "parameter loc was changed inside a lane of step 0"),
    ],
)
def test_what_lanes_would_not_agree_on_is_refused_by_name(make: Callable[..., nn.Module], told: str) -> None:
    assert told in refused(make)
    assert all(told in said for said in on_workers(2, refused, make))


@pytest.mark.parametrize("make", [ActNorm, Rescaled, Late])
def test_one_lane_alone_is_refused_as_with_others_beside_it(make: Callable[..., nn.Module]) -> None:
    told = refused(make, lanes=1)
    assert "inside" in told
    assert told in on_workers(2, refused, make, 1)


def test_a_layer_that_was_set_up_before_is_one_like_others() -> None:
    alone = trained(ActNorm, warm=True)
    for num_workers in (2, 3, 4):
        assert on_workers(num_workers, trained, ActNorm, LANES, True) == [alone] * num_workers


@pytest.mark.parametrize("lanes", [1, LANES])
def test_a_large_buffer_that_is_written_without_a_sign_is_averaged_like_others(lanes: int) -> None:
    alone = trained(LargeBank, lanes)
    for num_workers in (2, 3, 4):
        assert on_workers(num_workers, trained, LargeBank, lanes) == [alone] * num_workers


def test_a_large_buffer_is_the_mean_over_lanes() -> None:
    with lockstep.start(lanes=LANES) as run:
        model = LargeBank(4, 2)
        run.replicate(model)
        x, expected = torch.arange(52.0).view(13, 4), torch.zeros(4)
        for step in range(3):
            mean = torch.zeros(4)
            for part in run.lanes(x):
                model(part).square().mean().backward()
                mean += len(part) / 13 * part.mean(0)
            expected = 0.9 * expected + 0.1 * mean
            torch.testing.assert_close(model.bank[step], expected)


def evaluated(make: Callable[..., nn.Module], lanes: int = LANES, warm: bool = False) -> str:
    """Refused in an evaluation; then the models are replicated again."""
    with lockstep.start(lanes=lanes, seed=0) as run:
        model = make(4, 2)
        x = torch.randn(13, 4, generator=torch.Generator().manual_seed(5))
        if warm:
            model(x)
        run.replicate(model)
        nn.Linear(2, 2)  # somebody registers something, elsewhere
        model.eval()
        try:
            for part in run.lanes(x):
                model(part)
        except Misuse as told:
            return str(told)
        return "legal"


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("make", [Late, NoneAtFirst])
def test_a_buffer_first_made_in_an_evaluation_is_refused_by_name(
    make: Callable[..., nn.Module], num_workers: int
) -> None:
    for told in on_workers(num_workers, evaluated, make):
        assert told.startswith("buffer mean was first made inside run.lanes")
    assert set(on_workers(num_workers, evaluated, make, LANES, True)) == {"legal"}


def test_between_evaluations_a_buffer_may_be_made() -> None:
    with lockstep.start(lanes=LANES) as run:
        model = nn.Linear(4, 2)
        run.replicate(model)
        model.eval()
        for name in ("one", "other"):
            model.register_buffer(name, torch.zeros(3))
            for part in run.lanes(torch.zeros(13, 4)):
                model(part)


def pruned_before_the_update() -> str:
    torch.manual_seed(1)
    with lockstep.start(lanes=LANES, seed=0) as run:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run.replicate(model, optimizer)
        for step in range(3):
            for part in run.lanes(torch.arange(52.0).view(13, 4) / 52):
                run.backward(model(part).square().mean())
            if step == 1:
                model.register_buffer("mask", torch.ones(2, 4))
            optimizer.step()
            optimizer.zero_grad()
        return run.digest()


def test_between_lanes_and_update_a_buffer_may_be_made() -> None:
    alone = pruned_before_the_update()
    assert on_workers(2, pruned_before_the_update) == [alone] * 2


def padded() -> float | None:
    with lockstep.start(lanes=2, seed=0) as run:
        model = nn.Linear(4, 2)
        run.replicate(model)
        for part, weight in run.lanes((torch.ones(4, 4), torch.tensor([0, 0, 1, 1]))):
            loss = model(part).square().mean()
            run.backward(loss if weight[0] else loss * float("nan"), weight=int(weight.sum()))
        return run.loss


def test_the_loss_of_a_lane_that_counts_for_nothing_is_not_remarked_on(capfd: pytest.CaptureFixture[str]) -> None:
    assert padded() is not None
    assert "not finite" not in capfd.readouterr().err


@pytest.mark.parametrize("make", [Late, NoneAtFirst])
def test_after_one_forward_pass_the_buffer_is_one_like_others(make: Callable[..., nn.Module]) -> None:
    alone = trained(make, warm=True)
    for num_workers in (2, 3):
        assert on_workers(num_workers, trained, make, LANES, True) == [alone] * num_workers


class Tied(nn.Module):
    """Two modules hold one tensor, and one of them replaces it."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        mean = torch.zeros(4)
        self.one, self.other = nn.Linear(*sizes), nn.Linear(*sizes)
        self.one.register_buffer("mean", mean)
        self.other.register_buffer("mean", mean)

    def forward(self, x: Tensor) -> Tensor:
        self.other.mean = 0.9 * self.other.mean + 0.1 * x.mean(0)
        return self.one(x - self.other.mean) + self.other(x)


class TiedTheOtherWay(Tied):
    def forward(self, x: Tensor) -> Tensor:
        self.one.mean = 0.9 * self.one.mean + 0.1 * x.mean(0)
        return self.one(x - self.one.mean) + self.other(x)


class Twice(nn.Module):
    """One module under two names."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(sizes[0]), nn.Linear(*sizes)
        self.again = self.norm

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.again(self.norm(x.repeat(2, 1))))


@pytest.mark.parametrize("as_on_a_gpu", [False, True])
@pytest.mark.parametrize("make", [Tied, TiedTheOtherWay, Twice])
def test_buffers_may_be_held_in_two_places(
    make: Callable[..., nn.Module], as_on_a_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if as_on_a_gpu:
        monkeypatch.setattr(buffers, "COMPARED_ALWAYS", ())
    alone = trained(make)
    for num_workers in (2, 3, 6):
        assert on_workers(num_workers, trained, make) == [alone] * num_workers


def test_a_run_that_has_ended_trains_no_more_but_can_be_saved(tmp_path: Path) -> None:
    run = lockstep.start(lanes=2)
    model = nn.Linear(4, 2)
    run.replicate(model)
    run.close()
    calls: list[Callable[[], Any]] = [
        lambda: run.lanes(torch.zeros(4, 4)),
        lambda: run.total(1),
        lambda: run.replicate(nn.Linear(2, 2)),
        lambda: run.resume(tmp_path / "kept"),
        lambda: run.checkpoints(tmp_path / "many"),
        lambda: run.backward(model(torch.zeros(4, 4)).sum()),
    ]
    for call in calls:
        with pytest.raises(Misuse, match=r"after run\.close\(\)"):
            call()
    run.save(tmp_path / "kept")
    assert (tmp_path / "kept").exists()


@pytest.mark.parametrize("weight", ["x", torch.ones(2), 10**400, -1, float("nan")], ids=lambda value: str(value)[:8])
def test_a_weight_that_is_no_number_is_refused(weight: Any) -> None:
    with lockstep.start(lanes=1) as run:
        model = nn.Linear(4, 2)
        run.replicate(model)
        lanes = run.lanes(torch.zeros(4, 4))
        with pytest.raises(BadArgument, match="a lane's weight must be 0 or a positive number"):
            run.backward(model(next(lanes)).sum(), weight=weight)
        lanes.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", [3, None])
def test_a_path_that_is_none_is_refused(path: Any) -> None:
    with lockstep.start(lanes=1) as run:
        run.replicate(nn.Linear(4, 2))
        for call in (run.save, run.resume):
            with pytest.raises(BadArgument, match="takes a path, not"):
                call(path)


def test_a_run_that_was_told_to_resume_and_has_no_folder_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_RESUME", "auto")
    monkeypatch.delenv("LOCKSTEP_RUN_DIR", raising=False)
    with lockstep.start(lanes=1) as run:
        run.replicate(nn.Linear(4, 2))
        with pytest.raises(BadArgument, match="has no folder of checkpoints"):
            next(iter(run.lanes(torch.zeros(4, 4))))
