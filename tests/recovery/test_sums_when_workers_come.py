"""What is right on one worker and wrong on several is named when workers come."""

from pathlib import Path

from launched import launched_script, scale

SCRIPT = """
import select
import torch
import lockstep

run = lockstep.start(lanes=4, seed=3)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
run.replicate(model, optimizer)
x = torch.ones(8, 2)
more = 20
while more:
    for part in run.lanes(x):
        model(part).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    seen = 0
    with torch.no_grad():
        for part in run.lanes(x):
            seen += len(part)
    run.print("step", run.step, "workers", run.size, flush=True)
    more -= run.size > 1
    select.select([], [], [], 0.1)
"""


def test_a_sum_over_the_lanes_of_one_worker_is_named_as_soon_as_there_are_two(tmp_path: Path) -> None:
    with launched_script(tmp_path, SCRIPT, "-n", "1", "--run-dir", str(tmp_path / "run")) as run:
        run.wait_for("^step 3 workers 1")
        assert "note" not in run.shown()
        scale(tmp_path / "run", 2)
        run.wait_for("workers 2")
        run.wait_for("note: .*`seen \\+= len\\(part\\)`")
