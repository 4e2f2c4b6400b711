"""Whole runs under the launcher, disturbed by real signals: the digest at the end is that of the undisturbed run."""

import random
import signal
from pathlib import Path

import pytest
from launched import launched, scale, send
from training import Job, digest_after
from workers import on_workers

pytestmark = pytest.mark.timeout(170)


@pytest.fixture(scope="module")
def undisturbed():
    """The digest and the number of steps after some epochs on one worker."""
    known = {}

    def after(epochs: int) -> tuple[str, int]:
        if epochs not in known:
            job = Job(model="conv", epochs=epochs)
            known[epochs] = tuple(on_workers(1, digest_after, job, limit_s=60 + epochs)[0])
        return known[epochs]

    return after


def disturb(run, kills: int, choice: random.Random) -> None:
    """Kills a random member, worker 0 too, as soon as two are at work, as often as asked for."""
    for _ in range(kills):
        run.wait_for(r"^step \d+ workers [23]$", after=len(run.lines))
        members = run.members()
        send(members[choice.choice(sorted(members))])
        run.next_step()


def kills(folder: Path, number: int, epochs: int, seed: int) -> tuple[str, int]:
    with launched(folder, "-n", "3", "--spares", "1", "--fault-budget", "1000", epochs=epochs, pause_s=0.05) as run:
        run.await_workers(3)
        disturb(run, number, random.Random(seed))
        return run.finish()


@pytest.mark.soak
def test_random_kills_and_a_stopped_worker_cost_no_step(tmp_path, undisturbed):
    choice = random.Random(1)
    with launched(tmp_path, "-n", "3", "--spares", "1", epochs=100) as run:
        run.await_workers(3)
        disturb(run, 2, choice)
        run.await_workers(3)
        stop_one(run, choice)
        assert run.finish() == undisturbed(100)


@pytest.mark.soak
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("seed", range(4))
def test_two_hundred_random_kills_in_four_runs_cost_no_step(tmp_path, undisturbed, seed):
    assert kills(tmp_path, 50, 700, seed) == undisturbed(700)


def stop_one(run, choice: random.Random) -> None:
    """Stops a member; returns when it was named, and a replacement is at work."""
    members = run.members()
    slot = choice.choice(sorted(members))
    before = len(run.lines)
    send(members[slot], signal.SIGSTOP)
    run.wait_for(rf"worker {slot}\b.*stopped", after=before)
    run.await_workers(3)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_twenty_stopped_workers_are_named_and_replaced(tmp_path, undisturbed):
    with launched(tmp_path, "-n", "3", "--spares", "1", "--fault-budget", "100", epochs=500) as run:
        run.await_workers(3)
        for number in range(20):
            stop_one(run, random.Random(number))
        assert run.finish(600) == undisturbed(500)


@pytest.mark.soak
def test_pauses_of_five_seconds_raise_no_alarm(tmp_path):
    pause = "time.sleep(5) if epoch % 8 == 7 and run.rank == epoch % 3 else None"
    with launched(tmp_path, "-n", "3", epochs=40, each_epoch=pause) as run:
        run.finish()
        assert "late" not in run.shown()
        assert "!" not in run.shown()


@pytest.mark.soak
def test_one_worker_then_four_then_two_then_three_give_the_digest_of_a_fixed_number(tmp_path, undisturbed):
    with launched(tmp_path, "-n", "1", "--run-dir", str(tmp_path / "run"), epochs=100) as run:
        run.await_workers(1)
        for number in (4, 2, 3):
            scale(tmp_path / "run", number)
            run.await_workers(number)
        assert run.finish() == undisturbed(100)


@pytest.mark.soak
def test_when_all_workers_are_killed_the_run_goes_on_from_its_newest_checkpoint(tmp_path, undisturbed):
    with launched(tmp_path, "-n", "2", "--checkpoint-every", "5 steps", epochs=60) as run:
        run.wait_for(r"^step 12 ")
        for pid in run.members().values():
            send(pid)
        run.wait_for("start again")
        run.wait_for("going on from step-")
        assert run.finish() == undisturbed(60)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.soak
def test_a_signal_saves_the_run_and_a_resume_on_other_workers_gives_the_same_digest(
    tmp_path, undisturbed, signum, code
):
    with launched(tmp_path, "-n", "3", "--run-dir", str(tmp_path / "run"), epochs=20) as run:
        run.wait_for(r"^step 9 ")
        run.process.send_signal(signum)
        assert run.process.wait(30) == code
        run.wait_for(r"saved as .*step-\d+$")
    with launched(tmp_path, "-n", "2", "--run-dir", str(tmp_path / "run"), "--resume", "auto", epochs=20) as run:
        run.wait_for("going on from step-")
        assert run.finish() == undisturbed(20)
