"""A newcomer is no member before it is admitted: nobody who asks at its endpoint then learns terms of the run."""

import json
from pathlib import Path

from launches import launch

# Worker 1 is lost once. Each newcomer asks at its own endpoint when it is about to join, and after its first step.
SCRIPT = """
import json, os, select, signal
import torch
import lockstep
from lockstep.elastic.client import EndpointClient
from lockstep.events import JoinBegan

run = lockstep.start(lanes=4)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run.replicate(model, optimizer)
is_newcomer = not run.guard.is_member
found = {}


def ask(moment):
    endpoint = run.guard.recovery.endpoint
    found[moment] = EndpointClient(endpoint.member.address, endpoint.secret).terms()


run._events.subscribe(lambda event: ask("before"), JoinBegan)
run.checkpoints("checkpoints", every_steps=1000)
while run.step < 300:
    for x in run.lanes(torch.ones(8, 4)):
        model(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if run.step == 3 and not is_newcomer and run._events.worker == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if run.size == 1:
        select.select([], [], [], 0.3)  # until the newcomer is there
    if is_newcomer and "after" not in found:
        ask("after")
        with open("found.json", "w") as file:
            json.dump(found, file)
    if run.step > 10 and run.total(float("after" in found)):  # nobody is lost in this call
        break
"""


def test_a_newcomer_with_a_folder_of_checkpoints_publishes_terms_only_when_it_is_a_member(tmp_path: Path) -> None:
    with launch(tmp_path, SCRIPT, "-n", "2", "--no-copies") as run:
        assert run.finish() == 0, run.shown()
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["before"] is None
    assert found["after"]["lanes"] == 4
