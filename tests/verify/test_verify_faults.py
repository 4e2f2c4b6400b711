"""`lockstep verify` with faults: scripts that bear them, scripts that do not, and what is said of each."""

import json
from pathlib import Path
from typing import Any

import pytest
from launches import launch

CORPUS = Path(__file__).parents[1] / "corpus"
PARTS = f"import sys; sys.path[:0] = [{str(CORPUS)!r}]\n"

SCRIPT = """
import lockstep, torch
from corpus_parts import *
run = lockstep.start(lanes=6, seed=1)
torch.manual_seed(2)
model = {model}
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
run.replicate(model, optimizer)
loader = run.shard(plain_loader(drop_last=True))
kept = {begins}
for epoch in run.epochs(4):
    for batch in loader:
        for number, (x, y) in enumerate(run.lanes(batch)):
            {loss}.backward()
        {before_update}
        optimizer.step()
        optimizer.zero_grad()
        {after_update}
"""

HIDDEN = """h = model(x, kept.get(number, torch.zeros(len(x), 5)))
            kept[number] = h.detach()
            h.square().mean()"""

AVERAGE = """with torch.no_grad():
            for mean, p in zip(kept, model.parameters()):
                mean.lerp_(p, 0.3)
                if run.step % 5 == 0:
                    p.copy_(mean)"""

CARRIED = "state that a script carries for its samples by hand"
UNTRACKED = "state that the run does not know"


def script(
    model: str = "network()",
    begins: str = "None",
    loss: str = "loss_of(model, x, y)",
    before_update: str = "pass",
    after_update: str = "pass",
) -> str:
    return PARTS + SCRIPT.format(
        model=model, begins=begins, loss=loss, before_update=before_update, after_update=after_update
    )


def shape(name: str) -> str:
    return PARTS + (CORPUS / "shapes" / f"{name}.py").read_text()


def verify(folder: Path, text: str, *options: str) -> tuple[int, list[str]]:
    """The exit code, and what was printed."""
    with launch(folder, text, "-n", "2", "--lanes", "2", *options, command="verify") as run:
        return run.finish(), run.lines


def report(folder: Path, text: str, *options: str) -> tuple[int, dict[str, Any]]:
    exit_code, lines = verify(folder, text, "--json", *options)
    result = [line for line in lines if line.startswith("{")]
    assert result, lines
    return exit_code, json.loads(result[-1])


def faults(folder: Path, text: str) -> dict[str, dict[str, Any]]:
    """What came of each fault, in a script whose calm runs are equal and that does not bear all faults."""
    exit_code, found = report(folder, text, "--no-distance", "--steps", "14")
    assert (exit_code, found["equal"]) == (1, False)
    assert "first_step" not in found
    return {fault["kind"]: fault for fault in found["faults"]}


def test_a_script_that_bears_all_faults_is_equal_and_each_has_a_line(tmp_path: Path) -> None:
    exit_code, lines = verify(tmp_path, shape("epochs"), "--no-distance")
    assert exit_code == 0, lines
    text = "\n".join(lines)
    for label in (
        "killed at step 13, copied ",
        "killed at step 13, new process ",
        "stopped at step 13, resumed on 1 ",
    ):
        assert label in text
    assert "✓ and also when workers are lost, and when the run is stopped and resumed." in text


def test_a_hidden_state_kept_by_hand_shows_as_soon_as_lanes_move_and_belongs_in_run_carried(tmp_path: Path) -> None:
    found = faults(tmp_path, script(model="nn.GRUCell(6, 5)", begins="{}", loss=HIDDEN))
    assert [fault["cause"] for fault in found.values()] == [CARRIED] * 3
    assert "lane 1 (worker 1 in the calm run, worker 0 here)" in found["replace"]["explanation"]
    assert all("run.carried" in fault["explanation"] for fault in found.values())


def test_a_weight_of_the_loss_that_the_script_raises_itself_is_not_known_to_workers_that_come_later(
    tmp_path: Path,
) -> None:
    loss = "(loss_of(model, x, y) + kept.sum() * model(x).square().mean())"
    found = faults(tmp_path, script(begins="torch.zeros(2)", loss=loss, after_update="kept.add_(0.05)"))
    assert (found["kill"]["equal"], found["kill"]["first_step"]) == (True, None)
    assert [found[kind]["cause"] for kind in ("replace", "stop")] == [UNTRACKED] * 2
    assert "run.replicate" in found["replace"]["explanation"]


def test_a_tensor_whose_name_the_loop_sets_is_told_in_the_words_of_the_run(tmp_path: Path) -> None:
    loss = "(loss_of(model, x, y) + kept.sum() * model(x).square().mean())"
    found = faults(tmp_path, script(begins="torch.zeros(2)", loss=loss, after_update="kept = kept + 0.05"))
    assert found["replace"]["equal"] is True
    assert found["replace"]["cause"].startswith("a worker that joins is sent away: tensors in `kept` (train.py) had ")
    assert found["stop"]["cause"].startswith("Misuse: tensors in `kept` (train.py) had changed in training")


def test_a_rate_made_by_hand_sends_newcomers_away_and_is_named_after_a_resume(tmp_path: Path) -> None:
    rate = "kept.mul_(0.9); optimizer.param_groups[0]['lr'] = float(kept[0])"
    found = faults(tmp_path, script(begins="torch.full((2,), 0.01, dtype=torch.float64)", before_update=rate))
    assert found["replace"]["equal"] is True
    assert found["replace"]["cause"].startswith("a worker that joins is sent away: tensors in `kept` (train.py) had ")
    assert found["stop"]["cause"] == UNTRACKED
    assert "the learning rate of optimizer, group 0 is 0.009 and was" in found["stop"]["explanation"]


def test_a_plain_value_that_goes_into_the_loss_is_told_in_the_words_of_the_run(tmp_path: Path) -> None:
    loss = "(loss_of(model, x, y) + kept * model(x).square().mean())"
    found = faults(tmp_path, script(begins="0.0", loss=loss, after_update="kept += 0.1"))
    assert found["replace"]["equal"] is True
    assert found["replace"]["cause"].startswith("a worker that joins is sent away: `kept` (train.py) is 0.0 and was ")
    assert found["stop"]["cause"].startswith("Misuse: `kept` (train.py) is 0.0 and was ")


def test_an_average_of_weights_held_by_hand_is_named(tmp_path: Path) -> None:
    begins = "[p.detach().clone() for p in model.parameters()]"
    found = faults(tmp_path, script(begins=begins, after_update=AVERAGE))
    assert found["kill"]["equal"] is True
    assert found["stop"]["cause"] == UNTRACKED
    assert "average of weights" in found["stop"]["explanation"]


def test_a_counter_of_the_scripts_own_is_told_in_the_words_of_the_run(tmp_path: Path) -> None:
    found = faults(tmp_path, shape("enumerated_accumulation"))
    assert found["kill"]["equal"] is True
    assert found["replace"]["equal"] is True
    assert found["replace"]["cause"].startswith("a worker that joins is sent away: `i` (train.py) is 0 and should be ")
    assert (found["stop"]["equal"], found["stop"]["first_step"]) == (False, 7)
    assert found["stop"]["cause"].startswith("Misuse: `i` (train.py) is 0 and should be 1, as steps go on at 7. It ")
    assert "Count by run.step and run.epochs" in found["stop"]["cause"]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("clipped_in_the_lanes", "Clip after the loop over run.lanes"),
        ("data_changed_in_place", "Change a copy"),
        ("a_draw_by_rank", "or from a generator of your own (torch.Generator, random.Random)"),
        ("sampler_without_a_seed", "A sampler draws other samples on each worker"),
    ],
)
def test_what_a_calm_run_refuses_is_the_cause_in_full(tmp_path: Path, name: str, sentence: str) -> None:
    exit_code, found = report(tmp_path, shape(name))
    assert (exit_code, found["equal"]) == (1, False)
    assert sentence in found["cause"]


def test_a_loss_that_is_a_sum_is_told_from_the_distance_to_one_lane(tmp_path: Path) -> None:
    summed = 'F.cross_entropy(model(x), y, reduction="sum")'
    exit_code, found = report(tmp_path, script(model="network(dropout=0.0)", loss=summed), "--steps", "3")
    assert (exit_code, found["faults"]) == (0, [])
    assert found["faults_untested"] == "3 steps are too few, 4 are needed"
    assert 'run.backward(loss, reduction="sum")' in found["distance_explanation"]
