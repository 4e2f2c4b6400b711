"""Whatever happens while a checkpoint is saved, a good one is there: a kill at any moment, a full disk."""

import ctypes
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from workers import Outcome, fork, gather, on_workers

from lockstep.state.checkpoints.file import read, verify, write
from lockstep.state.checkpoints.folder import Retention, name_of, newest_good, next_serial, remove_leftovers
from lockstep.state.checkpoints.plan import CheckpointPlan, Every
from lockstep.state.checkpoints.saver import Checkpoints, SavingWorker
from lockstep.state.snapshot import Snapshot

ELEMENTS = 20_000


def snapshot(step: int) -> Snapshot:
    tensors = {f"w{number}": torch.full((ELEMENTS,), float(step)) for number in range(3)}
    return Snapshot(tensors, {"step": step})


CALLS = ("os.", "open", "shutil.", "tempfile.", "fcntl.")
REMOVALS = ("os.rename", "os.remove", "os.rmdir", "tempfile.")


def die_at_call(kinds: tuple[str, ...], which: int, job: Callable[..., None], *args: object) -> None:
    """Does the job; killed at call number `which` of these kinds, as Python tells of them, if it makes so many."""
    left = which

    def count(event: str, _: object) -> None:
        nonlocal left
        if event.startswith(kinds):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    job(*args)


def prune(folder: Path) -> None:
    Retention(folder, keep=1).prune()


def save(folder: Path, step: int) -> None:
    remove_leftovers(folder)
    write(folder / name_of(step), snapshot(step), next_serial(folder), file_bytes=100_000)
    Retention(folder, keep=2).prune()


def outcome_of(job: object, *args: object) -> Outcome:
    (found,) = gather([fork(lambda: None, 30.0, job, args, {})], 30.0)  # type: ignore[arg-type]
    return found


def calls_of_a_save(folder: Path) -> int:
    (calls,) = on_workers(1, count_calls, str(folder))
    return int(calls)


def count_calls(folder: str) -> int:
    calls = 0

    def count(event: str, _: object) -> None:
        nonlocal calls
        calls += event.startswith(CALLS)

    for step in range(1, 4):
        save(Path(folder), step)
    sys.addaudithook(count)
    save(Path(folder), 4)
    return calls


@pytest.mark.parametrize("times", [8, pytest.param(100, marks=pytest.mark.soak)])
def test_a_writer_killed_at_any_call_leaves_a_good_checkpoint_that_loads(tmp_path: Path, times: int) -> None:
    calls = calls_of_a_save(tmp_path)
    chance = random.Random(times)
    killed = 0
    for number in range(times):
        step = 5 + number
        before = newest_good(tmp_path).path
        call = 1 + int((number + chance.random()) * (calls - 1) / times)  # from the first to the last, at random
        killed += outcome_of(die_at_call, CALLS, call, save, tmp_path, step).killed_by == signal.SIGKILL
        found = newest_good(tmp_path)
        assert found.refused == []
        assert found.path in (before, tmp_path / name_of(step))
        loaded = read(found.path)
        assert all(bool((t == loaded.state["step"]).all()) for t in loaded.tensors.values())
        for path in tmp_path.glob("step-*"):
            verify(path)  # what was being removed is not there by half
    assert killed == times
    remove_leftovers(tmp_path)
    assert all(path.name.startswith("step-") for path in tmp_path.iterdir())


def test_a_remover_killed_at_any_call_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    call, was_killed = 0, True
    while was_killed:
        call += 1
        save(tmp_path, 2 * call)
        save(tmp_path, 2 * call + 1)
        was_killed = outcome_of(die_at_call, REMOVALS, call, prune, tmp_path).killed_by == signal.SIGKILL
        for path in tmp_path.glob("step-*"):
            verify(path)
    assert call > 4


def save_for_ever(folder: str, told: int) -> None:
    """Saves step after step; tells a byte when the first is there."""
    step = 1
    while True:
        save(Path(folder), step)
        if step == 1:
            os.write(told, b".")
        step += 1


@pytest.mark.parametrize("times", [4, pytest.param(100, marks=pytest.mark.soak)])
def test_a_writer_killed_at_a_random_time_leaves_a_good_checkpoint_that_loads(tmp_path: Path, times: int) -> None:
    for number in range(times):
        folder = tmp_path / str(number)
        folder.mkdir()
        reader, writer = os.pipe()
        process = fork(lambda: None, 30.0, save_for_ever, (str(folder), writer), {})
        os.close(writer)
        assert os.read(reader, 1) == b"."
        os.close(reader)
        for _ in range(random.Random(number).randrange(40)):  # reads of the folder: a time that varies, no sleep
            newest_good(folder)
        os.kill(process[0], signal.SIGKILL)
        assert gather([process], 30.0)[0].killed_by == signal.SIGKILL
        found = newest_good(folder)
        assert found.path is not None
        assert found.refused == []
        read(found.path)


def train_on_a_full_disk(folder: str) -> list[object]:
    """Saves four steps where two small checkpoints have room, the third does not; then there is room again."""
    place = Path(folder)
    how = _small_disk(place)
    said: list[str] = []
    checkpoints = Checkpoints(CheckpointPlan(place, Every(1), keep=4), SavingWorker(lambda: 0, said.append))
    for step in range(1, 5):
        size = 100 if step in (1, 4) else 400_000
        checkpoints.between_steps(step, lambda s=step, n=size: Snapshot({"w": torch.zeros(n)}, {"step": s}))
        checkpoints._writer.wait(20)
        if step == 2:
            newest_while_full = newest_good(place).path
    checkpoints.close()
    kept = sorted(path.name for path in place.iterdir())
    return [how, newest_while_full and newest_while_full.name, kept, said]


def _small_disk(place: Path) -> str:
    """A file system of one MiB that only this process sees; where mounting is not allowed, files that end at one."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_namespace = 0x20000
    mounts = (["mount", "--make-rprivate", "/"], ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)])
    if libc.unshare(new_namespace) == 0 and all(subprocess.run(m, capture_output=True).returncode == 0 for m in mounts):
        return "tmpfs"
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
    return "limit"


def test_training_goes_on_when_the_disk_is_full_and_the_checkpoint_before_stays(tmp_path: Path) -> None:
    ((how, while_full, kept, said),) = on_workers(1, train_on_a_full_disk, str(tmp_path))
    assert while_full == name_of(1)
    assert kept == [name_of(1), name_of(4)]
    assert len(said) == 1
    assert ("No space left on device" if how == "tmpfs" else "File too large") in said[0]
