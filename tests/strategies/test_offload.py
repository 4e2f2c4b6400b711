"""Parameters that leave their memory in a lane: the gradients of a plain model, and nothing is lost in silence."""

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from workers import apart

from lockstep.errors import Misuse
from lockstep.gradients.bucket_set import NamedParameter
from lockstep.strategies import Replicas
from lockstep.strategies.sharded import offload
from lockstep.strategies.sharded.offload import ParameterOffload, has_compiled_code
from lockstep.wire import in_process


@pytest.fixture(autouse=True)
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """They leave when their module has been computed, however small they are."""
    monkeypatch.setattr(offload, "GROUP_BYTES", 1)


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[nn.Parameter]:
    """Those that have left, as often as they did."""
    found: list[nn.Parameter] = []
    leave = offload.Offloadable.leave

    def counted(self: offload.Offloadable) -> None:
        assert torch._C._current_graph_task_id() == -1, "it leaves in the backward pass"
        leave(self)
        found.append(self.parameter)

    monkeypatch.setattr(offload.Offloadable, "leave", counted)
    return found


def _held(model: nn.Module) -> ParameterOffload:
    named = [NamedParameter(name, parameter, 0) for name, parameter in model.named_parameters()]
    held = ParameterOffload(Replicas(named, [model], [""]))
    held.hold(in_process())
    return held


def _lane(held: ParameterOffload, compute: Callable[[], object]) -> None:
    held.begin({}, closely=True)
    held.enter()
    try:
        compute()
    finally:
        held.leave()
        held.finish()
    held.check()


class Square(torch.autograd.Function):
    """Keeps a parameter itself."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        return x * weight * weight

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # type: ignore[no-untyped-def, override]
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def, override]
        x, weight = ctx.saved_tensors
        return gradient * weight * weight, (gradient * x * weight * 2).sum(0)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return Square.apply(x, self.weight)  # type: ignore[no-any-return]


class Model(nn.Module):
    """Layers of several kinds; `table` is used by its own module, and again by this one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 6)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 6), Scaled())
        self.attend = nn.MultiheadAttention(6, 2, batch_first=True)
        self.recur = nn.GRU(6, 6, batch_first=True)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.shift = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        words = self.table(x) + self.shift
        mixed = self.attend(words, words, words)[0]
        out = self.normed(self.recur(self.body(mixed))[0])
        return F.linear(out, self.table.weight)


X, Y = torch.arange(20).view(4, 5) % 5, torch.arange(20) * 2 % 5


def _loss(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(X).flatten(0, 1), Y)


def _plainly(model: nn.Module) -> None:
    _loss(model).backward()


def _twice(model: nn.Module) -> None:
    (_loss(model) + 0.5 * _loss(model)).backward()
    _loss(model).backward()


def _through_a_graph_that_stays(model: nn.Module) -> None:
    loss = _loss(model)
    loss.backward(retain_graph=True)
    loss.backward()


def _with_a_penalty(model: nn.Module) -> None:
    weight = model.body[0].weight  # type: ignore[index, union-attr]
    (first,) = torch.autograd.grad(_loss(model), [weight], create_graph=True)
    first.square().sum().backward()


def _computed_again(model: nn.Module) -> None:
    checkpoint(_loss, model, use_reentrant=False).backward()  # type: ignore[union-attr]


class InParts(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self) -> Tensor:
        return checkpoint(_loss, self.model, use_reentrant=False)  # type: ignore[return-value]


def _computed_again_inside_of_a_module(model: nn.Module) -> None:
    InParts(model)().backward()


def _with_a_look_between(model: nn.Module) -> None:
    loss = _loss(model)
    with torch.no_grad():
        weight = _loss(model) + torch.stack([parameter.sum() for parameter in model.parameters()]).sum()
    (weight * loss).backward()


def _with_other_values(model: nn.Module) -> None:
    doubled = {name: 2 * parameter for name, parameter in model.named_parameters()}
    F.cross_entropy(torch.func.functional_call(model, doubled, (X,)).flatten(0, 1), Y).backward()


def _by_a_function_of_parameters(model: nn.Module) -> None:
    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, parameters, (X,)).flatten(0, 1), Y)

    _loss(model)
    for name, gradient in torch.func.grad(loss)(dict(model.named_parameters())).items():
        model.get_parameter(name).grad = gradient.detach()  # else it is a graph that holds its parameter


class Penalty(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self) -> Tensor:
        return torch.stack([one.flatten()[2:].square().sum() for one in self.model.parameters()]).sum()


def _decayed(model: nn.Module) -> None:
    (_loss(model) + 0.1 * Penalty(model)()).backward()


def _decayed_without_a_module(model: nn.Module) -> None:
    loss = _loss(model)
    (loss + 0.1 * torch.stack([one.flatten()[2:].square().sum() for one in model.parameters()]).sum()).backward()


def _with_another_hook(model: nn.Module) -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        loss = _loss(model)
    loss.backward()


def _model() -> Model:
    torch.manual_seed(5)
    return Model()


DEEDS = [
    _plainly, _twice, _through_a_graph_that_stays, _with_a_penalty, _computed_again, _computed_again_inside_of_a_module,
    _with_a_look_between,
    _with_other_values, _by_a_function_of_parameters, _decayed,
    _decayed_without_a_module, _with_another_hook,
]  # fmt: skip
STAYING = (_computed_again, _with_other_values, _with_another_hook)
"""Modules use other tensors in the places of parameters, or there are other hooks for saved tensors."""


@pytest.mark.parametrize("deed", DEEDS)
def test_gradients_are_those_of_a_model_whose_parameters_stay(
    left: list[nn.Parameter], deed: Callable[[nn.Module], None]
) -> None:
    model, plain = _model(), _model()
    deed(plain)
    held = _held(model)
    for _ in range(2):
        model.zero_grad()
        _lane(held, lambda: deed(model))
        for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(one, other), name
            assert (one.grad is None) == (other.grad is None), name
            assert one.grad is None or torch.equal(one.grad, other.grad), name
    assert {id(one) for one in left} >= {id(one) for one in model.body.parameters() if deed not in STAYING}


def test_what_is_computed_in_a_lane_and_not_used_is_freed() -> None:
    def computed() -> "weakref.ref[ParameterOffload]":
        model = _model()
        held = _held(model)
        _lane(held, lambda: torch.tanh(_loss(model)))  # no backward pass: as the generator in a step of its critic
        return weakref.ref(held)

    alive = computed()
    gc.collect()
    assert alive() is None


def _memory(model: nn.Module) -> dict[str, int]:
    return {name: one.untyped_storage().nbytes() for name, one in model.named_parameters()}


def test_what_has_left_has_no_memory_shows_its_values_and_is_back_after_the_lane() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    sizes, values = _memory(model), copy.deepcopy(list(model.parameters()))
    held = _held(model)

    def compute() -> None:
        homes = [one._storage for one in held._in_step.values()]
        loss = model(torch.ones(2, 3)).sum()
        assert [home.nbytes() for home in homes] == [0, 0, 0, 0]
        assert all(map(torch.equal, model.parameters(), values))
        loss.backward()
        assert [home.nbytes() > 0 for home in homes] == [False, False, True, False]  # the only one that is needed

    _lane(held, compute)
    assert _memory(model) == sizes
    assert all(map(torch.equal, model.parameters(), values))


def test_parameters_are_back_when_a_lane_ends_by_an_exception() -> None:
    model = nn.Linear(3, 4)
    values, held = copy.deepcopy(list(model.parameters())), _held(model)

    def compute() -> None:
        model(torch.ones(2, 3))
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        _lane(held, compute)
    assert all(map(torch.equal, model.parameters(), values))
    assert not held._lane._exit_callbacks  # type: ignore[attr-defined]


def test_memory_to_which_a_script_refers_stays(left: list[nn.Parameter]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    kept = model[0].weight.detach()
    values = kept.clone()
    _lane(_held(model), lambda: model(torch.ones(2, 3)).sum().backward())
    assert {id(one) for one in model.parameters()} - {id(one) for one in left} == {id(model[0].weight)}
    assert torch.equal(kept, values)


def test_memory_that_is_not_a_parameter_s_own_stays(left: list[nn.Parameter]) -> None:
    model, memory = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)), torch.randn(24)
    model[0].weight.data, model[1].weight.data = memory[:12].view(4, 3), memory[12:].view(3, 4)
    _lane(_held(model), lambda: model(torch.ones(2, 3)).sum().backward())
    assert {id(one) for one in left} == {id(model[0].bias), id(model[1].bias)}


def test_a_part_of_other_memory_stays(left: list[nn.Parameter]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    model[0].weight.data = torch.randn(24)[12:].view(4, 3)
    _lane(_held(model), lambda: (model(torch.ones(2, 3)).sum() * model[0].weight.square().sum()).backward())
    assert id(model[0].weight) not in {id(one) for one in left}


def test_one_that_a_script_has_turned_stays_and_has_the_gradient_of_a_plain_one(left: list[nn.Parameter]) -> None:
    """The same memory, and the same bits there."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    plain, held = copy.deepcopy(model), _held(model)
    _lane(held, lambda: model(torch.ones(2, 3)).sum().backward())
    for one in (model, plain):
        one[0].weight.data = one[0].weight.data.t()
        one.zero_grad()
    del left[:]
    _lane(held, lambda: model(torch.ones(2, 3)).exp().sum().backward())
    plain(torch.ones(2, 3)).exp().sum().backward()
    assert id(model[0].weight) not in {id(one) for one in left}
    assert all(torch.equal(one.grad, two.grad) for one, two in zip(model.parameters(), plain.parameters(), strict=True))


def test_what_a_script_has_changed_stays_until_the_host_knows_it(left: list[nn.Parameter]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    held = _held(model)
    first = model[0].weight
    first.data[[0, 1]] = first.data[[1, 0]]
    changed = first.detach().clone()
    _lane(held, lambda: model(torch.ones(2, 3)).sum().backward())
    assert id(first) not in {id(one) for one in left}
    assert torch.equal(first, changed)
    held.once.shared["0.weight"].copy_(first.detach())
    held.take_updated(["0.weight"])
    _lane(held, lambda: model(torch.ones(2, 3)).sum().backward())
    assert id(first) in {id(one) for one in left}
    assert torch.equal(first, changed)


def test_one_that_is_used_outside_of_its_module_does_not_leave_again(left: list[nn.Parameter]) -> None:
    model = _model()
    held = _held(model)
    for _ in range(3):
        _lane(held, lambda: _plainly(model))
    assert [sum(one is other for one in left) for other in (model.table.weight, model.shift)] == [1, 3]


def _write_before(model: nn.Module) -> None:
    model[0].weight.data.mul_(2)  # type: ignore[index, union-attr, operator]
    model(torch.ones(2, 3)).sum().backward()


def _write_after(model: nn.Module) -> None:
    loss = model(torch.ones(2, 3)).sum()
    model[0].weight.data.mul_(2)  # type: ignore[index, union-attr, operator]
    loss.backward()


@pytest.mark.parametrize("write", [_write_before, _write_after])
def test_a_write_through_data_inside_of_a_lane_is_refused_by_name(write: Callable[[nn.Module], None]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    with pytest.raises(Misuse, match=r"parameter 0\.weight was written inside of a lane"):
        _lane(_held(model), lambda: write(model))


@pytest.mark.parametrize("is_away", [False, True])
def test_another_memory_that_a_lane_gives_a_parameter_stays(is_away: bool) -> None:
    """So that the rules for lanes find it. One that has left before is refused here too."""
    model = nn.Linear(3, 4)
    other = torch.randn(4, 3)

    def compute() -> None:
        if is_away:
            model(torch.ones(2, 3))
        model.weight.data = other
        model(torch.ones(2, 3)).sum().backward()

    with pytest.raises(Misuse, match="parameter weight was written") if is_away else nullcontext():
        _lane(_held(model), compute)
    assert model.weight.data_ptr() == other.data_ptr()


@pytest.mark.parametrize("which", ["activation", "weight"])
def test_what_autograd_needs_may_not_be_written_before_the_backward_pass(which: str) -> None:
    """As torch itself says it: with a hook for saved tensors it does not look."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))

    def compute() -> None:
        hidden = model[0](torch.ones(2, 3)).exp()
        loss = model[1](hidden).sum()
        with torch.no_grad():
            (hidden if which == "activation" else model[1].weight).add_(1)
        loss.backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        compute()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        _lane(_held(model), compute)


def test_those_that_were_needed_next_in_the_lane_before_are_known() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    held = _held(model)
    _lane(held, lambda: model(torch.ones(2, 4)).sum().backward())
    found = [(id(one.parameter), id(two.parameter)) for one, two in held._following.items()]
    assert found == list(pairwise(id(layer.weight) for layer in reversed(model[1:])))


def test_what_was_needed_next_is_fetched_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    held = _held(model)
    _lane(held, lambda: model(torch.ones(2, 4)).sum().backward())
    begun: list[tuple[int, int]] = []
    begin = offload.Offloadable.begin_fetch

    def counted(self: offload.Offloadable) -> None:
        begun.append((id(self.parameter), self._storage.nbytes()))
        begin(self)

    monkeypatch.setattr(offload.Offloadable, "begin_fetch", counted)

    def compute() -> None:
        loss = model(torch.ones(2, 4)).sum()
        monkeypatch.setattr(offload, "GROUP_BYTES", 2 * model[0].weight.nbytes)
        loss.backward()

    _lane(held, compute)
    ids = [id(layer.weight) for layer in reversed(model)]
    assert begun[:3] == [(ids[0], 0), (ids[1], 0), (ids[2], 0)]  # the first one itself, and two ahead
    assert [number for number, num_bytes in begun if num_bytes == 0 and number in ids] == ids  # each once
    assert all(torch.isfinite(one.grad).all() for one in model.parameters())


@apart
def test_whether_a_process_has_compiled_code_is_known() -> None:
    torch._dynamo.eval_frame.cached_backends.clear()  # other tests may have compiled
    assert not has_compiled_code()
    torch.compile(lambda x: x, backend="eager")
    assert has_compiled_code()
