"""What signals make of a run under an engine, which tells its workers that their time is up."""

import os
import signal
import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from training import Job, digest_after, loader_of, make, train_step
from workers import Outcome, all_values, fork, gather, on_workers

import lockstep
from lockstep.observe.finish import Finish, read_finish

JOB = Job(epochs=3)
AT = 5
OF_SLURM = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
SAVED_AND_ENDED = Outcome(error="SystemExit", message="143")


def training(folder: str, environ: dict[str, str], told: dict[int, list[int]]) -> list[Any]:
    """`told` has the signals that each rank gets after step AT of a run that begins at 0."""
    os.environ |= {"LOCKSTEP_RUN_DIR": folder, **environ}
    run = lockstep.start(lanes=8, seed=3)
    model, optimizer = make(JOB)
    run.replicate(model, optimizer)
    loader = run.shard(loader_of(JOB))
    began, rank = run.checkpoints(Path(folder) / "checkpoints", every_steps=1000), run.rank
    for _ in run.epochs(JOB.epochs):
        for batch in loader:
            train_step(run, JOB, model, optimizer, batch)
            if run.step == AT and began == 0:
                for number in told.get(rank, []):
                    os.kill(os.getpid(), number)
    return [run.digest(), run.step, began]


def outcomes(num_workers: int, *args: Any, limit_s: float = 60.0) -> list[Outcome]:
    """Of workers that were started by hand, with the variables of torchrun."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    places = [partial(_place, rank, num_workers, port) for rank in range(num_workers)]
    return gather([fork(place, limit_s, training, args, {}) for place in places], limit_s)


def _place(rank: int, num_workers: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_workers)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def calm() -> list[Any]:
    return on_workers(1, digest_after, JOB)[0]


def resumed(folder: Path) -> list[Any]:
    return all_values(outcomes(2, str(folder), {"SLURM_JOB_ID": "7"}, {}))[0]


@pytest.mark.parametrize("number", OF_SLURM)
def test_in_a_slurm_job_a_signal_to_all_saves_and_ends_the_run_and_it_goes_on_from_there(
    number: int, tmp_path: Path
) -> None:
    found = outcomes(2, str(tmp_path), {"SLURM_JOB_ID": "7"}, {0: [number], 1: [number, number]})
    assert found == [SAVED_AND_ENDED] * 2
    assert resumed(tmp_path) == [*calm(), AT + 1]


def test_a_signal_to_one_task_of_a_slurm_step_saves_and_ends_the_run(tmp_path: Path) -> None:
    assert outcomes(2, str(tmp_path), {"SLURM_JOB_ID": "7"}, {1: [signal.SIGUSR1]}) == [SAVED_AND_ENDED] * 2
    assert read_finish(tmp_path) is None


def test_workers_that_all_leave_in_one_step_save_and_end(tmp_path: Path) -> None:
    told = {0: [signal.SIGUSR1], 1: [signal.SIGUSR1]}
    assert outcomes(2, str(tmp_path), {}, told) == [SAVED_AND_ENDED] * 2
    assert resumed(tmp_path) == [*calm(), AT + 1]


def test_a_worker_that_leaves_alone_leaves_the_others_to_the_same_bits(tmp_path: Path) -> None:
    left, stayed = outcomes(2, str(tmp_path), {}, {0: [signal.SIGUSR1]})
    assert left == Outcome(error="SystemExit", message="0")
    assert stayed.value == [*calm(), 0]
    assert read_finish(tmp_path) == Finish(step=JOB.epochs * 4, num_workers=1)


def test_a_worker_that_an_engine_has_leave_does_not_end_as_if_its_part_was_done(tmp_path: Path) -> None:
    environ = {"SLURM_JOB_ID": "7", "LOCKSTEP_ROSTER": str(tmp_path)}
    stayed, left = outcomes(2, str(tmp_path), environ, {1: [signal.SIGTERM]})
    assert left == SAVED_AND_ENDED
    assert stayed.value == [*calm(), 0]


def test_where_no_worker_can_leave_the_run_is_saved_and_ends(tmp_path: Path) -> None:
    """Alone, and under torchrun, which would end the others as well."""
    environ = {"TORCHELASTIC_RUN_ID": "7"}
    assert outcomes(2, str(tmp_path), environ, {1: [signal.SIGUSR1]}) == [SAVED_AND_ENDED] * 2
