"""`for x, y in run.steps(loader)`: a body written for one device has the bits of the loop over run.lanes."""

import io
import os
import signal
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from launches import REPOSITORY, launch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training import Job, data, loader_of, make
from workers import on_workers, outcomes

import lockstep
from lockstep.errors import BadArgument, Misuse

JOB = Job(model="conv", epochs=3)


def _explicit(lanes: int) -> str:
    run = lockstep.start(lanes=lanes, seed=3)
    model, optimizer = make(JOB)
    run.replicate(model, optimizer)
    loader = run.shard(loader_of(JOB))
    for _ in run.epochs(JOB.epochs):
        for batch in loader:
            for x, y in run.lanes(batch):
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return run.digest()


def _plain_body(lanes: int, dies: tuple[int, int] | None = None, strategy: str = "replicated") -> str:
    """Worker 1 is killed in step `dies[0]`, in its lane `dies[1]`, counted from 0."""
    run = lockstep.start(lanes=lanes, seed=3, strategy=strategy)
    me, seen = run.rank, list[int]()
    model, optimizer = make(JOB)
    run.replicate(model, optimizer)
    loader = run.shard(loader_of(JOB))
    for _ in run.epochs(JOB.epochs):
        for x, y in run.steps(loader):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            seen.append(run.step)  # by this worker, which only this test may do
            if me == 1 and dies is not None and run.step == dies[0] and len(seen) > dies[1]:
                os.kill(os.getpid(), signal.SIGKILL)
    return run.digest()


@pytest.fixture(scope="module")
def digest() -> str:
    return on_workers(1, _explicit, 8)[0]


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_the_digest_is_that_of_the_explicit_loop_on_any_number_of_workers(num_workers: int, digest: str) -> None:
    assert set(on_workers(num_workers, _plain_body, 8)) == {digest}


def test_a_sharded_run_has_the_same_digest(digest: str) -> None:
    assert set(on_workers(2, _plain_body, 8, strategy="sharded:parameters")) == {digest}


def test_a_worker_without_lanes_makes_the_same_updates() -> None:
    """Two lanes on three workers."""
    (alone,) = on_workers(1, _explicit, 2)
    assert set(on_workers(3, _plain_body, 2)) == {alone}


def test_a_kill_in_the_middle_of_a_body_costs_nothing(digest: str) -> None:
    first, killed, last = outcomes(3, _plain_body, 8, (5, 15))
    assert killed.killed_by == signal.SIGKILL
    assert [first.value, last.value] == [digest, digest], (first, last)


def _gpt(explicit: bool) -> list[Any]:
    """As nanoGPT: clipping and a schedule for each batch, and a loss that is logged."""
    run = lockstep.start(lanes=6, seed=3)
    job = Job(model="gpt", epochs=2)
    model, optimizer = make(job)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    run.replicate(model, optimizer, scheduler=scheduler)
    loader = run.shard(loader_of(job))
    losses = []

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(run.loss)

    for _ in run.epochs(job.epochs):
        if explicit:
            for batch in loader:
                for x, y in run.lanes(batch):
                    run.backward(F.cross_entropy(model(x), y))
                update()
        else:
            for x, y in run.steps(loader, update):
                run.backward(F.cross_entropy(model(x), y))
    return [run.digest(), losses, scheduler.get_last_lr()]


def test_what_happens_once_for_each_batch_is_given_as_a_function() -> None:
    (expected,) = on_workers(1, _gpt, True)
    assert on_workers(2, _gpt, False) == [expected, expected]


def _evaluates() -> list[int]:
    run = lockstep.start(lanes=8, seed=3)
    model, optimizer = make(JOB)
    run.replicate(model, optimizer)
    model.eval()
    num_right = num_samples = 0
    with torch.no_grad():
        for x, y in run.steps(run.shard(DataLoader(TensorDataset(*data()), batch_size=50))):
            num_right += int((model(x).argmax(1) == y).sum())
            num_samples += len(x)
    return [run.total(num_right), run.total(num_samples), run.step]


def test_an_evaluation_sees_every_sample_once_and_makes_no_update() -> None:
    (alone,) = on_workers(1, _evaluates)
    assert on_workers(2, _evaluates) == [alone, alone]
    assert alone[1:] == [173, 0]


LAUNCHED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import torch.nn.functional as F
import lockstep
from training import Job, loader_of, make

run = lockstep.start(lanes=8, seed=3)
job = Job(model="conv", epochs=3)
model, optimizer = make(job)
run.replicate(model, optimizer)
loader = run.shard(loader_of(job))
for _ in run.epochs(job.epochs):
    for x, y in run.steps(loader):
        if run.step == 4 and run.is_first and not os.path.exists("died"):
            open("died", "x").close()
            os.kill(os.getpid(), signal.SIGKILL)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
run.print("digest", run.digest())
"""


@pytest.mark.parametrize("how", ["--no-copies", "--copies"])
def test_a_replacement_goes_on_in_the_middle_of_an_epoch(tmp_path: Path, digest: str, how: str) -> None:
    with launch(tmp_path, LAUNCHED.format(tests=str(REPOSITORY / "tests")), "-n", "2", how) as run:
        assert run.finish() == 0, run.shown()
    assert (tmp_path / "died").exists()
    assert f"digest {digest}" in run.lines


# -- what is refused ----------------------------------------------------------------------------------------------


class Parts:
    """A run of one worker with a small model."""

    def __init__(self, **tracked: Any) -> None:
        self.run = lockstep.start(lanes=2)
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 100)
        self.run.replicate(self.model, self.optimizer, scheduler=self.scheduler, **tracked)
        self.batches = [torch.ones(4, 2)] * 3

    def backward(self, x: torch.Tensor) -> None:
        self.run.backward(self.model(x).mean())


@pytest.fixture
def parts() -> Any:
    made = Parts()
    yield made
    made.run.failed = True
    made.run.close()


def test_a_sum_in_the_body_is_refused_with_its_line(parts: Parts) -> None:
    total = 0.0
    with pytest.raises(Misuse, match=r"`total \+= .*` \(line \d+\).*the sum would depend on the workers"):
        for x in parts.run.steps(parts.batches):
            total += float(parts.model(x).mean())


def test_what_goes_on_from_the_lane_before_is_refused_with_its_line(parts: Parts) -> None:
    best, average = 1e9, 0.0
    with pytest.raises(Misuse, match=r"`best = min\(best, .*` \(line \d+\).*what it goes on from would depend"):
        for x in parts.run.steps(parts.batches):
            best = min(best, float(parts.model(x).mean()))
    with pytest.raises(Misuse, match=r"`average = 0\.9 \* average .*` \(line \d+\)"):
        for x in parts.run.steps(parts.batches):
            average = 0.9 * average + 0.1 * float(parts.model(x).mean())


def test_what_the_body_has_set_itself_may_be_added_to(parts: Parts) -> None:
    for x in parts.run.steps(parts.batches):
        loss = parts.model(x).mean()
        loss += 0.1
        x = x * 2
        loss = loss + parts.model(x).square().mean()
        parts.run.backward(loss)
        parts.optimizer.step()
        parts.optimizer.zero_grad()
    assert parts.run.step == len(parts.batches)


def _numbered(dies: bool) -> tuple[str, list[str]]:
    """Batches are counted, and what each says is printed once; worker 1 is killed in a step that has spoken."""
    run = lockstep.start(lanes=4, seed=3)
    me = run.rank
    model, optimizer = make(JOB)
    run.replicate(model, optimizer)
    loader = run.shard(loader_of(JOB))
    with redirect_stdout(io.StringIO()) as said:
        for number, (x, y) in run.steps(enumerate(loader)):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.print(number, loss.item())
            if dies and me == 1 and run.step == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    return run.digest(), said.getvalue().splitlines()


def test_batches_may_be_counted_and_each_prints_once() -> None:
    ((digest, said),) = on_workers(1, _numbered, False)
    assert [line.split()[0] for line in said] == [str(number) for number in range(len(said))]
    assert len(said) > 2
    for found in (on_workers(3, _numbered, False), [one.value for one in outcomes(3, _numbered, True) if one.value]):
        assert {one[0] for one in found} == {digest}
        assert [one[1] for one in found if one[1]] == [said]  # on one worker


def _counted(folder: Path, resumes: bool) -> list[int]:
    """The numbers of the batches of two passes, counted from 1; after two batches of the second the run is saved."""
    with lockstep.start(lanes=2, seed=3) as run:
        model, optimizer = make(JOB)
        run.replicate(model, optimizer)
        loader = run.shard(loader_of(JOB))
        seen: list[int] = []
        num_batches = len(loader)
        if resumes:
            run.resume(folder / "saved")

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()
            if not resumes and run.step == num_batches + 2:
                run.save(folder / "saved")

        for _ in run.epochs(2):
            for number, (x, y) in run.steps(enumerate(loader, 1), update):
                run.backward(F.cross_entropy(model(x), y) * number)
                seen += [number] if number not in seen[-1:] else []
        return [*seen, num_batches]


def test_a_pass_that_is_resumed_goes_on_counting(tmp_path: Path) -> None:
    *numbers, num_batches = _counted(tmp_path, resumes=False)
    assert numbers == [*range(1, num_batches + 1)] * 2
    assert num_batches > 3
    assert _counted(tmp_path, resumes=True) == [*range(3, num_batches + 1), num_batches]


def test_enumerate_is_refused(parts: Parts) -> None:
    with pytest.raises(Misuse, match="counts the lanes of this worker, not the batches"):
        for _, _ in enumerate(parts.run.steps(parts.batches)):
            pass


def test_a_scheduler_in_the_body_is_refused(parts: Parts) -> None:
    with pytest.raises(
        Misuse,
        match=r"StepLR\.step\(\) was called in a body of run\.steps.*run\.steps\(loader, \[optimizer, function\]\)",
    ):
        for x in parts.run.steps(parts.batches):
            parts.backward(x)
            parts.optimizer.step()
            parts.scheduler.step()


def test_clipping_in_the_body_is_refused(parts: Parts) -> None:
    with pytest.raises(Misuse, match=r"was changed inside a lane of step 0, after its backward pass \(clipped"):
        for x in parts.run.steps(parts.batches):
            parts.backward(x)
            torch.nn.utils.clip_grad_norm_(parts.model.parameters(), 1e-3)
            parts.optimizer.step()


def _average_by_hand(model: nn.Module, average: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        average.setdefault(name, torch.zeros_like(parameter.data)).lerp_(parameter.data, 0.1)


def _average_by_foreach(model: nn.Module, average: dict[str, torch.Tensor]) -> None:
    kept = [average.setdefault(name, torch.zeros(one.shape)) for name, one in model.named_parameters()]
    with torch.no_grad():
        torch._foreach_lerp_(kept, list(model.parameters()), 0.1)


def _keep(model: nn.Module, average: dict[str, torch.Tensor]) -> None:
    average.update(model.state_dict())


@pytest.mark.parametrize("given", ["nothing", "the optimizer", "a list"])
@pytest.mark.parametrize("look", [_average_by_hand, _average_by_foreach, _keep])
def test_weights_that_are_read_after_the_step_in_a_body_are_refused(parts: Parts, look: Any, given: str) -> None:
    update: Any = {"nothing": None, "the optimizer": parts.optimizer, "a list": [parts.optimizer]}[given]
    with pytest.raises(
        Misuse,
        match=r"weight is used after step\(\) in a body of run\.steps.*run\.steps\(loader, \[optimizer, function\]\)",
    ):
        for x in parts.run.steps(parts.batches, update):
            parts.backward(x)
            parts.optimizer.step()
            look(parts.model, {})


def test_what_is_no_weight_may_be_read_after_the_step_and_weights_before_it(parts: Parts) -> None:
    losses = []
    for x in parts.run.steps(parts.batches):
        loss = parts.model(x).mean() + sum(one.square().sum() for one in parts.model.parameters())
        parts.run.backward(loss)
        parts.optimizer.step()
        parts.optimizer.zero_grad()
        losses.append(loss.detach() * 2)
    assert parts.run.step == len(parts.batches)
    assert torch.stack(losses).isfinite().all()


@pytest.mark.parametrize("times", [0, 2])
def test_a_body_that_does_not_make_one_update_is_refused(parts: Parts, times: int) -> None:
    with pytest.raises(Misuse, match=rf"has called step\(\) of optimizer {times} times"):
        for x in parts.run.steps(parts.batches):
            parts.backward(x)
            for _ in range(times):
                parts.optimizer.step()


def test_a_closure_and_gradients_that_stay_are_refused(parts: Parts) -> None:
    with pytest.raises(Misuse, match=r"optimizer\.step\(closure\)"):
        for x in parts.run.steps(parts.batches):
            parts.optimizer.step(lambda x=x: parts.model(x).mean())


def test_gradients_that_are_set_to_zero_are_refused(parts: Parts) -> None:
    with pytest.raises(Misuse, match="set_to_none=False"):
        for _ in parts.run.steps(parts.batches):
            parts.optimizer.zero_grad(set_to_none=False)


def test_an_update_of_ones_own_leaves_none_in_the_body(parts: Parts) -> None:
    with pytest.raises(Misuse, match=r"optimizer\.step\(\) inside of run\.lanes"):
        for x in parts.run.steps(parts.batches, parts.optimizer.step):
            parts.backward(x)
            parts.optimizer.step()


def test_a_loop_that_turns_into_an_evaluation_is_refused(parts: Parts) -> None:
    with pytest.raises(Misuse, match="with the model in eval mode"):
        for x in parts.run.steps(parts.batches):
            parts.backward(x)
            parts.optimizer.step()
            parts.model.eval()


def test_optimizers_are_as_before_after_the_loop(parts: Parts) -> None:
    before = parts.optimizer.step, parts.optimizer.zero_grad
    for x in parts.run.steps(parts.batches):
        assert (parts.optimizer.step, parts.optimizer.zero_grad) != before
        parts.backward(x)
        parts.optimizer.step()
    assert (parts.optimizer.step, parts.optimizer.zero_grad) == before
    parts.scheduler.step()
    assert parts.run.step == 3


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_scheduler_is_stepped_after_the_update_where_its_step_is_given(num_workers: int) -> None:
    assert len({*on_workers(num_workers, _scheduled, False), *on_workers(1, _scheduled, True)}) == 1


def _scheduled(by_lanes: bool) -> str:
    run = lockstep.start(lanes=4)
    model, optimizer = make(Job())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    run.replicate(model, optimizer, scheduler=scheduler)
    x, y = data()
    batches = [(x[n : n + 16], y[n : n + 16]) for n in (0, 16, 32, 48, 64)]
    if by_lanes:
        for batch in batches:
            for inputs, targets in run.lanes(batch):
                F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    else:
        for inputs, targets in run.steps(batches, [optimizer, scheduler.step]):
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    return run.digest()


@pytest.mark.parametrize("order", ["function first", "a number"])
def test_what_is_neither_optimizer_nor_function_or_stands_in_the_wrong_order_is_refused(
    parts: Parts, order: str
) -> None:
    update: Any = [print, parts.optimizer] if order == "function first" else [parts.optimizer, 3]
    with pytest.raises(BadArgument, match="a list of optimizers in the order of their updates, and after them"):
        parts.run.steps(parts.batches, update)


def test_a_grad_scaler_is_refused() -> None:
    made = Parts(scaler=torch.amp.GradScaler("cpu"))
    try:
        with pytest.raises(Misuse, match="GradScaler"):
            made.run.steps(made.batches)
    finally:
        made.run.close()
