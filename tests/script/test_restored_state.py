"""What a script changes of what a snapshot has restored, before it trains on."""

import pytest
import torch

from lockstep.script.restart.restored_state import RestoredState
from lockstep.state.models import Models


class Counting(Models):
    """Counts how often its rates are read."""

    num_reads = 0

    def rates(self) -> dict[str, float]:
        self.num_reads += 1
        return super().rates()


def restored() -> tuple[Counting, RestoredState]:
    """Two groups of one optimizer with the rates 0.5 and 0.25, and a second optimizer with 0.5."""
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    groups = [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias], "lr": 0.25}]
    models = Counting()
    models.add(model, [torch.optim.SGD(groups)], {})
    models.add(other, [torch.optim.SGD(other.parameters(), 0.5)], {})
    state = RestoredState(models)
    state.loaded(has_gradients=False)
    return models, state


class Mean:
    """An object of a script's own that is tracked."""

    def __init__(self) -> None:
        self.total = 1.0

    def state_dict(self) -> dict[str, float]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.total = state["total"]


def set_rate(models: Models, rate: float) -> None:
    models.optimizers["optimizer"].param_groups[1]["lr"] = rate


def test_a_rate_set_before_the_pass_goes_on_and_not_since_is_named_once_at_its_optimizers_update() -> None:
    models, state = restored()
    set_rate(models, 0.125)
    assert state.asked(at_start=False)
    assert state.at_update("optimizer2") is None
    told = state.at_update("optimizer")
    assert told is not None
    assert "the rate of optimizer, group 1 to 0.125, and 0.25 was restored" in told
    assert state.at_update("optimizer") is None


def test_a_rate_that_is_set_again_before_the_update_is_none_of_the_heads() -> None:
    models, state = restored()
    set_rate(models, 0.125)
    state.asked(at_start=False)
    set_rate(models, 0.0625)
    assert state.at_update("optimizer") is None


@pytest.mark.parametrize("at_start", [True, False])
def test_rates_are_read_before_an_update_only_where_one_had_been_set_otherwise(at_start: bool) -> None:
    models, state = restored()
    if at_start:
        set_rate(models, 0.125)
    state.asked(at_start=at_start)
    before = models.num_reads
    assert state.at_update("optimizer") is None
    assert models.num_reads == before


def test_a_scheduler_that_steps_at_the_head_is_wrong_also_where_no_rate_changes() -> None:
    models, state = restored()
    scheduler, mean = torch.optim.lr_scheduler.StepLR(models.optimizers["optimizer"], 5), Mean()
    models.tracked |= {"mean": mean, "scheduler": scheduler}
    models.optimizers["optimizer"].step()
    state.loaded(has_gradients=False)
    mean.total = 0.0
    scheduler.step()
    state.asked(at_start=False)
    (changed,) = state.changed()
    assert changed.is_wrong
    assert str(changed).startswith("the script has changed `scheduler`, which was restored: ")


def test_a_mean_that_begins_anew_at_the_head_is_said() -> None:
    models, state = restored()
    models.tracked["mean"] = mean = Mean()
    state.loaded(has_gradients=False)
    mean.total = 0.0
    state.asked(at_start=False)
    (changed,) = state.changed()
    assert not changed.is_wrong
    assert str(changed).startswith("the script has changed `mean`, which was restored: ")


def test_what_is_tracked_and_unchanged_is_not_named() -> None:
    models, state = restored()
    models.tracked["mean"] = Mean()
    state.loaded(has_gradients=False)
    state.asked(at_start=False)
    assert state.changed() == []
