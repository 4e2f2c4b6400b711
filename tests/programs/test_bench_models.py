"""The reference models are what the reports say they are."""

import pytest
import torch

from lockstep.programs import models
from lockstep.programs.bench.plan import REFERENCES


@pytest.mark.parametrize(("name", "millions"), [("mlp", 6.3), ("wide", 8.5), ("gpt", 10.9), ("cnn", 0.3)])
def test_a_reference_model_has_the_size_it_is_known_by(name: str, millions: float) -> None:
    model = models.reference_workload(name).make_model()
    assert round(models.count_parameters(model) / 1e6, 1) == millions


def test_the_plans_know_the_batch_size_of_every_workload() -> None:
    sizes = {name: reference.batch_size for name, reference in REFERENCES.items()}
    assert sizes == {name: models.reference_workload(name).batch_size for name in models.WORKLOADS}


@pytest.mark.parametrize(
    "workload",
    [
        models.mlp(batch_size=6, width=16),
        models.wide(batch_size=6),
        models.gpt(models.GptShape(num_tokens=32, context=8, width=16, num_blocks=2, num_heads=2), batch_size=6),
        models.cnn(batch_size=6),
    ],
    ids=lambda workload: workload.name,
)
def test_every_parameter_of_a_workload_gets_a_gradient(workload: models.Workload) -> None:
    model = workload.make_model()
    batch = workload.make_batch(torch.Generator().manual_seed(0))
    workload.loss(model, batch).backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())
    assert len(batch[0]) == len(batch[1]) == workload.batch_size


def test_a_gpt_does_not_see_later_tokens() -> None:
    gpt = models.Gpt(models.GptShape(num_tokens=32, context=8, width=16, num_blocks=2, num_heads=2))
    tokens = torch.arange(8).reshape(1, 8)
    changed = tokens.clone()
    changed[0, 5] = 31
    torch.testing.assert_close(gpt(tokens)[:, :5], gpt(changed)[:, :5])
