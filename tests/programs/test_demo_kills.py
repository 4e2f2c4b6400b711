"""Whom the demo kills and when, and what it concludes from it."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from io import StringIO
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from lockstep.events import GenerationFormed
from lockstep.launch.channels.status import Phase, StatusPage, StatusRow, StatusWriter
from lockstep.launch.host.processes import process_state
from lockstep.observe.console import changes
from lockstep.programs.demo.demonstration import Demonstration, Disturbed
from lockstep.programs.demo.kills import (
    GOES_ON,
    STEPS_PER_KILL,
    Killer,
    KillPlan,
    KillRecord,
    LivingWorker,
    choose,
    living_members,
)
from lockstep.programs.demo.recipe import Recipe
from lockstep.programs.demo.report import as_json, show_report
from lockstep.programs.demo.result import DemoResult, judge, judge_disturbed

WENT_ON = f"  step 5 was not applied; {GOES_ON} 0.1 s"
END = {"steps": 3, "digest": "ab" * 32, "held_out_loss": 2.5, "written": "def f(): pass"}
plans = st.builds(KillPlan, st.integers(STEPS_PER_KILL, 2000), st.integers(2, 8), st.integers(0, 99))


def members(*slots: int) -> list[LivingWorker]:
    return [LivingWorker(slot, 100 + slot, step=5) for slot in slots]


def result(losses: tuple[float, ...] = (5.5, 4.0, 3.0), **end: object) -> DemoResult:
    return DemoResult(3, 100, 6.0, {"torch": "2.11.0", "parameters": 1234}, list(losses), {**END, **end})


def demonstration(disturbed: DemoResult, num_kills: int = 1) -> Demonstration:
    calm = result()
    kills = (KillRecord(LivingWorker(1, 812, 2), 0.25),) * num_kills
    verdict = judge_disturbed(calm, disturbed, num_kills)
    recipe = replace(Recipe(), steps=3)
    return Demonstration(recipe, (calm,), judge([calm]), Disturbed(calm, disturbed, kills, verdict))


# -- the plan -------------------------------------------------------------------------------------------------


@given(plans)
def test_kills_are_some_steps_apart_and_leave_the_ends_of_the_run_out(plan: KillPlan) -> None:
    moments = [0, *(plan.due(number) for number in range(1, plan.num_kills + 1)), plan.steps]
    assert plan.num_kills >= 1
    assert all(late - early >= STEPS_PER_KILL // 2 for early, late in pairwise(moments))


@given(plans)
def test_every_worker_has_its_turn_before_any_has_a_second(plan: KillPlan) -> None:
    first = [plan.order(number)[0] for number in range(1, plan.num_workers + 1)]
    assert sorted(first) == list(range(plan.num_workers))


def test_another_seed_kills_in_another_order() -> None:
    assert len({tuple(KillPlan(360, 3, seed).order(1)) for seed in range(20)}) > 1


def test_the_same_seed_kills_in_the_same_order() -> None:
    assert KillPlan(360, 3, 7).order(2) == KillPlan(360, 3, 7).order(2)


@given(plans, st.data())
def test_the_first_of_the_order_who_lives_is_killed(plan: KillPlan, data: st.DataObject) -> None:
    living = data.draw(st.sets(st.integers(0, plan.num_workers - 1), min_size=2))
    victim = choose(plan, 1, members(*living))
    assert victim is not None
    assert victim.slot == next(slot for slot in plan.order(1) if slot in living)


@pytest.mark.parametrize("living", [members(), members(0), members(2)])
def test_the_last_who_lives_is_never_killed(living: list[LivingWorker]) -> None:
    assert choose(KillPlan(360, 3, 0), 1, living) is None


# -- the killer -----------------------------------------------------------------------------------------------


class Scene:
    """A killer with a clock that is set by hand, and what it did."""

    def __init__(self, *living: int) -> None:
        self.living, self.now_s = list(living), 10.0
        self.killed: list[int] = []
        self.said: list[str] = []
        plan = KillPlan(36, 3, seed=0)  # three kills, after 9, 18 and 27 steps
        self.killer = Killer(plan, self._members, self.killed.append, lambda: self.now_s, self.said.append)

    def _members(self) -> list[LivingWorker]:
        return [member for member in members(*self.living) if member.slot not in self.killed]


def test_nobody_is_killed_before_the_first_kill_is_due() -> None:
    scene = Scene(0, 1, 2)
    for step in range(1, 9):
        scene.killer.stepped(step)
    assert scene.killed == []


def test_a_kill_is_told_with_its_number_its_victim_and_the_step() -> None:
    scene = Scene(0, 1, 2)
    scene.killer.stepped(9)
    (slot,) = scene.killed
    assert scene.said == [f"kill 1 of 3: worker {slot} (pid {100 + slot}) at step 5"]


def test_a_kill_waits_until_two_live() -> None:
    scene = Scene(1)
    scene.killer.stepped(9)
    assert scene.killed == []
    scene.living.append(2)
    scene.killer.stepped(10)
    assert len(scene.killed) == 1


def test_nobody_else_is_killed_before_the_run_goes_on() -> None:
    scene = Scene(0, 1, 2)
    for step in range(9, 30):
        scene.killer.stepped(step)
    assert len(scene.killed) == 1


def test_the_pause_ends_with_the_first_step_after_the_others_went_on() -> None:
    scene = Scene(0, 1, 2)
    scene.killer.stepped(9)
    scene.now_s = 10.01
    scene.killer.stepped(10)  # was under way, and complete without the victim
    scene.killer.read_line(WENT_ON)
    scene.now_s = 10.5
    scene.killer.stepped(11)
    assert scene.killer.kills[0].pause_s == pytest.approx(0.5)
    assert scene.said[-1] == "  the next step was done 0.50 s after the kill"


def test_nobody_is_killed_after_the_last_step() -> None:
    scene = Scene(0, 1, 2)
    scene.killer.stepped(36)
    assert scene.killed == []


def test_a_run_that_has_lost_a_worker_says_the_words_that_the_killer_waits_for() -> None:
    for committed in (False, True):
        lost = GenerationFormed(2, (0, 2), (1,), (), (), (2,), (0,), committed, "gone", 0.1, step=5)
        assert any(GOES_ON in line for line in changes(lost, reported_by_launcher=True))


def test_a_run_that_a_worker_has_joined_does_not_say_them() -> None:
    joined = GenerationFormed(2, (0, 1, 2), (), (), (1,), (), (), False, "", 0.1, step=5)
    assert not any(GOES_ON in line for line in changes(joined, reported_by_launcher=True))


# -- who lives ------------------------------------------------------------------------------------------------


def write_row(page: StatusPage, slot: int, generation: int, phase: Phase = Phase.COMPUTING) -> None:
    writer = StatusWriter(page.fd, slot)
    writer.place(generation, slot, 3, endpoint_port=1, num_lanes=2)
    writer.enter(phase, step=41)
    writer.close()


@dataclass
class Pool:
    """What the demo asks of a pool, answered by a page and by the kernel."""

    page: StatusPage
    running: dict[int, str]

    def row(self, slot: int) -> StatusRow:
        return self.page.row(slot)

    def state(self, slot: int) -> str:
        return process_state(self.page.row(slot).pid).state


def test_those_of_the_newest_generation_who_have_not_ended_are_members() -> None:
    with StatusPage() as page:
        assert living_members(Pool(page, {})) == []
        write_row(page, 0, generation=2)
        write_row(page, 1, generation=1)
        write_row(page, 2, generation=0)
        write_row(page, 4, generation=2)
        write_row(page, 5, generation=2, phase=Phase.ENDED)
        found = living_members(Pool(page, dict.fromkeys([0, 1, 2, 4, 5], "us")))
    assert found == [LivingWorker(0, os.getpid(), 41), LivingWorker(4, os.getpid(), 41)]


def test_a_worker_that_is_dead_and_was_not_replaced_yet_is_no_member() -> None:
    words = [
        "import sys",
        "from lockstep.launch.channels.status import StatusWriter",
        "StatusWriter(int(sys.argv[1]), 1).place(1, 1, 2, 1, 1)",
    ]
    with StatusPage() as page:
        write_row(page, 0, generation=1)
        dead = subprocess.Popen([sys.executable, "-c", "\n".join(words), str(page.fd)], pass_fds=[page.fd])
        os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)  # as the launcher does: it stays a zombie
        assert page.row(1).pid == dead.pid
        assert [member.slot for member in living_members(Pool(page, {0: "us", 1: "dead"}))] == [0]
        dead.wait()


# -- the verdict and the report -------------------------------------------------------------------------------


def test_the_same_digest_after_kills_is_equal() -> None:
    verdict = judge_disturbed(result(), result(), 6)
    assert verdict.equal
    assert "6 workers were killed" in verdict.sentence


def test_another_digest_after_kills_is_not_equal() -> None:
    verdict = judge_disturbed(result(), result(digest="cd" * 32), 6)
    assert not verdict.equal
    assert "cdcd" in verdict.sentence


def test_another_loss_in_a_step_that_was_told_is_not_equal() -> None:
    assert not judge_disturbed(result(), result(losses=(5.5, 4.1, 3.0)), 6).equal


def test_a_loss_that_nobody_told_is_no_difference() -> None:
    silent = replace(result(losses=(5.5, float("nan"), 3.0)), unreported={2})
    assert judge_disturbed(result(), silent, 6).equal


def test_a_run_in_which_nobody_was_killed_shows_nothing() -> None:
    verdict = judge_disturbed(result(), result(), 0)
    assert not verdict.equal
    assert "Nobody was killed" in verdict.sentence


def test_the_demo_is_not_equal_when_the_disturbed_run_is_not() -> None:
    assert demonstration(result()).equal
    assert not demonstration(result(digest="cd" * 32)).equal


def test_the_terminal_shows_both_runs_side_by_side_in_80_columns() -> None:
    screen = StringIO()
    show_report(demonstration(result()), Console(file=screen, width=80))
    (digests,) = [line for line in screen.getvalue().splitlines() if line.startswith("│ digest")]
    assert digests.count("abababababababab…") == 2
    assert "1 worker was killed" in screen.getvalue()
    assert "nothing to be compared with" not in screen.getvalue()


def test_the_object_for_machines_has_null_where_no_loss_was_told() -> None:
    silent = replace(result(losses=(5.5, float("nan"), 3.0)), unreported={2})
    found = json.loads(json.dumps(as_json(demonstration(silent)), allow_nan=False))
    assert found["disturbed"]["losses"] == [5.5, None, 3.0]
    assert found["disturbed"]["kills"] == [{"worker": 1, "pid": 812, "step": 2, "pause_s": 0.25}]
    assert found["equal"] is True
