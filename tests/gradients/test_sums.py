"""Losses that are sums over samples: added up where the script says so, and a note where it does not."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from workers import apart, on_workers

import lockstep
from lockstep.errors import BadArgument, Misuse
from lockstep.gradients.autograd_graph import summed_by
from lockstep.gradients.squares import KINDS, as_means, of_all
from lockstep.optim.noise import measure

LANES = 6
X = torch.rand(13, 12, generator=torch.Generator().manual_seed(5))


class Vae(nn.Module):
    """As in PyTorch's example, smaller."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.hidden, self.mean, self.spread = nn.Linear(12, 8), nn.Linear(8, 2), nn.Linear(8, 2)
        self.back, self.out = nn.Linear(2, 8), nn.Linear(8, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = F.relu(self.hidden(x))
        mean, spread = self.mean(h), self.spread(h)
        z = mean + torch.exp(0.5 * spread)  # without chance, to be compared with a plain loop
        return torch.sigmoid(self.out(F.relu(self.back(z)))), mean, spread


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    found, mean, spread = model(x)
    divergence = -0.5 * torch.sum(1 + spread - mean.pow(2) - spread.exp())
    return F.binary_cross_entropy(found, x, reduction="sum") + divergence


def trained(lanes: int = LANES, **options: Any) -> list[Any]:
    with lockstep.start(lanes=lanes, seed=0, noise_every=1) as run:
        model = Vae()
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        run.replicate(model, optimizer)
        losses = []
        for _ in range(4):
            for x in run.lanes(X):
                run.backward(loss_of(model, x), reduction="sum", **options)
            losses.append(run.loss)
            optimizer.step()
            optimizer.zero_grad()
        return [run.digest(), losses, run.noise.critical_batch]


def trained_plainly() -> list[float]:
    model = Vae()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(4):
        loss = loss_of(model, X)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("lanes", [1, LANES])
def test_sums_are_added_up_as_in_a_plain_loop_and_have_the_same_bits_on_any_workers(lanes: int) -> None:
    alone = trained(lanes)
    assert alone[1] == pytest.approx(trained_plainly(), rel=1e-5)
    for num_workers in (2, 3, 4):
        assert on_workers(num_workers, trained, lanes) == [alone] * num_workers


def test_the_gradient_is_that_of_the_whole_batch() -> None:
    model = Vae()
    loss_of(model, X).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with lockstep.start(lanes=LANES) as run:
        run.replicate(model)
        for x in run.lanes(X):
            run.backward(loss_of(model, x), reduction="sum")
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name])


def test_with_a_scaler_the_loss_is_told_unscaled() -> None:
    found = trained(LANES, scaler=torch.amp.GradScaler("cpu", init_scale=4.0))
    assert found[1][0] == pytest.approx(trained_plainly()[0], rel=1e-5)


def test_the_noise_is_measured_as_of_means() -> None:
    """Three lanes of 2, 3 and 5 samples; of the other kind of squares there are none."""
    shares, squares, whole = {0: 2, 1: 3, 2: 5}, [3.0, 2.0, 1.5], 1.0
    means, _ = of_all([*squares, None, None, None], {0: 2.0, 1: 3.0, 2: 5.0}, (whole, None))
    told = [square * count**2 for square, count in zip(squares, shares.values(), strict=True)]
    sums, _ = of_all(*as_means([*told, *[None] * 3 * (KINDS - 1)], (whole * 100, None), shares))
    assert means is not None
    assert sums is not None
    expected = measure(means.lanes, means.weights, means.whole)
    found = measure(sums.lanes, sums.weights, sums.whole)
    assert (found.gradient_square, found.variance) == pytest.approx((expected.gradient_square, expected.variance))


def mixed(first: dict[str, Any], others: dict[str, Any]) -> None:
    with lockstep.start(lanes=LANES) as run:
        model = Vae()
        run.replicate(model)
        for number, x in enumerate(run.lanes(X)):
            run.backward(loss_of(model, x), **(first if number == 0 else others))


@pytest.mark.parametrize(
    ("first", "others", "told"),
    [
        ({"reduction": "sum"}, {}, r'lanes \[0\] were given by run.backward\(loss, reduction="sum"\), lanes \[1, 2'),
        ({}, {"reduction": "sum"}, r'reduction="sum"\), lanes \[0\] were not'),
        ({"weight": 2}, {"reduction": "sum"}, r'reduction="sum"\), lanes \[0\] were not'),
        ({"weight": 2}, {}, r"lanes \[0\] were given by run.backward\(loss, weight=...\), lanes \[1, 2, 3, 4, 5\]"),
    ],
)
def test_lanes_that_are_told_differently_are_refused(first: dict[str, Any], others: dict[str, Any], told: str) -> None:
    with pytest.raises(Misuse, match=told):
        mixed(first, others)


def test_two_losses_of_a_lane_that_are_told_differently_are_refused() -> None:
    told = r'a loss of lane 0 was given by run.backward\(loss\) and then one by run.backward\(loss, reduction="sum"\)'
    with lockstep.start(lanes=LANES) as run, pytest.raises(Misuse, match=told):
        model = Vae()
        run.replicate(model)
        for x in run.lanes(X):
            with run.no_sync():
                run.backward(loss_of(model, x))
            run.backward(loss_of(model, x), reduction="sum")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"reduction": "sum", "weight": 3}, 'takes weight= or reduction="sum", not both'),
        ({"reduction": "none"}, 'reduction="mean" or reduction="sum", not \'none\''),
    ],
)
def test_a_reduction_that_means_nothing_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(BadArgument, match=told):
        mixed(options, options)


# -- the note ------------------------------------------------------------------------------------------------

W = torch.randn(5, 4, requires_grad=True)
PENALISED = torch.randn(30, 20, requires_grad=True)
IN, TARGET, CLASSES = torch.randn(6, 5), torch.rand(6, 4), torch.arange(6) % 4


def out() -> Tensor:
    return IN @ W


SUMS: dict[str, Callable[[], Tensor]] = {
    "Sum": lambda: out().sum(),
    "Sum, of rows": lambda: out().sum(1).sum(0),
    "Sum, negated and shifted": lambda: 3 - (-out().sum()),
    "Sum, scaled up": lambda: 65536 * out().sum(),
    "Sum, in another dtype": lambda: out().sum().double().squeeze(),
    "Sum, beside a mean": lambda: out().mean() + out().square().sum(),
    "Sum, of absolute differences": lambda: F.l1_loss(out(), TARGET, reduction="sum"),
    'BinaryCrossEntropy with reduction="sum"': lambda: (
        F.binary_cross_entropy(torch.sigmoid(out()), TARGET, reduction="sum") - 0.5 * out().sum()
    ),
    'BinaryCrossEntropyWithLogits with reduction="sum"': lambda: F.binary_cross_entropy_with_logits(
        out(), TARGET, reduction="sum"
    ),
    'NllLoss with reduction="sum"': lambda: F.cross_entropy(out(), CLASSES, reduction="sum"),
    'MseLoss with reduction="sum"': lambda: F.mse_loss(out(), TARGET, reduction="sum"),
}
MEANS: dict[str, Callable[[], Tensor]] = {
    "a mean": lambda: out().mean(),
    "a mean of sums": lambda: out().square().sum(1).mean(),
    "a loss": lambda: F.cross_entropy(out(), CLASSES),
    "divided": lambda: out().sum() / 6,
    "divided in place": lambda: out().sum().div_(6),
    "by tokens": lambda: (out() * TARGET).sum() / TARGET.sum(),
    "multiplied": lambda: out().sum() * (1 / 6),
    "multiplied by a tensor": lambda: torch.tensor(1 / 6) * out().sum(),
    "per batch": lambda: F.kl_div(out().log_softmax(1), TARGET, reduction="batchmean"),
    "two tasks": lambda: torch.stack([out().mean(), out().square().mean()]).sum(),
    "a penalty": lambda: out().mean() + PENALISED.abs().sum() + (PENALISED * PENALISED).sum(),
    "of few": lambda: out().mean() + out().mean(0).sum(),
    "a norm": lambda: out().norm(),
    "smoothed": lambda: F.cross_entropy(out(), CLASSES, label_smoothing=0.1),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_seen_with_its_operator(name: str) -> None:
    root = SUMS[name]().grad_fn
    assert root is not None
    assert summed_by(root, 6) == name.split(",")[0]


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_is_not_taken_for_a_sum(name: str) -> None:
    root = MEANS[name]().grad_fn
    assert root is not None
    assert summed_by(root, 6) is None


def test_nothing_is_computed_again_to_look_at_a_factor() -> None:
    calls = []

    def computed(w: Tensor) -> Tensor:
        calls.append(1)
        return (IN @ w).sum() * torch.tensor(1.5)

    loss = torch.utils.checkpoint.checkpoint(computed, W, use_reentrant=False)
    assert summed_by(loss.grad_fn, 6) is None
    assert len(calls) == 1


def noted(lane: Callable[..., None], lanes: int = LANES, compiled: bool = False, device: str = "cpu") -> list[str]:
    """What is said in three steps, and whether torch's own function is there afterwards."""
    said: list[str] = []
    own = torch.autograd.backward
    with lockstep.start(lanes=lanes, seed=0, device=device) as run:
        run._events.subscribe(lambda event: said.append(event.text), lockstep.events.Note)
        model = Vae()
        used = torch.compile(model, backend="aot_eager") if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        run.replicate(model, optimizer)
        for _ in range(3):
            for x in run.lanes(X):
                lane(run, used, x)
            assert torch.autograd.backward is own
            optimizer.step()
            optimizer.zero_grad()
    return [text for text in said if "sum" in text]


def plainly(run: lockstep.Run, model: nn.Module, x: Tensor) -> None:
    loss_of(model, x).backward()


def by_run(run: lockstep.Run, model: nn.Module, x: Tensor) -> None:
    run.backward(loss_of(model, x))


def as_sum(run: lockstep.Run, model: nn.Module, x: Tensor) -> None:
    run.backward(loss_of(model, x), reduction="sum")


def by_weight(run: lockstep.Run, model: nn.Module, x: Tensor) -> None:
    run.backward(loss_of(model, x), weight=len(x))


def as_mean(run: lockstep.Run, model: nn.Module, x: Tensor) -> None:
    (loss_of(model, x) / len(x)).backward()


@pytest.mark.parametrize(("lane", "compiled"), [(plainly, False), (by_run, False), (by_run, True)])
@apart
def test_a_sum_that_nobody_told_of_is_noted_once(lane: Callable[..., None], compiled: bool) -> None:
    (said,) = noted(lane, compiled=compiled)
    assert 'the loss of lane 0 is a sum over its samples (BinaryCrossEntropy with reduction="sum")' in said
    assert "about 1/6" in said
    assert 'run.backward(loss, reduction="sum")' in said


@pytest.mark.cuda
def test_a_sum_on_a_gpu_is_noted_too() -> None:
    assert len(noted(plainly, device="cuda")) == 1
    assert noted(as_mean, device="cuda") == []


@pytest.mark.parametrize(("lane", "lanes"), [(as_sum, 6), (by_weight, 6), (as_mean, 6), (plainly, 1)])
def test_there_is_no_note_where_nothing_is_wrong(lane: Callable[..., None], lanes: int) -> None:
    assert noted(lane, lanes) == []


def test_torchs_own_function_is_back_after_an_exception() -> None:
    own = torch.autograd.backward
    with lockstep.start(lanes=LANES) as run:
        model = Vae()
        run.replicate(model)
        with pytest.raises(ZeroDivisionError):
            for _ in run.lanes(X):
                assert torch.autograd.backward is not own
                assert inspect.signature(torch.autograd.backward) == inspect.signature(own)
                raise ZeroDivisionError
        assert torch.autograd.backward is own
