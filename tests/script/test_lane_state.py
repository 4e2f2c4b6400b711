"""What the code of a lane keeps for the next one is noted by its name."""

import math
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from workers import on_workers

import lockstep
from lockstep import Run
from lockstep.errors import Misuse

X, Y = torch.linspace(-1, 1, 24).view(8, 3), torch.arange(8) % 2


def notes(num_workers: int, script: Callable[[Run], None], lanes: int = 4) -> list[str]:
    """What the first worker noted."""

    def job() -> list[str]:
        said: list[str] = []
        with lockstep.start(lanes=lanes, seed=0) as run:
            run._events.subscribe(lambda event: said.append(event.text), lockstep.events.Note)
            script(run)
        return [text for text in said if "BatchNorm sees" not in text]

    return list(on_workers(num_workers, job)[0])


def train(run: Run, model: nn.Module, *, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.replicate(model, optimizer)
    for _ in range(steps):
        for x, y in run.lanes((X, Y)):
            run.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(3, 2), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x) / math.exp(-0.1 * self.calls)


class Remembers(nn.Linear):
    """What it keeps is only looked at."""

    def forward(self, x: Tensor) -> Tensor:
        self.shown, self.size = x, len(x)
        return super().forward(x)


class Queue(nn.Linear):
    queue: Tensor
    place: Tensor

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("queue", torch.zeros(8, 2))
        self.register_buffer("place", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.queue[: len(x)] = out.detach()
        self.place += len(x)
        return out


class Recurrent(nn.Linear):
    """Its state goes by a variable from one batch to the next."""

    state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        before = self.state
        out = super().forward(x) if before is None else super().forward(x) + before
        self.state = out.detach().mean(0)
        return out


class Averaging(nn.Linear):
    """There is None at first, and one statement goes on from what is there later."""

    average: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.average = out.detach().mean() if self.average is None else 0.9 * self.average + 0.1 * out.detach().mean()
        return out - self.average


class Masked(nn.Linear):
    """Makes a mask once, and another one for each size."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.mask: Tensor | None = None
        self.scale: Tensor | None = None
        self.of_size: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask
        if mask is None:
            mask = torch.ones(3)
            self.mask = mask
        self.scale = self.scale if self.scale is not None else torch.ones(2)
        if len(x) not in self.of_size:
            self.of_size[len(x)] = torch.ones(len(x), 1)
        return super().forward(x * mask * self.of_size[len(x)]) * self.scale


@pytest.mark.parametrize("num_workers", [1, 4])
def test_state_that_goes_by_a_variable_is_noted(num_workers: int) -> None:
    (note,) = notes(num_workers, lambda run: train(run, Recurrent(3, 2)))
    assert "`self.state = out.detach().mean(0)` (line" in note
    assert "it moves once for each lane of this worker" in note


@pytest.mark.parametrize("num_workers", [1, 3])
def test_an_average_that_begins_with_none_is_noted(num_workers: int) -> None:
    (note,) = notes(num_workers, lambda run: train(run, Averaging(3, 2)))
    assert "`self.average = out.detach().mean() if self.average is None else" in note


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_what_is_made_once_is_not_noted(num_workers: int) -> None:
    assert notes(num_workers, lambda run: train(run, Masked(), steps=4)) == []


class Draws(nn.Linear):
    """Multiplies by numbers that it draws where they are not there yet."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.kept: Tensor | None = None
        self.of_size: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.drawn(x))

    def drawn(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = torch.bernoulli(torch.full((3,), 0.5))
        return self.kept


class DrawsByVariable(Draws):
    def drawn(self, x: Tensor) -> Tensor:
        kept = self.kept
        if kept is None:
            kept = torch.empty(3).uniform_(0.5, 1.5)
            self.kept = kept
        return kept


class DrawsInOneExpression(Draws):
    def drawn(self, x: Tensor) -> Tensor:
        self.kept = torch.rand(3) if self.kept is None else self.kept
        return self.kept


class DrawsForEachSize(Draws):
    def drawn(self, x: Tensor) -> Tensor:
        if len(x) not in self.of_size:
            self.of_size[len(x)] = torch.randn(len(x), 1)
        return self.of_size[len(x)]


class DrawsInEachLane(Draws):
    fresh: Tensor | None = None

    def drawn(self, x: Tensor) -> Tensor:
        self.fresh = None
        if self.fresh is None:
            self.fresh = torch.rand(3)
        return self.fresh


class DrawsSomethingElse(Draws):
    """Keeps ones; the noise, which it draws in training, is another one each time."""

    def drawn(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = torch.ones(3)
        if self.training:
            self.noise = torch.randn(3)
        return self.kept + 0.1 * self.noise


@pytest.mark.parametrize("num_workers", [1, 4])
@pytest.mark.parametrize("model", [Draws, DrawsByVariable, DrawsInOneExpression, DrawsForEachSize])
def test_what_is_drawn_once_and_kept_is_noted(num_workers: int, model: type[Draws]) -> None:
    (note,) = notes(num_workers, lambda run: train(run, model(), steps=3))
    assert "a lane keeps something for the next one, by `self." in note
    assert "each worker draws it in its first lane" in note


@pytest.mark.parametrize("model", [DrawsInEachLane, DrawsSomethingElse])
def test_what_is_drawn_in_each_lane_is_not_noted(model: type[Draws]) -> None:
    assert notes(1, lambda run: train(run, model(), steps=3)) == []


class Centred(nn.Module):
    """A loss with a running average, and no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(2))

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(out - self.centre, y)
        self.centre = 0.9 * self.centre + 0.1 * out.detach().mean(0)
        return loss


def _centred(replicated: bool) -> list[str]:
    said: list[str] = []
    with lockstep.start(lanes=4, seed=0) as run:
        run._events.subscribe(lambda event: said.append(event.text), lockstep.events.Note)
        model, loss = nn.Linear(3, 2), Centred()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if replicated:
            run.replicate(loss)
        run.replicate(model, optimizer, loss=loss)
        for step in range(3):
            for x, y in run.lanes((X + step, Y)):
                run.backward(loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        return [run.digest(), *said]


def test_a_loss_with_buffers_and_no_parameters_is_a_model_too() -> None:
    digest, note = on_workers(3, _centred, True)[0]
    assert "lanes write centre of Centred: after a step such a buffer is the mean" in note
    assert on_workers(1, _centred, True)[0][0] == digest
    other, note = on_workers(3, _centred, False)[0]
    assert "centre of Centred, which is no model of the run (what run.replicate is given by a name" in note
    assert on_workers(1, _centred, False)[0][0] != other


class Threshold:
    """Not a module, and never made."""

    mean = 1.0


_smooth = 1.0


def _weight(loss: Tensor) -> float:
    global _smooth
    now = 0.9 * _smooth + 0.1 * loss.item()
    _smooth = now
    before = Threshold.mean
    Threshold.mean = 0.5 * before + 0.5 * loss.item()
    return before * now


def _kept_in_variables(run: Run) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.replicate(model, optimizer)
    seen: dict[str, float] = {}
    history, best, at, last = np.zeros(4), 1e9, 0.0, 0.0
    for step in range(4):
        for x, y in run.lanes((X + step, Y)):
            loss, now = F.cross_entropy(model(x), y) / (step + 1), time.perf_counter()
            taken, at = now - at, now
            print(f"{taken} {last}")  # what is only shown is not noted
            last = loss.item()
            before, old = seen.get("loss", 0.0), history[0]
            if loss.item() < best:
                best = loss.item()
            run.backward(loss * (1 + before + float(old) + best) * _weight(loss))  # two more
            seen["loss"] = loss.item()
            history[0] = loss.item()
        optimizer.step()
        optimizer.zero_grad()


def test_variables_that_lanes_read_and_write_are_noted_on_several_workers() -> None:
    said = " ".join(notes(2, _kept_in_variables))
    words = ("`seen['loss'] = loss.item()`", "`history[0] = loss.item()`", "`best = loss.item()`", " and 2 more: ")
    assert all(word in said for word in words), said


def _hidden_state(run: Run) -> None:
    model, hidden = nn.Linear(3, 2), None
    run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        for x, y in run.lanes((X + step, Y)):
            out = model(x) if hidden is None else model(x) + hidden
            hidden = out.detach().mean(0)
            run.backward(F.cross_entropy(out, y))


def _loss_by_its_average(run: Run) -> None:
    model, average, seen = nn.Linear(3, 2), 1.0, 0
    run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in run.lanes((X, Y)):
        loss = F.cross_entropy(model(x), y)
        seen += len(x)
        average = 0.9 * average + 0.1 * loss.item()
        run.backward(loss / average)
    print(average, seen)


def _average_that_is_shown(run: Run) -> None:
    model, average, taken, seen = nn.Linear(3, 2), 1.0, 0.0, 0
    run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in run.lanes((X, Y)):
        loss, now = F.cross_entropy(model(x), y), time.perf_counter()
        run.backward(loss)
        seen += len(x)
        average = 0.9 * average + 0.1 * loss.item()
        taken = now - taken
    print(average, taken, seen)
    assert seen > 7


def test_what_training_depends_on_is_noted_on_one_worker_too() -> None:
    (hidden,), (average,) = notes(1, _hidden_state), notes(1, _loss_by_its_average)
    assert "by `hidden = out.detach().mean(0)` (line" in hidden
    assert "by `average = 0.9 * average + 0.1 * loss.item()` (line" in average
    (variables,) = notes(1, _kept_in_variables)
    assert "`seen['loss'] = loss.item()`" in variables
    assert notes(1, _hidden_state, lanes=1) == []
    assert notes(1, _average_that_is_shown) == []


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_counter_of_the_model_is_noted_on_any_number_of_workers(num_workers: int) -> None:
    (note,) = notes(num_workers, lambda run: train(run, Annealed()))
    assert note.startswith("a lane keeps something for the next one, by `self.calls += 1` (line")
    assert "of test_lane_state.py: it moves once for each lane of this worker" in note
    assert "run.carried" in note


class CountedByClass(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return super().forward(x)


class CountedFromClass(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize("kind", [CountedByClass, CountedFromClass])
def test_a_counter_of_its_class_is_noted_too(kind: type[nn.Linear]) -> None:
    def script(run: Run) -> None:
        model = kind(3, 2)
        model(X)
        train(run, model)

    (note,) = notes(1, script)
    assert "calls += 1` (line" in note


def test_a_module_that_was_not_made_to_its_end_does_no_harm() -> None:
    half = Annealed.__new__(Annealed)
    assert notes(1, lambda run: train(run, nn.Linear(3, 2))) == []
    assert isinstance(half, nn.Module)


def test_what_is_only_looked_at_is_not_noted() -> None:
    assert notes(2, lambda run: train(run, Remembers(3, 2))) == []


def test_one_lane_is_what_a_plain_loop_is() -> None:
    assert notes(1, lambda run: train(run, Annealed()), lanes=1) == []
    assert notes(1, lambda run: train(run, Queue()), lanes=1) == []


def test_buffers_that_are_no_averages_are_noted() -> None:
    (note,) = notes(1, lambda run: train(run, Queue()))
    assert note.startswith("lanes write queue of Queue, place of Queue: after a step such a buffer is the mean")
    assert "docs/lanes.md" in note


class OwnNorm(nn.BatchNorm1d):
    pass


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, OwnNorm])
def test_statistics_of_torchs_layers_are_averages(norm: type[nn.BatchNorm1d]) -> None:
    assert notes(1, lambda run: train(run, nn.Sequential(nn.Linear(3, 4), norm(4), nn.Linear(4, 2)))) == []


def test_a_module_that_the_run_was_not_given_is_noted_if_lanes_write_its_buffers() -> None:
    def script(run: Run, frozen: bool) -> None:
        model, teacher = nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.replicate(model, optimizer)
        if frozen:
            teacher.eval()
        for x, _ in run.lanes((X, Y)):
            run.backward(F.mse_loss(model(x), teacher(x).detach()))
        optimizer.step()

    (note,) = notes(2, lambda run: script(run, frozen=False))
    assert note.startswith("lanes write num_batches_tracked of BatchNorm1d, which is no model of the run")
    assert notes(2, lambda run: script(run, frozen=True)) == []


class Accuracy:
    def __init__(self) -> None:
        self.right = self.seen = 0

    def __call__(self, scores: Tensor, y: Tensor) -> None:
        self.right += int((scores.argmax(1) == y).sum())
        self.seen += len(y)


class Evaluation:
    """As trainers are written: what is added up is in attributes."""

    def __init__(self, run: Run, *, totals: bool) -> None:
        self.run, self.totals, self.model = run, totals, nn.Linear(3, 2)
        run.replicate(self.model)

    def __call__(self) -> None:
        self.right = self.weight = 0
        self.model.eval()
        for x, y in self.run.lanes((X, Y)):
            self.count(self.model(x), y)
        if self.totals:
            assert 0 <= self.run.total(self.weight) <= 8

    def count(self, scores: Tensor, y: Tensor) -> None:
        if self.totals:
            self.weight += len(y)
        else:
            self.right += int((scores.argmax(1) == y).sum())


def test_sums_in_attributes_are_noted_on_several_workers() -> None:
    assert notes(1, lambda run: Evaluation(run, totals=False)()) == []
    (note,) = notes(2, lambda run: Evaluation(run, totals=False)())
    assert "by `self.right += int((scores.argmax(1) == y).sum())` (line" in note
    assert "a worker computes its own lanes only" in note
    assert "run.total adds up what all lanes hold" in note


def test_sums_in_attributes_that_are_totalled_are_not() -> None:
    assert notes(2, lambda run: Evaluation(run, totals=True)()) == []


def test_a_metric_that_is_called_is_noted() -> None:
    def script(run: Run) -> None:
        model, accuracy = nn.Linear(3, 2), Accuracy()
        run.replicate(model)
        model.eval()
        for x, y in run.lanes((X, Y)):
            accuracy(model(x), y)

    (note,) = notes(2, script)
    assert "by `self.right += " in note
    assert "`self.seen += len(y)`" in note


drawn = 0


def weight() -> float:
    global drawn
    drawn += 1
    return 1 / drawn


def test_a_global_number_and_a_variable_of_the_loop_are_noted() -> None:
    def outside(run: Run) -> None:
        model = nn.Linear(3, 2)
        run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y in run.lanes((X, Y)):
            run.backward(weight() * F.cross_entropy(model(x), y))

    def inside(run: Run) -> None:
        model, turns = nn.Linear(3, 2), 0
        run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y in run.lanes((X, Y)):
            turns = turns + 1
            run.backward(F.cross_entropy(model(x), y) / turns)

    for num_workers in (1, 2):
        (first,), (second,) = (notes(num_workers, script) for script in (outside, inside))
        assert "by `drawn += 1` (line" in first
        assert "by `turns = turns + 1` (line" in second


def test_a_loop_that_is_left_by_break_is_refused_as_it_was() -> None:
    def script(run: Run) -> None:
        model = nn.Linear(3, 2)
        run.replicate(model)
        for _ in run.lanes((X, Y)):
            break
        with pytest.raises(Misuse, match="was left by break"):
            run.lanes((X, Y))

    assert notes(2, script) == []


def lanes_of(run: Run) -> Iterator[tuple[Tensor, Tensor]]:
    yield from run.lanes((X, Y))


def test_a_loop_through_a_generator_of_the_scripts_is_looked_at_too() -> None:
    def script(run: Run) -> None:
        model, accuracy = nn.Linear(3, 2), Accuracy()
        run.replicate(model)
        model.eval()
        for x, y in lanes_of(run):
            accuracy(model(x), y)

    (note,) = notes(2, script)
    assert "by `self.right += " in note


class Drawing(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)
        self.chance = torch.Generator().manual_seed(5)

    def begin_epoch(self, epoch: int) -> None:
        self.chance.manual_seed(epoch)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn(x.shape, generator=self.chance))


class Setting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)
        self.set_each_time = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        self.set_each_time.manual_seed(torch.initial_seed())
        return super().forward(x + torch.randn(x.shape, generator=self.set_each_time))


def draws_in_the_loop(run: Run) -> None:
    rng, unused, made_here = np.random.default_rng(0), np.random.default_rng(1), np.random.default_rng(2)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.replicate(model, optimizer)
    for x, y in run.lanes((X, Y)):
        made_here = np.random.default_rng(torch.initial_seed())
        run.backward(F.cross_entropy(model(float(rng.random() + made_here.random()) * x), y))
    assert unused is not None


def draws_from_the_global_ones(run: Run) -> None:
    mine, model = torch.default_generator, nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.replicate(model, optimizer)
    for x, y in run.lanes((X, Y)):
        run.backward(F.cross_entropy(model(x + torch.randn(x.shape, generator=mine)), y))


DRAWN = "lanes draw from {}, a random generator of the script's own"


@pytest.mark.parametrize("workers", [1, 3])
def test_a_generator_of_the_scripts_own_from_which_lanes_draw_is_noted(workers: int) -> None:
    [of_model] = notes(workers, lambda run: train(run, Drawing()))
    [of_loop] = notes(workers, draws_in_the_loop)
    assert DRAWN.format("`chance` of model") in of_model or DRAWN.format("`chance` of Drawing") in of_model
    assert DRAWN.format("`rng`") in of_loop


def test_one_that_is_set_in_each_lane_and_those_that_the_run_sets_are_not() -> None:
    assert notes(2, lambda run: train(run, Setting())) == []
    assert notes(2, draws_from_the_global_ones) == []
