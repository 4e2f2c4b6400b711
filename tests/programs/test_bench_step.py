"""The whole benchmark once, with real workers. Times are looked at, never judged."""

import json
import math
import tempfile
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner
from launches import FORKING
from report_keys import RECORDED, keys

from lockstep.cli.bench import command
from lockstep.launch.pools import process
from lockstep.programs.bench.step.plan import SIDES
from lockstep.programs.models import WORKLOADS, mlp


def test_a_short_benchmark_reports_every_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(process, "subprocess", FORKING)
    monkeypatch.setitem(WORKLOADS, "mlp", partial(mlp, width=512))
    words = ["step", "--model", "mlp", "-n", "2", "--steps", "1", "--rounds", "2", "--json"]
    ended = CliRunner().invoke(command, words, catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    report = json.loads(ended.stdout)
    assert keys(report) == set(RECORDED["step"])
    [row] = report["rows"]
    assert (row["model"], row["workers"]) == ("mlp", 2)
    times = [row[f"{side}_ms"] for side in SIDES]
    ratios = [row[f"speedup_over_ddp{end}"] for end in ("_low", "", "_high")]
    assert all(math.isfinite(value) and value > 0 for value in (*times, *ratios))
    assert ratios == sorted(ratios)
    assert row["difference_from_lockstep"].keys() == {*SIDES} - {"lockstep"}
    held = {side: row["memory"][side] for side in SIDES}
    most = {"lockstep": 2, "ddp": 2, "ddp_on_lockstep": 2}  # workers that hold parameters, gradients and two of state
    for side, found in held.items():  # small tensors lie in memory that was freed and not returned: it is held before
        assert found["host_bytes"] > 0.9 * most.get(side, 1) * 4 * 4 * row["parameters"], side
    assert not list(tmp_path.iterdir()), "the benchmark left its folder behind"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--model", "resnet"], "'mlp', 'wide', 'gpt', 'cnn', 'all'"),
        (["--steps", "0"], "a whole number, 1 or more"),
        (["-n", "two"], "a number of workers, 1 to 1024"),
    ],
)
def test_a_wrong_word_is_refused_with_what_is_allowed(words: list[str], sentence: str) -> None:
    ended = CliRunner().invoke(command, ["step", *words])
    assert ended.exit_code == 2
    assert sentence in ended.output
