"""Every script of the corpus with a fault of each kind: the bits of the calm run, or a sentence. Never silence.

`make test` runs every script: many with the kinds of faults that would show what is wrong with them, some with any, the
others calm. `make soak` runs all with all kinds, and with 1,000 random faults.
"""

import ast
import random
import re
from collections import Counter
from pathlib import Path

import pytest
from corpus import COLLECTING, HERE, KINDS, SHAPES, USUAL, WHILE_COLLECTING, Fault, calm, disturbed, verdict
from expected import ALWAYS, ANEW, said_of

NUM_RANDOM = 1000
TELLING = {
    "a_coin_for_each_batch": ("resumed",),
    "a_data_set_changed_once": ("resumed",),
    "a_data_set_that_makes_its_generator": ("resumed",),
    "a_data_set_with_a_generator": ("resumed",),
    "a_data_set_shuffled_by_hand": ("joined", "resumed"),
    "a_strength_before_each_batch": ("joined", "resumed"),
    "a_strength_for_each_pass": ("joined", "resumed"),
    "a_generator_for_what_is_shown": ("joined",),
    "a_generator_of_its_own": ("joined", "resumed"),
    "a_global_that_samples_depend_on": ("resumed",),
    "a_loss_read_after_the_lanes": ("joined",),
    "a_rate_at_the_head_of_an_epoch": ("resumed",),
    "a_rate_halved_by_hand": ("resumed",),
    "a_rate_that_falls_with_epochs": (),
    "a_rollback_to_the_best": ("joined", "resumed"),
    "a_schedule_in_a_closure": ("joined", "resumed"),
    "a_scheduler_at_the_head_of_an_epoch": ("resumed",),
    "a_strength_drawn_for_each_epoch": ("joined", "resumed"),
    "a_switch_set_once": ("resumed",),
    "a_teacher_at_the_head_of_an_epoch": ("resumed",),
    "a_teacher_that_follows": ("joined", "resumed"),
    "a_temperature_for_each_epoch": ("resumed",),
    "a_trainer_with_a_history": ("joined", "resumed"),
    "early_stopping_object": ("joined",),
    "a_weight_between_two_closures": ("joined", "resumed"),
    "a_weight_from_a_method": ("joined", "resumed"),
    "an_annealed_loss": ("resumed",),
    "an_annealed_temperature": ("joined", "resumed"),
    "an_optimizer_of_its_own": ("resumed",),
    "an_optimizer_that_finds_its_rate": ("resumed",),
    "an_optimizer_that_is_forgotten": ("joined", "resumed"),
    "another_loss_once": ("resumed",),
    "counted_by_run_step": ("resumed",),
    "dropout_from_the_optimizer": ("joined", "resumed"),
    "early_stopping": ("joined", "resumed"),
    "early_stopping_tracked": ("resumed",),
    "enumerated_accumulation": ("joined", "resumed"),
    "errors_that_are_caught": ("resumed",),
    "evaluated_before_each_epoch": ("resumed",),
    "evaluation_on_rank_0": ("resumed",),
    "features_from_hooks": ("joined",),
    "generators_seeded_after_resuming": ("resumed",),
    "generators_seeded_in_each_epoch": ("resumed",),
    "hidden_state_carried": ("lost", "resumed"),
    "islice": ("resumed",),
    "loader_made_in_each_epoch": ("resumed",),
    "look_ahead": ("resumed",),
    "masters_in_float32": ("joined", "resumed"),
    "modes_set_once": ("joined", "resumed"),
    "named_samples": ("resumed",),
    "one_loader_after_the_other": ("resumed",),
    "objects_that_only_show": ("joined", "resumed"),
    "sampler_that_remembers": ("joined",),
    "totals_of_lanes": ("joined",),
    "training_left_by_break": ("resumed",),
    "two_loops_on_a_batch": ("joined",),
    "untracked_scheduler": ("joined", "resumed"),
    "validation_batch_now_and_then": ("resumed",),
    "validation_left_by_break": ("joined", "resumed"),
    "rates_by_next": ("resumed",),
    "slow_weights": ("joined", "resumed"),
    "weights_by_next": ("joined", "resumed"),
    "weights_clamped_before_each_batch": ("resumed",),
    "weights_of_classes": ("joined", "resumed"),
    "zipped_epochs": ("joined", "resumed"),
    "zipped_with_a_cycle": ("resumed",),
    "writer_on_rank_0": ("lost",),
}
"""The kinds of faults that would show what is wrong with a script."""
FEW = [shape for shape in SHAPES if shape not in TELLING and shape not in ALWAYS][::4]
OFTEN = [
    *((shape, "calm") for shape in ALWAYS),
    *((shape, kind) for shape, kinds in TELLING.items() for kind in kinds),
    *((shape, KINDS[1 + number % (len(KINDS) - 1)]) for number, shape in enumerate(FEW)),
]
"""What `make test` runs."""
COLLECTED_OFTEN = ("a_scheduler_before_the_evaluation",)


def check(folder: Path, shape: str, fault: Fault) -> str:
    """What it comes to; fails where that is not what the table says."""
    folder.mkdir(exist_ok=True)
    result = disturbed(folder, shape, fault)
    came_to = verdict(shape, result)
    said = said_of(shape, fault.kind)
    if said is None:
        assert came_to == "same", result.shown
    else:
        heard = [*result.refusals, *result.left]
        assert any(re.search(said.pattern, one) for one in heard), f"{shape} was not told {said}:\n{result.shown}"
    assert shape in ALWAYS or fault.happened(folder), f"the fault never came:\n{result.shown}"
    return came_to


@pytest.mark.parametrize(("shape", "kind"), OFTEN)
def test_a_script_with_a_fault_gives_the_bits_of_the_calm_one_or_a_sentence(
    tmp_path: Path, shape: str, kind: str
) -> None:
    check(tmp_path / "run", shape, USUAL[kind])


@pytest.mark.parametrize(
    "shape",
    [shape if shape in COLLECTED_OFTEN else pytest.param(shape, marks=pytest.mark.soak) for shape in COLLECTING],
)
def test_a_script_that_loses_workers_in_evaluations_gives_the_bits_of_the_calm_one(tmp_path: Path, shape: str) -> None:
    """All start again, twice, and go on where the script has done nothing yet that it would do twice."""
    result = disturbed(tmp_path, shape, WHILE_COLLECTING)
    assert verdict(shape, result) == "same", result.shown
    assert WHILE_COLLECTING.happened(tmp_path), f"the fault never came:\n{result.shown}"


def test_a_run_that_was_killed_is_compared_with_what_it_had_come_to(tmp_path: Path) -> None:
    """Saved at step 9, or, on a slow disk, at step 6, and killed in step 11."""
    fault = Fault("crashed", workers=2, crash=11, then=3)
    right = disturbed(tmp_path / "right", "epochs", fault)
    assert verdict("epochs", right) == "same", right.shown
    other = disturbed(tmp_path / "other", "dropout_from_the_optimizer", fault)
    assert verdict("dropout_from_the_optimizer", other) == "refused"
    assert re.search("the gradient of step [69] is not what it was", other.refusals[0])
    assert fault.happened(tmp_path / "right")
    assert fault.happened(tmp_path / "other")


def test_what_an_update_makes_of_the_same_gradient_is_compared_too(tmp_path: Path) -> None:
    script = (HERE / "shapes" / "dropout_from_the_optimizer.py").read_text()
    script = script.replace("model[2].p = 0.2 * optimizer.warmth", "").replace(
        "        optimizer.step()", "        run.clip_grad_norm_(0.01 * optimizer.warmth)\n        optimizer.step()"
    )
    other = disturbed(tmp_path / "run", script, Fault("crashed", workers=2, crash=11, then=3))
    assert verdict(script, other) == "refused", other.shown
    assert re.search("what the update of step [0-9]+ has made is not what it was", other.refusals[0])


def test_what_was_changed_on_purpose_goes_on_with_a_note(tmp_path: Path) -> None:
    """The script is another one when it is resumed."""
    disturbed(tmp_path, "epochs", Fault("crashed", workers=1, crash=11, then=0))
    script = (HERE / "shapes" / "epochs.py").read_text().replace("loss_of(model, x, y)", "(2 * loss_of(model, x, y))")
    resumed = disturbed(tmp_path, script, Fault("again", workers=2))
    assert resumed.exit_code == 0, resumed.shown
    assert resumed.shown.count("is not what it was in the run from whose checkpoint this one goes on") == 1
    assert "; train.py is not as in that run" in resumed.shown


def test_a_worker_is_copied_again_and_again_also_one_that_is_a_copy(tmp_path: Path) -> None:
    fault = Fault("replaced", kills=((1, 4), (2, 9), (1, 13)))
    result = disturbed(tmp_path / "run", "untracked_scheduler", fault)
    assert verdict("untracked_scheduler", result) == "same", result.shown
    assert "cannot be copied" not in result.shown, result.shown
    assert fault.happened(tmp_path / "run")


def test_a_copy_of_the_worker_at_whose_door_all_meet_is_admitted_where_it_was_made(tmp_path: Path) -> None:
    """Worker 2 is the last that has been there from the start when worker 1 is killed."""
    result = disturbed(tmp_path / "run", "untracked_scheduler", Fault("replaced", kills=((0, 4), (1, 9))))
    assert verdict("untracked_scheduler", result) == "same", result.shown
    assert "before it had joined" not in result.shown, result.shown


def test_worker_0_is_lost_and_what_it_alone_has_opened_is_still_written(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    result = disturbed(folder, "writer_on_rank_0", Fault("replaced", kills=((0, 7),)))
    assert verdict("writer_on_rank_0", result) == "same", result.shown
    steps = [int(line.split()[-1]) for line in (folder / "curve.txt").read_text().splitlines()]
    assert sorted(set(steps)) == list(range(1, 25)), "a line is missing"
    assert (folder / "final.pt").exists()


def test_where_nobody_takes_the_place_of_worker_0_it_is_said_what_the_new_rank_0_lacks(tmp_path: Path) -> None:
    result = disturbed(tmp_path, "writer_on_rank_0", Fault("lost", kills=((0, 7),)))
    assert verdict("writer_on_rank_0", result) == "refused"
    assert "worker 1 is rank 0 from now on: worker 0 is lost, and nobody takes its place" in result.refusals[0]


@pytest.mark.parametrize(("kind", "who"), [("joined", "worker 1: "), ("resumed", "")])
def test_what_begins_anew_is_noted_on_the_screen_by_newcomers_too(tmp_path: Path, kind: str, who: str) -> None:
    result = disturbed(tmp_path / "run", "an_average_that_nobody_tracks", USUAL[kind])
    assert verdict("an_average_that_nobody_tracks", result) == "same", result.shown
    assert f"  note: {who}tensors in `mean` (train.py) had changed in training, and begin anew" in result.shown


def test_a_lost_worker_0_does_not_make_a_line_appear_twice(tmp_path: Path) -> None:
    result = disturbed(tmp_path / "run", "totals_of_lanes", Fault("replaced", kills=((0, 8),)))
    assert verdict("totals_of_lanes", result) == "same", result.shown
    assert result.extra == calm("totals_of_lanes").extra


@pytest.mark.parametrize("shape", ["named_samples"])
def test_a_run_goes_on_at_the_start_of_an_epoch(tmp_path: Path, shape: str) -> None:
    """A single worker that is told to stop in step 10 ends before step 12, with which the third epoch begins."""
    result = disturbed(tmp_path / "run", shape, Fault("resumed", workers=1, stop=10, then=3))
    assert verdict(shape, result) == "same", result.shown
    assert "going on from step-00000012" in result.shown
    assert "nothing saves" not in result.shown, result.shown


def test_what_an_epoch_does_at_its_end_is_not_done_twice_by_a_run_that_was_stopped_before(tmp_path: Path) -> None:
    result = disturbed(tmp_path, "a_rate_that_falls_with_epochs", Fault("resumed", workers=1, stop=10, then=3))
    assert verdict("a_rate_that_falls_with_epochs", result) == "refused", result.shown
    assert "`rate` (train.py) is 0.01 and was 0.0048999999" in result.refusals[0]


@pytest.mark.parametrize("shape", ["loader_made_in_each_epoch", "a_growing_data_set"])
def test_a_newcomer_need_not_have_made_the_loaders_of_epochs_that_are_over(tmp_path: Path, shape: str) -> None:
    result = disturbed(tmp_path / "run", shape, Fault("joined", workers=2, kills=((1, 2),)))
    assert verdict(shape, result) == "same", result.shown


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_every_script_with_such_a_fault(tmp_path: Path, kind: str) -> None:
    for shape in SHAPES:
        if (shape, kind) not in OFTEN:
            check(tmp_path / shape, shape, USUAL[kind])


@pytest.mark.soak
@pytest.mark.timeout(3 * 3600)
def test_a_thousand_random_faults(tmp_path: Path) -> None:
    chance, counts = random.Random(20), Counter[tuple[str, str]]()
    shapes = [shape for shape in SHAPES if shape not in ALWAYS]
    for number in range(NUM_RANDOM):
        shape, fault = chance.choice(shapes), random_fault(chance)
        folder = tmp_path / str(number)
        folder.mkdir()
        counts[fault.kind, verdict(shape, disturbed(folder, shape, fault))] += 1
    for (kind, came_to), count in sorted(counts.items()):
        print(f"{kind:10} {came_to:20} {count:5}")


def random_fault(chance: random.Random) -> Fault:
    kind = chance.choice(KINDS[1:])
    workers = chance.choice([2, 3, 4])
    match kind:
        case "scaled":
            first = chance.choice([number for number in (1, 2, 3, 4) if number != workers])
            second = chance.choice([number for number in (1, 2, 3, 4) if number != first])
            at = chance.randrange(1, 8)
            return Fault(kind, workers, scale=((at, first), (at + chance.randrange(4, 8), second)))
        case "resumed":
            return Fault(kind, workers, stop=chance.randrange(1, 16), then=chance.choice([1, 2, 3, 4]))
    slots = chance.sample(range(workers), k=chance.choice([1, 1, 2]) if workers > 2 else 1)
    return Fault(kind, workers, kills=tuple((slot, chance.randrange(1, 16)) for slot in slots))


@pytest.mark.parametrize("shape", sorted(set(SHAPES) - {shape for shape, _ in OFTEN}))
def test_a_script_ends_when_nothing_happens(shape: str) -> None:
    result = calm(shape)
    assert result.exit_code == 0, result.shown
    assert len(result.digests) == 1


def test_the_documentation_has_the_table_of_scripts_and_outcomes() -> None:
    page = (Path(__file__).parents[2] / "docs" / "scripts.md").read_text()
    assert table() in page, f"docs/scripts.md should have\n{table()}"


def table() -> str:
    lines = [
        "| script | a worker is lost, or copied; scaling | a newcomer joins | stopped and resumed |",
        "| --- | --- | --- | --- |",
    ]
    for shape in SHAPES:
        cells = [cell(shape, kind) for kind in ("replaced", "joined", "resumed")]
        source = Path(HERE, "shapes", f"{shape}.py").read_text()
        lines.append(" | ".join([f"| {ast.get_docstring(ast.parse(source))}", *cells]) + " |")
    return "\n".join(lines)


def cell(shape: str, kind: str) -> str:
    said = said_of(shape, kind)
    if said is None:
        return "same bits"
    return (
        f"the newcomer leaves: {said.instead}"
        if kind == "joined" and shape not in ALWAYS
        else f"refused: {said.instead}"
    )


def test_expectations_are_of_scripts_that_exist() -> None:
    assert set(ALWAYS) | set(ANEW) <= set(SHAPES)
    assert not set(ALWAYS) & set(ANEW)
