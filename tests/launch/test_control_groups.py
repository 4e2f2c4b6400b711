"""What a container may use, read from the files of its control groups."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from lockstep.launch.host.resources import ControlGroups, free_bytes


def groups(root: Path, paths: str, files: dict[str, str]) -> ControlGroups:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return ControlGroups(paths, root)


def test_limits_of_the_second_version_are_the_tightest_of_all_groups_above(tmp_path: Path) -> None:
    files = {
        "cpu.max": "max 100000",
        "job/cpu.max": "150000 100000",
        "job/task/cpu.max": "400000 100000",
        "job/memory.max": "1000",
        "job/memory.current": "900",
        "job/memory.stat": "anon 500\ninactive_file 50",
        "job/task/memory.max": "max",
        "job/task/memory.current": "900",
        "job/task/pids.max": "100",
        "job/task/pids.current": "30",
    }
    found = groups(tmp_path, "0::/job/task", files)
    assert (found.cpu_quota(), found.memory(), found.processes_left()) == (1.5, (1000, 150), 70)


def test_limits_of_the_first_version_are_read_too(tmp_path: Path) -> None:
    files = {
        "cpu/box/cpu.cfs_quota_us": "50000",
        "cpu/box/cpu.cfs_period_us": "100000",
        "memory/box/memory.limit_in_bytes": "2000",
        "memory/box/memory.usage_in_bytes": "500",
        "memory/memory.limit_in_bytes": "9223372036854771712",
        "memory/memory.usage_in_bytes": "5",
        "pids/box/pids.max": "max",
        "pids/box/pids.current": "3",
    }
    found = groups(tmp_path, "4:memory:/box\n3:cpu,cpuacct:/box\n2:pids:/box\n0::/", files)
    assert (found.cpu_quota(), found.memory(), found.processes_left()) == (0.5, (2000, 1500), float("inf"))


def test_a_group_that_cannot_be_seen_from_a_container_is_that_of_the_root(tmp_path: Path) -> None:
    found = groups(tmp_path, "0::/docker/1a2b", {"cpu.max": "200000 100000"})
    assert found.cpu_quota() == 2.0


@pytest.mark.parametrize("paths", ["", "0::/", "nonsense"])
def test_where_there_are_no_groups_nothing_is_known(paths: str, tmp_path: Path) -> None:
    found = groups(tmp_path, paths, {})
    assert (found.cpu_quota(), found.memory(), found.processes_left()) == (None, None, None)


@pytest.mark.parametrize(("limit", "expected"), [("1000", 900), ("max", None)])
def test_what_is_free_is_what_the_host_has_and_the_container_allows(
    limit: str, expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = groups(tmp_path, "0::/", {"memory.max": limit, "memory.current": "100"})
    monkeypatch.setattr(ControlGroups, "of_this_process", lambda: found)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=5001))
    assert free_bytes() == (expected or 5001)
