"""What LARS and LAMB share, on both."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.errors import BadArgument
from lockstep.optim.lamb import LAMB
from lockstep.optim.lars import LARS
from lockstep.optim.trust import TrustRatioOptimizer, two_norms

Make = Callable[..., TrustRatioOptimizer]
MAKERS: dict[str, Make] = {
    "LARS": lambda params, **options: LARS(params, lr=0.1, **{"weight_decay": 0.01, **options}),
    "LAMB": lambda params, **options: LAMB(params, lr=0.1, **{"weight_decay": 0.01, **options}),
}
each = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
each_way = pytest.mark.parametrize("foreach", [True, False], ids=["together", "one by one"])


def parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    chance = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=chance).to(dtype).requires_grad_() for shape in shapes]


def give_gradients(params: list[Tensor], seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=chance).to(param.dtype)


def take_steps(optimizer: torch.optim.Optimizer, params: list[Tensor], seeds: range) -> None:
    for seed in seeds:
        give_gradients(params, seed)
        optimizer.step()


def same_bits(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_bits(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_bits, one, other))
    return type(one) is type(other) and one == other


@each
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_one_by_one_gives_the_same_bits_as_together_in_every_dtype(make: Make, dtype: torch.dtype) -> None:
    found = []
    for foreach in (True, False):
        params = parameters([(9, 4), (30,), (), (0, 3)], dtype)
        optimizer = make(params, foreach=foreach)
        take_steps(optimizer, params, range(10))
        found.append([params, optimizer.state_dict()["state"]])
    assert same_bits(*found)


@each
@settings(max_examples=20)
@given(shapes=st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=6))
def test_one_by_one_gives_the_same_bits_as_together_for_any_shapes(make: Make, shapes: list[tuple[int, ...]]) -> None:
    found = []
    for foreach in (True, False):
        params = parameters(shapes)
        take_steps(make(params, foreach=foreach), params, range(3))
        found.append(params)
    assert same_bits(*found)


@each
@each_way
def test_bfloat16_parameters_stay_near_the_float32_ones(make: Make, foreach: bool) -> None:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        params = parameters([(40, 40)], dtype)
        take_steps(make(params, foreach=foreach), params, range(5))
        assert params[0].dtype is dtype
        found.append(params[0].detach().float())
    assert (found[0] - found[1]).norm() < 0.02 * found[0].norm()


def test_norms_of_16_bit_tensors_are_added_up_in_float32() -> None:
    (norm,) = two_norms([torch.ones(300 * 300, dtype=torch.bfloat16)])
    assert norm.dtype is torch.float32
    assert norm.item() == 300.0


@each
@each_way
def test_parameters_of_different_dtypes_share_a_group(make: Make, foreach: bool) -> None:
    mixed = parameters([(4, 3)]) + parameters([(5,)], torch.float64) + parameters([(2, 2)])
    apart = [param.detach().clone().requires_grad_() for param in mixed]
    optimizers = [make(mixed, foreach=foreach), *(make([param], foreach=foreach) for param in apart)]
    for seed in range(3):
        give_gradients(mixed, seed)
        give_gradients(apart, seed)
        for optimizer in optimizers:
            optimizer.step()
    assert same_bits(mixed, apart)


@each
@each_way
def test_a_parameter_that_is_zero_moves(make: Make, foreach: bool) -> None:
    param = torch.zeros(3, requires_grad=True)
    param.grad = torch.ones(3)
    make([param], foreach=foreach).step()
    assert param.tolist() == pytest.approx([-0.1] * 3, rel=1e-5)  # ratio 1


@each
@each_way
def test_a_gradient_that_is_zero_leaves_a_parameter_without_decay_where_it_is(make: Make, foreach: bool) -> None:
    param = torch.ones(3, requires_grad=True)
    param.grad = torch.zeros(3)
    make([param], foreach=foreach, weight_decay=0.0).step()
    assert param.tolist() == [1.0, 1.0, 1.0]


def test_in_lars_a_gradient_that_is_zero_leaves_the_decay_at_ratio_1() -> None:
    param = torch.ones(3, dtype=torch.float64, requires_grad=True)
    param.grad = torch.zeros_like(param)
    LARS([param], lr=0.1, weight_decay=0.01).step()
    assert param.tolist() == [1 - 0.1 * 0.01] * 3


@each
@each_way
def test_an_empty_tensor_and_a_scalar_are_parameters(make: Make, foreach: bool) -> None:
    params = parameters([(0,), ()])
    before = params[1].item()
    take_steps(make(params, foreach=foreach), params, range(2))
    assert params[1].item() != before
    assert bool(params[1].isfinite())


@each
@each_way
def test_a_nan_in_a_gradient_shows_in_its_tensor_and_in_no_other(make: Make, foreach: bool) -> None:
    params = parameters([(3,), (3,)])
    give_gradients(params, 0)
    assert params[0].grad is not None
    params[0].grad[1] = float("nan")
    make(params, foreach=foreach).step()
    assert bool(params[0].isnan()[1])
    assert not bool(params[1].isnan().any())


@each
@each_way
def test_a_parameter_without_a_gradient_stays_and_has_no_state(make: Make, foreach: bool) -> None:
    params = parameters([(3,), (3,)])
    before = params[1].detach().clone()
    give_gradients(params[:1], 0)
    optimizer = make(params, foreach=foreach)
    optimizer.step()
    assert torch.equal(params[1], before)
    assert params[1] not in optimizer.state


@each
@each_way
def test_gradients_are_left_as_they_were(make: Make, foreach: bool) -> None:
    params = parameters([(3, 2), (4,)])
    groups = [{"params": params[:1], "weight_decay": 0.0}, {"params": params[1:], "adapt": False}]
    optimizer = make(groups, foreach=foreach)
    give_gradients(params, 0)
    before = [param.grad.clone() for param in params if param.grad is not None]
    optimizer.step()
    assert same_bits([param.grad for param in params], before)


@each
def test_a_closure_is_called_with_gradients_enabled_and_its_loss_given(make: Make) -> None:
    (param,) = parameters([(3,)])
    before = param.detach().clone()

    def closure() -> float:
        param.grad = None
        loss = (param**2).sum()
        loss.backward()
        return loss.item()

    assert make([param]).step(closure) == pytest.approx((before**2).sum().item())
    assert not torch.equal(param, before)


@each
@each_way
def test_the_host_reads_nothing_from_the_device(make: Make, foreach: bool) -> None:
    params = [torch.ones(3, device="meta", requires_grad=True) for _ in range(2)]  # which has nothing to read
    for param in params:
        param.grad = torch.ones(3, device="meta")
    make(params, foreach=foreach).step()


def resumed_through_a_file(optimizer: torch.optim.Optimizer, make: Make, groups: Any) -> TrustRatioOptimizer:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = make(groups)
    other.load_state_dict(torch.load(file, weights_only=True))
    return other


@each
def test_a_training_resumed_from_a_file_goes_on_with_the_same_bits(make: Make) -> None:
    params = parameters([(4, 3), (5,)])
    optimizer = make(params)
    take_steps(optimizer, params, range(3))
    copied = [param.detach().clone().requires_grad_() for param in params]
    other = resumed_through_a_file(optimizer, make, copied)
    assert same_bits(optimizer.state_dict(), other.state_dict())
    for one, its in ((optimizer, params), (other, copied)):
        take_steps(one, its, range(3, 6))
    assert same_bits([params, optimizer.state_dict()], [copied, other.state_dict()])


@each
def test_a_group_added_later_resumes_too(make: Make) -> None:
    params = parameters([(4, 3), (5,)])
    optimizer = make(params[:1])
    take_steps(optimizer, params[:1], range(2))
    optimizer.add_param_group({"params": params[1:], "adapt": False, "lr": 0.01})
    take_steps(optimizer, params, range(2, 4))
    copied = [param.detach().clone().requires_grad_() for param in params]
    other = resumed_through_a_file(optimizer, make, [{"params": copied[:1]}, {"params": copied[1:]}])
    for one, its in ((optimizer, params), (other, copied)):
        take_steps(one, its, range(4, 6))
    assert same_bits([params, optimizer.state_dict()], [copied, other.state_dict()])


def test_momentum_correction_resumes_across_a_change_of_rate() -> None:
    params = parameters([(4, 3)])
    optimizer = LARS(params, lr=0.1, momentum_correction=True)
    take_steps(optimizer, params, range(2))
    copied = [param.detach().clone().requires_grad_() for param in params]
    other = resumed_through_a_file(optimizer, lambda its: LARS(its, lr=0.7), copied)
    for one, its in ((optimizer, params), (other, copied)):
        one.param_groups[0]["lr"] = 0.3
        take_steps(one, its, range(2, 4))
    assert same_bits(params, copied)


class Counting:
    """Norms from outside; notes how many tensors each call was for."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        self.calls.append(len(tensors))
        return [2 * norm for norm in two_norms(tensors)]


@each
def test_norms_from_outside_are_asked_once_for_a_group_that_adapts(make: Make) -> None:
    params, norms = parameters([(4, 3), (5,), (2,)]), Counting()
    optimizer = make([{"params": params[:2]}, {"params": params[2:], "adapt": False}], norms=norms)
    take_steps(optimizer, params, range(3))
    assert norms.calls == [4, 4, 4]


@each_way
def test_norms_from_outside_are_what_counts(foreach: bool) -> None:
    param = torch.full((4,), 1.0, dtype=torch.float64, requires_grad=True)
    param.grad = torch.full((4,), 0.5, dtype=torch.float64)

    def as_if_of_larger_tensors(tensors: list[Tensor]) -> list[Tensor]:
        return [torch.tensor(norm, dtype=torch.float64) for norm in (4.0, 8.0)]

    LARS([param], lr=1.0, trust_coefficient=1.0, eps=0.0, norms=as_if_of_larger_tensors, foreach=foreach).step()
    assert param.tolist() == [1.0 - 4.0 / 8.0 * 0.5] * 4


@each
def test_norms_from_outside_survive_a_copy(make: Make) -> None:
    params, norms = parameters([(4, 3)]), Counting()
    optimizer = copy.deepcopy(make(params, norms=norms))
    take_steps(optimizer, optimizer.param_groups[0]["params"], range(1))
    assert optimizer._norms.calls == [2]  # type: ignore[attr-defined]


@each
def test_norms_that_are_too_few_are_refused(make: Make) -> None:
    params = parameters([(4, 3), (5,)])
    give_gradients(params, 0)
    with pytest.raises(BadArgument, match="norms gave 2 norms for 4 tensors; give one for each, in order"):
        make(params, norms=lambda tensors: two_norms(tensors)[:2]).step()


@each
def test_a_complex_parameter_is_refused_by_group_and_index(make: Make) -> None:
    good, bad = torch.ones(2), torch.ones(2, dtype=torch.complex64, requires_grad=True)
    with pytest.raises(BadArgument, match="the parameter of group 1, index 1, is complex"):
        make([{"params": [torch.ones(2)]}, {"params": [good, bad]}])


@each
def test_a_refused_group_is_not_added(make: Make) -> None:
    optimizer = make(parameters([(2,)]))
    with pytest.raises(BadArgument, match="parameter group 1: adapt is 'no'; write True or False"):
        optimizer.add_param_group({"params": parameters([(3,)]), "adapt": "no"})
    assert len(optimizer.param_groups) == 1


@each
def test_a_sparse_parameter_is_refused_by_its_name(make: Make) -> None:
    sparse = torch.eye(3).to_sparse().requires_grad_()
    with pytest.raises(BadArgument, match=r"the parameter of group 0, index 0 \(table\), is sparse"):
        make([("table", sparse)])


@each
def test_a_sparse_gradient_is_refused_before_anything_moves(make: Make) -> None:
    params = parameters([(3,), (4, 2)])
    give_gradients(params[:1], 0)
    params[1].grad = torch.eye(4, 2).to_sparse()
    before = params[0].detach().clone()
    with pytest.raises(BadArgument, match="the gradient of the parameter of group 0, index 1, is sparse"):
        make(params).step()
    assert torch.equal(params[0], before)


@each
def test_torchs_schedulers_set_the_rate(make: Make) -> None:
    params = parameters([(3,)])
    optimizer = make(params)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for seed in range(2):
        take_steps(optimizer, params, range(seed, seed + 1))
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
