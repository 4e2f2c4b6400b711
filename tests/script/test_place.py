"""What a difference between the places of two workers is called."""

import torch

from lockstep.chance import Generators
from lockstep.data import GlobalBatch
from lockstep.script.call_site import Site
from lockstep.script.places import Places
from lockstep.script.turns import LaneLoop
from lockstep.state.models import Models
from lockstep.state.progress import DataProgress


def test_of_states_that_differ_the_first_tensor_that_does_is_named() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    models, batch = Models(), GlobalBatch(2, {}, whole=torch.zeros(2))
    models.add(model, [], {})
    places = Places(models, DataProgress())
    places.enter(batch, LaneLoop(Site("train.py", 7), {}), 0)
    everyone = []
    for slot in range(2):
        place = places.of_step(batch, Generators.now(), slot, 0, closely=True)
        everyone.append(place.facts() | place.details())
        torch.nn.init.ones_(model[1].bias)
    found = place.judge(0, everyone)
    assert found is not None
    assert found.what == "the state of 1.bias"


def test_of_groups_that_differ_only_the_numbers_that_do_are_named() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), 0.5)
    models, batch = Models(), GlobalBatch(2, {}, whole=torch.zeros(2))
    models.add(model, [optimizer], {})
    places = Places(models, DataProgress())
    places.enter(batch, LaneLoop(Site("train.py", 7), {}), 0)
    everyone = []
    for slot in range(2):
        place = places.of_step(batch, Generators.now(), slot, 0, closely=False)
        everyone.append(place.facts())
        optimizer.param_groups[0] |= {"lr": 0.25, "betas": (0.5, 0.5)}
    found = place.judge(0, everyone)
    assert found is not None
    assert (found.what, found.mine, found.theirs) == (
        "group 0 of optimizer", "betas=(0.9, 0.999); lr=0.5", "betas=(0.5, 0.5); lr=0.25",
    )  # fmt: skip
