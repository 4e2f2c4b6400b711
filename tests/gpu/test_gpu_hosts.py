"""One digest of workers on several hosts that add by NCCL, with a worker, or a whole host, lost or not.

The hosts are network namespaces that share this machine's GPU. NCCL talks over the interface between them.
"""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gpu_processes import environment
from hosts import INTERFACE, hosts
from together import Outcome, RunPool, Together, Wanted

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500)]

SCRIPT = Path(__file__).parent / "lanes_on_gpu.py"
LIMIT_S = 120.0


def launch(words: Wanted, _: Path) -> dict[str, Any]:
    """What worker 0 printed, and what it said beside it. The first word says how many workers are on each host."""
    workers_of, *arguments = words
    with hosts([int(number) for number in workers_of.split("+")]) as network:
        workers = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), "resnet", *arguments],
                env={**environment(), **network.variables(rank), "NCCL_SOCKET_IFNAME": INTERFACE},
                preexec_fn=partial(network.enter, rank),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(sum(network.workers_of))
        ]
        try:
            said = [worker.communicate(timeout=LIMIT_S)[0] for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    assert workers[0].returncode == 0, "\n".join(said)
    return {**json.loads(said[0].strip().splitlines()[-1]), "said": said[0], "codes": [w.returncode for w in workers]}


RUNS = Together(launch, __file__)
run = RUNS.run
ALONE = RUNS.always(run("1"))
NCCL = ("--wire", "nccl")


@pytest.fixture(scope="module")
def outcome(pool: RunPool) -> Outcome:
    return RUNS.outcomes(pool)


@pytest.mark.parametrize(
    "several",
    [
        run("1+1", *NCCL), run("2+1", *NCCL), run("2+1", *NCCL, "--sharded", "gradients"),
        run("2+1", *NCCL, "--sharded", "parameters"),
    ],
    ids=str,
)  # fmt: skip
def test_workers_of_two_hosts_give_the_bits_of_one(outcome: Outcome, several: Wanted) -> None:
    got, want = outcome(several), outcome(ALONE)
    assert got["workers"] == sum(map(int, several[0].split("+")))
    assert [got[what] for what in ("digest", "losses")] == [want[what] for what in ("digest", "losses")]


@pytest.mark.parametrize(
    ("lost", "killed"),
    [
        (1, run("2+1", *NCCL, "--kill", "1:20", "--kill-in", "lanes")),
        (2, run("2+1", *NCCL, "--kill", "2:20", "--kill-in", "lanes")),
        (2, run("2+1", *NCCL, "--fault", "2:4:before reduce")),
        (1, run("2+1", *NCCL, "--sharded", "--fault", "1:4:before store")),
        (2, run("2+1", *NCCL, "--sharded", "gradients", "--fault", "2:4:in batch")),
        (1, run("2+1", *NCCL, "--sharded", "parameters", "--fault", "1:4:after fetch")),
    ],
    ids=str,
)
def test_a_worker_lost_on_this_host_or_on_another_costs_nothing(outcome: Outcome, lost: int, killed: Wanted) -> None:
    """The second host has one worker: with it the whole host is gone."""
    got = outcome(killed)
    assert got["codes"] == [-9 if rank == lost else 0 for rank in range(3)], "the fault never fired"
    assert got["workers"] == 2
    assert "waiting for other workers" not in got["said"], got["said"]
    assert [got[what] for what in ("digest", "losses")] == [outcome(ALONE)[what] for what in ("digest", "losses")]
