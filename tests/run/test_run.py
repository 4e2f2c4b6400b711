"""What a run gives its user: totals, evaluation, several models, mixed precision, chance, printing."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from workers import on_workers

import lockstep

G = torch.Generator().manual_seed(9)
X, Y = torch.randn(23, 4, generator=G), torch.randint(0, 3, (23,), generator=G)


@pytest.fixture
def run() -> Iterator[lockstep.Run]:
    with lockstep.start(lanes=5, seed=1) as started:
        yield started


def _evaluate() -> list[Any]:
    run = lockstep.start(lanes=8)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 3))
    run.replicate(model)
    model.eval()
    hits, losses, table = 0, [], torch.zeros(3)
    with torch.no_grad():
        for begin in (0, 10, 20):
            for x, y in run.lanes((X[begin : begin + 10], Y[begin : begin + 10])):
                scores = model(x)
                hits += int((scores.argmax(1) == y).sum())
                losses.append(F.cross_entropy(scores, y, reduction="sum"))
                table += torch.bincount(y, minlength=3)
    return [run.total(hits), run.total(losses), run.total(table).tolist(), run.total(0.5), run.step]


def test_an_evaluation_counts_every_sample_once_on_any_number_of_workers() -> None:
    (alone,) = on_workers(1, _evaluate)
    assert alone[2] == torch.bincount(Y, minlength=3).tolist()
    assert alone[4] == 0
    for num_workers in (2, 3):
        for found in on_workers(num_workers, _evaluate):
            assert found[:3] == alone[:3]  # the losses too: to the last bit
            assert found[3] == 0.5 * num_workers


def _gan() -> str:
    run = lockstep.start(lanes=6, seed=2)
    torch.manual_seed(0)
    make, judge = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    make_optimizer = torch.optim.Adam(make.parameters(), 1e-2)
    judge_optimizer = torch.optim.Adam(judge.parameters(), 1e-2)
    run.replicate(make, make_optimizer)
    run.replicate(judge, judge_optimizer)
    for _ in range(6):
        for x in run.lanes(X):
            fake = make(torch.randn(len(x), 3)).detach()
            (F.softplus(-judge(x)).mean() + F.softplus(judge(fake)).mean()).backward()
        judge_optimizer.step()
        judge_optimizer.zero_grad()
        for x in run.lanes(X):
            F.softplus(-judge(make(torch.randn(len(x), 3)))).mean().backward()
        make_optimizer.step()
        make_optimizer.zero_grad()
        judge_optimizer.zero_grad()
    assert run.step == 12
    return run.digest()


def test_two_models_with_two_optimizers_have_the_same_bits_on_any_number_of_workers() -> None:
    (alone,) = on_workers(1, _gan)
    assert on_workers(3, _gan) == [alone] * 3


def _scaled(poison: int | None) -> list[Any]:
    """fp16 with a GradScaler; at step 2 the data of one lane overflow."""
    run = lockstep.start(lanes=6, seed=2)
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    run.replicate(model, optimizer, scaler=scaler)
    for step in range(4):
        for lane, (x, y) in enumerate(run.lanes((X, Y))):
            with torch.autocast("cpu", torch.float16):
                loss = F.cross_entropy(model(x).float(), y)
            if step == 2 and poison is not None and run.rank == run.size - 1 and lane == 0:
                loss = loss * float("inf")
            run.backward(loss, scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [run.digest(), scaler.get_scale(), run.loss]


def test_a_grad_scaler_takes_the_same_decision_on_every_worker() -> None:
    found = on_workers(3, _scaled, 0)
    assert [scale for _, scale, _ in found] == [2.0**9] * 3
    assert len({digest for digest, _, _ in found}) == 1


def test_a_grad_scaler_gives_the_same_bits_on_any_number_of_workers() -> None:
    (alone,) = on_workers(1, _scaled, None)
    assert on_workers(3, _scaled, None) == [alone] * 3


def _streams() -> list[Any]:
    run = lockstep.start(lanes=6, seed=4)
    model = nn.Linear(4, 3)
    run.replicate(model)
    outside, inside = [], []
    for _ in range(3):
        outside.append(torch.rand(()).item())
        for _ in run.lanes(X):
            inside.append(torch.rand(()).item())
    return [outside, inside]


def test_code_outside_of_lanes_draws_the_same_numbers_on_every_worker_and_lanes_their_own() -> None:
    (alone,) = on_workers(1, _streams)
    found = on_workers(3, _streams)
    assert [outside for outside, _ in found] == [alone[0]] * 3
    per_step = [[value for _, inside in found for value in inside[2 * step : 2 * step + 2]] for step in range(3)]
    assert sorted(map(tuple, per_step)) == sorted(tuple(alone[1][6 * s : 6 * s + 6]) for s in range(3))


def _initial_values() -> list[float]:
    run = lockstep.start()
    torch.manual_seed(run.rank)  # workers begin differently
    model = nn.Linear(2, 2)
    run.replicate(model)
    return model.weight.flatten().tolist()


def test_the_first_workers_values_go_to_all() -> None:
    torch.manual_seed(0)
    expected = nn.Linear(2, 2).weight.flatten().tolist()
    assert on_workers(3, _initial_values) == [expected] * 3


def _calibrate() -> list[float]:
    run = lockstep.start(lanes=4)
    model = nn.BatchNorm1d(4)
    run.replicate(model)
    with torch.no_grad():
        for x in run.lanes(X):
            model(x)
    assert run.step == 0
    return model.running_mean.tolist()


def test_forward_passes_in_training_mode_without_gradients_still_average_statistics() -> None:
    (alone,) = on_workers(1, _calibrate)
    assert on_workers(3, _calibrate) == [alone] * 3
    assert any(alone)


def test_the_model_comes_back_as_the_same_object(run: lockstep.Run) -> None:
    model = nn.Linear(4, 3)
    assert run.replicate(model) is model
    assert list(model.state_dict()) == ["weight", "bias"]


def test_the_counters_say_where_the_run_is(run: lockstep.Run) -> None:
    model = nn.Linear(4, 3)
    run.replicate(model)
    assert (run.rank, run.size, run.step, run.epoch, run.lane_count) == (0, 1, 0, 0, 5)
    for _ in run.epochs(2):
        for x in run.lanes(X):
            assert run.step == run.epoch
            run.backward(model(x).sum())
    assert (run.step, run.epoch) == (2, 2)


def test_the_loss_is_the_mean_over_samples(run: lockstep.Run) -> None:
    model = nn.Linear(4, 3)
    run.replicate(model)
    expected = F.cross_entropy(model(X), Y).item()
    for x, y in run.lanes((X, Y)):
        run.backward(F.cross_entropy(model(x), y))
    assert run.loss == pytest.approx(expected, rel=1e-6)


def test_print_speaks_once(run: lockstep.Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.print("hello", 3, sep="-")
    assert capsys.readouterr().out == "hello-3\n"


def test_print_in_lanes_goes_to_the_file_it_is_given(run: lockstep.Run, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(4, 3)
    run.replicate(model)
    for x, y in run.lanes((X, Y)):
        run.backward(F.cross_entropy(model(x), y))
        run.print("aside", file=sys.stderr)
        run.print("once")
        assert capsys.readouterr() == ("", "aside\n")
    assert capsys.readouterr().out == "once\n"


def test_the_digest_sees_parameters_buffers_and_optimizer_state(run: lockstep.Run) -> None:
    model = nn.BatchNorm1d(4)
    optimizer = torch.optim.Adam(model.parameters(), 0.0)
    run.replicate(model, optimizer)
    seen = {run.digest()}
    for change in (
        lambda: model.weight.data.add_(1),
        lambda: model.running_var.add_(1),
        lambda: optimizer.state.setdefault(model.weight, {}).update(exp_avg=torch.ones(4)),
        lambda: optimizer.state[model.weight]["exp_avg"].neg_(),
    ):
        change()
        seen.add(run.digest())
    assert len(seen) == 5


def test_closing_puts_threads_and_determinism_back() -> None:
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    with lockstep.start(threads=2):
        assert torch.get_num_threads() == 2
        assert torch.are_deterministic_algorithms_enabled()
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before


def test_exact_false_leaves_kernels_alone_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with lockstep.start(exact=False):
        assert not torch.are_deterministic_algorithms_enabled()
    result = capsys.readouterr().err
    assert "not exact" in result
    assert "exact=False: results may differ" in result


def _sync_with_two_lanes() -> None:
    run = lockstep.start(lanes=4)
    model = lockstep.sync_batchnorm(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    run.replicate(model)
    for x in run.lanes(X):
        model(x).sum().backward()


def test_synchronised_batch_norm_with_several_lanes_per_worker_says_so() -> None:
    from workers import outcomes

    found = outcomes(2, _sync_with_two_lanes)
    assert [outcome.error for outcome in found] == ["Misuse"] * 2
    assert "Start with lanes=2" in found[0].message


def _sync_weighted() -> list[float]:
    run = lockstep.start()
    torch.manual_seed(0)
    model = lockstep.sync_batchnorm(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))).double()
    run.replicate(model)
    weights = torch.arange(23) % 3 + 1.0
    for x, w in run.lanes((X.double(), weights.double())):
        run.backward((model(x)[:, 0].square() * w).sum() / w.sum(), weight=w.sum())
    return [p.grad.flatten().tolist() for p in model.parameters()]


def test_synchronised_batch_norm_is_right_for_lanes_weighted_by_tokens() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)).double()
    weights = (torch.arange(23) % 3 + 1.0).double()
    ((model(X.double())[:, 0].square() * weights).sum() / weights.sum()).backward()
    expected = [p.grad.flatten() for p in model.parameters()]
    for found in on_workers(3, _sync_weighted):
        for mine, plain in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(mine, dtype=torch.float64), plain, rtol=1e-10, atol=1e-13)
