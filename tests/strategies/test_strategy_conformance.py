"""What every strategy must do: one row for each variant, one suite for all."""

from typing import Any

import pytest
import torch
from own_parameters import AsOnGpus
from torch import nn
from training import Job, digest_after
from workers import on_workers

import lockstep
from lockstep import strategies
from lockstep.errors import BadArgument
from lockstep.events import Events
from lockstep.gradients.bucket_set import BucketOptions, NamedParameter
from lockstep.gradients.health import HealthPlan
from lockstep.gradients.plan import StepPlan
from lockstep.gradients.squares import SquaresPlan
from lockstep.lanes import Assignment
from lockstep.settings.device import CPU
from lockstep.strategies import EngineOptions, Replicas, StepEngine, Strategy
from lockstep.strategies.sharded import LEVELS
from lockstep.wire import in_process
from lockstep.wire.generation import Generation

NAMED = [strategies.Replicated(), *map(strategies.Sharded, LEVELS)]
STRATEGIES = [*NAMED, *map(AsOnGpus, LEVELS)]
X = torch.linspace(-1, 1, 36).reshape(9, 4)
NUM_LANES = 3

each_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda one: f"{type(one).__name__}-{one}")
each_named = pytest.mark.parametrize("strategy", NAMED, ids=str)


class Training:
    """A model with buffers, its engine, and steps on it, without a run around them."""

    def __init__(self, strategy: Strategy) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
        options = EngineOptions(BucketOptions(), HealthPlan(), SquaresPlan(), CPU)
        self.generation = Generation(in_process(), (0,), Assignment.even(NUM_LANES, 1))
        self.engine: StepEngine = strategy.engine(options, self.generation, Events())
        named = [NamedParameter(name, parameter, 0) for name, parameter in self.model.named_parameters()]
        self.engine.hold(Replicas(named, [self.model], [""]), self.generation)

    def compute(self, x: torch.Tensor = X, step: int = 0) -> None:
        """A step up to the end of its last lane."""
        plan = StepPlan(step, len(x), self.generation.assignment)
        self.engine.begin_loop(is_first_turn=False)
        self.engine.begin(plan, self.generation)
        for lane in plan.present:
            self.engine.begin_lane()
            self.loss(x[plan.samples(lane).start : plan.samples(lane).stop]).backward()
            self.engine.end_lane()
        self.engine.end_loop()

    def finish(self) -> None:
        self.engine.reduce([False] * 5, carries=False)
        self.engine.commit()
        self.engine.hand_over()

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(x).square().mean()
        return loss

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) > 0 and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@each_named
def test_its_string_form_makes_it_again(strategy: Strategy) -> None:
    assert strategies.parse(str(strategy)) == strategy


@each_strategy
def test_the_gradient_is_the_mean_of_the_lanes_by_their_samples(strategy: Strategy) -> None:
    training, plain = Training(strategy), Training(strategy)
    training.compute(X[:7])
    training.finish()
    shares = StepPlan(0, 7, training.generation.assignment)
    plain.engine.close()  # no hooks: what torch alone does
    total = [torch.zeros_like(p, dtype=torch.float64) for p in plain.model.parameters()]
    for lane in shares.present:
        share = X[:7][shares.samples(lane).start : shares.samples(lane).stop]
        found = torch.autograd.grad(plain.loss(share), list(plain.model.parameters()))
        total = [sum_ + len(share) / 7 * gradient.double() for sum_, gradient in zip(total, found, strict=True)]
    for ours, reference in zip(training.gradients(), total, strict=True):
        torch.testing.assert_close(ours.double(), reference, rtol=1e-5, atol=1e-7)


@each_strategy
def test_an_abandoned_step_leaves_gradients_and_buffers_as_they_were(strategy: Strategy) -> None:
    training, straight = Training(strategy), Training(strategy)
    for one in (training, straight):
        one.compute()
        one.finish()
    gradients = training.gradients()
    buffers = [buffer.clone() for buffer in training.model.buffers()]
    training.compute(X * 3, step=1)
    training.engine.abandon()
    assert same(training.gradients(), gradients)
    assert same(list(training.model.buffers()), buffers)
    for one in (training, straight):
        one.compute(step=1)
        one.finish()
    assert same(training.gradients(), straight.gradients())


@each_strategy
def test_a_step_in_another_generation_gives_the_same_bits(strategy: Strategy) -> None:
    training, straight = Training(strategy), Training(strategy)
    for one in (training, straight):
        one.compute()
        one.finish()
    training.generation.wire.close()
    training.generation = Generation(in_process(), (0,), Assignment.even(NUM_LANES, 1))
    for one in (training, straight):
        one.compute(X * 2, step=1)
        one.finish()
    assert same(training.gradients(), straight.gradients())


@each_strategy
def test_gradients_that_are_kept_share_no_memory_with_the_next_step(strategy: Strategy) -> None:
    training = Training(strategy)
    training.compute()
    training.finish()
    training.engine.keep_gradients()
    held = [p.grad for p in training.model.parameters()]
    before = training.gradients()
    for parameter in training.model.parameters():
        parameter.grad = None
    training.compute(X * 5, step=1)
    training.finish()
    assert same([gradient for gradient in held if gradient is not None], before)


@each_strategy
def test_what_it_adds_to_a_snapshot_loads_again(strategy: Strategy) -> None:
    training, tensors = Training(strategy), dict[str, torch.Tensor]()
    training.compute()
    training.finish()
    training.engine.load(training.engine.state(tensors), tensors)
    training.compute(step=1)
    training.finish()


@each_strategy
def test_held_again_it_owns_the_new_parameters_too(strategy: Strategy) -> None:
    training = Training(strategy)
    training.model.append(nn.Linear(2, 2))
    named = [NamedParameter(name, parameter, 0) for name, parameter in training.model.named_parameters()]
    training.engine.hold(Replicas(named, [training.model], [""]), training.generation)
    training.compute()
    training.finish()
    assert all(parameter.grad is not None for parameter in training.model.parameters())


def digest_under(strategy: Strategy) -> list[Any]:
    return digest_after(Job("conv", epochs=4), strategy=strategy)


@each_strategy
def test_its_digest_is_that_of_replicated_on_one_worker_on_1_and_3(strategy: Strategy) -> None:
    alone = on_workers(1, digest_under, strategies.Replicated())
    assert on_workers(1, digest_under, strategy) == alone
    assert on_workers(3, digest_under, strategy) == alone * 3


@each_named
def test_a_run_takes_it_as_an_object_and_by_its_string_form(strategy: Strategy) -> None:
    for given in (strategy, str(strategy)):
        with lockstep.start(strategy=given) as run:
            assert run._settings.strategy == str(strategy)


class Own(strategies.Replicated):
    """A strategy of the user's own that calls itself like one of lockstep's."""

    made = 0

    def engine(self, *given: Any) -> StepEngine:
        type(self).made += 1
        return super().engine(*given)


def test_an_object_of_the_users_own_is_used_itself() -> None:
    with lockstep.start(strategy=Own()):
        assert Own.made == 1
    Own.made = 0


@pytest.mark.parametrize("given", ["no such thing", "", 7, object()], ids=["other", "empty", "number", "object"])
def test_what_is_no_strategy_is_refused_with_what_is_allowed(given: Any) -> None:
    with pytest.raises(BadArgument, match="strategy"):
        lockstep.start(strategy=given)
