"""The whole all-reduce benchmark, with real workers. Times are looked at, never judged."""

import json
import math
import signal
import tempfile
from pathlib import Path
from uuid import uuid4
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from launches import FORKING, start_lockstep
from marked import MARK, survivors
from report_keys import RECORDED, keys
from workers import on_workers

from lockstep.cli.bench import command
from lockstep.launch.pools import process
from lockstep.programs.bench.allreduce.plan import AllreducePlan, parse_algorithm
from lockstep.programs.bench.allreduce.worker import main
from lockstep.programs.bench.launch import accept
from lockstep.programs.bench.plan import BenchResult


def test_a_short_benchmark_reports_every_size_on_every_number_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setattr(process, "subprocess", FORKING)
    picture = tmp_path / "times.svg"
    words = ["-n", "2,2", "-n", "3", "--sizes", "4B,64KiB", "--rounds", "2", "--svg", str(picture), "--json"]
    ended = CliRunner().invoke(command, ["allreduce", *words], catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    report = json.loads(ended.stdout)
    assert keys(report) == set(RECORDED["allreduce"])
    assert report["algorithm"] == "shared"
    assert {"cores", "cpu", "torch", "threads_per_worker"} <= report["machine"].keys()
    assert [(row["workers"], row["bytes"]) for row in report["rows"]] == [(2, 4), (2, 65536), (3, 4), (3, 65536)]
    for row in report["rows"]:
        check_row(row)
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    assert not list(scratch.iterdir()), "the benchmark left its folder behind"


def test_a_schedule_over_gloo_can_take_the_place_of_shared_memory(tmp_path: Path) -> None:
    plan = AllreducePlan(3, (4096,), parse_algorithm("halving_doubling"), rounds=1)
    on_workers(3, main, plan, tmp_path)
    [row] = accept(BenchResult.find(tmp_path)).rows
    assert plan.algorithm == "halving-doubling"
    check_row(row)


def check_row(row: dict[str, float]) -> None:
    times = [row[f"{side}_ms"] for side in ("lockstep", "gloo", "floor", "lockstep_p95", "gloo_p95")]
    ratios = [row[f"ratio_to_gloo{end}"] for end in ("_low", "", "_high")]
    others = [row["ratio_to_floor"], row["bandwidth_gb_per_s"], row["gloo_bandwidth_gb_per_s"]]
    assert all(math.isfinite(value) and value > 0 for value in (*times, *ratios, *others))
    assert ratios == sorted(ratios)


def test_ctrl_c_ends_the_benchmark_with_130_and_leaves_nothing(tmp_path: Path) -> None:
    mark = uuid4().hex
    words = ["--sizes", "4B..128MiB", "--rounds", "5"]
    bench = start_lockstep("bench", "allreduce", *words, cwd=tmp_path, TMPDIR=str(tmp_path), **{MARK: mark})
    assert bench.stderr is not None
    assert bench.stderr.readline() == "4 B on 2 workers: done\n"
    bench.send_signal(signal.SIGINT)
    out, err = bench.communicate(timeout=90)
    assert (bench.returncode, out, err.splitlines()[-1]) == (130, "", "✗ stopped; all workers have ended")
    assert survivors(mark) == []
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["-n", "1"], "a number of workers, 2 to 1024"),
        (["-n", "2,"], "a number of workers, 2 to 1024"),
        (["-n", "2;4"], "a number of workers, 2 to 1024"),
        (["--sizes", "4KB"], '"4KiB,1MiB" or a range such as "4KiB..128MiB"'),
        (["--sizes", "1MiB..4KiB"], "ends below its beginning"),
        (["--sizes", "2B"], "no whole number of float32"),
        (["--algorithm", "rings"], "there is no algorithm 'rings': choose one of shared, direct"),
        (["--rounds", "0"], "a whole number, 1 or more"),
        (["--svg", "times.png"], "name a file that ends in .svg"),
        (["--svg", "folder.svg"], "name a file that ends in .svg"),
        (["--svg", "nowhere/times.svg"], "there is no folder nowhere"),
    ],
)
def test_a_wrong_word_of_allreduce_is_refused_with_what_is_allowed(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.svg").mkdir()
    ended = CliRunner().invoke(command, ["allreduce", *words], terminal_width=200)
    assert ended.exit_code == 2
    assert sentence in " ".join(ended.output.split())
