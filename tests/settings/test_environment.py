"""What each launcher's variables say about this worker's place, and what the overrides say."""

import platform
import re
from pathlib import Path

import pytest

from lockstep.errors import BadEnvironment
from lockstep.launch.job import write_assignment
from lockstep.settings.environment import STRATEGIES, Overrides, find_place, nccl_host, parse_assignment, read_overrides
from lockstep.settings.environments.lockstep_run import Bootstrap, bootstrap, variables
from lockstep.world import World

BOOT = Bootstrap(slot=0, parent_pid=812, run_dir=Path("/runs/mnist-3"), notice_fd=7, listen_fd=5)
LOCKSTEP = variables(BOOT, num_workers=2, port=4321)
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
BARE = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "node[01-03,07]",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-812@1",
}
HYDRA = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "MASTER_PORT": "29500",
}

TRAINER = {
    "PET_NNODES": "4",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "3",
    "PET_MASTER_ADDR": "train-node-0-0.train",
    "PET_MASTER_PORT": "29500",
    "JOB_COMPLETION_INDEX": "3",
}
INDEXED = {"JOB_COMPLETION_INDEX": "2", "LOCKSTEP_WORKERS": "3", "MASTER_ADDR": "train-0.train"}
ROSTER = {"LOCKSTEP_ROSTER": "/shared/run-7"}
ARRAY = {
    "SLURM_PROCID": "0",
    "SLURM_JOB_ID": "4713",
    "SLURM_ARRAY_TASK_ID": "12",
    "SLURM_ARRAY_TASK_MIN": "10",
    **ROSTER,
}

LAUNCHERS = {
    "lockstep run": (LOCKSTEP, World(0, 2, 0, 2)),
    "torchrun": (TORCHRUN, World(3, 4, 1, 2)),
    "RANK and WORLD_SIZE": (BARE, World(1, 2, 1, 2)),
    "slurm": (SLURM, World(5, 7, 1, 2)),
    "mpi": (OPEN_MPI, World(1, 2, 1, 2)),
    "kubernetes": (INDEXED, World(2, 3, 0, 1)),
    "alone": ({}, World(0, 1)),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_gives_its_worker_a_place(launcher):
    environ, world = LAUNCHERS[launcher]
    place = find_place(environ)
    assert (place.launcher, place.world) == (launcher, world)


def test_the_launchers_variables_are_read_back_whole():
    assert bootstrap(LOCKSTEP) == BOOT


def test_worker_0_of_lockstep_run_gets_the_listening_socket():
    place = find_place(LOCKSTEP)
    assert (place.address, place.port, place.listen_fd) == ("127.0.0.1", 4321, 5)


def test_under_torchrun_the_agent_hosts_the_store():
    assert find_place(TORCHRUN).agent_store


def test_without_torchruns_agent_worker_0_hosts_the_store():
    assert not find_place(BARE).agent_store


def test_the_hydra_launcher_of_mpich_and_intel_mpi_is_understood():
    assert find_place(HYDRA).world == World(1, 2, 1, 2)


def test_lockstep_run_inside_a_slurm_task_is_lockstep_run():
    assert find_place({**SLURM, **LOCKSTEP}).launcher == "lockstep run"


def test_torchrun_inside_a_slurm_task_is_torchrun():
    assert find_place({**SLURM, **TORCHRUN}).launcher == "torchrun"


def test_mpirun_inside_slurm_is_mpi_because_the_slurm_tasks_are_its_daemons():
    assert find_place({**SLURM, **OPEN_MPI}).launcher == "mpi"


def test_srun_with_pmi2_is_slurm():
    assert find_place({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "7"}).launcher == "slurm"


def test_a_slurm_batch_script_is_alone():
    assert find_place({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"}).launcher == "alone"


def test_slurm_workers_on_several_hosts_meet_at_the_first():
    assert find_place(SLURM).address == "node01"


def test_slurm_workers_on_one_host_meet_on_loopback():
    one_host = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "7", "SLURM_STEP_NODELIST": "node01"}
    assert find_place(one_host).address == "127.0.0.1"


def test_every_task_of_a_slurm_step_derives_the_same_port():
    assert find_place(SLURM).port == find_place({**SLURM, "SLURM_PROCID": "4", "SLURM_LOCALID": "0"}).port
    assert 20_000 <= find_place(SLURM).port < 40_000


def test_two_steps_of_a_slurm_job_derive_different_ports():
    assert find_place(SLURM).port != find_place({**SLURM, "SLURM_STEP_ID": "1"}).port


@pytest.mark.parametrize("environ", [SLURM, OPEN_MPI])
def test_a_given_port_is_used(environ):
    assert find_place({**environ, "MASTER_PORT": "1234"}).port == 1234


def test_mpi_workers_of_one_job_derive_one_port():
    other = {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    assert find_place(OPEN_MPI).port == find_place(other).port


def test_mpi_over_several_hosts_asks_for_an_address():
    with pytest.raises(BadEnvironment, match="set MASTER_ADDR"):
        find_place({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"})


def test_mpi_over_several_hosts_uses_the_address_it_is_given():
    given = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    two_hosts = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    assert find_place({**two_hosts, **given}).address == "node1"


def test_an_mpi_launcher_that_does_not_name_its_job_asks_for_a_port():
    with pytest.raises(BadEnvironment, match="set MASTER_PORT"):
        find_place({name: value for name, value in HYDRA.items() if name != "MASTER_PORT"})


def test_a_task_of_an_array_with_a_roster_is_a_worker_by_its_number():
    place = find_place(ARRAY)
    assert (place.launcher, place.world.size, place.slot) == ("slurm", 1, 2)


def test_a_task_of_an_array_without_a_roster_trains_alone():
    place = find_place({name: value for name, value in ARRAY.items() if name != "LOCKSTEP_ROSTER"})
    assert (place.launcher, place.slot) == ("alone", None)


def test_the_slot_of_an_array_can_be_given():
    assert find_place({**ARRAY, "LOCKSTEP_SLOT": "7"}).slot == 7


def test_tasks_of_a_step_with_a_roster_have_the_slots_of_their_ranks():
    assert find_place({**SLURM, **ROSTER}).slot == 5


def test_no_two_tasks_of_an_array_of_steps_have_one_slot():
    one = {**SLURM, **ROSTER, "SLURM_ARRAY_TASK_MIN": "1"}
    slots = [
        find_place({**one, "SLURM_ARRAY_TASK_ID": str(task), "SLURM_PROCID": rank, "SLURM_LOCALID": "0"}).slot
        for task in (1, 2)
        for rank in ("0", "6")
    ]
    assert slots == [0, 6, 7, 13]


def test_a_pod_of_kubeflows_trainer_without_torchrun_is_one_worker():
    place = find_place(TRAINER)
    assert (place.world, place.address, place.port) == (World(3, 4, 0, 1), "train-node-0-0.train", 29500)


def test_torchrun_in_a_pod_of_kubeflows_trainer_is_torchrun():
    assert find_place({**TRAINER, **TORCHRUN}).launcher == "torchrun"


def test_a_pod_of_an_indexed_job_meets_the_others_at_index_0():
    place = find_place(INDEXED)
    assert (place.address, place.port, place.slot) == ("train-0.train", 29500, None)


def test_a_pod_with_a_roster_needs_no_number_of_workers():
    place = find_place({"JOB_COMPLETION_INDEX": "2", **ROSTER})
    assert (place.launcher, place.world.size, place.slot) == ("kubernetes", 1, 2)


def test_a_pod_of_an_indexed_job_that_names_neither_workers_nor_a_roster_trains_alone():
    assert find_place({"JOB_COMPLETION_INDEX": "2"}).launcher == "alone"


@pytest.mark.parametrize(
    ("environ", "blamed"),
    [
        ({**ARRAY, "SLURM_ARRAY_TASK_ID": "9"}, "SLURM_ARRAY_TASK_ID=9 contradicts SLURM_ARRAY_TASK_MIN=10"),
        ({**ARRAY, "SLURM_ARRAY_TASK_ID": "x"}, "SLURM_ARRAY_TASK_ID=x"),
        ({**ARRAY, "SLURM_ARRAY_TASK_MIN": ""}, "SLURM_ARRAY_TASK_MIN is not set"),
        ({**ARRAY, "LOCKSTEP_SLOT": "-1"}, "LOCKSTEP_SLOT=-1"),
        ({**SLURM, **ROSTER, "LOCKSTEP_SLOT": "3"}, "LOCKSTEP_SLOT=3 would be the number of all 7 tasks"),
        ({**TRAINER, "PET_NODE_RANK": "4"}, "PET_NODE_RANK=4 contradicts PET_NNODES=4"),
        ({**TRAINER, "PET_NNODES": "1:4"}, "PET_NNODES=1:4 is a range"),
        ({**TRAINER, "PET_NNODES": "many"}, "PET_NNODES=many"),
        ({**TRAINER, "PET_NPROC_PER_NODE": "8"}, "PET_NPROC_PER_NODE=8 asks for more than one worker"),
        ({**TRAINER, "PET_NPROC_PER_NODE": "auto"}, "PET_NPROC_PER_NODE=auto asks for more than one worker"),
        ({**TRAINER, "PET_MASTER_ADDR": ""}, "PET_MASTER_ADDR is not set"),
        ({**TRAINER, "PET_MASTER_PORT": "0"}, "PET_MASTER_PORT=0"),
        ({**INDEXED, "JOB_COMPLETION_INDEX": "3"}, "JOB_COMPLETION_INDEX=3 contradicts LOCKSTEP_WORKERS=3"),
        ({**INDEXED, "LOCKSTEP_WORKERS": "0"}, "LOCKSTEP_WORKERS=0"),
        ({**INDEXED, "MASTER_ADDR": ""}, "set MASTER_ADDR to <job>-0.<service>"),
        ({**INDEXED, "MASTER_PORT": "99999"}, "MASTER_PORT=99999"),
        ({**BARE, "RANK": "5"}, "RANK=5 contradicts WORLD_SIZE=2"),
        ({**BARE, "RANK": "one"}, "RANK=one"),
        ({**BARE, "RANK": "-1"}, "RANK=-1"),
        ({**BARE, "WORLD_SIZE": ""}, "WORLD_SIZE is not set"),
        ({**BARE, "WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        ({**BARE, "MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({**BARE, "MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
        ({**BARE, "MASTER_ADDR": "node1"}, "LOCAL_RANK is not set"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, "local rank 1 of 9"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 is set but RANK is not"),
        ({**BARE, "RANK": "9" * 5000}, "RANK=99"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "9" * 5000}, "SLURM_STEP_TASKS_PER_NODE=99"),
        ({**SLURM, "SLURM_PROCID": "9"}, "SLURM_PROCID=9"),
        ({**SLURM, "SLURM_LOCALID": ""}, "SLURM_LOCALID is not set"),
        ({**SLURM, "SLURM_NODEID": "4"}, "SLURM_NODEID=4"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, "SLURM_STEP_TASKS_PER_NODE gives 4 tasks"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"}, "OMPI_COMM_WORLD_RANK=1"),
        ({**HYDRA, "PMI_SIZE": "x"}, "PMI_SIZE=x"),
        ({**LOCKSTEP, "LOCKSTEP_PORT": ""}, "LOCKSTEP_PORT is not set"),
    ],
)
def test_a_variable_that_is_missing_or_wrong_is_named(environ, blamed):
    with pytest.raises(BadEnvironment, match=re.escape(blamed)):
        find_place(environ)


def test_overrides_are_silent_where_no_variable_is_set():
    assert read_overrides({}) == Overrides()


def test_every_override_has_its_variable():
    environ = {
        "LOCKSTEP_LANES": "5",
        "LOCKSTEP_SEED": "7",
        "LOCKSTEP_THREADS": "2",
        "LOCKSTEP_STRATEGY": "replicated",
        "LOCKSTEP_ASSIGNMENT": "0,1;2,3,4",
        "LOCKSTEP_RUN_DIR": "runs/mnist-3",
        "LOCKSTEP_TRACE_DIR": "traces",
        "LOCKSTEP_STOP_AFTER": "10",
        "LOCKSTEP_DUMP": "final.safetensors",
    }
    expected = Overrides(
        lanes=5,
        seed=7,
        threads=2,
        strategy="replicated",
        assignment=((0, 1), (2, 3, 4)),
        run_dir=Path("runs/mnist-3"),
        trace_dir=Path("traces"),
        stop_after=10,
        dump_path=Path("final.safetensors"),
    )
    assert read_overrides(environ) == expected


def test_threads_fall_back_to_those_of_openmp():
    assert read_overrides({"OMP_NUM_THREADS": "4,2"}).usual_threads == 4


def test_threads_told_to_lockstep_are_apart_from_those_of_openmp():
    overrides = read_overrides({"OMP_NUM_THREADS": "4", "LOCKSTEP_THREADS": "1"})
    assert (overrides.threads, overrides.usual_threads) == (1, 4)


@pytest.mark.parametrize("name", ["LOCKSTEP_LANES", "LOCKSTEP_SEED", "LOCKSTEP_ASSIGNMENT", "OMP_NUM_THREADS"])
def test_an_override_that_cannot_be_read_is_named(name):
    with pytest.raises(BadEnvironment, match=name):
        read_overrides({name: "many"})


def test_a_strategy_that_does_not_exist_is_named_with_those_that_do():
    allowed = " or ".join(map(repr, STRATEGIES))
    with pytest.raises(BadEnvironment, match=f"^LOCKSTEP_STRATEGY must be {allowed}, not 'shared'$"):
        read_overrides({"LOCKSTEP_STRATEGY": "shared"})


@pytest.mark.parametrize("assignment", [((0, 1), (2, 3, 4)), ((0,), ()), ((), (0, 1)), ((2, 0), (1,))])
def test_an_assignment_survives_being_written_and_read(assignment):
    assert parse_assignment(write_assignment(assignment)) == assignment


def test_only_the_environment_module_reads_the_environment():
    package = Path(__file__).parents[2] / "lockstep"
    readers = [path for path in package.rglob("*.py") if re.search(r"\bos\.(environ|getenv)\b", path.read_text())]
    assert {str(path.relative_to(package)) for path in readers} == {"settings/environment.py"}


def test_nccl_takes_a_host_for_what_its_variable_says() -> None:
    assert nccl_host({"NCCL_HOSTID": " rack-7 "}) == "rack-7"
    assert nccl_host({}) == platform.node()
