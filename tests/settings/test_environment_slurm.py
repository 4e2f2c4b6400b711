"""Slurm's compressed lists."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import BadEnvironment
from lockstep.settings.environments.slurm import expand_counts, expand_hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node[01-03,07],login1", ("node01", "node02", "node03", "node07", "login1")),
        ("node1", ("node1",)),
        ("a,b", ("a", "b")),
        ("gpu[9-11]", ("gpu9", "gpu10", "gpu11")),
        ("rack[1-2]node[1-2]", ("rack1node1", "rack1node2", "rack2node1", "rack2node2")),
        ("n[1-2]-ib.site", ("n1-ib.site", "n2-ib.site")),
    ],
)
def test_a_host_list_names_every_host_in_order(text, hosts):
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "node[", "node[1-", "node[b-a]", "node[3-1]", "a,,b", "node]1["])
def test_a_host_list_that_cannot_be_read_is_named(text):
    with pytest.raises(BadEnvironment, match="SLURM_STEP_NODELIST"):
        expand_hosts(text)


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 50)), min_size=1))
def test_task_counts_expand_to_one_number_per_host(groups):
    text = ",".join(f"{tasks}(x{hosts})" if hosts > 1 else str(tasks) for tasks, hosts in groups)
    assert expand_counts(text) == tuple(tasks for tasks, hosts in groups for _ in range(hosts))


@given(st.integers(0, 10**4), st.integers(0, 300), st.integers(0, 6))
def test_a_range_of_hosts_keeps_its_leading_zeros(first, more, width):
    low, high = str(first).zfill(width), str(first + more).zfill(width)
    hosts = expand_hosts(f"n[{low}-{high}]")
    assert (hosts[0], hosts[-1], len(hosts)) == (f"n{low}", f"n{high}", more + 1)


@pytest.mark.parametrize("text", ["2(x", "two", "2,,1", "2(3)", ""])
def test_task_counts_that_cannot_be_read_are_named(text):
    with pytest.raises(BadEnvironment, match="SLURM_STEP_TASKS_PER_NODE"):
        expand_counts(text)
