"""Which signals save and end a run, and which have one worker leave, under which launcher."""

import signal

import pytest

from lockstep.settings.environments.stop_signals import ENGINE_GRACE_S, GRACE_S, stop_signals

OF_SLURM = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
SLURM = {"SLURM_JOB_ID": "4711"}
ROSTER = {"LOCKSTEP_ROSTER": "/shared/run-7"}


@pytest.mark.parametrize("launcher", ["slurm", "alone", "torchrun", "mpi"])
def test_in_a_slurm_job_every_signal_that_announces_its_end_saves_and_ends_the_run(launcher):
    asked = stop_signals(SLURM, launcher)
    assert (asked.ends, asked.leaves, asked.engine) == (OF_SLURM, (), "Slurm")


def test_a_worker_that_is_a_job_of_its_own_leaves():
    asked = stop_signals({**SLURM, **ROSTER}, "slurm")
    assert (asked.ends, asked.leaves) == ((), OF_SLURM)


def test_a_pod_with_a_roster_leaves_when_it_is_evicted():
    asked = stop_signals(ROSTER, "kubernetes")
    assert (asked.ends, asked.leaves) == ((), (signal.SIGTERM,))


@pytest.mark.parametrize(("environ", "grace_s"), [({}, GRACE_S), (ROSTER, GRACE_S), (SLURM, ENGINE_GRACE_S)])
def test_workers_of_lockstep_run_take_signals_from_their_launcher_everywhere(environ, grace_s):
    asked = stop_signals(environ, "lockstep run")
    assert (asked.ends, asked.leaves, asked.engine) == ((signal.SIGTERM,), (signal.SIGUSR1,), None)
    assert (asked.grace_s, asked.has_limit) == (grace_s, grace_s == GRACE_S)


@pytest.mark.parametrize("launcher", ["kubernetes", "torchrun", "mpi"])
def test_an_engine_that_kills_by_itself_sets_the_limit(launcher):
    asked = stop_signals({}, launcher)
    assert (asked.ends, asked.leaves, asked.grace_s) == ((signal.SIGTERM,), (signal.SIGUSR1,), ENGINE_GRACE_S)
