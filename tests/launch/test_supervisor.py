"""The supervisor with real processes. The workers are played: they say on the status page what a test orders."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from launches import IMPORTABLE, finish, start_lockstep
from marked import MARK, survivors

from lockstep.launch.channels.exits import NO_MOMENT
from lockstep.launch.host.processes import await_end
from lockstep.settings.environments.lockstep_run import PARENT_PID

pytestmark = pytest.mark.timeout(60)

# A worker that does what it is ordered to, line by line. It is a member from the start unless it comes too late. It
# asks for patience until it is ordered to be `impatient()`: on a busy machine orders may be long in coming.
PLAYER = """
import json, os, signal, sys
from lockstep.errors import WorkerLost
from lockstep.launch.channels import status as page
from lockstep.launch.channels.status import Phase, StatusWriter
slot, joiner = int(os.environ["LOCKSTEP_SLOT"]), "LOCKSTEP_ENDPOINTS" in os.environ
status = StatusWriter(int(os.environ["LOCKSTEP_STATUS_FD"]), slot)
patience = status.patient(1000)
patience.__enter__()
impatient = lambda: patience.__exit__(None, None, None)
def member(generation=1, rank=slot, step=412):
    status.committed(step - 1, 0)
    status.enter(Phase.COMPUTING, step)
    status.place(generation, rank, int(os.environ["LOCKSTEP_SIZE"]), 41000 + slot, 1)
def finish():
    status.enter(Phase.ENDED, 412)
    sys.exit(0)
def here():
    told = {"slot": slot, "pid": os.getpid(), "endpoints": os.environ.get("LOCKSTEP_ENDPOINTS"),
            "resume": os.environ.get("LOCKSTEP_RESUME")}
    with open("here", "w") as pipe:
        pipe.write(json.dumps(told) + "\\n")
def obey():
    os.mkfifo(f"orders-{os.getpid()}")
    # Open for writing too: between two orders the pipe neither ends nor loses its reader.
    orders = open(os.open(f"orders-{os.getpid()}", os.O_RDWR))
    here()
    for line in orders: exec(line, globals())
"""
MEMBERS = "member(generation=2 if joiner else 1)\nobey()\n"
NOT_ADMITTED = "if not joiner: member()\nobey()\n"
NOBODY = "obey()\n"


@dataclass(frozen=True)
class Player:
    """A worker that waits for orders in `folder`; what it knew of itself when it came."""

    folder: Path
    slot: int
    pid: int
    endpoints: str | None
    resume: str | None

    def do(self, order: str) -> None:
        with open(self.folder / f"orders-{self.pid}", "w") as pipe:
            pipe.write(order + "\n")

    def kill(self, signum: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid, signum)


class Stage:
    """A folder with a launcher and its played workers. Every process has the stage's mark."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid4().hex
        os.mkfifo(folder / "here")
        # Open for writing too, so that the pipe does not end between two workers.
        self._here = open(os.open(folder / "here", os.O_RDWR))  # noqa: SIM115

    def start(self, script: str, *options: str) -> subprocess.Popen[str]:
        (self.folder / "train.py").write_text(PLAYER + script)
        self.launcher = self._lockstep("run", *options, "train.py")
        return self.launcher

    def scale(self, num_workers: int) -> None:
        done = self._lockstep("scale", "runs/train-1", str(num_workers))
        assert finish(done)[0] == 0

    def hold_launcher(self) -> None:
        """Stops the launcher, so that it sees all at once what happens until it goes on."""
        self.launcher.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.launcher.pid, os.WSTOPPED | os.WNOWAIT)

    def players(self, number: int) -> list[Player]:
        """The next workers that come, or that say once more that they are here; by slot."""
        result: list[dict[str, Any]] = [json.loads(self._here.readline()) for _ in range(number)]
        return sorted((Player(self.folder, **one) for one in result), key=lambda player: player.slot)

    def player(self) -> Player:
        return self.players(1)[0]

    def dismiss(self, *players: Player) -> tuple[int, str, str]:
        """Lets the workers come to the end of their script, and gives how the launch ended."""
        for player in players:
            player.do("finish()")
        return finish(self.launcher)

    def log(self, slot: int) -> str:
        return (self.folder / f"runs/train-1/worker-{slot}.log").read_text()

    def await_processes(self, number: int) -> list[int]:
        """The processes that the launcher has started, once there are so many."""
        pids: list[int] = []
        while len(pids) < number:
            pids = [pid for pid in survivors(self.mark) if pid != self.launcher.pid]
        return pids

    def close(self) -> None:
        self._here.close()
        left = survivors(self.mark)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, "processes stayed after the launch"

    def _lockstep(self, *words: str) -> "subprocess.Popen[str]":
        return start_lockstep(*words, cwd=self.folder, **{MARK: self.mark})


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.close()


def test_a_killed_worker_is_told_in_one_line_and_replaced_while_the_others_go_on(stage):
    stage.start(MEMBERS, "-n", "3")
    first, second, victim = stage.players(3)
    victim.kill()
    joiner = stage.player()
    assert (joiner.slot, joiner.endpoints) == (2, "127.0.0.1:41000,127.0.0.1:41001")
    code, _, err = stage.dismiss(first, second, joiner)
    assert (code, err) == (0, f"! worker 2 (pid {victim.pid}) was killed by SIGKILL at step 412\n")


def test_the_log_of_a_slot_goes_on_with_the_replacement_after_a_line_between(stage):
    stage.start("print('I am', 'new' if joiner else 'old')\n" + MEMBERS, "-n", "2")
    first, victim = stage.players(2)
    victim.kill()
    stage.dismiss(first, stage.player())
    assert stage.log(1) == "I am old\n--- here another process takes over as this worker ---\nI am new\n"


def test_a_member_that_leaves_with_an_exit_code_of_its_own_is_replaced(stage):
    stage.start(MEMBERS, "-n", "2")
    first, leaver = stage.players(2)
    leaver.do("os._exit(5)")
    code, _, err = stage.dismiss(first, stage.player())
    assert (code, err) == (0, "! worker 1 exited with code 5 at step 412\n")


def test_members_that_all_leave_with_an_exit_code_are_told_as_one_failure(stage):
    stage.start(MEMBERS, "-n", "2")
    players = stage.players(2)
    stage.hold_launcher()
    for player in players:
        player.do("os._exit(5)")
    await_end([player.pid for player in players], within_s=30)
    stage.launcher.send_signal(signal.SIGCONT)
    code, _, err = finish(stage.launcher)
    assert code == 1
    assert err.startswith("✗ worker ")
    assert " exited with code 5 at step 412" in err


def test_a_member_that_leaves_with_an_exit_code_just_before_the_others_finish_is_a_loss_and_no_failure(stage):
    stage.start(MEMBERS, "-n", "2")
    first, leaver = stage.players(2)
    stage.hold_launcher()
    leaver.do("os._exit(7)")
    first.do("finish()")
    await_end([first.pid, leaver.pid], within_s=30)
    stage.launcher.send_signal(signal.SIGCONT)
    assert finish(stage.launcher) == (0, "", "! worker 1 exited with code 7 at step 412\n")


def test_children_of_a_killed_worker_are_ended_while_the_others_go_on(stage):
    stage.start(MEMBERS, "-n", "2")
    first, victim = stage.players(2)
    deaf = "preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    victim.do(f"import subprocess; print(subprocess.Popen(['sleep', '1000'], {deaf}).pid, flush=True); here()")
    stage.player()
    victim.kill()
    joiner = stage.player()
    child = int(stage.log(1).splitlines()[0])
    assert await_end([child], within_s=30.0)
    stage.dismiss(first, joiner)


def test_one_loss_more_than_the_budget_ends_the_run_with_4(stage):
    stage.start(MEMBERS, "-n", "3", "--fault-budget", "1")
    second, third = stage.players(3)[1:]
    second.do("status.enter(Phase.COMPUTING, 413); here()")
    stage.player()
    third.kill()
    stage.player()
    second.kill()
    code, _, err = finish(stage.launcher)
    first_line, *story = err.splitlines()
    assert code == 4
    assert first_line == f"! worker 2 (pid {third.pid}) was killed by SIGKILL at step 412"
    assert story[0] == f"✗ worker 1 (pid {second.pid}) was killed by SIGKILL at step 413"
    assert any(
        line.startswith("  2 workers lost in this run, and too few steps meanwhile: the fault budg") for line in story
    )
    assert len(story) <= 6


def test_a_step_that_has_cost_workers_in_five_attempts_ends_the_run_with_4(stage):
    stage.start(MEMBERS, "-n", "2")
    victim = stage.players(2)[1]
    for attempt in range(4):
        victim.kill()
        victim = stage.player()
        victim.do(f"member(generation={attempt + 2}); here()")
        stage.player()
    victim.kill()
    code, _, err = finish(stage.launcher)
    assert code == 4
    assert "step 412 has cost workers in 5 attempts: it would cost the next one too" in err


def test_an_error_in_user_code_ends_the_run_and_is_not_tried_again(stage):
    stage.start(MEMBERS, "-n", "3")
    stage.players(3)[1].do("raise ValueError('bad sample')")
    code, _, err = finish(stage.launcher)
    assert code == 1
    assert err.startswith("✗ worker 1 failed: ValueError: bad sample\n")


def test_exit_functions_of_a_worker_that_has_failed_are_not_disturbed_when_the_others_are_ended(stage):
    os.mkfifo(stage.folder / "other")
    stage.start(MEMBERS, "-n", "2")
    failing, other = stage.players(2)
    other.do("held = open('other', 'w')")
    failing.do(
        "import atexit\natexit.register(lambda: print(repr(open('other').read())))\nraise ValueError('bad sample 7')"
    )
    code, out, _ = finish(stage.launcher)
    assert (code, out) == (1, "''\n")


def test_a_worker_killed_before_there_are_members_starts_all_again_as_they_were_told_to(stage):
    stage.start(NOBODY, "-n", "2", "--resume", "never")
    victim = stage.players(2)[1]
    victim.kill()
    again = stage.players(2)
    assert [(player.slot, player.resume, player.endpoints) for player in again] == [
        (0, "never", None),
        (1, "never", None),
    ]
    code, _, err = stage.dismiss(*again)
    assert code == 0
    assert err.splitlines() == [
        f"! worker 1 (pid {victim.pid}) was killed by SIGKILL",
        "  no step was made yet: all 2 workers start again",
    ]


def test_when_all_members_are_killed_all_start_again(stage):
    stage.start(MEMBERS, "-n", "2")
    players = stage.players(2)
    stage.hold_launcher()
    for player in players:
        player.kill()
    await_end([player.pid for player in players], within_s=30)
    stage.launcher.send_signal(signal.SIGCONT)
    again = stage.players(2)
    assert [player.resume for player in again] == ["auto", "auto"]
    code, _, err = stage.dismiss(*again)
    assert (code, len(err.splitlines())) == (0, 3)


def test_survivors_that_cannot_recover_start_all_again(stage):
    stage.start(NOT_ADMITTED, "-n", "2")
    survivor, victim = stage.players(2)
    victim.kill()
    joiner = stage.player()
    survivor.do("raise WorkerLost(rank=1, step=412, during='reduce', cause='closed')")
    again = stage.players(2)
    assert (joiner.resume, again[0].resume) == (None, "auto")
    code, _, err = stage.dismiss(*again)
    assert code == 0
    assert "all 2 workers start again" in err


def test_ctrl_c_while_all_are_ended_to_start_again_ends_the_run(stage):
    stage.start("signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getppid(), 2))\n" + NOBODY, "-n", "2")
    stage.players(2)[1].kill()
    code, _, err = finish(stage.launcher)
    assert code == 130
    assert "start again" in err
    assert stage.log(0) == ""


def test_a_joiner_that_nobody_is_left_to_admit_is_ended_quietly(stage):
    stage.start(NOT_ADMITTED, "-n", "2")
    survivor, victim = stage.players(2)
    victim.kill()
    stage.player()
    code, _, err = stage.dismiss(survivor)
    assert (code, len(err.splitlines())) == (0, 1)


def test_a_joiner_that_is_killed_before_it_is_admitted_is_tried_again(stage):
    stage.start(NOT_ADMITTED, "-n", "2")
    survivor, victim = stage.players(2)
    victim.kill()
    joiner = stage.player()
    joiner.kill()
    again = stage.player()
    assert again.slot == 1
    code, _, err = stage.dismiss(survivor)
    assert code == 0
    assert f"! worker 1 (pid {joiner.pid}) was killed by SIGKILL, before it had joined: tried again" in err


def test_a_joiner_that_raises_before_it_is_admitted_is_not_tried_again(stage):
    stage.start(NOT_ADMITTED, "-n", "2")
    survivor, victim = stage.players(2)
    victim.kill()
    stage.player().do("raise ValueError('no such folder')")
    assert "not tried again" in [stage.launcher.stderr.readline() for _ in range(2)][1]
    code, _, _ = stage.dismiss(survivor)
    assert code == 0


def test_joiners_that_give_their_place_up_cost_nothing_and_after_two_the_members_go_on_alone(stage):
    stage.start(MEMBERS, "-n", "2", "--fault-budget", "1")
    survivor, victim = stage.players(2)
    victim.kill()
    stage.player().do("os._exit(76)")
    stage.player().do("os._exit(76)")
    assert "was killed" in stage.launcher.stderr.readline()
    assert stage.launcher.stderr.readline().endswith("no more are started, and the others go on\n")
    survivor.do("while not status.is_given_up(1): pass\nhere()")
    assert stage.player() == survivor
    assert stage.dismiss(survivor) == (0, "", "")


def test_a_joiner_that_reports_and_ends_at_once_costs_the_next_one_nothing(stage):
    stage.start("from lockstep.launch.channels.exits import OutOfPlace\n" + NOT_ADMITTED, "-n", "2")
    survivor, victim = stage.players(2)
    victim.kill()
    joiner = stage.player()
    stage.hold_launcher()
    joiner.do("raise OutOfPlace('too late')")
    assert await_end([joiner.pid], within_s=30)
    stage.launcher.send_signal(signal.SIGCONT)
    again = stage.player()
    again.do("here()")
    assert stage.player() == again
    code, _, err = stage.dismiss(survivor, again)
    assert code == 0
    assert "no more are started" not in err


def test_a_joiner_is_not_waited_for(stage):
    stage.start(NOT_ADMITTED, "-n", "2")
    waiting, victim = stage.players(2)
    victim.kill()
    stage.player().do("impatient()")
    assert "was killed" in stage.launcher.stderr.readline()
    waiting.do("status.committed(411, 410_000_000); status.enter(Phase.REDUCING, 412, 1, 3)")
    waiting.do("status._row[page.SINCE_NS] -= 100_000_000_000")
    late, who = [stage.launcher.stderr.readline() for _ in range(2)]
    assert late.startswith("! step 412 is late: ")
    assert who.endswith("missing: nobody\n")
    assert stage.dismiss(waiting)[0] == 0


def test_what_is_late_again_after_all_have_started_again_is_told_again(stage):
    stage.start(MEMBERS, "-n", "2")
    for _ in range(2):
        for player in stage.players(2):
            player.do("status.enter(Phase.REDUCING, 412, 1, 3); status._row[page.SINCE_NS] -= 400_000_000_000")
    code, _, err = stage.dismiss(*stage.players(2))
    assert (code, err.count("! step 412 is late: ")) == (0, 2)


def test_the_last_words_of_the_speaker_are_shown_and_then_the_next_one_speaks(stage):
    stage.start(NOT_ADMITTED, "-n", "2")
    speaker, other = stage.players(2)
    other.do("print('not shown'); here()")
    stage.player()
    speaker.do("print('last words'); os.kill(os.getpid(), 9)")
    joiner = stage.player()
    joiner.do("print('not shown either'); here()")
    stage.player()
    other.do("member(generation=3, rank=0); print('I speak now')")
    _, out, _ = stage.dismiss(other)
    assert out == "last words\nI speak now\n"
    assert stage.log(1) == "not shown\nI speak now\n"


def test_what_the_speaker_wrote_is_shown_before_the_next_one_even_if_all_is_seen_at_once(stage):
    stage.start(NOT_ADMITTED, "-n", "2")
    speaker, other = stage.players(2)
    stage.hold_launcher()
    speaker.do("print('last words'); os.kill(os.getpid(), 9)")
    await_end([speaker.pid], within_s=30)
    other.do("member(generation=2, rank=0); print('I speak now'); here()")
    stage.player()
    stage.launcher.send_signal(signal.SIGCONT)
    stage.player()  # the replacement
    _, out, _ = stage.dismiss(other)
    assert out == "last words\nI speak now\n"


def test_a_stopped_worker_is_told_ended_and_replaced(stage):
    stage.start(MEMBERS, "-n", "2")
    first, victim = stage.players(2)
    victim.kill(signal.SIGSTOP)
    joiner = stage.player()
    code, _, err = stage.dismiss(first, joiner)
    assert (code, joiner.slot, len(err.splitlines())) == (0, 1, 1)
    assert err.startswith(f"! worker 1 (pid {victim.pid}) is stopped at step 412 (state T, since ")


def test_a_worker_that_does_nothing_while_others_wait_is_told_with_its_line_and_replaced(stage):
    stage.start(MEMBERS, "-n", "2", "--hang-s", "3")
    waiting, hung = stage.players(2)
    hung.do(
        "impatient(); status.committed(411, 410_000_000); status.enter(Phase.COMPUTING, 412); here(); signal.pause()"
    )
    stage.player()
    waiting.do("status.enter(Phase.REDUCING, 412, 1, 3); status._row[page.SINCE_NS] -= 10_000_000_000")
    joiner = stage.player()
    code, _, err = stage.dismiss(waiting, joiner)
    late, who, end = err.splitlines()
    assert code == 0
    assert late.startswith("! step 412 is late: ")
    assert late.endswith(" s (usually 0.41 s)")
    assert who.startswith("    waiting: 0 (reduce, bucket 2 of 3)    missing: 1 (sleeping, state S, since ")
    assert re.search(r"; train\.py:\d+ for line in orders: exec\(line, globals\(\)\)\)$", who)
    assert re.fullmatch(r"  worker 1 shows no sign of work for [3-9] s \(--hang-s\): it is ended", end)


def test_workers_that_all_do_nothing_are_told_with_their_lines_ended_and_started_again(stage, monkeypatch):
    monkeypatch.setattr("lockstep.launch.supervision.hangs.IDLE_S", 2.0)  # in the launcher too, which is forked
    stage.start(MEMBERS, "-n", "2", "--hang-s", "3")
    players = stage.players(2)
    for player in players:
        player.do("impatient(); status.enter(Phase.COMPUTING, 412); signal.pause()")
    again = stage.players(2)
    assert [player.resume for player in again] == ["auto", "auto"]
    code, _, err = stage.dismiss(*again)
    idle, places, end, restart = err.splitlines()
    assert code == 0
    assert re.fullmatch(r"! step 412 does not get on: all 2 workers do nothing, since [2-9] s", idle)
    assert places.count("train.py:") == 2
    assert re.fullmatch(r"  all 2 workers show no sign of work for \d s \(--hang-s\): they are ended", end)
    assert restart == "  nobody is left who could go on: all 2 workers start again, from the newest checkpoint"


def test_a_run_is_scaled_up_with_joiners_in_the_lowest_free_slots(stage):
    stage.start(MEMBERS, "-n", "1")
    founder = stage.player()
    stage.scale(3)
    joiners = stage.players(2)
    assert [(player.slot, player.endpoints) for player in joiners] == [(1, "127.0.0.1:41000"), (2, "127.0.0.1:41000")]
    code, _, err = stage.dismiss(founder, *joiners)
    assert (code, err) == (0, "  2 more workers will join: 3 wanted\n")


def test_a_run_is_scaled_down_by_its_highest_workers_which_leave_by_themselves(stage):
    leave = (
        "def leave(*_):\n    status.enter(Phase.AWAITING, 412, page.Collective.END)\n"
        "    print('left', flush=True)\n    os._exit(0)\nsignal.signal(signal.SIGUSR1, leave)\n"
    )
    stage.start(leave + MEMBERS, "-n", "3")
    players = stage.players(3)
    stage.scale(1)
    assert await_end([player.pid for player in players[1:]], within_s=30)
    code, _, err = stage.dismiss(players[0])
    assert (code, err) == (0, "  workers 1 and 2 leave after the step: 1 wanted\n")
    assert (stage.log(1), stage.log(2)) == ("left\n", "left\n")


def test_a_worker_that_cannot_be_started_does_not_end_the_run(stage):
    stage.start(MEMBERS, "-n", "1")
    founder = stage.player()
    (stage.folder / "runs/train-1/worker-1.log").symlink_to(stage.folder / "elsewhere")
    stage.scale(2)
    assert "will join" in stage.launcher.stderr.readline()
    assert stage.launcher.stderr.readline().endswith("; the others go on without it\n")
    (stage.folder / "runs/train-1/worker-1.log").unlink()
    stage.scale(2)
    assert stage.dismiss(founder, stage.player())[0] == 0


def test_a_worker_without_a_run_of_its_own_does_not_mind_being_asked_to_leave(stage):
    stage.start(MEMBERS, "-n", "2")
    players = stage.players(2)
    stage.scale(1)
    assert stage.launcher.stderr.readline() == "  worker 1 leaves after the step: 1 wanted\n"
    players[1].do("here()")
    assert stage.player() == players[1]
    assert stage.dismiss(*players)[0] == 0


def test_a_spare_takes_the_place_of_a_lost_worker(stage):
    stage.start(MEMBERS, "-n", "2", "--spares", "1")
    first, victim = stage.players(2)
    stage.await_processes(4)
    victim.kill()
    joiner = stage.player()
    assert (joiner.slot, joiner.endpoints) == (1, "127.0.0.1:41000")
    joiner.do("print('from the spare')")
    code, _, err = stage.dismiss(first, joiner)
    assert (code, len(err.splitlines())) == (0, 1)
    assert stage.log(1).endswith("from the spare\n")


def test_a_spare_has_loaded_torch_when_it_gets_its_part(tmp_path):
    (tmp_path / "train.py").write_text("import sys; print('torch' in sys.modules)")
    reader, writer = os.pipe()
    os.write(writer, b"{}")
    os.close(writer)
    spare = subprocess.run(
        [sys.executable, "-m", "lockstep.launch.worker.spare", str(reader), "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": IMPORTABLE, PARENT_PID: str(os.getpid())},
        pass_fds=[reader],
        capture_output=True,
        text=True,
    )
    os.close(reader)
    assert (spare.stdout, spare.stderr) == ("True\n", "")


def test_when_the_launcher_is_killed_spares_end_with_the_workers(stage):
    stage.start(MEMBERS, "-n", "2", "--spares", "2")
    stage.players(2)
    everyone = stage.await_processes(5)  # two members, the guard, and the spares, which come once there are members
    stage.launcher.kill()
    assert await_end(everyone, within_s=30.0)
    finish(stage.launcher)


def test_ctrl_c_tells_nothing_of_a_joiner(stage):
    exits = "signal.signal(signal.SIGINT, lambda *_: os._exit(130))\n"
    stage.start(exits + NOT_ADMITTED, "-n", "2")
    victim = stage.players(2)[1]
    victim.kill()
    stage.player()
    stage.launcher.send_signal(signal.SIGINT)
    code, _, err = finish(stage.launcher)
    assert code == 130
    stopped = "✗ stopped by Ctrl-C; all 2 workers have ended. Logs: runs/train-1"
    assert err.splitlines()[1:] == [stopped, f"  nothing was saved: {NO_MOMENT}"]


def test_a_folder_in_which_a_run_is_under_way_is_refused(stage):
    stage.start(MEMBERS, "-n", "1")
    player = stage.player()
    second = stage._lockstep("run", "--run-dir", "runs/train-1", "train.py")
    code, _, err = finish(second)
    assert code == 2
    assert "a run is under way in runs/train-1" in err
    assert stage.dismiss(player)[0] == 0


def test_what_is_said_on_checkpoints_reaches_the_workers(stage):
    names = ["LOCKSTEP_RESUME", "LOCKSTEP_CHECKPOINTS", "LOCKSTEP_CHECKPOINT_EVERY", "LOCKSTEP_CHECKPOINT_KEEP"]
    options = ["--resume", "auto", "--checkpoints", "ckpt", "--checkpoint-every", "100 steps", "--checkpoint-keep", "2"]
    _, out, _ = finish(stage.start(f"print([os.environ[name] for name in {names}])", *options))
    assert out == f"['auto', '{stage.folder / 'ckpt'}', '100 steps', '2']\n"


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        (("--resume", "no-such-folder"), "give auto, never, or the path of one"),
        (("--checkpoint-every", "often"), "'100 steps', '10 min'"),
        (("--fault-budget", "-1"), "a whole number, 0 or more"),
        (("-n", "1025"), "one host runs 1024 at most"),
    ],
)
def test_a_bad_option_is_refused_before_anything_starts(stage, options, allowed):
    code, _, err = finish(stage.start("", *options))
    assert code == 2
    assert allowed in err
    assert not (stage.folder / "runs").exists()
