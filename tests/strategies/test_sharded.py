"""Sharded strategies: the bits of the replicated one, whatever the optimizer, and whatever a script does between."""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from divisible import OPTIMIZERS, Wide
from torch import nn
from training import Convolutional, Gpt
from workers import on_workers, outcomes

import lockstep
from lockstep.errors import BadArgument, Disagreement
from lockstep.run.run import Run
from lockstep.strategies import Strategy
from lockstep.strategies.sharded import plan
from lockstep.strategies.sharded.fused import KernelByBatches
from lockstep.strategies.sharded.optimizer import BY_TENSOR, ELEMENTWISE

MODELS: dict[str, Callable[[], nn.Module]] = {"wide": Wide, "gpt": Gpt, "conv": Convolutional}
BATCHES = [
    (torch.randn(21, 12, generator=g), torch.randint(0, 5, (21,), generator=g))
    for g in map(torch.Generator().manual_seed, range(3))
]

Between = Callable[[Run, nn.Module, torch.optim.Optimizer, int], None]


def _nothing(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Between the gradient and the update."""


def _digest(strategy: str | Strategy, model: str, optimizer: str, between: Between = _nothing, **options: Any) -> str:
    with lockstep.start(lanes=4, seed=1, strategy=strategy, **options) as run:
        torch.manual_seed(3)
        net = MODELS[model]()
        updates = OPTIMIZERS[optimizer](net.parameters())
        run.replicate(net, updates)
        for step, batch in enumerate(BATCHES):
            for x, y in run.lanes(batch):
                run.backward(F.cross_entropy(net(x), y))
            between(run, net, updates, step)
            updates.step()
            updates.zero_grad()
        return run.digest()


def _side_by_side(strategy: str | Strategy, cases: Sequence[tuple[str, str, Between]]) -> dict[str, str]:
    """A digest for each model with an optimizer and what is done between, all trained in one run."""
    with lockstep.start(lanes=4, seed=1, strategy=strategy) as run:
        trained = []
        for model, optimizer, between in cases:
            torch.manual_seed(3)
            net = MODELS[model]()
            updates = OPTIMIZERS[optimizer](net.parameters())
            run.replicate(net, updates)
            trained.append((f"{model}, {optimizer}, {between.__name__}", net, updates, between))
        for step, batch in enumerate(BATCHES):
            for x, y in run.lanes(batch):
                run.backward(torch.stack([F.cross_entropy(net(x), y) for _, net, _, _ in trained]).sum())
            for _, net, updates, between in trained:
                between(run, net, updates, step)
                updates.step()
                updates.zero_grad()
        return {name: _content(net, updates) for name, net, updates, _ in trained}


def _content(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A digest of what is trained."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        for value in (parameter.detach(), *dict(sorted(optimizer.state[parameter].items())).values()):
            digest.update(value.contiguous().numpy().tobytes() if torch.is_tensor(value) else repr(value).encode())
    return digest.hexdigest()


SOME = {"wide": ("SGD fused", "AdamW", "Adagrad", "ASGD", "LAMB", "Adafactor"), "gpt": ("AdamW fused",)}
"""Those that `make test` runs, by models: a kernel of each kind, and of those that need whole tensors."""
FEW = ("AdamW fused", "SGD with momentum", "LAMB")
EVERY = {"wide": tuple(OPTIMIZERS), "gpt": FEW, "conv": FEW}


def _digests(strategy: str | Strategy, optimizers: Mapping[str, Sequence[str]]) -> dict[str, str]:
    runs = [[(model, name, _nothing) for name in names] for model, names in optimizers.items()]
    return {name: digest for cases in runs for name, digest in _side_by_side(strategy, cases).items()}


def _of_replicated(optimizers: Mapping[str, Sequence[str]]) -> dict[str, str]:
    digests: dict[str, str] = on_workers(1, _digests, "replicated", optimizers, limit_s=300.0)[0]
    assert len(set(digests.values())) >= len(digests) - 1  # AdamW with and without foreach
    return digests


@pytest.fixture(scope="module")
def some_replicated() -> dict[str, str]:
    return _of_replicated(SOME)


@pytest.fixture(scope="module")
def replicated() -> dict[str, str]:
    return _of_replicated(EVERY)


@pytest.mark.parametrize(("num_workers", "level"), [(1, "parameters"), (2, "gradients"), (3, "optimizer")])
def test_optimizers_have_the_digest_of_replicated(
    some_replicated: dict[str, str], num_workers: int, level: str
) -> None:
    for found in on_workers(num_workers, _digests, f"sharded:{level}", SOME):
        assert found == some_replicated


EVERY_LEVEL = [(count, level) for level in ("optimizer", "gradients", "parameters") for count in (1, 2, 3, 4)]


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("num_workers", "level"), EVERY_LEVEL)
def test_every_level_has_the_digest_of_replicated_on_any_number_of_workers(
    replicated: dict[str, str], num_workers: int, level: str
) -> None:
    strategy = f"sharded:{level}"
    assert on_workers(num_workers, _digests, strategy, EVERY, limit_s=600.0) == [replicated] * num_workers
    assert on_workers(num_workers, _two_models, strategy) == on_workers(1, _two_models, "replicated") * num_workers


def test_with_two_threads_each_no_tensor_is_cut_and_the_digest_is_the_same() -> None:
    alone = on_workers(1, _digest, "replicated", "wide", "AdamW fused", threads=2)
    assert on_workers(2, _digest, "sharded:optimizer", "wide", "AdamW fused", threads=2) == alone * 2


FUSED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda groups: torch.optim.SGD(groups, 0.05, momentum=0.9, fused=True),
    "Adam": lambda groups: torch.optim.Adam(groups, 1e-2, amsgrad=True, fused=True),
    "AdamW": lambda groups: torch.optim.AdamW(groups, torch.tensor(1e-2), fused=True),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, 1e-2, fused=True),
}


def _fused_digest(strategy: str, optimizer: str) -> tuple[str, int]:
    """Two groups, two dtypes, batches of 64 elements, and how many there were.

    The first tensors have no gradient, and the script changes them.
    """
    plan.GRANULE, plan.KERNEL_ELEMENTS, found = 32, 64, []
    parts = KernelByBatches._parts
    KernelByBatches._parts = lambda *args: found.extend(numbers := parts(*args)) or numbers  # type: ignore[method-assign, func-returns-value]
    with lockstep.start(lanes=4, seed=1, strategy=strategy) as run:
        torch.manual_seed(3)
        net = nn.ModuleList([nn.Linear(12, 40), nn.Linear(40, 5, dtype=torch.float64), nn.Linear(9, 9)])
        first, second = [*net[2].parameters(), *net[0].parameters()], [net[1].bias, net[1].weight]
        updates = FUSED[optimizer]([{"params": first}, {"params": second, "lr": 0.02}])
        run.replicate(net, updates)
        for x, y in BATCHES:
            for lane_x, lane_y in run.lanes((x, y)):
                run.backward(F.cross_entropy(net[1](net[0](lane_x).double()), lane_y))
            net[2].weight.data.mul_(1.5)
            updates.step()
            updates.zero_grad()
        return run.digest(), len(found)


@pytest.mark.parametrize("optimizer", FUSED)
def test_a_kernel_that_is_given_one_batch_after_the_other_has_the_bits_of_replicated(optimizer: str) -> None:
    ((alone, _),) = on_workers(1, _fused_digest, "replicated", optimizer)
    for digest, num_batches in on_workers(2, _fused_digest, "sharded:gradients", optimizer):
        assert digest == alone
        assert num_batches >= (len(BATCHES) - 1) * 4  # in all updates but the first, for each worker


def test_every_optimizer_of_torch_is_known_or_refused() -> None:
    known = {kind.__name__ for kind in (*ELEMENTWISE, *BY_TENSOR)}
    of_torch = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type)} - {"Optimizer"}
    assert of_torch - known == {"LBFGS", "SparseAdam"}


# -- what a script does between gradient and update ---------------------------------------------------------------


@torch.no_grad()
def _scale_weights(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step % 2:
        for parameter in model.parameters():
            parameter.mul_(0.9)


def _clamp_data(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.05, 0.05)


def _write_the_same(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data.clone())


def _clip(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def _halve_momentum(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            if torch.is_tensor(value) and value.dim():
                value.mul_(0.5)


def _load_optimizer(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def _load_model(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def _replace_data(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.25


def _freeze(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step >= 1:
        next(model.parameters()).grad = None


def _change_rate(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5


def _other_strides(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for parameter in model.parameters():
        if parameter.dim() == 2:
            assert parameter.grad is not None
            parameter.grad = parameter.grad.t().contiguous().t() * 2


def _replace_gradient_data(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.data = parameter.grad.data * (step + 2)


def _scale_gradient(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(step + 2)


def _split_groups(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 2:
        first = optimizer.param_groups[0]
        optimizer.add_param_group({"params": [first["params"].pop()], "lr": 0.5})


def _other_memory_format(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    weight = model.get_parameter("conv.weight")
    if step == 1:
        weight.data = weight.data.mul(1.5).contiguous()


BETWEEN = [
    _scale_weights, _clamp_data, _write_the_same, _clip, _halve_momentum, _load_optimizer, _load_model, _replace_data,
    _freeze, _change_rate, _other_strides, _replace_gradient_data, _scale_gradient, _split_groups,
    _other_memory_format,
]  # fmt: skip


REPLACING = (_load_optimizer, _replace_data, _split_groups, _other_memory_format)
"""After these, all that is held once is made again: what else is done stands in a run of its own."""


def _digests_between(strategy: str | Strategy) -> dict[str, str]:
    others = [act for act in BETWEEN if act not in REPLACING]
    groups = ((_nothing, *others), REPLACING)
    named = [_side_by_side(strategy, [("wide", "AdamW", act) for act in acts]) for acts in groups]
    return {name.split(", ")[-1]: digest for found in named for name, digest in found.items()}


@pytest.fixture(scope="module")
def plain_between() -> dict[str, str]:
    plain: dict[str, str] = on_workers(1, _digests_between, "replicated")[0]
    assert plain["_replace_gradient_data"] == plain["_scale_gradient"]
    assert len(set(plain.values())) == len(BETWEEN) - 2  # all but two change numbers
    return plain


def test_what_a_script_does_before_the_update_is_done_once(plain_between: dict[str, str]) -> None:
    for found in on_workers(3, _digests_between, "sharded:parameters"):
        assert found == plain_between


def _segments_while_state_is_loaded() -> list[int]:
    """How many segments of shared memory this worker holds after each update, if state is loaded before each."""
    found: list[int] = []

    def load(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
        host = run.guard.generation.wire.host
        assert host is not None
        found.append(len(host._own))

    _digest("sharded:optimizer", "wide", "AdamW", load)
    return found


def test_memory_that_is_made_again_for_loaded_state_replaces_the_one_before() -> None:
    for first, *later in on_workers(2, _segments_while_state_is_loaded):
        assert set(later) == {first + 1}  # the ledger, from the first update on


def _different(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 2:
        with torch.no_grad():
            next(model.parameters()).mul_(1 + run.rank)


def test_workers_that_change_parameters_differently_are_refused_before_anything_is_applied() -> None:
    for outcome in outcomes(2, _digest, "sharded:parameters", "wide", "AdamW", _different):
        assert outcome.error == "Disagreement"
        assert "what scripts have written to parameters or optimizer state" in outcome.message


def _scaled_by_rank(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    next(model.parameters()).grad.mul_(1 + run.rank)


def _put_by_rank(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.grad * (1 + run.rank)


def _added_by_rank(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if run.rank == 1:
        list(model.parameters())[-1].grad.data[-1:].add_(1e-3)


def _dropped_by_rank(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if run.rank == 1:
        next(model.parameters()).grad = None


@pytest.mark.parametrize("level", ["optimizer", "gradients"])
def test_gradients_that_scripts_have_changed_differently_are_refused_in_the_first_update(level: str) -> None:
    for change in (_scaled_by_rank, _put_by_rank, _added_by_rank, _dropped_by_rank):
        for outcome in outcomes(3, _digest, f"sharded:{level}", "wide", "AdamW", change):
            assert (outcome.error, "left in p.grad" in outcome.message) == ("Disagreement", True), outcome


def _scaled_in_a_late_step(drift_every: int) -> int:
    """How many updates there were when workers were found to use different gradients."""
    with lockstep.start(lanes=2, seed=1, strategy="sharded:gradients", drift_every=drift_every) as run:
        net = nn.Linear(4, 3)
        updates = torch.optim.SGD(net.parameters(), 1e-2)
        run.replicate(net, updates)
        for step in range(9):
            for lane in run.lanes(torch.ones(6, 4)):
                run.backward(net(lane).square().mean())
            net.bias.grad.mul_(1 + run.rank * (step > 1))
            try:
                updates.step()
            except Disagreement:
                return step
    return -1


def test_gradients_are_compared_as_often_as_replicas_are() -> None:
    assert on_workers(2, _scaled_in_a_late_step, 4) == [4, 4]
    assert on_workers(2, _scaled_in_a_late_step, 0) == [-1, -1]


def _two_models(strategy: str | Strategy) -> list[str]:
    """A GAN: two optimizers in turn."""
    with lockstep.start(lanes=3, seed=1, strategy=strategy) as run:
        torch.manual_seed(3)
        maker, judge = nn.Linear(8, 12), nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 1))
        of_maker = torch.optim.Adam(maker.parameters(), 1e-2)
        of_judge = torch.optim.RMSprop(judge.parameters(), 1e-2)
        run.replicate(maker, of_maker)
        run.replicate(judge, of_judge)
        for x, _ in BATCHES:
            for lane in run.lanes(x):
                fake = maker(torch.randn(len(lane), 8)).detach()
                run.backward((judge(fake) - judge(lane)).mean())
            of_judge.step()
            for parameter in judge.parameters():
                parameter.data.clamp_(-0.1, 0.1)
            judge.zero_grad()
            for lane in run.lanes(x):
                run.backward(-judge(maker(torch.randn(len(lane), 8))).mean())
            of_maker.step()
            maker.zero_grad()
            judge.zero_grad()
        return [run.digest()]


def test_two_optimizers_in_turn_have_the_digest_of_replicated() -> None:
    alone = on_workers(1, _two_models, "replicated")
    assert on_workers(3, _two_models, "sharded:parameters") == alone * 3


# -- checkpoints, other wires, clipping ---------------------------------------------------------------------------


def _saved_and_resumed(strategy: str | Strategy, path: str, until: int) -> str:
    """Trains up to `until` steps, from the checkpoint if there is one; leaves one."""
    with lockstep.start(lanes=4, seed=1, strategy=strategy) as run:
        torch.manual_seed(3)
        net = Wide()
        updates = torch.optim.AdamW(net.parameters(), 1e-2)
        run.replicate(net, updates)
        if os.path.exists(path):
            run.resume(path)
        while run.step < until:
            for x, y in run.lanes(BATCHES[run.step % len(BATCHES)]):
                run.backward(F.cross_entropy(net(x), y))
            updates.step()
            updates.zero_grad()
        run.save(path)
        return run.digest()


def test_a_checkpoint_goes_on_under_any_strategy_on_any_number_of_workers(tmp_path: Path) -> None:
    straight = on_workers(1, _saved_and_resumed, "replicated", str(tmp_path / "straight"), 6)
    mixed = str(tmp_path / "mixed")
    for num_workers, strategy, until in (
        (3, "sharded:optimizer", 2),
        (2, "replicated", 4),
        (1, "sharded:parameters", 5),
    ):
        on_workers(num_workers, _saved_and_resumed, strategy, mixed, until)
    assert on_workers(2, _saved_and_resumed, "sharded:gradients", mixed, 6) == straight * 2


def test_workers_on_several_hosts_have_one_copy_for_each() -> None:
    alone = on_workers(1, _digest, "replicated", "wide", "AdamW")
    assert on_workers(3, _digest, "sharded:optimizer", "wide", "AdamW", wire="hierarchical") == alone * 3


def _clip_by_run(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    norm = run.clip_grad_norm_(0.05)
    assert norm > 0.05
    run.clip_grad_value_(0.01, model.parameters())


def _clip_by_torch(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    nn.utils.clip_grad_value_(model.parameters(), 0.01)


def test_clipping_by_the_run_has_the_bits_of_torch_on_any_number_of_workers_under_any_strategy() -> None:
    by_torch = on_workers(1, _digest, "replicated", "wide", "AdamW", _clip_by_torch)
    for num_workers, strategy in ((1, "replicated"), (3, "replicated"), (2, "sharded:optimizer")):
        assert on_workers(num_workers, _digest, strategy, "wide", "AdamW", _clip_by_run) == by_torch * num_workers


# -- bad input ----------------------------------------------------------------------------------------------------


def _with_closure() -> None:
    def closure(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        optimizer.step(lambda: 0.0)

    _digest("sharded:optimizer", "wide", "AdamW", closure)


def test_a_closure_is_refused_with_what_to_write() -> None:
    (outcome,) = outcomes(1, _with_closure)
    assert (outcome.error, "write optimizer.step()" in outcome.message) == ("Misuse", True)


class Own(torch.optim.SGD):
    """Nobody knows what its update needs."""


def _with_own_optimizer() -> None:
    OPTIMIZERS["own"] = lambda p: Own(p, 0.1)
    _digest("sharded:optimizer", "wide", "own")


def test_an_optimizer_that_nobody_has_checked_is_refused_by_its_name() -> None:
    (outcome,) = outcomes(1, _with_own_optimizer)
    assert (outcome.error, outcome.message.startswith("the update of Own cannot be divided")) == ("BadArgument", True)


def _over_gloo() -> None:
    _digest("sharded:optimizer", "wide", "AdamW", wire="gloo")


def test_a_wire_without_shared_memory_is_refused_with_those_that_have_it() -> None:
    for outcome in outcomes(2, _over_gloo):
        assert (outcome.error, 'wire="shared"' in outcome.message) == ("BadArgument", True)


@pytest.mark.parametrize("level", ["", "all", "optimizers"])
def test_an_unknown_level_is_refused_with_those_there_are(level: str) -> None:
    with pytest.raises(BadArgument, match="'optimizer', 'gradients', 'parameters'"):
        lockstep.strategies.Sharded(level)
