"""What real models do to gradients, on one worker with several lanes, against plain torch on the whole batch."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from workers import on_workers

import lockstep
from lockstep.errors import BadArgument, Misuse

X = torch.randn(13, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (13,), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def run() -> Iterator[lockstep.Run]:
    with lockstep.start(lanes=5, seed=1) as started:
        yield started


def net() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def plain_gradients(model: nn.Module, forward: Callable[..., torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    F.cross_entropy((forward or model)(X), Y).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def lane_gradients(run: lockstep.Run, model: nn.Module, forward: Any = None) -> dict[str, torch.Tensor]:
    for x, y in run.lanes((X, Y)):
        F.cross_entropy((forward or model)(x), y).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], **limits: float) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], **limits, msg=lambda text, name=name: f"{name}: {text}")


def test_lanes_give_the_gradient_of_the_whole_batch(run: lockstep.Run) -> None:
    model = net()
    expected = plain_gradients(model)
    run.replicate(model)
    assert_close(lane_gradients(run, model), expected)


def test_tied_weights_have_one_gradient(run: lockstep.Run) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))
    model[1].weight = model[0].weight
    expected = plain_gradients(model)
    run.replicate(model)
    assert_close(lane_gradients(run, model), expected)


def test_mixed_dtypes_are_reduced_each_in_its_own(run: lockstep.Run) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.tanh(self.a(x)).double())

    model = Mixed()
    expected = plain_gradients(model)
    run.replicate(model)
    assert_close(lane_gradients(run, model), expected)


def test_channels_last_gradients_keep_the_layout_of_their_parameter(run: lockstep.Run) -> None:
    model = nn.Sequential(nn.Unflatten(1, (6, 1, 1)), nn.Conv2d(6, 4, 3, padding=1), nn.Flatten(), nn.Linear(4, 3))
    model = model.to(memory_format=torch.channels_last)
    expected = plain_gradients(model)
    run.replicate(model)
    found = lane_gradients(run, model)
    assert_close(found, expected)
    assert found["1.weight"].stride() == model[1].weight.stride()


def test_activation_checkpointing_gives_the_same_gradient(run: lockstep.Run) -> None:
    model = net()
    expected = plain_gradients(model)
    run.replicate(model)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return model[2](checkpoint(lambda h: model[1](model[0](h)), x, use_reentrant=False))

    assert_close(lane_gradients(run, model, forward), expected)


def test_a_compiled_model_gives_the_same_gradient_and_the_same_digest_names(run: lockstep.Run) -> None:
    model = net()
    expected = plain_gradients(model)
    compiled = torch.compile(model, backend="aot_eager")
    run.replicate(compiled)
    lane_gradients(run, compiled)
    assert_close({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, expected)
    assert set(run.state()) == set(dict(model.named_parameters()))


def test_a_lane_that_is_compiled_whole_gives_the_same_gradient(run: lockstep.Run) -> None:
    model = net()
    expected = plain_gradients(model)
    run.replicate(model)

    @torch.compile(backend="aot_eager")
    def lane(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(model(x), y).backward()

    for _ in range(2):
        model.zero_grad()
        for x, y in run.lanes((X, Y)):
            lane(x, y)
        assert_close({name: p.grad for name, p in model.named_parameters()}, expected)


def test_a_parameter_unused_in_all_lanes_has_no_gradient(run: lockstep.Run) -> None:
    model = nn.ModuleDict({"used": net(), "unused": nn.Linear(2, 2)})
    run.replicate(model)
    found = lane_gradients(run, model, model["used"])
    assert set(found) == {"used.0.weight", "used.0.bias", "used.2.weight", "used.2.bias"}


def test_a_parameter_used_in_some_lanes_counts_as_zero_in_the_others(run: lockstep.Run) -> None:
    model = nn.ModuleDict({"main": net(), "extra": nn.Linear(6, 3)})
    bonus = X[:, 0] > 0

    def rowwise(x: torch.Tensor) -> torch.Tensor:
        return model["main"](x) + model["extra"](x) * (x[:, :1] > 0)

    expected = plain_gradients(model, rowwise)
    run.replicate(model)

    def lanewise(x: torch.Tensor) -> torch.Tensor:
        return rowwise(x) if (x[:, 0] > 0).any() else model["main"](x)

    assert bonus.any()
    assert_close(lane_gradients(run, model, lanewise), expected)


def test_parameters_frozen_and_thawed_between_steps_are_followed(run: lockstep.Run) -> None:
    model = net()
    run.replicate(model)
    assert len(lane_gradients(run, model)) == 4
    model.zero_grad()
    model[0].requires_grad_(False)
    assert set(lane_gradients(run, model)) == {"2.weight", "2.bias"}
    model.zero_grad()
    model[0].requires_grad_(True)
    expected = plain_gradients_outside(run, model)
    assert_close(lane_gradients(run, model), expected)


def plain_gradients_outside(run: lockstep.Run, model: nn.Module) -> dict[str, torch.Tensor]:
    with run.no_sync():
        return plain_gradients(model)


def test_several_lane_loops_add_up_until_zero_grad(run: lockstep.Run) -> None:
    model = net()
    expected = {name: 2 * grad for name, grad in plain_gradients(model).items()}
    run.replicate(model)
    lane_gradients(run, model)
    assert_close(lane_gradients(run, model), expected)


def test_zero_grad_that_keeps_the_tensors_works_too(run: lockstep.Run) -> None:
    model = net()
    expected = plain_gradients(model)
    run.replicate(model)
    lane_gradients(run, model)
    model.zero_grad(set_to_none=False)
    assert_close(lane_gradients(run, model), expected)


def test_a_gradient_made_under_no_sync_is_added_to_the_step(run: lockstep.Run) -> None:
    model = net()
    expected = {
        name: grad + 2 * p.detach()
        for (name, grad), p in zip(plain_gradients(model).items(), model.parameters(), strict=True)
    }
    run.replicate(model)
    with run.no_sync():
        sum(p.square().sum() for p in model.parameters()).backward()
    assert_close(lane_gradients(run, model), expected)


def test_two_backward_passes_in_a_lane_add_up(run: lockstep.Run) -> None:
    model = net()
    expected = {name: 3 * grad for name, grad in plain_gradients(model).items()}
    run.replicate(model)
    for _ in range(3):  # the first step learns that a lane calls backward twice
        model.zero_grad()
        for x, y in run.lanes((X, Y)):
            F.cross_entropy(model(x), y).backward()
            (2 * F.cross_entropy(model(x), y)).backward()
        assert_close({name: p.grad for name, p in model.named_parameters()}, expected)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_that_have_a_graph_themselves_are_taken_without_it(run: lockstep.Run) -> None:
    model = net()
    expected = plain_gradients(model)
    run.replicate(model)
    for x, y in run.lanes((X, Y)):
        F.cross_entropy(model(x), y).backward(create_graph=True)
    assert_close({name: p.grad for name, p in model.named_parameters()}, expected)
    assert not any(p.grad.requires_grad for p in model.parameters() if p.grad is not None)


def test_a_second_backward_after_the_reduction_says_what_to_write(run: lockstep.Run) -> None:
    model = net()
    run.replicate(model)
    with pytest.raises(Misuse, match="call backward once"):
        for times in (1, 2):
            for x, y in run.lanes((X, Y)):
                for _ in range(times):
                    F.cross_entropy(model(x), y).backward()
            model.zero_grad()


def test_a_loop_of_its_own_may_call_backward_more_often_than_another(run: lockstep.Run) -> None:
    model = net()
    expected = {name: 2 * grad for name, grad in plain_gradients(model).items()}
    run.replicate(model)
    for _ in range(3):
        lane_gradients(run, model)
        model.zero_grad()
        for x, y in run.lanes((X, Y)):
            F.cross_entropy(model(x), y).backward()
            F.cross_entropy(model(x), y).backward()
        assert_close({name: p.grad for name, p in model.named_parameters()}, expected)
        model.zero_grad()


def test_an_extra_backward_under_no_sync_inside_a_lane_is_fine(run: lockstep.Run) -> None:
    model = net()
    expected = {name: 2 * grad for name, grad in plain_gradients(model).items()}
    run.replicate(model)
    for _ in range(2):
        model.zero_grad()
        for x, y in run.lanes((X, Y)):
            with run.no_sync():
                F.cross_entropy(model(x), y).backward()
            F.cross_entropy(model(x), y).backward()
    assert_close({name: p.grad for name, p in model.named_parameters()}, expected)


def test_lanes_weighted_by_tokens_give_the_mean_over_tokens(run: lockstep.Run) -> None:
    model = net()
    tokens = torch.arange(13) % 4 + 1.0
    losses = F.cross_entropy(model(X), Y, reduction="none")
    ((losses * tokens).sum() / tokens.sum()).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    mean = float((losses.detach() * tokens).sum() / tokens.sum())
    model.zero_grad()
    run.replicate(model)
    for x, y, t in run.lanes((X, Y, tokens)):
        each = F.cross_entropy(model(x), y, reduction="none")
        run.backward((each * t).sum() / t.sum(), weight=t.sum())
    assert_close({name: p.grad for name, p in model.named_parameters()}, expected)
    assert run.loss == pytest.approx(mean, rel=1e-6)


def test_weights_equal_to_the_samples_change_no_bit(run: lockstep.Run) -> None:
    model = net()
    run.replicate(model)
    unweighted = {name: grad.clone() for name, grad in lane_gradients(run, model).items()}
    model.zero_grad()
    for x, y in run.lanes((X, Y)):
        run.backward(F.cross_entropy(model(x), y), weight=len(x))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, unweighted[name])


def test_weighting_only_some_lanes_is_refused(run: lockstep.Run) -> None:
    model = net()
    run.replicate(model)
    with pytest.raises(Misuse, match="Weight all lanes"):
        for number, (x, y) in enumerate(run.lanes((X, Y))):
            run.backward(F.cross_entropy(model(x), y), weight=2.0 if number else None)


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf")])
def test_a_weight_that_is_no_weight_is_refused(run: lockstep.Run, weight: float) -> None:
    model = net()
    run.replicate(model)
    with pytest.raises(BadArgument, match="weight must be"):
        for x, y in run.lanes((X, Y)):
            run.backward(F.cross_entropy(model(x), y), weight=weight)


def test_clipping_after_the_lanes_sees_the_whole_gradient(run: lockstep.Run) -> None:
    model = net()
    expected = plain_gradients(model)
    norm = torch.stack([g.norm() for g in expected.values()]).norm()
    run.replicate(model)
    lane_gradients(run, model)
    torch.testing.assert_close(nn.utils.clip_grad_norm_(model.parameters(), 1e-3), norm)


def test_sparse_gradients_are_refused_with_what_to_change(run: lockstep.Run) -> None:
    model = nn.Embedding(10, 3, sparse=True)
    run.replicate(model)
    with pytest.raises(BadArgument, match=r"weight has a sparse gradient.*sparse=True"):
        for (y,) in run.lanes((Y,)):
            model(y).sum().backward()


def test_a_large_constant_buffer_is_not_touched(run: lockstep.Run) -> None:
    model = net()
    model.register_buffer("mask", torch.ones(50, 50))
    run.replicate(model)
    mask, version = model.mask, model.mask._version
    lane_gradients(run, model)
    assert model.mask is mask
    assert model.mask._version == version


def test_running_statistics_are_the_weighted_mean_of_the_lanes(run: lockstep.Run) -> None:
    model = nn.BatchNorm1d(6)
    run.replicate(model)
    expected = torch.zeros(6)
    for (x,) in run.lanes((X,)):
        model(x).sum().backward()
        expected += len(x) / 13 * 0.1 * x.mean(0)
    torch.testing.assert_close(model.running_mean, expected)
    assert int(model.num_batches_tracked) == 1


def test_a_custom_buffer_written_in_forward_is_averaged(run: lockstep.Run) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.register_buffer("seen", torch.zeros(()))
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = self.seen + len(x)  # replaced, not written in place
            self.calls += 1
            return self.scale * x.sum()

    model = Counting()
    run.replicate(model)
    for (x,) in run.lanes((X,)):
        model(x).backward()
    assert float(model.seen) == pytest.approx(sum(n * n for n in (2, 3, 2, 3, 3)) / 13)
    assert int(model.calls) == 1


def _one_lane(weight: float | None) -> str:
    """One lane, two backward passes in it, and gradients kept over two steps."""
    run = lockstep.start(lanes=1)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.replicate(model, optimizer)
    for step in range(6):
        for x, y in run.lanes((X, Y)):
            run.backward(F.cross_entropy(model(x), y), weight=weight)
            run.backward(model(x).square().mean(), weight=weight)
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return run.digest()


@pytest.mark.parametrize("weight", [None, 7.0])
def test_one_lane_has_the_same_bits_with_and_without_an_idle_worker(weight: float | None) -> None:
    (alone,) = on_workers(1, _one_lane, weight)
    assert on_workers(2, _one_lane, weight) == [alone] * 2


def _train_beside_another_default_device(device: str | None) -> str:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.set_default_device(device)
    with lockstep.start(lanes=4, seed=1) as run:
        run.replicate(model, optimizer)
        for _ in range(2):
            for x, y in run.lanes((X, Y)):
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return run.digest()


def test_torchs_default_device_is_the_users_own_business() -> None:
    expected = on_workers(2, _train_beside_another_default_device, None)
    assert on_workers(2, _train_beside_another_default_device, "meta") == expected


def _fork_a_process_that_ends() -> int:
    model = net()
    with lockstep.start(lanes=4, seed=1) as run:
        run.replicate(model)
        if (pid := os.fork()) == 0:
            run.close()  # as Python does at the end of a process
            os._exit(0)
        os.waitpid(pid, 0)
        lane_gradients(run, model)
        return run.step


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_forked_process_that_ends_does_not_end_the_run(num_workers: int) -> None:
    assert on_workers(num_workers, _fork_a_process_that_ends) == [1] * num_workers


def _handed_over() -> list[Any]:
    """Three steps whose sums are left to Gloo's own all-reduce: is the gradient that of the whole batch, and whose?"""
    model = net()
    expected = plain_gradients(model)
    with lockstep.start(lanes=5, seed=1, exact=False, wire="gloo") as run:
        run.replicate(model)
        for _ in range(3):
            model.zero_grad()
            found = lane_gradients(run, model)
            assert_close(found, expected)
        return [run.guard.generation.wire.how, [gradient.double().sum().item() for gradient in found.values()]]


def test_without_exact_the_backend_adds_and_the_gradient_is_right_to_rounding_and_equal_on_all() -> None:
    first, *others = on_workers(3, _handed_over)
    assert first[0] == "Gloo's all-reduce"
    assert all(other == first for other in others)
