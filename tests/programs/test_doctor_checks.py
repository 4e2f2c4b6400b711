"""What the doctor says of machines that are described to it."""

import tomllib
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.programs.doctor import checks
from lockstep.programs.doctor.checks import CHECKS, diagnose
from lockstep.programs.doctor.diagnosis import CheckResult, GiB, Level, MiB
from lockstep.programs.doctor.facts import Facts, Orphan
from lockstep.programs.doctor.machine import parse_gpus

INSTALLED = {
    "torch-lockstep": "0.1.0",
    "torch": "2.13.0+cpu",
    "click": "8.1.8",
    "rich": "13.9",
    "safetensors": "0.5.3",
    "psutil": "5.9.8",
    "llvmlite": "0.45.0",
}
HEALTHY = Facts(
    num_workers=4,
    python=(3, 11, 7),
    running="0.1.0",
    installed=INSTALLED,
    saving_error="",
    usable_cores=8,
    free_bytes=16 * GiB,
    shm_bytes=8 * GiB,
    shm_free_bytes=8 * GiB,
    open_files_soft=4096,
    open_files_hard=65536,
    processes_left=inf,
    disk_free_bytes=50 * GiB,
    host_name="node1",
    addresses=("10.0.0.1",),
    resolving_s=0.01,
    waited_s=1.0,
    interfaces=("lo", "eth0"),
    loopback_works=True,
    gpus=(),
    orphans=(),
    dead_runs=(),
    shared_files=(),
)
NOTHING_KNOWN = Facts(4, (3, 11), "0.1.0", INSTALLED, host_name="node1", addresses=("10.0.0.1",), resolving_s=0.0)


def but(**changed: Any) -> Facts:
    return replace(HEALTHY, **changed)


def with_installed(**versions: str | None) -> Facts:
    return but(installed=INSTALLED | versions)


def test_a_healthy_machine_has_neither_problem_nor_warning() -> None:
    assert {finding.level for finding in diagnose(HEALTHY).results.values()} == {Level.OK}


PROBLEMS = [
    (checks.python, but(python=(3, 10, 2)), "Python 3.10.2 is too old", "python3.11"),
    (checks.packages, with_installed(torch=None), "torch is not installed", '"torch>=2.11"'),
    (checks.packages, with_installed(torch="2.9.1"), "torch 2.9.1 is too old, lockstep needs 2.11", "torch"),
    (checks.packages, with_installed(safetensors="0.4.9"), "safetensors 0.4.9", '"safetensors>=0.5"'),
    (checks.saving, but(saving_error="ModuleNotFoundError: numpy"), "loaded: ModuleNotFoundError", "shows where"),
    (checks.threads, but(threads="many"), "OMP_NUM_THREADS=many", "unset OMP_NUM_THREADS"),
    (checks.memory, but(free_bytes=600 * MiB), "600 MiB free; 4 workers take 1.0 GiB", "-n 2 "),
    (checks.memory, but(group_limit_bytes=GiB, group_left_bytes=300 * MiB), "limited to 1.0 GiB", "-n 1 "),
    (
        checks.shared_memory,
        but(shm_bytes=64 * MiB, shm_free_bytes=3 * MiB),
        "3 MiB free of 64 MiB",
        "--shm-size",
    ),
    (checks.memfd, but(memfd=False), "memfd_create", "seccomp"),
    (
        checks.open_files,
        but(open_files_soft=70, open_files_hard=4096),
        "70 at a time; 4 workers may need 80",
        "ulimit -n 4096",
    ),
    (checks.open_files, but(open_files_soft=70, open_files_hard=inf), "may need 80", "ulimit -n 65536"),
    (checks.open_files, but(open_files_soft=70, open_files_hard=79), "the hard limit is 79", "limits.conf"),
    (checks.processes, but(processes_left=20), "20 more processes", "--pids-limit"),
    (checks.disk, but(disk_free_bytes=5 * MiB), "5 MiB free in runs", "du -sh runs/*"),
    (checks.disk, but(folder="/", writable=False), "nothing can be written in /", "--run-dir"),
    (checks.loopback, but(loopback_works=False), "127.0.0.1", "ip link set lo up"),
    (
        checks.gloo_interface,
        but(gloo_interfaces=("eth0", "ib0")),
        "names ib0, and this host has lo, eth0",
        "unset GLOO_SOCKET_IFNAME",
    ),
]
WARNINGS = [
    (checks.lockstep, with_installed(**{"torch-lockstep": None}), "is not installed", "pip install -e ."),
    (checks.lockstep, with_installed(**{"torch-lockstep": "0.0.9"}), "the installation says 0.0.9", "pip install"),
    (checks.llvmlite, with_installed(llvmlite=None), "llvmlite is not installed", "torch-lockstep[fast]"),
    (checks.llvmlite, with_installed(llvmlite="0.44.1"), "0.44.1 is older than 0.45", "torch-lockstep[fast]"),
    (checks.cores, but(usable_cores=2), "2 usable; 4 workers would take turns", "lockstep run -n 2 "),
    (checks.cores, but(core_quota=1.5), "8 cores in sight, of which the container may use 1.5", "-n 1 "),
    (checks.threads, but(threads="4"), "16 threads on 8 cores", "export OMP_NUM_THREADS=1"),
    (checks.threads, but(architecture="aarch64"), "on Arm, libraries below torch", "export OMP_NUM_THREADS=1"),
    (checks.gpus, but(gpus=("NVIDIA H200",)), "1 GPU: NVIDIA H200; but this torch", "a torch with CUDA"),
    (checks.shared_memory, but(shm_bytes=64 * MiB, shm_free_bytes=64 * MiB), "bus error", "--shm-size"),
    (checks.shared_memory, but(shm_bytes=GiB, shm_free_bytes=64 * MiB), "64 MiB free of 1.0 GiB", "ls -lS"),
    (checks.open_files, but(open_files_soft=256, open_files_hard=4096), "256 at a time", "ulimit -n 4096"),
    (checks.disk, but(folder="my runs", disk_free_bytes=GiB), "1.0 GiB free in my runs", "du -sh 'my runs'/*"),
    (checks.host_name, but(addresses=(), resolving_s=0.1), "does not resolve", "/etc/hosts"),
    (checks.host_name, but(addresses=(), resolving_s=None), "not resolved within 1 s", "/etc/hosts"),
    (checks.host_name, but(resolving_s=0.8), "takes 0.8 s", "/etc/hosts"),
    (checks.orphans, but(orphans=(Orphan(7, "python t.py"), Orphan(9, "x"))), "7 (python t.py)", "kill 7 9"),
    (checks.ended_runs, but(dead_runs=("runs/a b",)), "runs/a b", "rm 'runs/a b/launcher.json'"),
    (
        checks.checkpoints,
        but(partial_checkpoints=("c/.s.partial",)),
        "1 half-written",
        "rm -r c/.s.partial",
    ),
    (checks.shared_files, but(shared_files=("/dev/shm/torch_1_2_3",)), "1 file", "rm /dev/shm/torch_1_2_3"),
]


def named(row: Any) -> str | None:
    return row if isinstance(row, str) else None


@pytest.mark.parametrize(("check", "facts", "sentence", "fix"), PROBLEMS, ids=named)
def test_what_stops_a_run_is_a_problem_with_its_fix(check: Any, facts: Facts, sentence: str, fix: str) -> None:
    assert_told(check(facts), Level.PROBLEM, sentence, fix)


@pytest.mark.parametrize(("check", "facts", "sentence", "fix"), WARNINGS, ids=named)
def test_what_hinders_a_run_is_a_warning_with_its_fix(check: Any, facts: Facts, sentence: str, fix: str) -> None:
    assert_told(check(facts), Level.WARNING, sentence, fix)


def assert_told(finding: CheckResult, level: Level, sentence: str, fix: str) -> None:
    assert finding.level is level
    assert sentence in finding.sentence
    assert fix in finding.fix


def test_every_check_can_find_something_wrong() -> None:
    assert {row[0] for row in PROBLEMS + WARNINGS} == set(CHECKS.values()) - {checks.extras}  # nobody needs those


def test_a_machine_that_tells_nothing_is_not_called_healthy_or_ill() -> None:
    silent = [finding for finding in diagnose(NOTHING_KNOWN).results.values() if finding.level is not Level.OK]
    assert {finding.level for finding in silent} == {Level.UNKNOWN}
    assert len(silent) == 12
    assert all(finding.sentence.endswith("is not known here") for finding in silent)


def test_a_quota_that_leaves_all_cores_is_not_mentioned() -> None:
    assert checks.cores(but(core_quota=8.0)).sentence == "8 usable, for 4 workers"


def test_a_host_that_is_its_own_loopback_hears_what_several_hosts_need() -> None:
    assert "GLOO_SOCKET_IFNAME" in checks.host_name(but(addresses=("127.0.1.1", "::1"))).sentence


def test_one_thread_for_each_of_too_many_workers_is_the_cores_finding_alone() -> None:
    assert checks.threads(but(threads="1", usable_cores=2)).level is Level.OK
    assert checks.threads(but(architecture="arm64", threads="1")).level is Level.OK
    assert checks.threads(but(architecture="arm64", num_workers=1)).level is Level.OK


def test_the_needed_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    needed = [f"{name}>={'.'.join(map(str, version))}" for name, version in checks.NEEDED.items()]
    assert needed == project["dependencies"]
    assert project["requires-python"] == f">={'.'.join(map(str, checks.PYTHON))}"
    assert project["optional-dependencies"]["fast"] == [f"llvmlite>={'.'.join(map(str, checks.FAST))}"]


def test_extras_that_are_not_installed_are_named_with_what_they_are_for() -> None:
    said = checks.extras(with_installed(ray="2.60.0"))
    assert said.level is Level.OK
    assert "notebook (lockstep.launch)" in said.sentence
    assert "ray (" not in said.sentence
    assert "pip install 'torch-lockstep[notebook,cuda,cudnn,transformers,lightning]'" in said.sentence
    everything = with_installed(**dict.fromkeys((package for package, _ in checks.EXTRAS.values()), "2"))
    assert checks.extras(everything).sentence == "notebook, cuda, cudnn, ray, transformers, lightning are installed"


def test_the_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for name, (package, _) in checks.EXTRAS.items():
        assert project["optional-dependencies"][name][0].startswith(package)


@given(num_workers=st.integers(1, 2000), cores=st.integers(1, 256), free_bytes=st.integers(0, 2**40))
def test_whatever_is_wrong_comes_with_a_fix_and_nothing_else_does(
    num_workers: int, cores: int, free_bytes: int
) -> None:
    facts = but(num_workers=num_workers, usable_cores=cores, free_bytes=free_bytes, disk_free_bytes=free_bytes)
    for finding in diagnose(facts).results.values():
        assert bool(finding.fix) == (finding.level in (Level.WARNING, Level.PROBLEM))


@pytest.mark.parametrize(
    ("facts", "code"), [(HEALTHY, 0), (NOTHING_KNOWN, 0), (WARNINGS[0][1], 0), (PROBLEMS[0][1], 3)]
)
def test_only_a_problem_changes_the_exit_code(facts: Facts, code: int) -> None:
    assert diagnose(facts).exit_code == code


def test_lines_and_json_tell_the_same() -> None:
    diagnosis = diagnose(but(usable_cores=2, threads="no"))
    result, text = diagnosis.as_json(), "\n".join(diagnosis.lines())
    assert (result["problems"], result["warnings"]) == (1, 1)
    assert "1 problem, 1 warning" in text
    for finding in result["findings"]:
        assert finding["sentence"] in text
        assert finding["fix"] in text


def test_gpus_are_told_with_their_free_memory_and_with_what_torch_has() -> None:
    finding = checks.gpus(but(gpus=("NVIDIA H200",), gpu_free_bytes=(138 * GiB,), torch_cuda="13.0", mps=True))
    assert finding.level is Level.OK
    assert finding.sentence == "1 GPU: NVIDIA H200 with 138.0 GiB free; torch has CUDA 13.0; the MPS daemon runs"


def test_what_the_drivers_tool_writes_is_read_as_names_and_bytes() -> None:
    assert parse_gpus("NVIDIA H200, 142771\nsomething else\n") == [("NVIDIA H200", 142771 * MiB)]
