"""Every parameter in exactly one group, and the right one."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lockstep.errors import BadArgument
from lockstep.optim.groups import exclude_biases_and_norms
from lockstep.optim.lars import LARS


def names(model: nn.Module, group: dict[str, Any]) -> set[str]:
    held = {id(param) for param in group["params"]}
    return {name for name, param in model.named_parameters() if id(param) in held}


def excluded(model: nn.Module) -> set[str]:
    return names(model, exclude_biases_and_norms(model, 1e-4)[1])


def test_weights_decay_and_biases_do_not() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(4, 5), nn.Embedding(3, 2))
    decaying, plain = exclude_biases_and_norms(model, 1e-4)
    assert names(model, decaying) == {"0.weight", "1.weight", "2.weight"}
    assert names(model, plain) == {"0.bias", "1.bias"}


def test_the_two_groups_carry_their_options() -> None:
    decaying, plain = exclude_biases_and_norms(nn.Linear(2, 2), 1e-4, lr=0.3)
    assert (decaying["weight_decay"], decaying["adapt"], decaying["lr"]) == (1e-4, True, 0.3)
    assert (plain["weight_decay"], plain["adapt"], plain["lr"]) == (0.0, False, 0.3)


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(4),
        nn.BatchNorm2d(4),
        nn.BatchNorm3d(4),
        nn.SyncBatchNorm(4),
        nn.LayerNorm((4, 4)),
        nn.GroupNorm(2, 4),
        nn.InstanceNorm1d(4, affine=True),
        nn.InstanceNorm2d(4, affine=True),
        nn.InstanceNorm3d(4, affine=True),
        nn.RMSNorm((4, 4)),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_all_of_a_normalisation_layer_is_excluded(norm: nn.Module) -> None:
    assert excluded(norm) == {name for name, _ in norm.named_parameters()} != set()


def test_a_tensor_with_fewer_than_two_dimensions_is_excluded() -> None:
    model = nn.Module()
    model.scale, model.gain, model.table = (nn.Parameter(torch.ones(shape)) for shape in ((), (3,), (3, 3)))
    assert excluded(model) == {"scale", "gain"}


def test_a_bias_with_three_dimensions_is_excluded() -> None:
    attention = nn.MultiheadAttention(4, 2, add_bias_kv=True)
    assert excluded(attention) == {"in_proj_bias", "bias_k", "bias_v", "out_proj.bias"}


def test_a_shared_parameter_is_held_once() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5))
    model[1].weight = model[0].weight
    decaying, plain = exclude_biases_and_norms(model, 1e-4)
    assert [len(decaying["params"]), len(plain["params"])] == [1, 1]


def test_a_parameter_shared_with_a_normalisation_layer_is_excluded() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.LayerNorm((4, 4), bias=False)})
    model["a"].weight = model["b"].weight
    assert excluded(model) == {"a.weight"}


def test_a_parameter_with_two_names_in_one_module_is_excluded_by_either() -> None:
    model = nn.Module()
    model.weight = model.bias = nn.Parameter(torch.ones(3, 3))
    assert excluded(model) == {"weight"}


def test_frozen_parameters_are_held() -> None:
    model = nn.Linear(3, 3).requires_grad_(False)
    assert sum(len(group["params"]) for group in exclude_biases_and_norms(model, 1e-4)) == 2


MODULES = st.sampled_from(
    [
        lambda: nn.Linear(3, 3),
        lambda: nn.Conv1d(3, 3, 1),
        lambda: nn.LayerNorm((3, 3)),
        lambda: nn.LocalResponseNorm(2),
        lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)),
        lambda: nn.TransformerEncoderLayer(4, 2, 4),
        lambda: nn.LSTM(3, 3),
    ]
)


@given(makers=st.lists(MODULES, max_size=5), decay=st.floats(0, 10))
def test_every_parameter_is_in_exactly_one_group(makers: list[Any], decay: float) -> None:
    model = nn.ModuleList(make() for make in makers)
    held = [id(param) for group in exclude_biases_and_norms(model, decay) for param in group["params"]]
    assert sorted(held) == sorted(id(param) for param in model.parameters())


def train(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    torch.manual_seed(1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).pow(2).mean().backward()
        optimizer.step()


def model_of_two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def test_lars_takes_the_groups() -> None:
    model = model_of_two_layers()
    train(LARS(exclude_biases_and_norms(model, 1e-4), lr=0.1), model)
    assert all(bool(param.isfinite().all()) for param in model.parameters())


def test_torchs_adamw_takes_the_groups_and_does_not_mind_adapt() -> None:
    ours, theirs = model_of_two_layers(), model_of_two_layers()
    train(torch.optim.AdamW(exclude_biases_and_norms(ours, 0.1), lr=0.01), ours)
    groups = [
        {"params": [param for param in theirs.parameters() if (param.dim() < 2) is plain], "weight_decay": decay}
        for plain, decay in ((False, 0.1), (True, 0.0))
    ]
    train(torch.optim.AdamW(groups, lr=0.01), theirs)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_a_model_without_biases_gives_an_empty_second_group_that_optimizers_take() -> None:
    model = nn.Linear(4, 4, bias=False)
    train(LARS(exclude_biases_and_norms(model, 1e-4), lr=0.1), model)
    train(torch.optim.AdamW(exclude_biases_and_norms(model, 1e-4), lr=0.1), model)


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        ((nn.Linear(2, 2), -1.0), {}, "weight_decay is -1.0; write a number that is 0 or more"),
        ((nn.Linear(2, 2), float("nan")), {}, "weight_decay is nan"),
        ((nn.Linear(2, 2), 0.1), {"adapt": True}, "sets adapt itself; leave it out"),
        ((nn.Linear(2, 2).parameters(), 0.1), {}, "was given a generator; write the model itself"),
        ((nn.LazyLinear(2), 0.1), {}, "parameter weight has no shape yet; run the model on one batch first"),
    ],
    ids=["negative decay", "nan decay", "adapt", "parameters in place of the model", "lazy parameters"],
)
def test_nonsense_is_refused_with_what_to_write(arguments: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadArgument) as refusal:
        exclude_biases_and_norms(*arguments, **options)
    assert said in str(refusal.value)
