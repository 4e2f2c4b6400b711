"""`run.steps` with the optimizers of a body in their order: a GAN's body stays as it was, and runs once for each."""

import os
import signal
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from workers import on_workers, outcomes

import lockstep


def _gan_parts(with_norm: bool = False) -> tuple[Any, ...]:
    torch.manual_seed(5)
    judge, maker = (
        nn.Sequential(
            nn.Linear(3, 4), nn.BatchNorm1d(4) if with_norm else nn.Identity(), nn.Tanh(), nn.Linear(4, num_outputs)
        ).double()
        for num_outputs in (1, 3)
    )
    return judge, maker, *(torch.optim.Adam(one.parameters(), 0.05) for one in (judge, maker))


def _gan_data() -> DataLoader[Any]:
    values = torch.randn(22, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(values), batch_size=8, shuffle=False)


def _numbers(*models: nn.Module) -> list[float]:
    return [float(value) for model in models for one in model.state_dict().values() for value in one.flatten()]


def _started(lanes: int, with_norm: bool = False, strategy: str = "replicated") -> tuple[Any, ...]:
    run = lockstep.start(lanes=lanes, strategy=strategy)
    judge, maker, of_judge, of_maker = _gan_parts(with_norm)
    run.replicate(judge, of_judge)
    run.replicate(maker, of_maker)
    return run, judge, maker, of_judge, of_maker


def _gan(
    order: list[int] | None,
    lanes: int = 4,
    dies: tuple[int, int] | None = None,
    with_norm: bool = False,
    strategy: str = "replicated",
) -> list[Any]:
    """Worker 1 is killed in step `dies[0]`, in its lane `dies[1]`."""
    run, judge, maker, of_judge, of_maker = _started(lanes, with_norm, strategy)
    me, seen, draws = run.rank, list[int](), []
    loader = run.shard(_gan_data())
    for _ in run.epochs(3):
        for (row,) in run.steps(loader, None if order is None else [(of_judge, of_maker)[one] for one in order]):
            seen.append(run.step)  # by this worker, which only this test may do
            if me == 1 and dies is not None and run.step == dies[0] and len(seen) > dies[1]:
                os.kill(os.getpid(), signal.SIGKILL)
            draws.append((run.step // 2, float(torch.rand(()))))
            judge.zero_grad()
            false = maker(row[:, 3:])
            judge(row[:, :3]).square().mean().backward()
            (judge(false.detach()) - 1).square().mean().backward()
            of_judge.step()
            maker.zero_grad()
            run.backward(judge(false).square().mean())
            of_maker.step()
    return [run.digest(), _numbers(judge, maker), run.loss, run.step, draws if run.size == 1 else []]


def _plain_gan(with_norm: bool = False) -> tuple[list[float], float]:
    judge, maker, of_judge, of_maker = _gan_parts(with_norm)
    for _ in range(3):
        for (row,) in _gan_data():
            judge.zero_grad()
            false = maker(row[:, 3:])
            judge(row[:, :3]).square().mean().backward()
            (judge(false.detach()) - 1).square().mean().backward()
            of_judge.step()
            maker.zero_grad()
            loss = judge(false).square().mean()
            loss.backward()
            of_maker.step()
    return _numbers(judge, maker), loss.item()


def test_a_gan_with_two_updates_in_one_body_comes_to_what_the_plain_loop_does() -> None:
    ((digest, numbers, loss, step, draws),) = on_workers(1, _gan, [0, 1])
    expected, plain_loss = _plain_gan()
    assert numbers == pytest.approx(expected, abs=1e-9)
    assert loss == pytest.approx(plain_loss)
    assert step == 18  # two updates for each of nine batches
    by_batch: dict[int, list[float]] = {}
    for batch, draw in draws:
        by_batch.setdefault(batch, []).append(draw)
    assert all(drawn[:4] == drawn[4:] and len(set(drawn)) == 4 for drawn in by_batch.values())  # in both passes alike
    for num_workers in (2, 3):
        assert {found[0] for found in on_workers(num_workers, _gan, [0, 1])} == {digest}


def test_each_forward_pass_of_a_body_with_two_updates_moves_the_averages_of_batch_norm_once() -> None:
    ((_, numbers, *_),) = on_workers(1, _gan, [0, 1], lanes=1, with_norm=True)
    assert numbers == pytest.approx(_plain_gan(with_norm=True)[0], abs=1e-9)
    ((digest, *_),) = on_workers(1, _gan, [0, 1], with_norm=True)
    assert {found[0] for found in on_workers(3, _gan, [0, 1], with_norm=True)} == {digest}
    sharded = on_workers(3, _gan, [0, 1], with_norm=True, strategy="sharded:parameters")
    assert {found[0] for found in sharded} == {digest}


@pytest.mark.parametrize("dies", [(4, 0), (5, 0)])
def test_a_kill_in_either_pass_over_a_body_costs_nothing(dies: tuple[int, int]) -> None:
    ((digest, *_),) = on_workers(1, _gan, [0, 1], with_norm=True)
    first, killed, last = outcomes(3, _gan, [0, 1], 4, dies, with_norm=True)
    assert killed.killed_by == signal.SIGKILL
    assert [first.value[0], last.value[0]] == [digest, digest]


def test_a_worker_without_lanes_makes_both_updates() -> None:
    ((digest, *_),) = on_workers(1, _gan, [0, 1], 2)
    assert {found[0] for found in on_workers(3, _gan, [0, 1], 2)} == {digest}


@pytest.mark.parametrize(
    ("order", "error", "sentence"),
    [
        (None, "Misuse", "a backward pass comes after step() of optimizer in one body of run.steps"),
        ([1, 0], "Misuse", "has called step() of its optimizer 2 where that of optimizer 1 was due"),
        ([0], "BadArgument", "every optimizer of the run once, in the order of their updates: 1 are given"),
        ([0, 0], "BadArgument", "every optimizer of the run once"),
    ],
)
def test_two_updates_in_one_body_are_refused_unless_their_order_is_given(
    order: list[int] | None, error: str, sentence: str
) -> None:
    (found,) = outcomes(1, _gan, order)
    assert found.error == error
    assert sentence in found.message


def _averaged_gan() -> None:
    run, judge, maker, of_judge, of_maker = _started(lanes=3)
    average = {name: parameter.detach().clone() for name, parameter in maker.named_parameters()}
    for (row,) in run.steps(run.shard(_gan_data()), [of_judge, of_maker]):
        judge(row[:, :3]).square().mean().backward()
        of_judge.step()
        judge(maker(row[:, 3:])).square().mean().backward()
        of_maker.step()
        for name, parameter in maker.named_parameters():
            average[name].lerp_(parameter.data, 0.1)


def test_an_average_of_the_generator_in_a_body_with_two_updates_is_refused_before_anything_is_applied() -> None:
    for found in outcomes(3, _averaged_gan):
        assert found.error == "Misuse"
        assert "weight is used after step() in a body of run.steps" in found.message
        assert "run.steps(loader, [optimizer, function])" in found.message


def _gan_with_functions(dies: int | None = None) -> list[Any]:
    """An average of the generator's weights, as after the body of the plain loop; worker 1 dies after step `dies`."""
    run, judge, maker, of_judge, of_maker = _started(lanes=4)
    average, calls = _Average(maker), list[int]()

    def count() -> None:
        calls.append(run.step)
        if run.step == dies and run.size == 3 and run.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    for (row,) in run.steps(run.shard(_gan_data()), [of_judge, of_maker, average.update, count]):
        judge(row[:, :3]).square().mean().backward()
        of_judge.step()
        judge(maker(row[:, 3:])).square().mean().backward()
        of_maker.step()
    return [run.digest(), average.numbers(), calls]


class _Average:
    def __init__(self, model: nn.Module) -> None:
        self._model, self._copy = model, deepcopy(model)

    @torch.no_grad()
    def update(self) -> None:
        for kept, parameter in zip(self._copy.parameters(), self._model.parameters(), strict=True):
            kept.lerp_(parameter, 0.3)

    def numbers(self) -> list[float]:
        return _numbers(self._copy)


def test_functions_after_the_optimizers_are_called_once_for_each_batch_after_its_updates() -> None:
    judge, maker, of_judge, of_maker = _gan_parts()
    average = _Average(maker)
    for (row,) in _gan_data():
        judge.zero_grad()
        judge(row[:, :3]).square().mean().backward()
        of_judge.step()
        maker.zero_grad()
        judge(maker(row[:, 3:])).square().mean().backward()
        of_maker.step()
        average.update()
    (alone,) = on_workers(1, _gan_with_functions)
    assert alone[1] == pytest.approx(average.numbers(), abs=1e-9)
    assert alone[2] == [2, 4, 6]
    assert on_workers(3, _gan_with_functions) == [alone] * 3
    first, killed, last = outcomes(3, _gan_with_functions, 4)
    assert killed.killed_by == signal.SIGKILL
    assert [first.value, last.value] == [alone, alone]


def _carrying_gan() -> None:
    run, _, _, *optimizers = _started(lanes=2)
    for _ in run.steps(run.shard(_gan_data()), optimizers):
        run.carried["seen"] = run.carried.get("seen", 0) + 1


def test_what_lanes_carry_is_refused_in_a_body_with_two_updates() -> None:
    (found,) = outcomes(1, _carrying_gan)
    assert found.error == "Misuse"
    assert "run.carried in a body of run.steps with several updates" in found.message


def _rare_update() -> None:
    run, judge, maker, of_judge, of_maker = _started(lanes=2)
    for number, (row,) in run.steps(enumerate(run.shard(_gan_data())), [of_judge, of_maker]):
        judge(row[:, :3]).square().mean().backward()
        of_judge.step()
        if number % 2 == 0:
            judge(maker(row[:, 3:])).square().mean().backward()
            of_maker.step()


def test_an_update_that_is_not_made_for_every_batch_is_refused() -> None:
    (found,) = outcomes(1, _rare_update)
    assert found.error == "Misuse"
    assert "has called step() of 1 optimizers, and was given 2" in found.message
