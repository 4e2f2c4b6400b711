"""What is measured, in which order, and what is made of the times. Nothing runs here."""

import io
import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from lockstep.errors import BadArgument
from lockstep.programs.bench.launch import ResultsDiffer, accept
from lockstep.programs.bench.plan import REFERENCES, BenchResult
from lockstep.programs.bench.rounds import RoundLines, RoundsDone, order, show_progress, timed_rounds
from lockstep.programs.bench.step.plan import ROUNDS, SIDES, CpuStepPlan, make_plans, make_row, show


def test_all_means_every_reference_model_once() -> None:
    plans = make_plans(("mlp", "all"), (2, 1, 2), steps=None, rounds=3)
    assert [(plan.model, plan.workers) for plan in plans] == list(itertools.product(REFERENCES, (2, 1)))


def test_unequal_shares_are_refused_with_the_numbers_of_workers_that_are_allowed() -> None:
    with pytest.raises(BadArgument, match=r"gpt, 8 samples, .* into 3 .* use 1, 2, 4 or 8 workers"):
        make_plans(("gpt",), (3,), steps=1, rounds=1)


def test_a_plan_reaches_the_workers_unchanged() -> None:
    plan = CpuStepPlan("wide", workers=4, steps=7, rounds=2)
    assert CpuStepPlan.read(plan.written()) == plan


MEMORY = {side: [7, 2**31] for side in ("base", *SIDES)}


def test_in_the_usual_rounds_every_side_stands_twice_in_every_place() -> None:
    places = [(place, side) for number in range(ROUNDS) for place, side in enumerate(order(SIDES, number))]
    assert all(places.count(pair) == 2 for pair in itertools.product(range(len(SIDES)), SIDES))


def test_in_the_usual_rounds_a_side_follows_another_as_often_as_that_follows_it() -> None:
    follows = [pair for number in range(ROUNDS) for pair in itertools.pairwise(order(SIDES, number))]
    assert all(follows.count((a, b)) == follows.count((b, a)) for a, b in itertools.permutations(SIDES, 2))


def test_ratios_are_made_within_rounds() -> None:
    lockstep, ddp = (10.0, 20.0, 40.0), (20.0, 10.0, 120.0)
    rounds = [
        {**dict.fromkeys(SIDES, 4.0), "lockstep": one, "ddp": other} for one, other in zip(lockstep, ddp, strict=True)
    ]
    row = make_row(CpuStepPlan("mlp", 2, 1, 3), rounds, 10, {}, MEMORY)
    assert (row["speedup_over_ddp_low"], row["speedup_over_ddp"], row["speedup_over_ddp_high"]) == (0.5, 2, 3)
    assert (row["lockstep_ms"], row["ddp_ms"], row["lockstep_over_plain_one_thread"]) == (20, 20, 5)
    assert row["memory"]["ddp"] == {"worker_bytes": 2**31, "host_bytes": 2**31 + 7}


def test_the_table_of_steps_is_whole_in_a_file_and_fits_100_columns() -> None:
    times = dict.fromkeys(SIDES, 1234.56)
    row = make_row(CpuStepPlan("wide", 16, 1, 1), [times], 10, {}, MEMORY)
    machine = {"cores": 128, "processor": "x86_64", "torch": "2.13.0+cpu", "threads_per_worker": 1}
    text = io.StringIO()
    show({"rows": [row], "machine": machine}, Console(file=text))
    assert "…" not in text.getvalue()
    assert max(map(len, text.getvalue().splitlines())) <= 100


def test_a_refused_result_never_becomes_a_row() -> None:
    with pytest.raises(ResultsDiffer, match="they disagree"):
        accept(BenchResult("they disagree", (), {}))


def test_progress_is_found_in_output_that_comes_in_pieces(capsys: pytest.CaptureFixture[str]) -> None:
    timed_rounds("mlp on 2 workers", 3, ("a", "b"), lambda name: 1.0)
    output = b"lockstep 0.1 ...\n" + capsys.readouterr().out.encode()
    found: list[RoundsDone] = []
    lines = RoundLines(found.append)
    for begin in range(0, len(output) - 1, 10):
        lines(output[begin : min(begin + 10, len(output) - 1)])
    assert found == [RoundsDone("mlp on 2 workers", done, 3) for done in (1, 2)]


def test_off_a_terminal_there_is_a_line_for_what_has_words_and_for_the_end_of_a_part() -> None:
    title, text = "mlp on 2 workers", io.StringIO()
    with show_progress(Console(file=text), num_rounds=2) as follow:
        for done, doing in ((0, "warming up [1]"), (0, ""), (1, ""), (2, "")):
            follow(RoundsDone(title, done, 2, doing))
    assert text.getvalue() == "mlp on 2 workers: warming up [1]\nmlp on 2 workers: done\n"


def test_the_bar_counts_the_rounds_of_all_titles() -> None:
    text = io.StringIO()
    with show_progress(Console(file=text, force_terminal=True, width=100), num_rounds=6) as follow:
        for title, done in (("4 KiB", 1), ("4 KiB", 3), ("1 MiB", 2)):
            follow(RoundsDone(title, done, 3))
    assert "5/6" in text.getvalue()


def test_the_command_line_of_benchmarks_loads_neither_torch_nor_rich() -> None:
    code = "import sys, lockstep.cli.bench; print([name for name in ('torch', 'rich') if name in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    assert (
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True).stdout == "[]\n"
    )


def test_a_result_survives_its_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    written = BenchResult(None, ({"ddp": {"gradients": math.inf}}, {"rounds_ms": [1.5]}), {"cores": 2})
    written.leave(tmp_path)
    assert BenchResult.find(tmp_path) == written
