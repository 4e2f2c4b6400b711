"""`lockstep run` with real processes. The scripts are plain Python: the launcher does not care."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from launches import IMPORTABLE, REPOSITORY, Forked, finish, start_lockstep
from marked import MARK, survivors

from lockstep.launch.host.processes import await_end
from lockstep.launch.launch import Job, launch
from lockstep.launch.supervision import supervisor

PREAMBLE = """
import os, signal, sys
rank = int(os.environ["LOCKSTEP_RANK"])
def ready(*pids):
    with open("ready", "w") as pipe:
        pipe.write(" ".join(map(str, (os.getpid(), *pids))) + "\\n")
"""


@dataclass
class Bench:
    """A folder for scripts, and a way to start `lockstep run` in it. Every process started has its mark."""

    folder: Path
    mark: str
    popen: "type[subprocess.Popen[Any]]" = Forked

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, MARK: self.mark, "PYTHONPATH": IMPORTABLE}

    def start(self, script: str, *options: str, arguments: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        """The scripts of these tests start no run of lockstep; the flag says that they need not."""
        (self.folder / "train.py").write_text(PREAMBLE + script)
        return self.command("--torch-distributed", *options, "train.py", *arguments)

    def command(self, *words: str) -> "subprocess.Popen[str]":
        return start_lockstep("run", *words, cwd=self.folder, popen=self.popen, **{MARK: self.mark})

    def run(self, script: str, *options: str, arguments: tuple[str, ...] = ()) -> tuple[int, str, str]:
        return finish(self.start(script, *options, arguments=arguments))

    def log(self, rank: int) -> str:
        return (self.folder / f"runs/train-1/worker-{rank}.log").read_text()

    def await_ready(self, num_workers: int) -> list[int]:
        """The process ids that the workers hand to `ready`, once all of them have."""
        # Opened for writing too, so that the pipe does not end between two workers.
        with open(os.open(self.folder / "ready", os.O_RDWR)) as pipe:
            return [int(pid) for _ in range(num_workers) for pid in pipe.readline().split()]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    os.mkfifo(tmp_path / "ready")
    bench = Bench(tmp_path, uuid4().hex)
    yield bench
    left = survivors(bench.mark)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "processes stayed after the launch"


@pytest.fixture
def real_bench(bench: Bench) -> Bench:
    """One whose processes are started from nothing, not forked."""
    bench.popen = subprocess.Popen
    return bench


def test_a_launch_whose_workers_all_finish_exits_with_0(real_bench):
    assert real_bench.run("", "-n", "3")[0] == 0


def test_worker_0_writes_to_the_screen_and_the_others_only_to_their_logs(bench):
    _, out, _ = bench.run("print('this is', rank)", "-n", "2")
    assert out == bench.log(0) == "this is 0\n"
    assert bench.log(1) == "this is 1\n"


def test_everything_after_the_script_reaches_it_untouched(bench):
    _, out, _ = bench.run("print(sys.argv[1:])", arguments=("--help", "-n", "5", "--", "--lanes=x"))
    assert out == "['--help', '-n', '5', '--', '--lanes=x']\n"


def test_a_script_sees_what_python_itself_would_show_it(real_bench):
    show = "print(__name__, __file__, os.path.basename(sys.argv[0]), sys.path[0], __spec__)"
    _, out, _ = real_bench.run(show)
    plain = subprocess.run(
        [sys.executable, "train.py"],
        cwd=real_bench.folder,
        env={**real_bench.environment, "LOCKSTEP_RANK": "0"},
        capture_output=True,
        text=True,
    ).stdout
    assert out == plain


def test_a_module_runs_as_main_with_its_arguments(real_bench):
    (real_bench.folder / "package").mkdir()
    (real_bench.folder / "package/train.py").write_text("import sys; print(__name__, sys.argv[1:])")
    code, out, _ = finish(real_bench.command("-m", "package.train", "--help"))
    assert (code, out) == (0, "__main__ ['--help']\n")


def test_every_worker_is_told_its_place_and_its_threads(bench):
    names = ["LOCKSTEP_SIZE", "LOCKSTEP_RANK", "OMP_NUM_THREADS", "LOCKSTEP_LANES", "LOCKSTEP_ASSIGNMENT"]
    bench.run(f"print([os.environ[name] for name in {names}])", "-n", "2", "--lanes", "3", "--assignment", "0,2;1")
    assert bench.log(1) == "['2', '1', '1', '3', '0,2;1']\n"


def test_an_exception_in_one_worker_ends_those_that_wait_for_it(bench):
    code, _, err = bench.run("if rank == 1: raise ValueError('bad sample 10442')\nsignal.pause()", "-n", "3")
    assert code == 1
    assert err.splitlines() == [
        "✗ worker 1 failed: ValueError: bad sample 10442",
        "    train.py:7  in <module>     if rank == 1: raise ValueError('bad sample 10442')",
        "  2 other workers were fine. Full log: runs/train-1/worker-1.log",
    ]


def test_the_log_has_the_whole_traceback_and_the_screen_does_not(bench):
    _, out, err = bench.run("print('before')\nraise ValueError('bad sample')")
    assert "Traceback" not in out + err
    assert bench.log(0).startswith("before\nTraceback (most recent call last):\n  File ")
    assert "worker.py" not in bench.log(0)


def test_an_error_that_every_worker_makes_is_told_once(bench):
    meet = """
if rank:
    ready()
else:
    with open(os.open("ready", os.O_RDWR)) as pipe: pipe.readline(), pipe.readline()
raise ValueError("the same everywhere")
"""
    code, _, err = bench.run(meet, "-n", "3")
    assert code == 1
    assert err.count("the same everywhere") == 2  # the message, and the line of the script


def test_the_cause_is_told_and_not_the_worker_that_only_noticed_it(bench):
    script = """
from lockstep.errors import WorkerLost
if rank == 0:
    with open("ready", "w"): pass
    raise WorkerLost(rank=1, step=3, during="reduce", cause="closed the connection")
with open("ready"): pass
raise ValueError("bad sample 7")
"""
    code, _, err = bench.run(script, "-n", "2")
    assert code == 1
    assert err.startswith("✗ worker 1 failed: ValueError: bad sample 7")
    assert "1 other worker was fine." in err


def test_exit_functions_that_never_return_do_not_hold_up_the_story(bench):
    code, _, _ = bench.run("import atexit; atexit.register(signal.pause)\nraise ValueError", "-n", "2")
    assert code == 1


def test_exit_functions_of_a_failing_script_run(bench):
    _, out, _ = bench.run("import atexit; atexit.register(print, 'closed')\nraise ValueError")
    assert out == "closed\n"


def test_the_scripts_own_exit_code_is_told(bench):
    code, _, err = bench.run("sys.exit(5 if rank == 1 else signal.pause())", "-n", "2")
    assert code == 1
    assert err.startswith("✗ worker 1 called sys.exit(5) at train.py:7\n")


def test_a_bad_environment_exits_with_3(bench):
    code, _, _ = bench.run("from lockstep.errors import BadEnvironment\nraise BadEnvironment('no port')")
    assert code == 3


def test_a_killed_worker_is_named_with_its_signal(bench):
    killed = "os.kill(os.getpid(), 9) if rank == 1 else signal.pause()"
    code, _, err = bench.run(killed, "-n", "2", "--fault-budget", "0")
    assert code == 4
    assert err.startswith("✗ worker 1 (pid ")
    assert ") was killed by SIGKILL" in err.splitlines()[0]
    assert "memory" in err


def test_a_start_that_costs_a_worker_five_times_is_not_tried_again(bench):
    code, _, err = bench.run("os.kill(os.getpid(), 9)")
    assert code == 4
    assert err.count("no step was made yet: the worker starts again") == 4
    assert "the start has cost workers in 5 attempts: it would cost the next one too" in err


def test_a_worker_that_ends_early_is_no_failure(bench):
    script = """
import select
if rank == 1:
    ready()
else:
    with open("ready") as pipe: peer = os.pidfd_open(int(pipe.readline()))
    poll = select.poll(); poll.register(peer); poll.poll()
    print("went on")
"""
    code, out, _ = bench.run(script, "-n", "2")
    assert (code, out) == (0, "went on\n")


def test_a_child_that_the_script_forked_does_not_speak_for_the_worker(bench):
    code, _, err = bench.run("if os.fork() == 0: raise ValueError\nos.wait()")
    assert (code, err) == (0, "")


def test_programs_that_a_script_starts_do_not_hold_what_the_launcher_gave_the_worker(real_bench):
    script = """
import subprocess
for name in ("NOTICE", "STATUS"):
    held = f"[ -e /proc/self/fd/{os.environ[f'LOCKSTEP_{name}_FD']} ]"
    print(name, subprocess.run(["sh", "-c", held], close_fds=False).returncode)
"""
    assert real_bench.run(script)[1] == "NOTICE 1\nSTATUS 1\n"


def test_children_left_behind_by_a_finished_worker_are_ended(bench):
    code, _, _ = bench.run("import subprocess; subprocess.Popen(['sleep', '1000'])", "-n", "2")
    assert code == 0
    assert survivors(bench.mark) == []


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_child_processes_of_every_kind_find_the_functions_of_the_script(real_bench, method):
    script = f"""
import multiprocessing
def double(queue): queue.put(2 * 21)
if __name__ == "__main__":
    context = multiprocessing.get_context("{method}")
    queue = context.SimpleQueue()
    child = context.Process(target=double, args=(queue,))
    child.start(); print(queue.get()); child.join()
"""
    code, out, _ = real_bench.run(script)
    assert (code, out) == (0, "42\n")


def test_when_the_launcher_is_killed_nothing_is_left(real_bench):
    script = """
import multiprocessing, subprocess
child = multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True)
child.start()
ready(child.pid, subprocess.Popen(["sleep", "1000"]).pid)
signal.pause()
"""
    launcher = real_bench.start(script, "-n", "2")
    pids = real_bench.await_ready(2)
    launcher.kill()
    assert await_end(pids, within_s=30.0)
    assert len(pids) == 6
    finish(launcher)
    await_end(survivors(real_bench.mark), within_s=30.0)  # the guard, once it has done its work


def test_the_first_ctrl_c_lets_finally_blocks_run(bench):
    launcher = bench.start("try: ready(); signal.pause()\nfinally: print('tidied up')", "-n", "2")
    bench.await_ready(2)
    launcher.send_signal(signal.SIGINT)
    code, out, err = finish(launcher)
    assert (code, out) == (130, "tidied up\n")
    assert err == "✗ stopped by Ctrl-C; all 2 workers have ended. Logs: runs/train-1\n"
    assert bench.log(1) == "tidied up\n"


def test_ctrl_c_waits_for_a_worker_in_which_python_has_not_started_yet(real_bench):
    (real_bench.folder / "sitecustomize.py").write_text(
        "import os, time\nif 'LOCKSTEP_SLOT' in os.environ: open('ready', 'w').write('0\\n'); time.sleep(0.3)\n"
    )
    (real_bench.folder / "train.py").write_text("print('the script runs')")
    path = os.pathsep.join([str(real_bench.folder), IMPORTABLE])
    launcher = start_lockstep(
        "run", "train.py", cwd=real_bench.folder, popen=subprocess.Popen, PYTHONPATH=path, **{MARK: real_bench.mark}
    )
    real_bench.await_ready(1)
    launcher.send_signal(signal.SIGINT)
    assert finish(launcher)[:2] == (130, "")
    assert real_bench.log(0) == ""


def test_a_worker_deaf_to_ctrl_c_is_ended(bench):
    deaf = "signal.signal(signal.SIGINT, signal.SIG_IGN)\nready()\nwhile True: signal.pause()"
    launcher = bench.start(deaf, "-n", "2")
    bench.await_ready(2)
    launcher.send_signal(signal.SIGINT)
    assert finish(launcher)[0] == 130


def test_the_second_ctrl_c_ends_everything_at_once(bench, monkeypatch):
    monkeypatch.setattr(supervisor, "INTERRUPT_S", 3600.0)  # after the first one: the launcher is forked from here
    slow = "signal.signal(signal.SIGINT, lambda *_: print('saving'))\nready()\nwhile True: signal.pause()"
    launcher = bench.start(slow)
    bench.await_ready(1)
    launcher.send_signal(signal.SIGINT)
    assert launcher.stdout.readline() == "saving\n"
    launcher.send_signal(signal.SIGINT)
    assert finish(launcher)[0] == 130


def test_sigterm_reaches_the_workers_and_exits_with_143(bench):
    script = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('saved')))\nready()\nsignal.pause()"
    launcher = bench.start(script)
    bench.await_ready(1)
    launcher.terminate()
    code, out, _ = finish(launcher)
    assert (code, out) == (143, "saved\n")


def test_a_terminal_that_is_closed_is_sigterm_once(bench, monkeypatch):
    save = "def save(*_): ready(), signal.sigwait([signal.SIGALRM]), sys.exit(print('saved'))\n"
    block = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])\n"
    monkeypatch.setattr(supervisor, "INTERRUPT_S", 60.0)  # in the launcher too, which is forked
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup themselves
    try:
        launcher = bench.start(f"{save}{block}signal.signal(signal.SIGTERM, save)\nready()\nsignal.pause()")
    finally:
        signal.signal(signal.SIGHUP, before)
    (worker,) = bench.await_ready(1)
    launcher.send_signal(signal.SIGHUP)
    bench.await_ready(1)  # it saves
    launcher.send_signal(signal.SIGHUP)
    os.kill(worker, signal.SIGALRM)
    assert finish(launcher)[:2] == (143, "saved\n")


def test_under_nohup_a_closed_terminal_is_nothing(bench):
    block = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])\n"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the launcher is forked from here
    try:
        launcher = bench.start(f"{block}ready()\nsignal.sigwait([signal.SIGALRM])\nprint('done')", "-n", "1")
    finally:
        signal.signal(signal.SIGHUP, before)
    (worker,) = bench.await_ready(1)
    launcher.send_signal(signal.SIGHUP)
    os.kill(worker, signal.SIGALRM)
    assert finish(launcher)[:2] == (0, "done\n")


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_inside_a_slurm_job_each_of_its_signals_is_sigterm_and_may_come_again(bench, monkeypatch, sent):
    monkeypatch.setattr(supervisor, "INTERRUPT_S", 0.0)  # the limit of a person's signal, which is none of Slurm's
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    save = "def save(*_): ready(), signal.sigwait([signal.SIGALRM]), sys.exit(print('saved'))\n"
    block = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])\n"
    launcher = bench.start(f"{save}{block}signal.signal(signal.SIGTERM, save)\nready()\nsignal.pause()")
    (worker,) = bench.await_ready(1)
    launcher.send_signal(sent)
    bench.await_ready(1)  # it saves
    launcher.send_signal(sent)
    launcher.terminate()
    os.kill(worker, signal.SIGALRM)
    assert finish(launcher)[:2] == (143, "saved\n")


def test_several_workers_of_a_script_that_never_starts_a_run_are_told_so_and_exit_with_1(bench):
    (bench.folder / "train.py").write_text("print('trained alone')")
    code, out, err = finish(bench.command("-n", "2", "train.py"))
    assert (code, out) == (1, "trained alone\n")
    assert err == (
        "✗ nobody called lockstep.start: each of the 2 workers ran the whole script by itself. Write "
        "`run = lockstep.start()` and what follows from it, or say --torch-distributed if the script opens a process "
        "group of its own\n"
    )
    assert finish(bench.command("train.py")) == (0, "trained alone\n", "")


def test_after_a_while_without_a_run_several_workers_are_told_so_once(bench, monkeypatch):
    monkeypatch.setattr(supervisor, "UNSTARTED_S", 0.0)
    (bench.folder / "train.py").write_text("import signal; signal.pause()")
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if len(said) == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    environment = {MARK: bench.mark, "PYTHONPATH": IMPORTABLE}
    job = Job(str(bench.folder / "train.py"), bench.folder, num_workers=2, environment=environment)
    launch(job, show=print, say=say)
    assert said[0] == (
        "! nobody has called lockstep.start for 0 s: without it each of the 2 workers runs the whole script by itself"
    )
    assert len(said) == 2  # the other one tells of the signal


def test_a_missing_script_is_refused_before_anything_starts(bench):
    (bench.folder / "train.py").write_text("")
    code, _, err = finish(bench.command("-n", "4", "trian.py"))
    assert (code, err) == (2, "✗ there is no script trian.py; did you mean train.py?\n")
    assert not (bench.folder / "runs").exists()


def test_a_missing_module_is_refused_before_anything_starts(bench):
    code, _, err = finish(bench.command("-m", "no_such_package.train"))
    assert code == 2
    assert "there is no module no_such_package.train" in err


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        (("-n", "0"), "a whole number, 1 or more"),
        (("--threads", "two"), "a whole number, 1 to 4096"),
        (("--seed", "-1"), "a whole number, 0 to 18446744073709551615"),
        (("--assignment", "0,1;x"), "it looks like"),
        (("--assignment", "0,2"), "every lane from 0 on exactly once"),
        (("--assignment", "0;1"), "names 2 workers, but --workers is 1"),
        (("--assignment", "0,1", "--lanes", "3"), "carries 2 lanes, but --lanes is 3"),
    ],
)
def test_a_bad_option_exits_with_2_and_says_what_is_allowed(bench, options, allowed):
    code, _, err = bench.run("", *options)
    assert code == 2
    assert allowed in err


def test_a_report_from_an_earlier_launch_is_not_taken_for_a_new_failure(bench):
    bench.run("raise ValueError('yesterday')", "--run-dir", "mine")
    code, _, err = bench.run("sys.exit(1)", "--run-dir", "mine")
    assert code == 1
    assert "yesterday" not in err


def test_a_launch_gives_back_the_signal_handlers_it_found(bench):
    before = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)]
    (bench.folder / "train.py").write_text("print('done')")
    shown: list[bytes] = []
    job = Job(
        program=str(bench.folder / "train.py"),
        run_dir=bench.folder,
        environment={MARK: bench.mark, "PYTHONPATH": IMPORTABLE},
    )
    outcome = launch(job, show=shown.append, say=print)
    assert (outcome.exit_code, b"".join(shown)) == (0, b"done\n")
    assert [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)] == before


def test_help_and_the_launcher_do_without_torch_and_rich():
    check = (
        "import sys, lockstep.cli.main, lockstep.cli.run, lockstep.launch.launch, lockstep.launch.worker.__main__;"
        "print({'torch', 'rich'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", check], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.stdout == "set()\n"


def test_help_lists_the_commands():
    done = subprocess.run([sys.executable, "-m", "lockstep", "--help"], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0
    assert all(name in done.stdout for name in ("run", "scale", "verify", "bench", "demo"))
