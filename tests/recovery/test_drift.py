"""A bit of one worker's state is flipped between two steps: found, named and healed."""

import random
import signal
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from disturbed import Plan, disturbed, observed
from faults import Fault
from torch import nn
from trainings import Training, Work
from workers import on_workers

import lockstep
from lockstep.errors import LockstepError
from lockstep.events import Note

KINDS = ["parameter", "buffer", "moment"]


def _flips(drift_every: int, model: str = "conv") -> Training:
    return Training(model=model, options=(("drift_every", drift_every),))


def _tensors(work: Work, kind: str) -> Iterator[torch.Tensor]:
    if kind == "parameter":
        yield from (parameter.data for parameter in work.model.parameters())
    elif kind == "buffer":
        yield from work.model.buffers()
    else:
        for state in work.optimizer.state.values():
            yield from (value for value in state.values() if torch.is_tensor(value))


def _flip(seed: int, kind: str, step: int, victim: int, number: int, work: Work) -> None:
    """One bit of one tensor, on one worker, before `step`."""
    if (number, work.run.step) != (victim, step):
        return
    chance = random.Random(seed)
    tensor = chance.choice(list(_tensors(work, kind)))
    data = tensor.view(-1).view(torch.uint8)
    data[chance.randrange(data.numel())] ^= 1 << chance.randrange(8)


def _check_healed(seed: int) -> None:
    chance = random.Random(seed)
    drift_every, victim, kind = chance.randint(1, 3), chance.randrange(3), KINDS[seed % 3]
    step = drift_every * chance.randint(1, 2)  # just before the workers compare
    plan = Plan(extra=partial(_flip, seed, kind, step, victim))
    result = disturbed(_flips(drift_every), 3, plan)
    for said in result.values("said"):
        said = [text for text in said if not text.startswith("BatchNorm sees")]
        assert len(said) == 1, said
        assert f"step {step}" in said[0]
        assert f"worker {victim}" in said[0]


@pytest.mark.parametrize("seed", range(8))
def test_a_flipped_bit_is_found_named_and_healed(seed: int) -> None:
    _check_healed(seed)


@pytest.mark.soak
def test_a_hundred_flipped_bits_are_found_named_and_healed() -> None:
    for seed in range(100):
        _check_healed(seed)


def _noted_by_rank(strategy: str) -> tuple[list[str], int]:
    """A script that changes gradients on one worker alone: what is said of it, and in which step the run ended."""
    notes: list[str] = []
    with lockstep.start(lanes=3, seed=1, strategy=strategy) as run:
        run._events.subscribe(lambda event: notes.append(event.text), Note)
        net = nn.Linear(4, 3)
        updates = torch.optim.SGD(net.parameters(), 1e-2)
        run.replicate(net, updates)
        try:
            for _ in range(4):
                for lane in run.lanes(torch.ones(6, 4)):
                    run.backward(net(lane).square().mean())
                if run.rank == 1:
                    net.weight.grad.mul_(0.5)
                updates.step()
        except LockstepError as error:
            notes.append(str(error))
        return notes, run.step


def test_a_script_that_changes_gradients_on_one_worker_is_found_in_the_first_steps() -> None:
    for notes, step in on_workers(3, _noted_by_rank, "replicated"):
        assert [note for note in notes if "step 1: worker 1 has drifted" in note and "weight" in note], notes
        assert step == 4
    for notes, step in on_workers(3, _noted_by_rank, "sharded:optimizer"):
        assert [note for note in notes if "left in p.grad" in note], notes
        assert step == 1


def test_of_two_workers_that_differ_none_can_be_healed_and_the_tensor_is_named() -> None:
    plan = Plan(extra=partial(_flip, 3, "parameter", 2, 1))
    result = observed(_flips(1, "mlp"), 2, plan)
    for outcome in result.outcomes:
        assert outcome.error == "Misuse"
        assert "body." in outcome.message


@pytest.mark.parametrize("worker", [0, 2])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_while_a_drifted_worker_is_healed_costs_nothing(when: str, worker: int) -> None:
    plan = Plan((Fault(worker, 2, f"{when} heals"),), extra=partial(_flip, 3, "parameter", 2, 1))
    result = disturbed(_flips(1, "mlp"), 4, plan)
    assert result.outcomes[worker].killed_by == signal.SIGKILL
