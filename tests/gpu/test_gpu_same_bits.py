"""One digest on a GPU, however many workers share it, captured or not, with a worker killed or not.

Each run takes seconds of starting and little of the GPU: all that the tests want are started together, a few at a time.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gpu_processes import environment
from together import Outcome, RunPool, Together, Wanted

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500)]

SCRIPT = Path(__file__).parent / "lanes_on_gpu.py"
MODELS = ("gpt", "resnet", "bf16")
LIMIT_S = 300.0
NCCL = ("--wire", "nccl")


def launch(words: Wanted, folder: Path) -> dict[str, Any]:
    num_workers, *arguments = words
    command = [sys.executable, "-m", "lockstep", "run", "-n", num_workers, "--run-dir", str(folder), str(SCRIPT)]
    done = subprocess.run(
        [*command, *arguments], env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    marks = [path.name for path in folder.iterdir()]
    return {**json.loads(done.stdout.strip().splitlines()[-1]), "said": done.stdout + done.stderr, "marks": marks}


RUNS = Together(launch, __file__)
run = RUNS.run


@pytest.fixture(scope="module")
def outcome(pool: RunPool) -> Outcome:
    return RUNS.outcomes(pool)


ALONE = {model: RUNS.always(run(1, model)) for model in MODELS}
ALONE_UPDATED = RUNS.always(run(1, "gpt", "--update"))
ONE_LANE = RUNS.always(run(1, "gpt", "--lanes", "1", "--update"))


@pytest.mark.parametrize(
    ("model", "several"),
    [(m, run(n, m)) for m, numbers in {"gpt": (2, 3, 8), "resnet": (2, 4), "bf16": (3,)}.items() for n in numbers],
    ids=str,
)
def test_workers_that_share_a_gpu_give_the_bits_of_one(outcome: Outcome, model: str, several: Wanted) -> None:
    got, want = outcome(several), outcome(ALONE[model])
    assert got["workers"] == int(several[0])
    assert [got[what] for what in ("digest", "losses", "noise")] == [
        want[what] for what in ("digest", "losses", "noise")
    ]


@pytest.mark.parametrize(
    ("model", "captured"),
    [
        (m, run(n, m, "--captured"))
        for m, numbers in {"gpt": (1, 3), "resnet": (3,), "bf16": (1, 8)}.items()
        for n in numbers
    ],
    ids=str,
)
def test_captured_lanes_give_the_same_bits(outcome: Outcome, model: str, captured: Wanted) -> None:
    got, want = outcome(captured), outcome(ALONE[model])
    assert got["graphs"] > 0, got["said"]
    assert [got[what] for what in ("digest", "losses", "noise")] == [
        want[what] for what in ("digest", "losses", "noise")
    ]


@pytest.mark.parametrize("captured", [run(n, "gpt", "--captured", "--update") for n in (1, 3)], ids=str)
def test_a_captured_update_gives_the_same_bits(outcome: Outcome, captured: Wanted) -> None:
    got = outcome(captured)
    assert got["graphs"] > 0, got["said"]
    assert got["updates"], got["said"]
    assert "runs as it is" not in got["said"]
    assert got["digest"] == outcome(ALONE_UPDATED)["digest"]


@pytest.mark.parametrize("captured", [run(1, "gpt", "--lanes", "1", "--captured", "--update")], ids=str)
def test_one_lane_captured_gives_the_bits_of_one_lane(outcome: Outcome, captured: Wanted) -> None:
    got = outcome(captured)
    assert got["graphs"] > 0, got["said"]
    assert got["updates"], got["said"]
    assert got["digest"] == outcome(ONE_LANE)["digest"]


@pytest.mark.parametrize(
    ("one", "three"),
    [
        (run(1, *arguments), run(3, *arguments))
        for arguments in (
            ("half",),
            ("half", "--reduce-dtype", "float32"),
            ("gpt", "--reduce-dtype", "bfloat16"),
            ("gpt", "--scaler"),
            ("resnet", "--lanes", "5"),
        )
    ],
    ids=str,
)
def test_half_precision_scaling_and_odd_numbers_of_lanes_keep_the_promise(
    outcome: Outcome, one: Wanted, three: Wanted
) -> None:
    assert outcome(three)["digest"] == outcome(one)["digest"]


@pytest.mark.parametrize(
    "killed",
    [
        run(3, "gpt", *captured, "--kill", "1:20", "--kill-in", moment)
        for captured in ((), ("--captured",))
        for moment in ("lanes", "update")
    ],
    ids=str,
)
def test_a_worker_killed_on_the_gpu_costs_nothing(outcome: Outcome, killed: Wanted) -> None:
    got = outcome(killed)
    assert "worker 1" in got["said"]
    assert got["digest"] == outcome(ALONE["gpt"])["digest"]


@pytest.mark.parametrize("replaced", [run(2, "resnet", "--kill", "1:10", "--pause-s", "0.4")], ids=str)
def test_a_killed_worker_is_replaced_and_the_bits_stay(outcome: Outcome, replaced: Wanted) -> None:
    got = outcome(replaced)
    assert got["workers"] == 2
    assert got["digest"] == outcome(ALONE["resnet"])["digest"]


@pytest.mark.parametrize(
    ("model", "several"),
    [
        ("gpt", run(2, "gpt", *NCCL)),
        ("resnet", run(3, "resnet", *NCCL)),
        ("bf16", run(4, "bf16", *NCCL)),
        ("gpt", run(3, "gpt", *NCCL, "--captured")),
    ],
    ids=str,
)
def test_workers_that_add_by_nccl_give_the_bits_of_one(outcome: Outcome, model: str, several: Wanted) -> None:
    got, want = outcome(several), outcome(ALONE[model])
    assert got["workers"] == int(several[0])
    assert [got[what] for what in ("digest", "losses", "noise")] == [
        want[what] for what in ("digest", "losses", "noise")
    ]


@pytest.mark.parametrize(
    "killed",
    [
        run(3, "resnet", *NCCL, "--fault", fault)
        for fault in (
            "0:4:before computes",
            "1:4:before send in record exchange",
            "2:4:before reduce",
            "1:4:after reduce",
            "0:4:after prepares",
            "2:4:before send in commit exchange",
            "0:4:before update",
        )
    ],
    ids=str,
)
def test_a_kill_at_any_point_of_a_step_over_nccl_costs_nothing(outcome: Outcome, killed: Wanted) -> None:
    got, (worker, *_) = outcome(killed), killed[-1].split(":")
    assert re.search(rf"worker {worker} \(pid \d+\) was killed by SIGKILL", got["said"]), "the fault never fired"
    assert got["digest"] == outcome(ALONE["resnet"])["digest"]


@pytest.mark.parametrize(
    "killed",
    [
        run(3, "resnet", *NCCL, "--fault", "2:4:before reduce", "--kill-reforming", "1"),
        run(2, "resnet", *NCCL, "--fault", "1:4:before reduce", "--kill-joining", "--pause-s", "0.5"),
    ],
    ids=str,
)
def test_a_kill_while_a_communicator_is_made_costs_nothing(outcome: Outcome, killed: Wanted) -> None:
    """Of one that was there before, and of one that joins."""
    got = outcome(killed)
    assert "connecting" in got["marks"], "the fault never fired"
    assert got["digest"] == outcome(ALONE["resnet"])["digest"]


@pytest.mark.parametrize("replaced", [run(2, "resnet", *NCCL, "--kill", "1:10", "--pause-s", "0.5")], ids=str)
def test_a_worker_joins_over_nccl_and_the_bits_stay(outcome: Outcome, replaced: Wanted) -> None:
    got = outcome(replaced)
    assert got["workers"] == 2
    assert got["digest"] == outcome(ALONE["resnet"])["digest"]


SHARDED = ("--sharded",)


@pytest.mark.parametrize(
    ("model", "several"),
    [
        *(("gpt", run(n, "gpt", *SHARDED)) for n in (1, 2, 4)),
        ("resnet", run(3, "resnet", *SHARDED)),
        ("bf16", run(4, "bf16", *SHARDED, "--captured")),
        ("gpt", run(3, "gpt", *SHARDED, *NCCL)),
        ("resnet", run(4, "resnet", *SHARDED, *NCCL)),
    ],
    ids=str,
)
def test_optimizer_state_that_is_divided_on_a_gpu_gives_the_same_bits(
    outcome: Outcome, model: str, several: Wanted
) -> None:
    got, want = outcome(several), outcome(ALONE[model])
    assert got["workers"] == int(several[0])
    assert got["state_on"] == (["cuda"] if several[0] == "1" else ["cpu"])  # as `optimizer.state` shows it
    assert [got[what] for what in ("digest", "losses", "noise")] == [
        want[what] for what in ("digest", "losses", "noise")
    ]


@pytest.mark.parametrize(
    ("one", "three"),
    [(run(1, *words), run(3, *words, *SHARDED)) for words in (("half",), ("gpt", "--scaler"))],
    ids=str,
)
def test_divided_state_in_half_precision_and_under_a_scaler_keeps_the_promise(
    outcome: Outcome, one: Wanted, three: Wanted
) -> None:
    assert outcome(three)["digest"] == outcome(one)["digest"]


GRADIENTS = ("--sharded", "gradients")


@pytest.mark.parametrize(
    ("one", "several"),
    [
        (run(1, *words), run(count, *words, *GRADIENTS, *more))
        for words, count, more in [
            (("gpt",), 3, ()),  # several lanes for a worker: each bucket has memory of its own
            (("gpt", "--lanes", "4"), 4, ()),  # one: they take turns
            (("gpt", "--lanes", "4"), 4, ("--captured",)),
            (("gpt", "--lanes", "4"), 4, NCCL),
            (("resnet", "--lanes", "3"), 3, NCCL),
            (("half", "--lanes", "3"), 3, ()),
            (("half", "--lanes", "3", "--reduce-dtype", "float32"), 3, NCCL),
            (("gpt", "--lanes", "3", "--scaler"), 3, ()),
        ]
    ],
    ids=str,
)
def test_gradients_that_stand_on_the_host_give_the_same_bits(outcome: Outcome, one: Wanted, several: Wanted) -> None:
    got, want = outcome(several), outcome(one)
    assert (got["workers"], got["buckets"]) == (int(several[0]), "HostBucket")
    assert [got[what] for what in ("digest", "losses", "noise")] == [
        want[what] for what in ("digest", "losses", "noise")
    ]


PARAMETERS = ("--sharded", "parameters")


@pytest.mark.parametrize(
    ("one", "several"),
    [
        (run(1, *words), run(count, *words, *PARAMETERS, *more))
        for words, count, more in [
            (("gpt",), 2, ()),
            (("gpt", "--lanes", "4"), 4, ()),
            (("gpt", "--lanes", "4"), 4, ("--captured",)),
            (("gpt",), 3, NCCL),
            (("resnet", "--lanes", "3"), 3, NCCL),
            (("half", "--lanes", "3", "--reduce-dtype", "float32"), 3, ()),
            (("bf16",), 3, ()),
            (("gpt", "--lanes", "3", "--scaler"), 3, ()),
        ]
    ],
    ids=str,
)
def test_parameters_that_leave_the_gpu_give_the_same_bits(outcome: Outcome, one: Wanted, several: Wanted) -> None:
    got, want = outcome(several), outcome(one)
    assert got["workers"] == int(several[0])
    assert (got["left"] == 0) == ("--captured" in several)
    assert ("called run.captured: parameters stay" in got["said"]) == ("--captured" in several)
    assert [got[what] for what in ("digest", "losses", "noise")] == [
        want[what] for what in ("digest", "losses", "noise")
    ]


@pytest.mark.parametrize("captured", [run(2, "gpt", *SHARDED, "--captured", "--update")], ids=str)
def test_an_update_of_divided_state_is_not_recorded_and_the_reason_is_named(outcome: Outcome, captured: Wanted) -> None:
    got = outcome(captured)
    assert "AdamW.step runs as it is, because it keeps" in got["said"]
    assert got["digest"] == outcome(ALONE_UPDATED)["digest"]


@pytest.mark.parametrize(
    "killed",
    [
        run(3, "resnet", *SHARDED, *wire, "--fault", f"{worker}:4:{point}")
        for wire in ((), NCCL)
        for worker, point in enumerate(("in batch", "before store", "before gather"))
    ],
    ids=str,
)
def test_a_kill_inside_of_an_update_of_divided_state_costs_nothing(outcome: Outcome, killed: Wanted) -> None:
    got, (worker, *_) = outcome(killed), killed[-1].split(":")
    assert re.search(rf"worker {worker} \(pid \d+\) was killed by SIGKILL", got["said"]), "the fault never fired"
    assert got["digest"] == outcome(ALONE["resnet"])["digest"]


@pytest.mark.parametrize(
    ("one", "killed"),
    [
        (run(1, *words), run(3, *words, *GRADIENTS, *wire, "--fault", f"{worker}:4:{point}"))
        for words in [("resnet", "--lanes", "3")]
        for wire, worker, point in [
            ((), 0, "after gradient"), ((), 1, "before update"), ((), 2, "in batch"), (NCCL, 1, "after gradient"),
            (NCCL, 2, "in batch"),
        ]
    ] + [
        (run(1, "gpt"), run(3, "gpt", *PARAMETERS, *wire, "--fault", f"{worker}:4:{point}"))
        for wire, worker, point in [((), 0, "after gradient"), ((), 1, "before store"), (NCCL, 2, "in batch")]
    ],
    ids=str,
)  # fmt: skip
def test_a_kill_where_the_host_holds_gradients_or_parameters_costs_nothing(
    outcome: Outcome, one: Wanted, killed: Wanted
) -> None:
    """While they go there, before an update, and in it."""
    got, (worker, *_) = outcome(killed), killed[-1].split(":")
    assert re.search(rf"worker {worker} \(pid \d+\) was killed by SIGKILL", got["said"]), "the fault never fired"
    assert got["digest"] == outcome(one)["digest"]


@pytest.mark.parametrize(
    "replaced",
    [run(2, "resnet", *level, "--kill", "1:10", "--pause-s", "0.4") for level in (SHARDED, PARAMETERS)],
    ids=str,
)
def test_who_takes_the_place_of_one_killed_has_its_part_of_the_state(outcome: Outcome, replaced: Wanted) -> None:
    got = outcome(replaced)
    assert got["workers"] == 2
    assert got["digest"] == outcome(ALONE["resnet"])["digest"]


@pytest.mark.parametrize("waits", [run(1, "gpt", "--captured", "--waits")], ids=str)
def test_a_lane_that_waits_for_the_gpu_runs_as_it_is_and_the_line_is_named(outcome: Outcome, waits: Wanted) -> None:
    got = outcome(waits)
    assert got["graphs"] == 0
    assert "lane runs as it is, because it waits for the GPU (" in got["said"]
    assert "lanes_on_gpu.py:" in got["said"]
    assert got["digest"] == outcome(ALONE["gpt"])["digest"]


@pytest.mark.parametrize(
    "broken", [run(1, "gpt", "--captured", "--breaks", *more) for more in ((), ("--update",))], ids=str
)
def test_a_recording_that_breaks_leaves_a_run_that_goes_on(outcome: Outcome, broken: Wanted) -> None:
    got = outcome(broken)
    assert got["graphs"] == 0
    assert got["on_default_stream"]
    assert "lane runs as it is, because" in got["said"]
    assert got["digest"] == outcome(ALONE_UPDATED if "--update" in broken else ALONE["gpt"])["digest"]
