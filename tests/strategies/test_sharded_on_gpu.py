"""Optimizer state that is divided among workers which have their own parameters, as on GPUs, with tensors on the CPU.

There is no GPU here: `tests/gpu` has the digests of one. All else is real: workers, shared memory.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from own_parameters import AsOnGpus
from test_sharded import (
    BATCHES,
    EVERY,
    MODELS,
    SOME,
    Between,
    _added_by_rank,
    _different,
    _digest,
    _digests,
    _digests_between,
    _dropped_by_rank,
    _nothing,
    _put_by_rank,
    _saved_and_resumed,
    _scaled_by_rank,
    _two_models,
    plain_between,
    replicated,
    some_replicated,
)
from torch import nn
from workers import on_workers, outcomes

import lockstep
from lockstep.errors import BadArgument, Misuse
from lockstep.events import Events, Note
from lockstep.gradients.bucket_set import BucketOptions, NamedParameter
from lockstep.gradients.health import HealthPlan
from lockstep.gradients.squares import SquaresPlan
from lockstep.lanes import Assignment
from lockstep.run.run import Run
from lockstep.settings.device import CPU
from lockstep.strategies import EngineOptions, Replicas, Sharded
from lockstep.strategies.sharded import offload, plan, rounds
from lockstep.wire import in_process
from lockstep.wire.generation import Generation

__all__ = ["plain_between", "replicated", "some_replicated"]

LEVELS = ("optimizer", "gradients", "parameters")


def _digests_in_many_rounds(level: str, optimizers: Mapping[str, Sequence[str]]) -> dict[str, str]:
    rounds.BUFFER_BYTES = 4096  # they cut chunks
    return _digests(AsOnGpus(level), optimizers)


@pytest.mark.parametrize("level", LEVELS)
def test_optimizers_on_gpus_have_the_digest_of_replicated(some_replicated: dict[str, str], level: str) -> None:
    for found in on_workers(3, _digests_in_many_rounds, level, SOME):
        assert found == some_replicated


@pytest.mark.soak
@pytest.mark.parametrize("level", LEVELS)
def test_every_optimizer_on_gpus_has_the_digest_of_replicated(replicated: dict[str, str], level: str) -> None:
    for found in on_workers(3, _digests_in_many_rounds, level, EVERY, limit_s=300.0):
        assert found == replicated


def _between(level: str) -> dict[str, str]:
    return _digests_between(AsOnGpus(level))


@pytest.mark.parametrize("level", LEVELS)
def test_what_a_script_does_before_an_update_on_gpus_is_done_once(plain_between: dict[str, str], level: str) -> None:
    for found in on_workers(3, _between, level):
        assert found == plain_between


def _two(level: str) -> list[str]:
    return _two_models(AsOnGpus(level))


@pytest.mark.parametrize("level", LEVELS)
def test_two_optimizers_in_turn_on_gpus_have_the_digest_of_replicated(level: str) -> None:
    assert on_workers(3, _two, level) == on_workers(1, _two_models, "replicated") * 3


def _resumed(level: str, path: str, until: int) -> str:
    return _saved_and_resumed(AsOnGpus(level), path, until)


def test_a_checkpoint_goes_on_where_state_is_divided_and_back(tmp_path: object) -> None:
    straight = on_workers(1, _saved_and_resumed, "replicated", f"{tmp_path}/straight", 6)
    mixed = f"{tmp_path}/mixed"
    on_workers(3, _resumed, "gradients", mixed, 2)
    on_workers(2, _saved_and_resumed, "sharded:parameters", mixed, 4)
    assert on_workers(2, _resumed, "optimizer", mixed, 6) == straight * 2


def _weighted(strategy: str | AsOnGpus, reduce_dtype: str | None) -> tuple[str, str]:
    """Weights that are not the numbers of samples, one lane for each worker, several buckets; the noise is measured."""
    options: dict[str, Any] = {"reduce_dtype": reduce_dtype, "bucket_bytes": 2048, "noise_every": 2}
    with lockstep.start(lanes=3, seed=1, strategy=strategy, **options) as run:
        torch.manual_seed(3)
        net = nn.Sequential(*(nn.Linear(23, 23) for _ in range(6)))
        updates = torch.optim.AdamW(net.parameters(), 1e-2)
        run.replicate(net, updates)
        for step in range(5):
            torch.manual_seed(step)
            for x, words in run.lanes((torch.randn(9, 23), torch.randint(1, 50, (9,)))):
                run.backward(net(x).square().mean(), weight=float(words.sum()))
            updates.step()
            updates.zero_grad()
        return run.digest(), repr(run.noise)


@pytest.mark.parametrize("reduce_dtype", [None, "float64"])
def test_sums_on_the_host_are_scaled_and_converted_when_they_are_read(reduce_dtype: str | None) -> None:
    assert on_workers(3, _weighted, AsOnGpus("gradients"), reduce_dtype) == (
        on_workers(1, _weighted, "replicated", reduce_dtype) * 3
    )


def _kept_until_each_second_step(strategy: str | AsOnGpus) -> str:
    """Gradients of two steps, added up in p.grad, and clipped before the second one adds its own."""
    with lockstep.start(lanes=3, seed=1, strategy=strategy) as run:
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(23, 40), nn.Linear(40, 5))
        updates = torch.optim.AdamW(net.parameters(), 1e-2)
        run.replicate(net, updates)
        for step in range(6):
            torch.manual_seed(step)
            for x in run.lanes(torch.randn(9, 23)):
                run.backward(net(x).square().mean())
            run.clip_grad_norm_(0.05)
            if step % 2:
                updates.step()
                updates.zero_grad(set_to_none=step == 3)
        return run.digest()


def test_gradients_of_several_steps_are_added_up_where_they_stand_on_the_host() -> None:
    want = on_workers(1, _kept_until_each_second_step, "replicated")
    assert on_workers(3, _kept_until_each_second_step, AsOnGpus("gradients")) == want * 3


# -- what a worker holds ------------------------------------------------------------------------------------------


def _held_by_this_worker() -> tuple[int, int, bool]:
    """Elements of state that stand in memory of this worker's own, those of the whole, and whether all are shown."""
    with lockstep.start(lanes=3, seed=1, strategy=AsOnGpus()) as run:
        torch.manual_seed(3)
        net = nn.Linear(100, 97)
        updates = torch.optim.AdamW(net.parameters(), 1e-2)
        run.replicate(net, updates)
        for _ in range(2):
            for lane in run.lanes(torch.randn(6, 100)):
                run.backward(net(lane).square().mean())
            updates.step()
        sharded = run._engine._of(updates)
        own = sum(held.numel() for chunk in sharded._chunks for held in chunk.held.values())
        whole = 2 * sum(parameter.numel() for parameter in net.parameters())
        is_shown = all(updates.state[one]["exp_avg"].shape == one.shape for one in net.parameters())
        return own, whole, is_shown


def test_each_worker_keeps_its_part_of_the_state_and_shows_all_of_it() -> None:
    found = on_workers(3, _held_by_this_worker)
    assert sum(own for own, _, _ in found) == found[0][1]
    assert max(own for own, _, _ in found) < 0.5 * found[0][1]
    assert all(is_shown for _, _, is_shown in found)


@pytest.mark.parametrize("buffer_bytes", [4096, 1 << 20])
def test_a_fingerprint_is_that_of_the_parameters_whoever_owns_them(
    monkeypatch: pytest.MonkeyPatch, buffer_bytes: int
) -> None:
    """Hosts with different numbers of workers compare theirs."""
    monkeypatch.setattr(rounds, "BUFFER_BYTES", buffer_bytes)
    parameters = [torch.randn(700, 9), torch.randn(3), torch.randn(2049).bfloat16(), torch.randn(60, 50).double()]
    sizes = [parameter.numel() for parameter in parameters]

    def found(num_workers: int) -> bytes:
        chunks = [[chunk for batch in own for chunk in batch] for own in plan.cut(sizes, num_workers)]
        return rounds.ParameterRounds(in_process(), 0, parameters, chunks).fingerprint()

    want = found(1)
    assert [found(2), found(3), found(7)] == [want] * 3
    for parameter in parameters:
        last = parameter.view(torch.uint8).flatten()[-1:]
        last ^= 1
        assert found(2) != want
        last ^= 1


# -- refused ------------------------------------------------------------------------------------------------------


def _with(between: Between) -> str:
    return _digest(AsOnGpus(), "wide", "AdamW", between)


def test_workers_that_have_changed_their_own_parameters_differently_are_refused() -> None:
    for outcome in outcomes(2, _with, _different):
        assert (outcome.error, "written to parameters" in outcome.message) == ("Disagreement", True)


def _flipped() -> tuple[str, list[str]]:
    """A bit of one worker's parameters is another one before the last update; the digest, and what was noted."""
    notes: list[str] = []

    def flip(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 0:
            run._events.subscribe(lambda event: notes.append(event.text), Note)
        if step == 2 and run.rank == 1:
            model.get_parameter("first.weight").data.view(torch.int32)[3, 5] ^= 1 << 20

    return _digest(AsOnGpus(), "wide", "AdamW", flip), notes


def test_one_of_three_whose_parameters_have_changed_is_named_and_gets_back_what_its_host_holds() -> None:
    want = on_workers(1, _digest, "replicated", "wide", "AdamW")[0]
    for digest, notes in on_workers(3, _flipped):
        assert digest == want
        assert [note for note in notes if "the parameters of worker 1 differ" in note], notes


def _compiled(strategy: str | AsOnGpus) -> tuple[str, list[str], int]:
    """The digest, what was noted, and how many parameters have left their memory."""
    notes: list[str] = []
    left: list[int] = []
    leave = offload.Offloadable.leave

    def counted(self: offload.Offloadable) -> None:
        leave(self)
        left.append(1)

    offload.Offloadable.leave = counted  # type: ignore[method-assign]
    with lockstep.start(lanes=4, seed=1, strategy=strategy) as run:
        run._events.subscribe(lambda event: notes.append(event.text), Note)
        model = MODELS["wide"]()
        updates = torch.optim.AdamW(model.parameters())
        run.replicate(model, updates)
        for step, (x, y) in enumerate(BATCHES):
            compute = torch.compile(model, backend="aot_eager") if step else model
            for own_x, own_y in run.lanes((x, y)):
                run.backward(nn.functional.cross_entropy(compute(own_x), own_y))
            updates.step()
            updates.zero_grad()
        return run.digest(), notes, len(left)


def test_parameters_of_a_script_that_compiles_stay_and_that_is_said() -> None:
    """From the step on in which it does."""
    ((want, _, none),) = on_workers(1, _compiled, "replicated")
    for digest, notes, num_left in on_workers(3, _compiled, AsOnGpus("parameters")):
        assert (digest, none) == (want, 0)
        lanes, parameters = 2, len(list(MODELS["wide"]().parameters()))
        assert 0 < num_left <= lanes * parameters  # those of the first step
        assert [note for note in notes if "has called torch.compile: parameters stay" in note], notes


def _scaled_and_flipped(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """All workers change parameters, and one of them others too: what the last update left is not what all have."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5 if step == 2 and run.rank == 1 else 0.9)


def test_parameters_that_cannot_be_healed_are_refused() -> None:
    for outcome in outcomes(3, _with, _scaled_and_flipped):
        assert (outcome.error, "written to parameters" in outcome.message) == ("Disagreement", True)


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_that_scripts_have_changed_differently_are_refused_in_the_first_update(level: str) -> None:
    for change in (_scaled_by_rank, _put_by_rank, _added_by_rank, _dropped_by_rank):
        for outcome in outcomes(3, _digest, AsOnGpus(level), "wide", "AdamW", change):
            assert (outcome.error, "left in p.grad" in outcome.message) == ("Disagreement", True), outcome


HELD: list[torch.Tensor] = []


def _write_to_old_state(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """It keeps what optimizer.state had after the first update."""
    if step == 1:
        HELD.extend(optimizer.state[one]["exp_avg"] for one in model.parameters())
    if step == 2:
        for tensor in HELD:
            tensor.data.zero_()


def test_a_write_to_a_state_tensor_of_an_earlier_update_is_refused_by_name() -> None:
    for outcome in outcomes(2, _with, _write_to_old_state):
        assert (outcome.error, "AdamW.state had before the last update" in outcome.message) == ("Misuse", True)


def _with_gaps() -> str:
    class Gaps(MODELS["wide"]):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.second.weight = nn.Parameter(torch.randn(5, 200)[:, :97])

    MODELS["gaps"] = Gaps
    return _digest(AsOnGpus(), "gaps", "AdamW", _nothing)


def test_a_parameter_with_gaps_in_memory_is_refused_by_its_name() -> None:
    outcome, _ = outcomes(2, _with_gaps)
    assert (outcome.error, "parameter second.weight" in outcome.message) == ("BadArgument", True)


def test_a_parameter_on_another_device_than_the_runs_is_refused_by_its_name() -> None:
    """Any device that is not the CPU stands for a GPU here."""
    generation = Generation(in_process(), (0,), Assignment.even(1, 1))
    options = EngineOptions(BucketOptions(), HealthPlan(), SquaresPlan(), CPU)
    engine = Sharded("optimizer").engine(options, generation, Events())
    named = [
        NamedParameter(f"p{number}", nn.Parameter(torch.zeros(3, device=device)), 0)
        for number, device in enumerate(("cpu", "meta"))
    ]
    with pytest.raises(BadArgument, match="parameter p1 is on meta, and the run's device is cpu"):
        engine.hold(Replicas(named), generation)


def _num_leaving() -> list[int]:
    """How many parameters have left in each of four steps."""
    found, leave = [0], offload.Offloadable.leave

    def counted(self: offload.Offloadable) -> None:
        found[-1] += 1
        leave(self)

    offload.Offloadable.leave = counted
    with lockstep.start(lanes=3, strategy=AsOnGpus("parameters")) as run:
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        updates = torch.optim.AdamW(net.parameters(), 1e-2)
        run.replicate(net, updates)
        for _ in range(4):
            for x in run.lanes(torch.ones(6, 4)):
                net(x).square().mean().backward()
            updates.step()
            updates.zero_grad()
            found.append(0)
    return found[:-1]


def test_all_parameters_leave_in_each_lane_of_every_step() -> None:
    assert on_workers(3, _num_leaving) == [[4] * 4] * 3


def _written_in_a_lane() -> tuple[str, bool]:
    """What optimizer.step() says of a parameter that a lane has written to, and whether it has changed another."""
    run = lockstep.start(lanes=2, seed=1, strategy=AsOnGpus("parameters"))
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run.replicate(model, optimizer)
    for number in range(2):
        for x in run.lanes(torch.ones(4, 3)):
            loss = model(x).sum()
            if number == 1:
                model[0].weight.data.mul_(2)
            run.backward(loss)
        before = model[1].bias.detach().clone()
        if number == 0:
            optimizer.step()
            optimizer.zero_grad()
    try:
        optimizer.step()
    except Misuse as refusal:
        return str(refusal), bool((model[1].bias != before).any())
    return "", True


def test_a_write_in_a_lane_is_refused_before_the_update_changes_anything() -> None:
    for said, has_changed in on_workers(2, _written_in_a_lane):
        assert said.startswith("parameter 0.weight was written inside of a lane")
        assert not has_changed
