"""What is killed and when, and what is made of the log of commits. Nothing is launched here."""

import fcntl
import json
from pathlib import Path

import pytest
from report_keys import RECORDED, keys

from lockstep.errors import BadArgument
from lockstep.programs.bench.launch import ResultsDiffer
from lockstep.programs.bench.plan import NUM_BATCHES
from lockstep.programs.bench.recovery.log import (
    CommitEntry,
    TrainingResult,
    TrainingTask,
    last_step,
    open_log,
    pass_gate,
    read_commits,
    read_workers,
    shut_gate,
)
from lockstep.programs.bench.recovery.plan import (
    ANEW,
    BEFORE,
    RESTART,
    RESTART_10,
    SIDES,
    SPARE,
    SURVIVORS,
    WINDOW,
    NotRecovered,
    PlannedKill,
    RecoveryPlan,
    RecoverySide,
    RecoveryTimes,
    agreement_lines,
    claim_line,
    default_lanes,
    make_plan,
    make_report,
    make_rounds,
    make_row,
    num_steps,
    recovery_from,
    usual_step_s,
)
from lockstep.programs.bench.recovery.trial import QUIET_S, Quiet, RecoveryBench, TrialResult, command_of

PLAN = RecoveryPlan("mlp", workers=3, lanes=6, kills=4)


def commit(time_s: float, step: int, generation: int = 1, size: int = 3, rank: int = 0) -> CommitEntry:
    return CommitEntry(time_s, step, rank, size, generation)


# -- the plan ---------------------------------------------------------------------------------------------------


def test_every_round_kills_each_side_once() -> None:
    rounds = make_rounds(PLAN)
    assert len(rounds) == PLAN.kills + 1
    assert all(sorted(side.name for side in each.order) == sorted(side.name for side in SIDES) for each in rounds)


def test_any_worker_may_be_the_victim_and_orders_differ() -> None:
    rounds = make_rounds(RecoveryPlan("mlp", 3, 6, kills=40))
    assert {each.victim for each in rounds} == {0, 1, 2}
    assert {each.step for each in rounds} == set(range(BEFORE, BEFORE + WINDOW))
    assert len({each.order for each in rounds}) > 1


def test_the_same_seed_kills_the_same_workers() -> None:
    assert make_rounds(PLAN) == make_rounds(PLAN)
    assert make_rounds(PLAN) != make_rounds(RecoveryPlan("mlp", 3, 6, 4, seed=1))


def test_without_a_baseline_only_lockstep_is_killed() -> None:
    plan = make_plan("mlp", 3, None, 2, baseline=False)
    assert all(set(each.order) == {SURVIVORS, ANEW, SPARE} for each in make_rounds(plan))


def test_the_number_of_runs_is_known_before() -> None:
    assert PLAN.rounds == 1 + 2 + 5 * 5
    assert make_plan("mlp", 3, None, 2, baseline=False).rounds == 1 + 1 + 3 * 3


@pytest.mark.parametrize(
    ("workers", "lanes", "sentence"),
    [(1, 2, "so that one is left"), (3, 2, "as many or more"), (2, 9, "8 samples, too few for 9 lanes")],
)
def test_a_plan_that_cannot_be_carried_out_is_refused(workers: int, lanes: int, sentence: str) -> None:
    with pytest.raises(BadArgument, match=sentence):
        RecoveryPlan("gpt", workers, lanes, kills=1)


def test_there_are_two_lanes_for_each_worker_as_far_as_samples_go() -> None:
    assert [default_lanes("gpt", workers) for workers in (2, 3, 6)] == [4, 6, 8]


def test_lockstep_goes_on_until_a_replacement_can_have_come() -> None:
    assert num_steps(SURVIVORS, step_s=0.1) >= BEFORE + WINDOW + 60
    assert num_steps(RESTART, step_s=0.1) < BEFORE + WINDOW + 60


@pytest.mark.parametrize("side", SIDES)
def test_a_run_has_whole_epochs_and_steps_after_every_kill(side: RecoverySide) -> None:
    steps = num_steps(side, step_s=10.0)
    assert steps % NUM_BATCHES == 0
    assert steps > BEFORE + WINDOW


def test_each_side_is_started_as_a_user_would() -> None:
    task = TrainingTask("mlp", 8, "folder")
    words = [" ".join(command_of(side, PLAN, task)) for side in SIDES]
    assert "-m lockstep run --workers 3 --lanes 6 --threads 1 --spares 0" in words[0]
    assert "--spares 0" in words[1]
    assert "--spares 1" in words[2]
    assert ["--no-copies" in line for line in words[:3]] == [False, True, True]
    assert "-m torch.distributed.run --nproc-per-node 3" in words[3]
    assert "--standalone -m lockstep.programs.bench.recovery.worker" in words[3]


def test_a_task_reaches_the_workers_unchanged() -> None:
    task = TrainingTask("gpt", 12, "folder", save_every=10)
    assert TrainingTask.read(task.written()) == task


# -- from the log to a recovery ---------------------------------------------------------------------------------


def test_the_clock_runs_from_the_kill_to_the_next_new_step() -> None:
    commits = [commit(1.0, 1), commit(2.0, 2), commit(2.75, 3, 2, size=2), commit(4.0, 4, 3, size=3)]
    assert recovery_from(commits, 2.5, num_workers=3) == RecoveryTimes(next_s=0.25, whole_s=1.5, steps_lost=0)


def test_a_step_that_the_victim_had_done_its_part_of_is_no_recovery() -> None:
    commits = [commit(2.0, 2), commit(2.51, 3), commit(3.0, 4, 2, size=2)]
    assert recovery_from(commits, 2.5, num_workers=3).next_s == 0.5


def test_steps_that_are_done_again_are_lost_and_do_not_stop_the_clock() -> None:
    again = [commit(10.0, 1, 2), commit(11.0, 2, 2), commit(12.0, 3, 2)]
    commits = [commit(1.0, 1), commit(2.0, 2), *again]
    assert recovery_from(commits, 2.5, num_workers=3) == RecoveryTimes(9.5, 9.5, steps_lost=2)


def test_only_the_worker_with_rank_0_is_read_when_a_step_is_timed() -> None:
    commits = [commit(2.0, 2), commit(3.0, 3, 2, size=2, rank=1), commit(3.5, 3, 2, size=2)]
    assert recovery_from(commits, 2.5, num_workers=3).next_s == 1.0


def test_a_step_that_any_worker_had_committed_counts_as_lost_when_it_is_done_again() -> None:
    commits = [commit(2.0, 2), commit(2.2, 3, rank=1), commit(3.0, 3, 2, size=2), commit(3.5, 4, 2, size=2)]
    assert recovery_from(commits, 2.1, num_workers=3).steps_lost == 1


def test_a_run_that_ends_before_all_are_back_has_no_time_for_it() -> None:
    assert recovery_from([commit(1.0, 1), commit(2.0, 2, 2, size=2)], 1.5, num_workers=3).whole_s is None


def test_a_run_without_a_step_after_the_kill_did_not_recover() -> None:
    with pytest.raises(NotRecovered, match="no step after step 2"):
        recovery_from([commit(1.0, 1), commit(2.0, 2)], 1.5, num_workers=3)


def test_the_usual_step_is_the_median_of_rank_0() -> None:
    commits = [commit(0.0, 1), commit(0.5, 1, rank=1), commit(1.0, 2), commit(2.0, 3), commit(9.0, 4)]
    assert usual_step_s(commits) == 1.0
    assert usual_step_s(commits[:1]) == 0.0


def test_commits_are_read_while_they_are_written(tmp_path: Path) -> None:
    with open_log(tmp_path, rank=2) as committed:
        assert list(read_workers(tmp_path)) == [2]
        committed(1, 2, 3, 1)
        committed(2, 0, 2, 2)
        [path] = (tmp_path / "commits").iterdir()
        with path.open("a") as file:
            file.write("12.5 3 0")
        found = read_commits(tmp_path)
    assert [(one.step, one.rank, one.size, one.generation) for one in found] == [(1, 2, 3, 1), (2, 0, 2, 2)]
    assert last_step(found) == 2


def test_before_anybody_came_there_is_nothing_to_read(tmp_path: Path) -> None:
    assert (read_workers(tmp_path), read_commits(tmp_path), last_step([])) == ({}, [], 0)


# -- waiting ------------------------------------------------------------------------------------------------------


def test_nobody_passes_the_gate_before_it_is_opened(tmp_path: Path) -> None:
    with shut_gate(tmp_path) as open_gate:
        with (tmp_path / "gate").open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        open_gate()
        pass_gate(tmp_path)


def test_something_is_quiet_when_it_stayed_the_same_for_a_while() -> None:
    now_s = 0.0
    quiet = Quiet(clock=lambda: now_s)
    assert not quiet.at("a")
    now_s = QUIET_S
    assert not quiet.at("b")
    now_s = 2 * QUIET_S
    assert quiet.at("b")


# -- from recoveries to the report ------------------------------------------------------------------------------


def measured(*rounds: tuple[float, ...]) -> list[dict[str, RecoveryTimes]]:
    names = [side.name for side in SIDES]
    return [dict(zip(names, (RecoveryTimes(time_s, None, 1) for time_s in times), strict=True)) for times in rounds]


def test_ratios_to_the_restart_are_made_within_rounds() -> None:
    row = make_row(SURVIVORS, measured((1.0, 1, 1, 10, 1), (2.0, 1, 1, 10, 1), (4.0, 1, 1, 80, 1)), steps=8)
    assert (row["restart_ratio_low"], row["restart_ratio"], row["restart_ratio_high"]) == (5, 10, 20)
    assert (row["next_median_s"], row["next_max_s"], row["steps_lost"]) == (2, 4, 3)


def test_times_until_all_are_back_leave_out_runs_that_ended_first() -> None:
    found = [{"spare": RecoveryTimes(0.1, whole_s, 0)} for whole_s in (1.0, None, 3.0)]
    row = make_row(SPARE, found, steps=8)
    assert (row["whole_median_s"], row["whole_reached"], row["restart_ratio"]) == (2.0, 2, None)
    assert make_row(SPARE, found[1:2], steps=8)["whole_median_s"] is None


def test_claims_are_judged_by_the_median() -> None:
    found = measured((0.9, 9, 2.5, 9, 9), (0.9, 9, 2.5, 9, 9), (7.0, 9, 0.5, 9, 9))
    plan = RecoveryPlan("mlp", 3, 6, kills=3)
    _, *rounds = make_rounds(plan)
    report = make_report(plan, rounds, found, {side.name: 8 for side in SIDES}, baseline_agrees=False, machine={})
    assert [claim["holds"] for claim in report["claims"]] == [True, False]
    assert claim_line(report["claims"][0]).endswith("0.90 s measured: holds")
    assert claim_line(report["claims"][1]).endswith("2.50 s measured: does not hold")
    assert agreement_lines(report)[1] == "torchrun: its runs did not always"


class Scripted:
    """Trials whose runs end with a digest known before: of undisturbed runs, then of those with a kill, by side."""

    def __init__(self, right: str, disturbed: dict[str, str]) -> None:
        self.right, self.disturbed = right, disturbed

    def run(self, side: RecoverySide, steps: int, kill: PlannedKill | None = None) -> TrialResult:
        digest = self.right if kill is None else self.disturbed.get(side.name, self.right)
        return TrialResult(TrainingResult(digest, {}), 0.1, None if kill is None else RecoveryTimes(0.1, 0.2, 0))


def benchmark(disturbed: dict[str, str]) -> RecoveryBench:
    return RecoveryBench(PLAN, Scripted("right", disturbed), lambda progress: None)


@pytest.mark.parametrize("side", [SURVIVORS, SPARE])
def test_other_bits_after_a_loss_are_never_reported_as_a_recovery(side: RecoverySide) -> None:
    with pytest.raises(ResultsDiffer, match=rf"{side.title}: worker \d was killed .* other bits"):
        benchmark({side.name: "wrong"}).run()


def test_other_bits_of_the_baseline_are_reported() -> None:
    assert benchmark({}).run()["baseline_bits_agree"] is True
    assert benchmark({RESTART_10.name: "wrong"}).run()["baseline_bits_agree"] is False


def test_a_report_of_recoveries_has_the_keys_that_it_always_had() -> None:
    report = json.loads(json.dumps(benchmark({}).run()))
    assert keys(report) == set(RECORDED["recovery"])


def test_all_runs_that_were_planned_are_followed() -> None:
    runs = []
    RecoveryBench(PLAN, Scripted("right", {}), lambda progress: runs.append(progress.done)).run()
    assert runs == list(range(1, PLAN.rounds + 1))
