"""lockstep under a real Slurm: a controller and three nodes, each a machine of its own."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_runs import SCRIPT, assert_resumed, await_file, await_that, digest_in
from slurm_cluster import Cluster, cluster

SRUN = ("srun", "--kill-on-bad-exit=0", "--no-kill", "-N", "3", "-n", "3")


@pytest.fixture(scope="module")
def shared_slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm")) as found:
        yield found


@pytest.fixture
def slurm(shared_slurm: Cluster) -> Iterator[Cluster]:
    """The cluster of all tests that take nothing away from it."""
    yield shared_slurm
    shared_slurm.await_quiet()


@pytest.fixture
def own_slurm(tmp_path: Path) -> Iterator[Cluster]:
    """For a test that takes a node away."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    with cluster(folder) as found:
        yield found


def python(folder: Path, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, str(SCRIPT), str(folder), *arguments)


def test_three_tasks_on_three_nodes_come_to_the_bits_of_one_worker(slurm: Cluster, tmp_path: Path, calm: str) -> None:
    code, output = slurm.run(*SRUN, *python(tmp_path))
    assert (code, digest_in(output)) == (0, calm), output
    assert "3 workers" in output


def test_when_a_task_is_killed_the_others_come_to_the_same_bits(slurm: Cluster, tmp_path: Path, calm: str) -> None:
    code, output = slurm.run(*SRUN, *python(tmp_path, "--kill", "1:12"))
    assert digest_in(output) == calm, output
    assert code == 137  # srun's own: the highest of its tasks' codes


def test_when_all_tasks_are_killed_the_next_step_of_the_job_resumes(slurm: Cluster, tmp_path: Path, calm: str) -> None:
    code, output = slurm.run(*SRUN, *python(tmp_path, "--kill", "all:12"))
    assert code == 137, output
    assert_resumed(slurm.run("srun", "-N", "2", "-n", "2", *python(tmp_path)), calm, "10")


def test_when_a_node_is_lost_the_others_come_to_the_same_bits(own_slurm: Cluster, tmp_path: Path, calm: str) -> None:
    with own_slurm.popen(*SRUN, *python(tmp_path, "--wait-at", "12")) as process:
        await_file(tmp_path / "reached")
        own_slurm.cut_power("n2")
        (tmp_path / "go").touch()
        output, _ = process.communicate(timeout=200)
    assert digest_in(output) == calm, output


def test_without_no_kill_the_loss_of_a_node_ends_all(own_slurm: Cluster, tmp_path: Path, calm: str) -> None:
    with own_slurm.popen("srun", "-N", "3", "-n", "3", *python(tmp_path, "--wait-at", "12")) as process:
        await_file(tmp_path / "reached")
        own_slurm.cut_power("n2")
        output, _ = process.communicate(timeout=200)
    assert process.returncode not in (0, None), output
    assert "digest" not in output
    code, output = own_slurm.run("srun", "-N", "2", "-n", "2", *python(tmp_path))
    assert (code, digest_in(output)) == (0, calm), output


def test_without_its_options_srun_ends_nobody_when_a_task_is_killed(slurm: Cluster, tmp_path: Path, calm: str) -> None:
    code, output = slurm.run("srun", "-N", "3", "-n", "3", *python(tmp_path, "--kill", "1:12"))
    assert (code, digest_in(output)) == (137, calm), output


def test_where_the_cluster_ends_a_step_with_its_first_lost_task_the_option_of_srun_keeps_the_others(
    tmp_path: Path, calm: str
) -> None:
    folder = tmp_path / "slurm"
    folder.mkdir()
    with cluster(folder, more="KillOnBadExit=1") as slurm:
        code, output = slurm.run("srun", "-N", "3", "-n", "3", *python(tmp_path, "--kill", "1:12"))
        assert code == 137, output
        assert "digest" not in output
        assert_resumed(slurm.run("srun", "-N", "2", "-n", "2", *python(tmp_path)), calm)
        (tmp_path / "kept").mkdir()
        code, output = slurm.run(*SRUN, *python(tmp_path / "kept", "--kill", "1:12"))
        assert (code, digest_in(output)) == (137, calm), output


# -- exit codes -------------------------------------------------------------------------------------------------------

BATCH = """\
#!/bin/sh
export LOCKSTEP_RUN_DIR={folder}/run
srun --kill-on-bad-exit=0 --no-kill {python}
lockstep finished $LOCKSTEP_RUN_DIR --code $?
code=$?
if [ $code = 143 ]; then scontrol requeue $SLURM_JOB_ID; fi
exit $code
"""


def batch(folder: Path, *arguments: str, text: str = BATCH) -> str:
    script = folder / "job.sh"
    command = " ".join(python(folder, *arguments))
    script.write_text(text.format(folder=folder, python=command))
    return str(script)


def sbatch(slurm: Cluster, folder: Path, *options: str) -> str:
    """Submits `job.sh`, whose output goes to `job.out`; gives the number of the job."""
    code, output = slurm.run(
        "sbatch", "--parsable", "--output", f"{folder}/job.out", "--open-mode=append", *options, f"{folder}/job.sh"
    )
    assert code == 0, output
    return output.strip()


def state(slurm: Cluster, job: str) -> dict[str, str]:
    _, output = slurm.run("scontrol", "show", "job", job)
    return dict(field.partition("=")[::2] for field in output.split())


def await_state(slurm: Cluster, job: str, *states: str) -> dict[str, str]:
    slurm.await_that(lambda: state(slurm, job).get("JobState") in states, limit_s=150)
    return state(slurm, job)


def test_lockstep_finished_gives_a_job_that_lost_a_task_the_code_0(slurm: Cluster, tmp_path: Path, calm: str) -> None:
    batch(tmp_path, "--kill", "1:12")
    job = sbatch(slurm, tmp_path, "-N", "3", "-n", "3", "--no-kill")
    found = await_state(slurm, job, "COMPLETED", "FAILED", "NODE_FAIL")
    output = (tmp_path / "job.out").read_text()
    assert (found["JobState"], found["ExitCode"]) == ("COMPLETED", "0:0"), output
    assert digest_in(output) == calm
    assert "at step 48 on 2 workers; code 137 is that of a worker that was lost on the way" in output


def test_lockstep_finished_gives_a_job_that_lost_all_tasks_their_code(slurm: Cluster, tmp_path: Path) -> None:
    batch(tmp_path, "--kill", "all:12")
    job = sbatch(slurm, tmp_path, "-N", "2", "-n", "2")
    found = await_state(slurm, job, "COMPLETED", "FAILED")
    assert (found["JobState"], found["ExitCode"]) == ("FAILED", "137:0"), (tmp_path / "job.out").read_text()


def test_lockstep_finished_gives_a_job_that_lost_a_node_the_code_0(
    own_slurm: Cluster, tmp_path: Path, calm: str
) -> None:
    batch(tmp_path, "--wait-at", "12")
    job = sbatch(own_slurm, tmp_path, "-N", "3", "-n", "3", "--no-kill", "--no-requeue")
    await_file(tmp_path / "reached")
    own_slurm.cut_power("n3")  # the script itself runs on the first node
    (tmp_path / "go").touch()
    found = await_state(own_slurm, job, "COMPLETED", "FAILED", "NODE_FAIL")
    output = (tmp_path / "job.out").read_text()
    assert digest_in(output) == calm, output
    assert (found["JobState"], found["ExitCode"]) == ("COMPLETED", "0:0"), output


# -- signals ----------------------------------------------------------------------------------------------------------


SIGNALS = pytest.mark.parametrize("name", ["USR1", "USR2", "TERM"])


def signalled(slurm: Cluster, name: str, folder: Path, *command: str) -> str:
    """The output of a step that was sent a signal when it had come to step 12: it has saved."""
    with slurm.popen(*command, "--wait-at", "12") as process:
        await_file(folder / "reached")
        _, jobs = slurm.run("squeue", "--noheader", "--format", "%i", "--states", "RUNNING")
        assert slurm.run("scancel", f"--signal={name}", f"{jobs.split()[0]}.0")[0] == 0
        (folder / "go").touch()
        output, _ = process.communicate(timeout=150)
    assert process.returncode == 143, output
    slurm.await_quiet()
    return output


@SIGNALS
def test_a_signal_to_a_step_saves_and_ends_the_run(name: str, slurm: Cluster, tmp_path: Path, calm: str) -> None:
    output = signalled(slurm, name, tmp_path, *SRUN, *python(tmp_path))
    assert f"SIG{name} has come: the run is saved and ends after the step" in output
    assert_resumed(slurm.run("srun", "-N", "2", "-n", "2", *python(tmp_path)), calm, "13", "14")


def test_a_signal_to_a_step_without_options_saves_and_ends_the_run(slurm: Cluster, tmp_path: Path, calm: str) -> None:
    output = signalled(slurm, "TERM", tmp_path, "srun", "-N", "3", "-n", "3", *python(tmp_path))
    assert "SIGTERM has come: the run is saved and ends after the step" in output
    assert_resumed(slurm.run("srun", "-N", "2", "-n", "2", *python(tmp_path)), calm, "13", "14")


def test_a_preempted_job_saves_is_requeued_and_comes_to_the_same_bits(
    slurm: Cluster, tmp_path: Path, calm: str
) -> None:
    batch(tmp_path, "--wait-at", "12")
    job = sbatch(slurm, tmp_path, "-N", "3", "-n", "3", "--exclusive", "--requeue")
    await_file(tmp_path / "reached")
    with slurm.popen("srun", "--partition", "urgent", "-N", "3", "-n", "3", "--exclusive", "hostname") as urgent:
        slurm.await_that(lambda: state(slurm, job).get("PreemptTime", "None") != "None")
        (tmp_path / "go").touch()
        output, _ = urgent.communicate(timeout=150)
    assert urgent.returncode == 0, output
    slurm.await_that(lambda: runs_again(slurm, job), limit_s=150)
    await_state(slurm, job, "COMPLETED")
    output = (tmp_path / "job.out").read_text()
    assert digest_in(output) == calm, output
    assert "SIGTERM has come: the run is saved and ends after the step" in output
    assert "begins at step 13" in output or "begins at step 14" in output


# -- one job per worker -----------------------------------------------------------------------------------------------

ARRAY = """\
#!/bin/sh
export LOCKSTEP_ROSTER={folder}/roster LOCKSTEP_SECRET=array
exec srun {python}
"""


def test_the_jobs_of_an_array_join_one_run_and_one_that_is_requeued_leaves_and_joins_again(
    slurm: Cluster, tmp_path: Path, calm: str
) -> None:
    batch(tmp_path, "--pace-s", "5", text=ARRAY)
    job = sbatch(slurm, tmp_path, "-n", "1", "--array=10-12", "--requeue", "--open-mode=append")
    shown = tmp_path / "job.out"
    await_words(shown, "3 workers now")
    assert slurm.run("scontrol", "requeue", f"{job}_11")[0] == 0
    await_words(shown, "- worker 1 is gone")
    slurm.await_that(lambda: runs_again(slurm, f"{job}_11"), limit_s=150)
    await_words(shown, "3 workers now", times=2)
    (tmp_path / "hurry").touch()
    await_over(slurm, job)
    assert digest_in(shown.read_text()) == calm, shown.read_text()


def test_when_a_node_is_lost_the_other_jobs_of_an_array_come_to_the_same_bits(
    own_slurm: Cluster, tmp_path: Path, calm: str
) -> None:
    batch(tmp_path, "--pace-s", "5", text=ARRAY)
    job = sbatch(own_slurm, tmp_path, "-n", "1", "--array=0-2", "--exclusive", "--no-requeue")
    await_words(tmp_path / "job.out", "3 workers now")
    own_slurm.cut_power("n2")
    await_words(tmp_path / "job.out", "is lost at step")
    (tmp_path / "hurry").touch()
    await_over(own_slurm, job)
    assert digest_in((tmp_path / "job.out").read_text()) == calm


def test_when_a_job_of_an_array_is_killed_the_others_come_to_the_same_bits(
    slurm: Cluster, tmp_path: Path, calm: str
) -> None:
    batch(tmp_path, "--pace-s", "5", text=ARRAY)
    job = sbatch(slurm, tmp_path, "-n", "1", "--array=0-2", "--no-requeue")
    await_words(tmp_path / "job.out", "3 workers now")
    assert slurm.run("scancel", "--signal=KILL", "--full", f"{job}_1")[0] == 0
    await_words(tmp_path / "job.out", "2 workers now")
    (tmp_path / "hurry").touch()
    await_over(slurm, job)
    assert digest_in((tmp_path / "job.out").read_text()) == calm


def test_when_all_jobs_of_an_array_are_killed_those_of_the_next_one_resume(
    slurm: Cluster, tmp_path: Path, calm: str
) -> None:
    batch(tmp_path, "--kill", "all:12", text=ARRAY)
    await_over(slurm, sbatch(slurm, tmp_path, "-n", "1", "--array=0-1", "--no-requeue"))
    assert "digest" not in (tmp_path / "job.out").read_text()
    await_over(slurm, sbatch(slurm, tmp_path, "-n", "1", "--array=0-1", "--no-requeue"))
    output = (tmp_path / "job.out").read_text()
    assert digest_in(output) == calm, output
    assert "begins at step 10" in output


def await_words(shown: Path, words: str, times: int = 1) -> None:
    def are_there() -> bool:
        return shown.exists() and shown.read_text().count(words) >= times

    await_that(are_there, lambda: f"{words!r} did not come {times} times:\n{shown.read_text()}", limit_s=180)


def await_over(slurm: Cluster, job: str) -> None:
    """All jobs of an array have ended."""
    slurm.await_that(lambda: job not in slurm.run("squeue", "--noheader", "--format", "%F")[1], limit_s=180)


def runs_again(slurm: Cluster, job: str) -> bool:
    """Whether a job that was requeued runs, or has run. It may show any state on its way to the queue, and waits there
    for two minutes, unless it is told not to."""
    slurm.run("scontrol", "update", f"jobid={job}", "starttime=now")
    found = state(slurm, job)
    return found.get("Restarts", "0") != "0" and found.get("JobState") in ("RUNNING", "COMPLETED")


# -- lockstep run inside a job ----------------------------------------------------------------------------------------


def launch(folder: Path) -> tuple[str, ...]:
    words = (sys.executable, "-m", "lockstep", "run", "-n", "2", "--run-dir", str(folder / "run"))
    return ("srun", "-n", "1", *words, str(SCRIPT), str(folder))


@SIGNALS
def test_a_signal_to_lockstep_run_inside_a_step_saves_and_ends_its_run(
    name: str, slurm: Cluster, tmp_path: Path, calm: str
) -> None:
    signalled(slurm, name, tmp_path, *launch(tmp_path))
    assert_resumed(slurm.run(*launch(tmp_path)), calm, "13", "14")


@pytest.mark.parametrize("killed", ["1", "all"])
def test_lockstep_run_inside_a_step_replaces_workers_that_are_killed(
    killed: str, slurm: Cluster, tmp_path: Path, calm: str
) -> None:
    code, output = slurm.run(*launch(tmp_path), "--kill", f"{killed}:12")
    assert (code, digest_in(output)) == (0, calm), output
    assert "killed by SIGKILL" in output
