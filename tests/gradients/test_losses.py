"""Losses that are no mean over the samples of a lane: added up or weighted where the script says so, else a note."""

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
from lockstep.gradients.loss_graph import compared_by, partial_mean_by, summed_by
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


PADDED = torch.tensor([0, 1, -100, 3, 0, 1])
TEXTS = torch.tensor([[0, 1, 2], [3, -100, 1]])
"""Two samples: with three targets that count, and with two."""
LAST_IGNORED = torch.tensor([[0, 1, -100], [3, 2, -100]])
THREE_OF_FOUR = torch.tensor([True, False, True, True]).expand(6, 4)
UNEVEN = torch.arange(24).reshape(6, 4) % 5 > 0
BY_CLASS = torch.tensor([0.5, 1.0, 2.0, 1.0])


def pictures() -> Tensor:
    return out().reshape(2, 3, 4).transpose(1, 2)[:, :, :, None]


PARTS: dict[str, tuple[int, Callable[[], Tensor], str]] = {
    "padding": (6, lambda: F.cross_entropy(out(), PADDED), "over 5 of 6 targets"),
    "scaled": (6, lambda: 1024 * F.cross_entropy(out(), PADDED) / 3, "over 5 of 6 targets"),
    "smoothed": (6, lambda: F.cross_entropy(out(), PADDED, label_smoothing=0.1), "divided by 5"),
    "texts": (2, lambda: F.cross_entropy(out(), TEXTS.flatten()) + PENALISED.abs().mean(), "over 5 of 6 targets"),
    "pictures": (2, lambda: F.cross_entropy(pictures(), TEXTS[:, :, None]), "over 5 of 6 targets"),
    "classes": (6, lambda: F.cross_entropy(out(), CLASSES, weight=BY_CLASS), "with weight=, the weights of classes"),
    "masked": (6, lambda: (out() * UNEVEN).sum() / UNEVEN.sum(), "a sum of 24 numbers that is divided by 19"),
    "masked, by a number": (6, lambda: (out() * UNEVEN).sum() / UNEVEN.sum().item(), "divided by 19"),
    "weighted": (6, lambda: (out() * TARGET).sum() / TARGET.sum(), "a sum of 24 numbers that is divided by"),
    "tokens": (6, lambda: F.cross_entropy(out(), PADDED, reduction="sum") / (PADDED >= 0).sum(), "divided by 5"),
    "selected": (6, lambda: out()[UNEVEN].mean(), "a mean of 19 selected numbers"),
    "by masked_select": (6, lambda: out().masked_select(UNEVEN).mean(), "a mean of 19 selected numbers"),
}
WHOLES: dict[str, tuple[int, Callable[[], Tensor]]] = {
    **{name: (6, loss) for name, loss in (MEANS | SUMS).items() if name != "by tokens"},
    "texts that all ignore their last target": (2, lambda: F.cross_entropy(out(), LAST_IGNORED.flatten())),
    "divided by the samples and by accumulated batches": (6, lambda: out().sum() / (6 * 4)),
    "divided by more than there is": (6, lambda: out().sum() / (24 * 7)),
    "a temperature": (6, lambda: out().sum() / 0.07),
    "a mean, divided": (6, lambda: out().mean() / 7),
    "as many of each sample": (6, lambda: out()[THREE_OF_FOUR].mean()),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_mean_over_a_part_is_seen_with_its_count(name: str) -> None:
    num_samples, loss, expected = PARTS[name]
    root = loss().grad_fn
    assert root is not None
    assert expected in (partial_mean_by(root, num_samples) or "")


@pytest.mark.parametrize("name", WHOLES)
def test_a_mean_over_samples_is_not_taken_for_one_over_a_part(name: str) -> None:
    num_samples, loss = WHOLES[name]
    root = loss().grad_fn
    assert root is not None
    assert partial_mean_by(root, num_samples) is None


def test_nothing_is_computed_again_to_look_at_a_factor() -> None:
    calls = []

    def computed(w: Tensor) -> Tensor:
        calls.append(1)
        return (IN @ w).sum() * torch.tensor(1.5)

    loss = torch.utils.checkpoint.checkpoint(computed, W, use_reentrant=False)
    assert summed_by(loss.grad_fn, 6) is None
    assert len(calls) == 1


def noted(
    lane: Callable[..., None],
    lanes: int = LANES,
    compiled: bool = False,
    device: str = "cpu",
    of_first: int | None = None,
) -> list[str]:
    """What is said in three steps, and whether torch's own function is there afterwards.

    The batch of the first has `of_first` samples.
    """
    said: list[str] = []
    own = torch.autograd.backward
    with lockstep.start(lanes=lanes, seed=0, device=device) as run:
        run._events.subscribe(lambda event: said.append(event.text), lockstep.events.Note)
        model = Vae()
        used = torch.compile(model, backend="aot_eager") if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        run.replicate(model, optimizer)
        for step in range(3):
            for x in run.lanes(X if step else X[:of_first]):
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


@apart
def test_it_is_noted_after_a_first_batch_of_a_single_lane() -> None:
    assert len(noted(plainly, of_first=1)) == 1


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


# -- a mean over a part ----------------------------------------------------------------------------------------

TOKENS = torch.arange(13) % 4
TOKENS[8:12] = -100  # lanes 4 and 5, of six


def padded_step(weighted: bool, lanes: int = LANES) -> tuple[Tensor, float | None, list[str]]:
    """The gradient and the loss of a step on padded targets; and what is said of means in two of them."""
    said: list[str] = []
    with lockstep.start(lanes=lanes, seed=0) as run:
        run._events.subscribe(lambda event: said.append(event.text), lockstep.events.Note)
        torch.manual_seed(1)
        model = nn.Linear(12, 4)
        run.replicate(model)
        for _ in range(2):
            model.zero_grad()
            for x, y in run.lanes((X, TOKENS)):
                loss = F.cross_entropy(model(x), y)
                run.backward(loss, weight=int((y >= 0).sum()) if weighted else None)
        loss_of_batch = run.loss
    assert model.weight.grad is not None
    return model.weight.grad, loss_of_batch, [text for text in said if "mean" in text]


def test_a_mean_over_a_part_is_noted_once_and_a_weight_makes_it_that_of_the_batch() -> None:
    torch.manual_seed(1)
    model = nn.Linear(12, 4)
    loss = F.cross_entropy(model(X), TOKENS)
    loss.backward()
    assert model.weight.grad is not None
    plain = model.weight.grad
    by_samples, _, (said,) = padded_step(weighted=False)
    assert not torch.allclose(by_samples, plain)
    assert "a mean over something else than its samples (cross_entropy or nll_loss over 0 of 2 targets)" in said
    assert "weight=int((y != -100).sum())" in said
    by_targets, found, nothing = padded_step(weighted=True)
    torch.testing.assert_close(by_targets, plain)
    assert found == pytest.approx(loss.item())  # a lane without any target has a loss that is not a number
    assert nothing == []
    alone, _, nothing = padded_step(weighted=False, lanes=1)
    torch.testing.assert_close(alone, plain)
    assert nothing == []


def said_of_padding() -> list[str]:
    return padded_step(weighted=False)[2]


def test_every_worker_knows_of_a_mean_over_a_part_that_one_has_seen() -> None:
    first, second, third = on_workers(3, said_of_padding)
    assert [len(said) for said in (first, second, third)] == [1, 1, 1]
    assert "than its samples, and lanes" in first[0]  # it carries no lane with padding
    assert "over 0 of 2 targets" in third[0]


# -- samples that are compared ---------------------------------------------------------------------------------

OTHERS = torch.randn(6, 5)
VIEWS = torch.randn(12, 5)
SQUARE = torch.randn(5, 6, requires_grad=True)
SAMPLES = torch.arange(6)


def rows(x: Tensor = IN) -> Tensor:
    return F.normalize(x @ W)


COMPARED: dict[str, tuple[Callable[[], Tensor], str]] = {
    "pairs": (lambda: F.cross_entropy(rows() @ rows(OTHERS).T / 0.1, SAMPLES), "the targets 0 to 5"),
    "pairs, one side detached": (lambda: F.cross_entropy(rows() @ rows(OTHERS).detach().T, SAMPLES), "the targets 0"),
    "two views": (lambda: (rows(VIEWS) @ rows(VIEWS).T).exp().mean(), "a product of two matrices, 12 x 4 and 4 x 12"),
    "by einsum": (lambda: torch.einsum("nc,kc->nk", rows(), rows(OTHERS)).exp().mean(), "6 x 4 and 4 x 6"),
    "distances": (lambda: torch.cdist(rows(), rows(OTHERS)).mean(), "distances of two matrices, 6 x 4 and 6 x 4"),
    "statistics": (lambda: (rows().T @ rows(OTHERS)).square().mean(), "a product of two matrices, 4 x 6 and 6 x 4"),
}
APART: dict[str, Callable[[], Tensor]] = {
    **MEANS,
    "targets in order": lambda: F.cross_entropy(IN @ SQUARE, SAMPLES) + F.cross_entropy(out() @ SQUARE[:4], SAMPLES),
    "targets in order, with a bias": lambda: F.cross_entropy(F.linear(out(), SQUARE[:4].T, SQUARE[4]), SAMPLES),
    "as many features as samples": lambda: (out() @ SQUARE[:4] @ SQUARE.T).mean() + (IN @ SQUARE).mean(),
    "a transposed weight": lambda: ((IN @ W) @ SQUARE[:4].detach().requires_grad_().clone()).mean(),
    "attention": lambda: F.scaled_dot_product_attention(*(out().reshape(6, 1, 2, 2),) * 3).mean(),
    "a product for each sample": lambda: (out().reshape(6, 2, 2) @ out().reshape(6, 2, 2)).mean(),
}


@pytest.mark.parametrize("name", COMPARED)
def test_samples_that_are_compared_are_seen(name: str) -> None:
    loss, expected = COMPARED[name]
    root = loss().grad_fn
    assert root is not None
    assert expected in (compared_by([root], 6) or "")
    assert compared_by([root], 1) is None


@pytest.mark.parametrize("name", APART)
def test_samples_that_are_not_compared_are_not_taken_for_it(name: str) -> None:
    root = APART[name]().grad_fn
    assert root is not None
    assert compared_by([root], 6) is None


@pytest.mark.parametrize("name", [*PARTS, *COMPARED])
def test_a_graph_that_a_pass_has_gone_through_is_looked_at_without_an_error(name: str) -> None:
    loss = PARTS[name][1]() if name in PARTS else COMPARED[name][0]()
    loss.backward()
    assert loss.grad_fn is not None
    partial_mean_by(loss.grad_fn, 6)
    compared_by([loss.grad_fn], 6)


def contrasted(lanes: int) -> list[str]:
    said: list[str] = []
    with lockstep.start(lanes=lanes, seed=0) as run:
        run._events.subscribe(lambda event: said.append(event.text), lockstep.events.Note)
        model = nn.Linear(12, 4)
        run.replicate(model)
        for _ in range(2):
            for x in run.lanes(X):
                scores = model(x) @ model(x + 0.1).T
                run.backward(F.cross_entropy(scores, torch.arange(len(x))), weight=len(x))
    return [text for text in said if "compare" in text]


def test_a_contrastive_loss_is_noted_once_where_there_are_several_lanes() -> None:
    (said,) = contrasted(LANES)
    assert "the loss of lane 0 seems to compare samples with each other (cross_entropy with the targets 0 to 1)" in said
    assert "2 of the 13 of the batch" in said
    assert contrasted(1) == []
