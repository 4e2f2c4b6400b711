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


COUNTING = """
import select
import torch
import lockstep

run = lockstep.start(lanes=4, seed=3)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
run.replicate(model, optimizer)
x = torch.ones(8, 2)
more, seen = 20, 0
while more:
    right = []
    for part in run.lanes(x):
        loss = model(part).mean()
        loss.backward()
        seen += len(part)
        right.append(len(part))
    optimizer.step()
    optimizer.zero_grad()
    run.print("step", run.step, "workers", run.size, "samples", run.total(right), flush=True)
    more -= run.size > 1
    select.select([], [], [], 0.1)
run.print("seen", run.total(seen))
"""


def test_what_a_step_counts_that_is_computed_twice_for_a_newcomer_is_named_and_a_list_is_right(tmp_path: Path) -> None:
    options = ("-n", "1", "--no-copies", "--run-dir", str(tmp_path / "run"))
    with launched_script(tmp_path, COUNTING, *options) as run:
        run.wait_for("^step 3 workers 1")
        scale(tmp_path / "run", 2)
        run.wait_for("workers 2")
        run.wait_for("note: .*`seen \\+= len\\(part\\)`.*are in it twice: a worker joins")
        run.wait_for("^seen")
        lines = [line for line in run.shown().splitlines() if line.startswith("step")]
        assert {line.split("samples ")[1] for line in lines} == {"8"}
