"""Graphs that are kept from one lane, or one loop over lanes, to another: refused with what to write instead."""

import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node
from workers import on_workers, outcomes

import lockstep
from lockstep.errors import Misuse, advise
from lockstep.gradients.autograd_graph import made_in
from lockstep.launch.channels.failure import Failure
from lockstep.launch.events import RunFailed
from lockstep.launch.supervision.messages import message as launcher_message

LANES = 6
X = torch.randn(13, 8, generator=torch.Generator().manual_seed(5))
REFUSED = re.compile(
    r"a backward pass of step \d goes through \w+Backward\d, a part of the graph that was made in another lane.*"
    r"a graph made in one loop over run\.lanes cannot be used in another.*Compute it again in this loop, or detach it"
)
INPLACE = "one of the variables needed for gradient computation has been modified by an inplace operation: [...]"


def gan(lanes: int, kept: str, device: str = "cpu") -> list[Any]:
    """DCGAN's two loops; `kept`: what of the first loop's generated samples the second uses."""
    torch.manual_seed(1)
    with lockstep.start(lanes=lanes, seed=0, recover=False, device=device) as run:
        make = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8))
        judge = nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(), nn.Linear(8, 1))
        for_make, for_judge = (torch.optim.SGD(model.parameters(), 0.1) for model in (make, judge))
        run.replicate(make, for_make)
        run.replicate(judge, for_judge)
        for _ in range(2):
            samples: list[Tensor] = []
            for x in run.lanes(X.repeat(2, 1)):
                samples.append(make(torch.randn(len(x), 4, device=device)))
                loss = judged(judge, x, 1.0) + judged(judge, samples[-1].detach(), 0.0)
                loss.backward()
            for_judge.step()
            for_judge.zero_grad()
            for number, x in enumerate(run.lanes(X.repeat(2, 1))):
                fake = samples[number] if kept == "graph" else make(torch.randn(len(x), 4, device=device))
                fake = fake + samples[number].detach() if kept == "values" else fake
                judged(judge, fake, 1.0).backward()
            for_make.step()
            for_make.zero_grad()
            for_judge.zero_grad()
        return [run.step, run.digest()]


def judged(judge: nn.Module, x: Tensor, wanted: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(judge(x), torch.full((len(x), 1), wanted, device=x.device))


@pytest.mark.parametrize(("num_workers", "lanes"), [(1, LANES), (2, LANES), (3, LANES), (4, LANES), (1, 1), (2, 1)])
def test_a_graph_of_one_loop_is_refused_in_the_next(num_workers: int, lanes: int) -> None:
    found = outcomes(num_workers, gan, lanes, "graph")
    result = [outcome for outcome in found if outcome.error == "Misuse"]
    assert result
    assert all(REFUSED.match(outcome.message) for outcome in result)
    assert all(outcome.error in ("Misuse", "WorkerLost") for outcome in found)


@pytest.mark.parametrize("kept", ["nothing", "values"])
def test_what_is_computed_again_or_detached_is_legal(kept: str) -> None:
    alone = gan(LANES, kept)
    for num_workers in (2, 3) if kept == "nothing" else ():
        assert on_workers(num_workers, gan, LANES, kept) == [alone] * num_workers


def carried() -> None:
    """A recurrent state that goes on from lane to lane with its graph."""
    with lockstep.start(lanes=LANES) as run:
        cell = nn.RNNCell(8, 4)
        run.replicate(cell)
        state = torch.zeros(1, 4)
        for x in run.lanes(X):
            for row in x:
                state = cell(row[None], state)
            state.square().mean().backward(retain_graph=True)


def test_a_graph_of_one_lane_is_refused_in_the_next() -> None:
    with pytest.raises(Misuse, match=REFUSED):
        carried()


def made_outside() -> list[float]:
    """A graph that no lane has made, used by all of them; and one made between two loops."""
    torch.manual_seed(1)
    with lockstep.start(lanes=LANES) as run:
        model, scale = nn.Linear(8, 4), nn.Parameter(torch.ones(4))
        run.replicate(nn.ModuleList([model, nn.ParameterList([scale])]))
        factor = scale.exp()
        for x in run.lanes(X):
            (model(x) * factor).square().mean().backward(retain_graph=True)
        factor = scale.exp() * 2
        for x in run.lanes(X):
            (model(x) * factor).square().mean().backward(retain_graph=True)
        assert scale.grad is not None
        return scale.grad.tolist()


def test_a_graph_made_outside_of_all_lanes_is_legal() -> None:
    alone = made_outside()
    assert on_workers(2, made_outside) == [alone] * 2


def made_by_a_backward_pass(device: str = "cpu") -> list[Any]:
    """A penalty on the gradient: part of the graph is made by autograd itself, on a GPU by a thread of its own."""
    torch.manual_seed(1)
    with lockstep.start(lanes=LANES, device=device) as run:
        model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))
        run.replicate(model)
        for _ in range(2):
            for x in run.lanes(X):
                x.requires_grad_()
                out = model(x).sum()
                (slope,) = torch.autograd.grad(out, x, create_graph=True)
                (out + slope.square().sum()).backward()
        return [run.step, run.digest()]


def test_a_graph_made_by_a_backward_pass_of_the_same_lane_is_legal() -> None:
    alone = made_by_a_backward_pass()
    assert on_workers(3, made_by_a_backward_pass) == [alone] * 3


@pytest.mark.cuda
def test_so_is_one_that_the_gpus_own_thread_has_made() -> None:
    assert made_by_a_backward_pass("cuda")[0] == 2


@pytest.mark.cuda
def test_a_graph_of_one_loop_is_refused_in_the_next_on_a_gpu() -> None:
    with pytest.raises(Misuse, match=REFUSED):
        gan(LANES, "graph", "cuda")


def node_of(tensor: Tensor) -> Node:
    assert tensor.grad_fn is not None
    return tensor.grad_fn


def test_numbers_of_several_threads_tell_nothing() -> None:
    weight = torch.ones(3, requires_grad=True)
    begin = node_of(weight * 1)._sequence_nr()
    inner = weight.exp()
    with ThreadPoolExecutor(1) as thread:  # its nodes are numbered from 0
        outer = thread.submit(inner.exp).result()
    both, one = outer + inner, inner.exp()
    assert made_in([(begin, begin + 2)], [node_of(one)]) == "ExpBackward0"
    assert made_in([(begin + 9, begin + 99)], [node_of(one)]) is None
    assert made_in([(0, 1)], [node_of(both)]) is None


# -- where torch itself raises, later in the run --------------------------------------------------------------


def kept_later(backward: Callable[[lockstep.Run, Tensor], None]) -> None:
    with lockstep.start(lanes=LANES) as run:
        model = nn.Linear(8, 4)
        run.replicate(model)
        for step in range(3):
            for number, x in enumerate(run.lanes(X)):
                if step < 2 or number == 0:
                    loss = model(x).square().mean()
                backward(run, loss)


def test_an_error_of_torchs_graph_carries_a_hint() -> None:
    with pytest.raises(RuntimeError, match="a second time") as raised:
        kept_later(lambda run, loss: run.backward(loss))
    (note,) = raised.value.__notes__
    assert "A graph made in one loop over run.lanes, or in one lane, cannot be used in another" in note


def test_an_error_that_ends_the_process_carries_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    with lockstep.start():
        sys.excepthook(RuntimeError, RuntimeError(INPLACE), None)
    assert "cannot be used in another" in capsys.readouterr().err


def test_the_hint_is_given_once_and_to_no_other_error() -> None:
    error, other = RuntimeError(INPLACE), RuntimeError("out of memory")
    for one in (error, error, other):
        advise(one)
    assert len(error.__notes__) == 1
    assert not hasattr(other, "__notes__")


def test_the_launcher_tells_the_hint(tmp_path: Any) -> None:
    def failed(message: str) -> str:
        return launcher_message(RunFailed(Failure.of(RuntimeError(message), 0, 7), (), "", 1, str(tmp_path)))

    assert "cannot be used in another" in failed(INPLACE)
    assert "cannot be used in another" not in failed("something else")
