"""What `lockstep doctor --gpus` says of links between GPUs, on machines that were measured on paper."""

from dataclasses import replace
from itertools import permutations

import pytest

from lockstep.programs.doctor.diagnosis import Level
from lockstep.programs.doctor.gpu_links import (
    GpuLink,
    GpuTrial,
    check_links,
    check_nccl,
    due_bytes_per_s,
    parse_topology,
    parse_trial,
)

TOPOLOGY = """
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-47\t0
GPU1\tNV18\t X \tSYS\tSYS\t0-47\t0
GPU2\tSYS\tSYS\t X \tSYS\t48-95\t1
NIC0\tPIX\tSYS\tSYS\t X \t

Legend:

  X    = Self
"""


def machine(rate: float = 380e9, kind: str = "NV18", count: int = 4, nccl: float | None = 350e9) -> GpuTrial:
    links = tuple(GpuLink(a, b, kind, True, rate) for a, b in permutations(range(count), 2))
    return GpuTrial((4e12,) * count, links, nccl)


def changed(trial: GpuTrial, source: int, target: int, **fields: object) -> GpuTrial:
    pair = (source, target)
    links = [replace(link, **fields) if (link.source, link.target) == pair else link for link in trial.links]
    return replace(trial, links=tuple(links))


def test_the_kinds_of_links_are_read_from_nvidias_table() -> None:
    kinds = parse_topology(TOPOLOGY)
    assert kinds == {(0, 1): "NV18", (1, 0): "NV18", (0, 2): "SYS", (2, 0): "SYS", (1, 2): "SYS", (2, 1): "SYS"}
    assert parse_topology("nothing") == {}


def test_what_the_trial_prints_is_read_back_with_the_kinds() -> None:
    text = '{"own": [4e12, 4e12], "pairs": [[0, 1, true, 3e11], [1, 0, false, 2e11]], "nccl": 1e11}'
    trial = parse_trial(text, {(0, 1): "NV18"})
    assert trial.links == (GpuLink(0, 1, "NV18", True, 3e11), GpuLink(1, 0, "", False, 2e11))
    assert trial.nccl_bytes_per_s == 1e11


def test_links_that_give_what_they_should_are_fine() -> None:
    result = check_links(machine())
    assert (result.level, result.sentence) == (Level.OK, "all 12 ways between 4 GPUs: NV18 380 GB/s to 380 GB/s")


def test_a_link_that_is_halved_is_named_with_what_is_due() -> None:
    result = check_links(changed(machine(), 1, 3, bytes_per_s=190e9))
    assert result.level is Level.WARNING
    assert "GPU 1 → GPU 3 (NV18) moves 190 GB/s, 450 GB/s are due" in result.sentence
    assert "GPU 0" not in result.sentence


def test_all_links_halved_are_named_by_their_number_alone() -> None:
    result = check_links(machine(rate=190e9))
    assert result.level is Level.WARNING
    assert "and 6 more" in result.sentence


@pytest.mark.parametrize(("rate", "level"), [(20e9, Level.OK), (9e9, Level.WARNING)])
def test_a_way_over_the_host_is_held_against_others_of_its_kind(rate: float, level: Level) -> None:
    assert check_links(changed(machine(25e9, "SYS"), 0, 1, bytes_per_s=rate)).level is level


def test_a_fast_link_makes_no_slow_one_of_another_kind() -> None:
    links = (*machine(count=2).links, GpuLink(0, 2, "SYS", True, 20e9))
    assert due_bytes_per_s(links[-1], links) == 20e9


def test_gpus_that_do_not_reach_each_other_are_named() -> None:
    result = check_links(changed(machine(25e9, "PHB"), 2, 0, reaches=False))
    assert result.level is Level.WARNING
    assert "no peer access: GPU 2 → GPU 0 (PHB)" in result.sentence


def test_one_gpu_has_nobody_to_reach() -> None:
    alone = GpuTrial((4e12,), ())
    assert check_links(alone).sentence == "one GPU: a copy on it moves 4e+03 GB/s; there is no other to reach"
    assert check_nccl(alone).level is Level.OK


def test_nccl_is_held_against_the_slowest_link() -> None:
    assert check_nccl(machine()).level is Level.OK
    slow = check_nccl(machine(nccl=20e9))
    assert slow.level is Level.WARNING
    assert "NCCL goes another way than the links" in slow.sentence
    assert check_nccl(machine(nccl=None)).level is Level.PROBLEM
