"""What the launcher writes down for each worker, and what the worker reads."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import BadEnvironment
from lockstep.launch.host.resources import MemoryKills
from lockstep.launch.job import Job
from lockstep.settings.environment import find_place, read_overrides
from lockstep.settings.environments.lockstep_run import Bootstrap, bootstrap, variables

FOUNDER = Bootstrap(
    slot=1, parent_pid=812, run_dir=Path("/runs/x-1"), notice_fd=7, listen_fd=None, status_fd=9, secret="s"
)
JOINER = replace(FOUNDER, slot=5, endpoints=("127.0.0.1:41001", "10.0.0.2:41007"))
JOB = Job(program="train.py", run_dir=Path("runs/x-1"), num_workers=2, assignment=((0,), (1,)))


@pytest.mark.parametrize("boot", [FOUNDER, JOINER])
def test_a_worker_reads_back_what_the_launcher_wrote(boot):
    assert bootstrap(variables(boot, 2, 4321)) == boot


def test_a_founder_stands_in_its_slot_and_has_no_endpoints():
    place = find_place(variables(FOUNDER, 2, 4321))
    assert (place.slot, place.endpoints, place.world.rank, place.world.size) == (1, (), 1, 2)


def test_a_joiner_counts_itself_into_the_world_and_knows_the_endpoints():
    place = find_place(variables(JOINER, 2, 4321))
    assert (place.slot, place.endpoints) == (5, ("127.0.0.1:41001", "10.0.0.2:41007"))
    assert (place.world.rank, place.world.size, place.world.local_size, place.listen_fd) == (5, 6, 6, None)


def test_a_script_that_looks_for_torchrun_finds_none_not_even_an_outer_one():
    outer = dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "7")
    result = {**JOB.variables_of_all(outer), **JOB.variables_of_one(FOUNDER, 2, 4321, 4322)}
    assert not outer.keys() & result.keys()


def test_the_variables_of_torch_distributed_are_set_where_they_are_asked_for():
    result = replace(JOB, torch_distributed=True).variables_of_one(JOINER, 2, 4321, 4322)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [result[name] for name in names] == ["5", "5", "6", "6", "127.0.0.1", "4322"]


@given(st.lists(st.tuples(st.integers(0, 255), st.integers(1, 65535))).map(tuple))
def test_endpoints_survive_being_written_and_read(where):
    endpoints = tuple(f"10.0.0.{host}:{port}" for host, port in where)
    assert find_place(variables(replace(JOINER, endpoints=endpoints), 2, 4321)).endpoints == endpoints


@pytest.mark.parametrize("text", ["0", "0:", ":41001", "a:b", "0:1;2:3", "0:-1"])
def test_endpoints_that_cannot_be_read_are_named(text):
    with pytest.raises(BadEnvironment, match="LOCKSTEP_ENDPOINTS"):
        find_place({**variables(JOINER, 2, 4321), "LOCKSTEP_ENDPOINTS": text})


def test_lanes_given_out_by_hand_are_for_the_number_of_workers_that_was_asked_for():
    environ = JOB.variables_of_all({})
    assert read_overrides({**environ, **JOB.variables_of_one(FOUNDER, 2, 1, 2)}).assignment == ((0,), (1,))
    assert read_overrides({**environ, **JOB.variables_of_one(FOUNDER, 3, 1, 2)}).assignment is None


def test_what_an_outer_launcher_said_of_endpoints_and_pages_is_not_handed_on():
    outer = variables(JOINER, 2, 4321)
    inner = {**JOB.variables_of_all(outer), **JOB.variables_of_one(replace(FOUNDER, status_fd=None), 2, 1, 2)}
    assert (find_place(inner).endpoints, read_overrides(inner).status_fd) == ((), None)


def test_checkpoints_lie_in_the_folder_that_is_named_and_else_beside_the_logs():
    assert read_overrides({"LOCKSTEP_RUN_DIR": "runs/x-1"}).checkpoint_folder == Path("runs/x-1/checkpoints")
    assert read_overrides({"LOCKSTEP_RUN_DIR": "r", "LOCKSTEP_CHECKPOINTS": "c"}).checkpoint_folder == Path("c")
    assert read_overrides({}).checkpoint_folder is None


def test_a_set_of_words_has_one_order_on_all_workers_unless_the_user_wants_another() -> None:
    assert JOB.variables_of_all({})["PYTHONHASHSEED"] == "0"
    assert JOB.variables_of_all({"PYTHONHASHSEED": "random"})["PYTHONHASHSEED"] == "random"


def test_torchs_own_log_is_quiet_unless_the_user_wants_it():
    assert JOB.variables_of_all({})["TORCH_CPP_LOG_LEVEL"] == "FATAL"
    assert JOB.variables_of_all({"TORCH_CPP_LOG_LEVEL": "INFO"})["TORCH_CPP_LOG_LEVEL"] == "INFO"


def test_words_on_resuming_and_saving_are_read():
    job = replace(JOB, resume="auto", checkpoint_every="100 steps", checkpoint_keep=2)
    found = read_overrides(job.variables_of_all({}))
    assert (found.resume, found.checkpoint_every, found.checkpoint_keep) == ("auto", "100 steps", 2)


def test_memory_ran_out_only_if_the_kernel_counted_a_kill_just_now():
    counts = iter([3, 3, 4, 4, 4])
    kills = MemoryKills(lambda: next(counts))
    assert [kills.recent(now_s) for now_s in (1.0, 2.0, 3.0, 10.0)] == [False, True, True, False]
