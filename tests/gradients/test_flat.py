"""Updates of whole buckets: the same training as with one tensor for each parameter.

On a CPU torch rounds the last elements of a tensor otherwise than the others. So models here have sizes without such a
rest where bits are compared, and flat updates are allowed there.
"""

import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from workers import on_workers

import lockstep
from lockstep.errors import BadArgument, BadEnvironment
from lockstep.gradients import arrangement, updates
from lockstep.gradients.layout import make_layout

X = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (96,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _flat_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "DEVICES", ("cuda", "cpu"))


class Net(nn.Module):
    """Registered in another order than used, with a branch that only data above 0 reaches."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.out = nn.Linear(width, 64)
        self.branch = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.first = nn.Linear(64, width)
        self.uses_branch = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(torch.tanh(self.first(x)))
        return self.out(h + self.branch(h) if self.uses_branch else h)


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": decayed}, {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}]


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda m: SGD(m.parameters(), 0.1, fused=True),
    "momentum": lambda m: SGD(two_groups(m), 0.1, momentum=0.9, weight_decay=0.01, fused=True),
    "nesterov": lambda m: SGD(m.parameters(), 0.1, momentum=0.9, nesterov=True, fused=True),
    "adam": lambda m: Adam(m.parameters(), torch.tensor(0.01), weight_decay=0.1, fused=True),
    "adamw": lambda m: AdamW(two_groups(m), 0.01, weight_decay=0.1, fused=True),
    "amsgrad": lambda m: AdamW(m.parameters(), 0.01, amsgrad=True, fused=True),
}


def model_and_optimizer(kind: str, width: int = 64) -> tuple[Net, Optimizer]:
    torch.manual_seed(4)
    model = Net(width)
    return model, OPTIMIZERS[kind](model)


def train_step(run: lockstep.Run, model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Leaves the gradient of a step in place."""
    optimizer.zero_grad()
    part = slice(16 * (step % 5), 16 * (step % 5) + 13)
    for x, y in run.lanes((X[part], Y[part])):
        run.backward(F.cross_entropy(model(x), y))


Meddle = Callable[[lockstep.Run, Net, Optimizer, int], None]


def trained(
    flat: bool, kind: str, steps: int = 6, meddle: Meddle | None = None, width: int = 64, **options: Any
) -> tuple[str, Net, Optimizer]:
    """`meddle` does something with each step's gradient before it is applied."""
    with lockstep.start(lanes=3, seed=3, flat=flat, **options) as run:
        model, optimizer = model_and_optimizer(kind, width)
        run.replicate(model, optimizer)
        for step in range(steps):
            train_step(run, model, optimizer, step)
            if meddle is not None:
                meddle(run, model, optimizer, step)
            optimizer.step()
        return run.digest(), model, optimizer


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors each call of a fused kernel was given."""
    counts: list[int] = []
    for name in ("_fused_sgd_", "_fused_adam_", "_fused_adamw_"):
        kernel = getattr(torch, name)

        def counted(params: Any, *args: Any, _kernel: Any = kernel, **options: Any) -> Any:
            counts.append(len(params))
            return _kernel(params, *args, **options)

        monkeypatch.setattr(torch, name, counted)
    return counts


# -- the same training ------------------------------------------------------------------------------------


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"bucket_bytes": 17_000, "first_bucket_bytes": 17_000}
    monkeypatch.setattr(arrangement, "make_layout", lambda specs, **told: make_layout(specs, **{**told, **sizes}))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_flat_update_gives_the_bits_of_the_fused_one(kind: str) -> None:
    assert trained(True, kind)[0] == trained(False, kind)[0]


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_flat_update_in_several_buckets_gives_the_bits_of_the_fused_one(kind: str) -> None:
    assert trained(True, kind)[0] == trained(False, kind)[0]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_parameters_of_any_size_are_updated(kind: str) -> None:
    _, flat, _ = trained(True, kind, width=37)
    _, plain, _ = trained(False, kind, width=37)
    for mine, theirs in zip(flat.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_one_lane_alone_is_updated_flat_to_the_same_bits(kind: str, handed: list[int]) -> None:
    def job(flat: bool) -> str:
        with lockstep.start(lanes=1, flat=flat) as run:
            model, optimizer = model_and_optimizer(kind)
            run.replicate(model, optimizer)
            for step in range(4):
                train_step(run, model, optimizer, step)
                optimizer.step()
            return run.digest()

    assert job(True) == job(False)
    assert handed[:8] == [3, 5] + [1, 1] * 3


@cache
def digest_alone(kind: str, reduce_dtype: str | None = None) -> str:
    return on_workers(1, _digest_on_workers, kind, reduce_dtype)[0]


def _digest_on_workers(kind: str, reduce_dtype: str | None = None, **options: Any) -> str:
    return trained(True, kind, width=37, drift_every=1, reduce_dtype=reduce_dtype, **options)[0]


@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_one_digest_on_any_number_of_workers(kind: str, num_workers: int, request: pytest.FixtureRequest) -> None:
    alone = digest_alone(kind)
    request.getfixturevalue("small_buckets")
    assert on_workers(num_workers, _digest_on_workers, kind) == [alone] * num_workers


def test_one_digest_where_gradients_are_added_in_another_dtype() -> None:
    assert on_workers(2, _digest_on_workers, "adamw", "bfloat16") == [digest_alone("adamw", "bfloat16")] * 2
    assert digest_alone("adamw", "bfloat16") != digest_alone("adamw")


def test_a_flat_update_of_converted_gradients_gives_the_bits_of_the_fused_one() -> None:
    assert trained(True, "adamw", reduce_dtype="bfloat16")[0] == trained(False, "adamw", reduce_dtype="bfloat16")[0]


# -- what is handed to the kernel -------------------------------------------------------------------------


def test_the_kernel_is_given_one_tensor_for_each_bucket_and_group(handed: list[int]) -> None:
    trained(True, "adamw", 4)
    assert handed == [3, 5, 1, 1, 1, 1, 1, 1]  # the first update makes the state


@pytest.mark.usefixtures("small_buckets")
def test_the_kernel_is_given_as_many_tensors_as_there_are_buckets(handed: list[int]) -> None:
    trained(True, "nesterov", 3)
    assert handed == [8, 3, 3]


def test_loaded_state_is_flat_again_in_the_next_update(handed: list[int]) -> None:
    def load(run: lockstep.Run, model: Net, optimizer: Optimizer, step: int) -> None:
        if step == 3:
            optimizer.load_state_dict(optimizer.state_dict())

    assert trained(True, "amsgrad", 5, load)[0] == trained(False, "amsgrad", 5, load)[0]
    assert handed[:5] == [8, 1, 1, 1, 1]


def test_parameters_whose_memory_was_replaced_are_flat_again_in_the_next_update(handed: list[int]) -> None:
    def replace(run: lockstep.Run, model: Net, optimizer: Optimizer, step: int) -> None:
        if step == 3:
            model.out.weight.data = model.out.weight.data.clone() * 0.5

    assert trained(True, "amsgrad", 5, replace)[0] == trained(False, "amsgrad", 5, replace)[0]
    assert handed[:5] == [8, 1, 1, 1, 1]


# -- what is not flat in some steps -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_a_parameter_that_some_steps_do_not_use_is_left_alone_in_these(kind: str) -> None:
    def skip(run: lockstep.Run, model: Net, optimizer: Optimizer, step: int) -> None:
        model.uses_branch = step not in (1, 2)

    assert trained(True, kind, 8, skip)[0] == trained(False, kind, 8, skip)[0]


def test_parameters_that_were_updated_equally_often_again_after_loading_are_flat_again(handed: list[int]) -> None:
    def skip_then_load(run: lockstep.Run, model: Net, optimizer: Optimizer, step: int) -> None:
        model.uses_branch = step != 1
        if step == 4:
            state = optimizer.state_dict()
            for kept in state["state"].values():
                kept["step"] = torch.tensor(9.0)
            optimizer.load_state_dict(state)

    assert trained(True, "amsgrad", 6, skip_then_load)[0] == trained(False, "amsgrad", 6, skip_then_load)[0]
    assert handed[:6] == [8, 1, 6, 8, 1, 1]


def test_counts_of_updates_that_are_changed_in_place_are_noticed() -> None:
    def change(run: lockstep.Run, model: Net, optimizer: Optimizer, step: int) -> None:
        if step == 3:
            optimizer.state[model.first.weight]["step"].fill_(100.0)

    assert trained(True, "adamw", 5, change)[0] == trained(False, "adamw", 5, change)[0]


def test_a_gradient_that_the_user_replaced_is_used() -> None:
    def replace(run: lockstep.Run, model: Net, optimizer: Optimizer, step: int) -> None:
        if step in (2, 3):
            model.first.weight.grad = model.first.weight.grad * 3  # type: ignore[operator]

    assert trained(True, "adamw", 6, replace)[0] == trained(False, "adamw", 6, replace)[0]


def test_a_group_that_is_added_later_is_updated() -> None:
    def job(flat: bool) -> tuple[str, int]:
        with lockstep.start(lanes=2, flat=flat) as run:
            torch.manual_seed(4)
            model = Net()
            optimizer = AdamW(model.first.parameters(), 0.01, fused=True)
            run.replicate(model, optimizer)
            for step in range(5):
                if step == 2:
                    optimizer.add_param_group({"params": list(model.out.parameters())})
                train_step(run, model, optimizer, step)
                optimizer.step()
            return run.digest(), len(optimizer.state)

    assert job(True) == job(False)


# -- another layout ---------------------------------------------------------------------------------------


def test_the_layout_of_the_second_step_takes_the_parameters_along() -> None:
    with lockstep.start(lanes=2, flat=True) as run:
        model, optimizer = model_and_optimizer("adamw")
        before = list(model.parameters())
        run.replicate(model, optimizer)
        layouts = []
        for step in range(4):
            train_step(run, model, optimizer, step)
            layouts.append(run._engine._arranged.layout)  # type: ignore[union-attr]
            optimizer.step()
        assert layouts[0] != layouts[1] == layouts[3]
        assert all(new is old for new, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_freezing_some_parameters_moves_the_others_with_their_state(kind: str, handed: list[int]) -> None:
    def freeze(run: lockstep.Run, model: Net, optimizer: Optimizer, step: int) -> None:
        if step in (2, 5):
            model.norm.requires_grad_(step == 5)

    assert trained(True, kind, 5, freeze)[0] == trained(False, kind, 5, freeze)[0]
    assert handed[:10] == [3, 5] + [1, 1] * 4


def test_another_wire_moves_parameters_and_state() -> None:
    def rewire(run: lockstep.Run, model: Net, optimizer: Optimizer, step: int) -> None:
        if step == 3:
            run._engine.rewire()  # type: ignore[union-attr]

    assert trained(True, "adamw", 6, rewire)[0] == trained(False, "adamw")[0]


def test_what_lies_between_parameters_stays_zero_in_the_gradient() -> None:
    with lockstep.start(lanes=3, flat=True) as run:
        model, optimizer = model_and_optimizer("adamw", 37)
        run.replicate(model, optimizer)
        for step in range(3):
            train_step(run, model, optimizer, step)
            optimizer.step()
        for bucket in run._engine._arranged.buckets:  # type: ignore[union-attr]
            total = bucket.total.clone()
            for view in bucket.layout.cut(total):
                view.zero_()
            assert not total.any()


# -- what everybody else sees -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_has_the_form_it_always_had(kind: str) -> None:
    _, flat, mine = trained(True, kind)
    _, plain, theirs = trained(False, kind)

    def forms(model: Net, optimizer: Optimizer) -> list[Any]:
        kept = [optimizer.state.get(p, {}) for p in model.parameters()]
        return [[(key, v.shape, v.stride(), v.dtype) for key, v in state.items()] for state in kept]

    assert forms(flat, mine) == forms(plain, theirs)
    assert len(mine.state) == len(theirs.state)


def test_a_state_dict_goes_to_a_plain_optimizer_and_back() -> None:
    def hand_around(run: lockstep.Run, model: Net, optimizer: Optimizer, step: int) -> None:
        if step == 3:
            other = OPTIMIZERS["adamw"](model)
            other.load_state_dict(optimizer.state_dict())
            optimizer.load_state_dict(other.state_dict())

    assert trained(True, "adamw", 6, hand_around)[0] == trained(False, "adamw")[0]


def _trained_in_two(folder: str, first: bool, second: bool, kind: str) -> str:
    for flat, steps in ((first, range(3)), (second, range(3, 6))):
        with lockstep.start(lanes=3, seed=3, flat=flat) as run:
            model, optimizer = model_and_optimizer(kind)
            run.replicate(model, optimizer)
            if steps[0]:
                run.resume(folder)
            for step in steps:
                train_step(run, model, optimizer, step)
                optimizer.step()
            run.save(folder)
            digest = run.digest()
    return digest


@pytest.mark.parametrize("kind", ["momentum", "adamw"])
@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (True, True)])
def test_a_run_is_resumed_flat_or_not(kind: str, first: bool, second: bool, tmp_path: Path) -> None:
    assert _trained_in_two(str(tmp_path / "saved"), first, second, kind) == trained(False, kind)[0]


def test_clipping_changes_the_flat_gradient() -> None:
    def clip(run: lockstep.Run, model: Net, optimizer: Optimizer, step: int) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    assert trained(True, "momentum", meddle=clip)[0] == trained(False, "momentum", meddle=clip)[0]
    assert trained(True, "momentum", meddle=clip)[0] != trained(True, "momentum")[0]


@pytest.mark.parametrize("scheduler_first", [True, False])
def test_a_scheduler_made_before_or_after_replicate_works_without_a_warning(scheduler_first: bool) -> None:
    def job(flat: bool) -> str:
        with lockstep.start(lanes=2, flat=flat) as run, warnings.catch_warnings():
            warnings.simplefilter("error")
            model, optimizer = model_and_optimizer("adamw")
            if scheduler_first:
                scheduler = StepLR(optimizer, 1, 0.5)
            run.replicate(model, optimizer)
            if not scheduler_first:
                scheduler = StepLR(optimizer, 1, 0.5)
            for step in range(5):
                train_step(run, model, optimizer, step)
                optimizer.step()
                scheduler.step()
            return run.digest()

    assert job(True) == job(False)


def test_hooks_of_the_optimizer_see_parameters_only() -> None:
    seen = []

    def look(optimizer: Optimizer, *_: Any) -> None:
        seen.append(
            (sum(len(group["params"]) for group in optimizer.param_groups), len(optimizer.state_dict()["state"]))
        )

    with lockstep.start(lanes=2, flat=True) as run:
        model, optimizer = model_and_optimizer("momentum")
        optimizer.register_step_post_hook(look)
        run.replicate(model, optimizer)
        optimizer.register_step_pre_hook(look)
        for step in range(3):
            train_step(run, model, optimizer, step)
            optimizer.step()
    assert seen == [(8, 0)] + [(8, 8)] * 5


def test_a_closure_computes_the_step_that_is_applied() -> None:
    def job(flat: bool) -> str:
        with lockstep.start(lanes=2, flat=flat) as run:
            model, optimizer = model_and_optimizer("adamw")
            run.replicate(model, optimizer)
            for step in range(4):
                optimizer.step(lambda step=step: train_step(run, model, optimizer, step))  # type: ignore[misc]
            return run.digest()

    assert job(True) == job(False)


def test_a_scaler_that_finds_infinity_skips_the_flat_update() -> None:
    def job(flat: bool) -> tuple[str, list[float]]:
        with lockstep.start(lanes=2, flat=flat) as run:
            model, optimizer = model_and_optimizer("amsgrad")
            run.replicate(model, optimizer)
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
            for step in range(5):
                train_step(run, model, optimizer, step)
                for p in model.parameters():
                    p.grad.mul_(scaler.get_scale() if step != 3 or p.dim() > 1 else torch.inf)  # type: ignore[union-attr]
                scaler.scale(torch.ones(()))
                scaler.step(optimizer)
                scaler.update()
            return run.digest(), [float(optimizer.state[p]["step"]) for p in model.parameters()]

    assert job(True) == job(False)
    assert job(True)[1] == [4.0] * 8


def test_after_the_run_the_optimizer_updates_as_before(handed: list[int]) -> None:
    _, model, optimizer = trained(True, "amsgrad", 3)
    del handed[:]
    F.cross_entropy(model(X), Y).backward()
    optimizer.step()
    assert handed == [8]
    assert "_init_group" not in vars(optimizer)


def test_a_second_run_with_the_same_model_is_flat_too(handed: list[int]) -> None:
    _, model, optimizer = trained(True, "amsgrad", 3)
    del handed[:]
    with lockstep.start(lanes=2, flat=True) as run:
        run.replicate(model, optimizer)
        run.replicate(model)
        for step in range(2):
            train_step(run, model, optimizer, step)
            optimizer.step()
    assert handed == [1, 1]


def test_weights_that_are_tied_by_views_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            both = torch.randn(2, 64)
            self.a, self.b = nn.Parameter(both[0]), nn.Parameter(both)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.a).sum() + (x * self.b[1]).sum()

    model = Tied()
    optimizer = SGD(model.parameters(), 0.01, momentum=0.9, fused=True)
    with lockstep.start(lanes=2, flat=True) as run:
        run.replicate(model, optimizer)
        for _ in range(3):
            for x in run.lanes(X):
                model(x).backward()
            optimizer.step()
    assert torch.equal(model.a, model.b[0])


# -- what is refused --------------------------------------------------------------------------------------


class Own(AdamW):
    pass


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda p: AdamW(p), "not AdamW without fused=True"),
        (lambda p: SGD(p, 0.1, foreach=True), "not SGD without fused=True"),
        (lambda p: torch.optim.RMSprop(p), "not RMSprop"),
        (lambda p: Own(p, fused=True), "not Own"),
    ],
)
def test_an_optimizer_that_cannot_be_flat_is_refused_with_what_can(make: Callable[..., Optimizer], told: str) -> None:
    model = Net()
    with lockstep.start(flat=True) as run, pytest.raises(BadArgument, match=f"SGD, Adam and AdamW .*{told}"):
        run.replicate(model, make(model.parameters()))


@pytest.fixture
def _as_it_is(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(updates, "DEVICES", ("cuda",))
        yield


@pytest.mark.usefixtures("_as_it_is")
def test_parameters_on_a_cpu_are_refused() -> None:
    model, optimizer = model_and_optimizer("adamw")
    with lockstep.start(flat=True) as run, pytest.raises(BadEnvironment, match="needs parameters on a GPU"):
        run.replicate(model, optimizer)


@pytest.mark.parametrize("bad", [1, None, "yes"])
def test_flat_is_true_or_false(bad: Any) -> None:
    with pytest.raises(BadArgument, match="flat must be True or False"):
        lockstep.start(flat=bad)


def test_a_parameter_that_is_not_made_of_whole_vectors_stays_by_itself() -> None:
    """On a GPU its end is rounded otherwise: see Note [Whole vectors] in flat.py."""
    whole, odd = nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(7))
    flat = updates.FlatUpdates([torch.optim.SGD([whole, odd], lr=0.1)])
    assert flat.groups([whole, odd]) == [1, 0]
    flat.close()
