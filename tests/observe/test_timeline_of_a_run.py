"""The timeline of real runs: two workers train a small GPT, and one of them is killed on the way."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from launches import Launch, launch
from trace_schema import check_trace, of_kind, overlap_us

from lockstep.cli.main import lockstep
from lockstep.errors import BadArgument
from lockstep.observe.timeline.part import read_parts

TRAINING = """
import torch
import lockstep
from lockstep.programs.models import GptShape, gpt

run = lockstep.start(lanes=4, bucket_bytes=1 << 18)
work = gpt(GptShape(num_tokens=64, context=32, width=128, num_blocks=3, num_heads=4))
model = work.make_model()
optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
run.replicate(model, optimizer)
batch = work.make_batch(torch.Generator().manual_seed(0))
while run.step < 12:
    for lane in run.lanes(batch):
        run.backward(work.loss(model, lane))
    optimizer.step()
    optimizer.zero_grad()
run.print("digest", run.digest())
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """Worker 1 is killed in step 6, and another process takes its place."""
    folder = tmp_path_factory.mktemp("timeline")
    with launch(folder, TRAINING, "-n", "2", "--timeline", LOCKSTEP_FAULT="kill 1 at 6") as run:
        assert run.finish() == 0, run.shown()
        yield run


@pytest.fixture(scope="module")
def trace(run: Launch) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run.run_dir / "timeline.json").read_text())
    return found


def explain(*words: str) -> Result:
    return CliRunner().invoke(lockstep, ["explain", "step", *words])


def test_the_trace_keeps_to_the_format_that_perfetto_reads(trace: dict[str, Any]) -> None:
    check_trace(trace)


def test_every_kind_of_work_is_shown_for_every_worker(trace: dict[str, Any]) -> None:
    for kind in ("step", "lane", "backward", "fill", "reduce", "wait", "update"):
        assert {event["pid"] for event in of_kind(trace, kind)} == {2, 3}, kind


def test_reductions_pass_beside_backward_passes_of_the_same_worker(trace: dict[str, Any]) -> None:
    backward = of_kind(trace, "backward")
    for pid in (2, 3):
        beside = [
            overlap_us(reduce, back)
            for reduce in of_kind(trace, "reduce")
            for back in backward
            if reduce["pid"] == back["pid"] == pid
        ]
        assert max(beside) > 0


def test_arrows_join_the_workers_of_one_reduction(trace: dict[str, Any]) -> None:
    joined = {event["id"]: {event["pid"]} for event in of_kind(trace, "reduction", "s")}
    for event in of_kind(trace, "reduction", "f"):
        joined[event["id"]].add(event["pid"])
    assert len(joined) > 20
    assert all(pids == {2, 3} for pids in joined.values())


def test_what_the_killed_worker_did_before_is_there(run: Launch, trace: dict[str, Any]) -> None:
    killed = next(part for part in read_parts(run.run_dir) if part.head.worker == 1)
    assert killed.records[-1].kind == "WaitBegan"
    assert killed.records[-1].step < 6
    again = [event for event in of_kind(trace, "step") if event["pid"] == 2 and event["args"].get("unfinished")]
    assert {event["name"] for event in again} == {"step 6"}


def test_membership_and_launcher_are_shown(trace: dict[str, Any]) -> None:
    assert [event["name"] for event in of_kind(trace, "recovery")] != []
    marks = [event["name"] for event in of_kind(trace, "launcher", "i")]
    assert "worker 1 ended (SIGKILL)" in marks
    assert marks.count("worker 1 started") == 2
    assert marks[-1] == "launch ended (0)"


def test_the_account_of_the_run_fits_in_ten_lines_and_adds_up(run: Launch) -> None:
    lines = explain(str(run.run_dir)).output.splitlines()
    assert len(lines) <= 10
    assert lines[-1].startswith("What would help: ")
    result = json.loads(explain(str(run.run_dir), "--json").output)
    assert result["workers"] == [0, 1]
    assert sum(result["parts_s"].values()) == pytest.approx(result["step_s"], rel=0.01)
    assert result["hidden_s"] > 0
    one = json.loads(explain(str(run.run_dir), "--step", "4", "--json").output)
    assert one["steps"] == [4]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [(lambda folder: folder / "nowhere", "there is no run in"), (lambda folder: folder, "has no timeline: start it")],
)
def test_a_folder_without_a_timeline_is_refused_in_a_sentence(tmp_path: Path, make: Any, sentence: str) -> None:
    for words in (["explain", "step"], ["timeline"]):
        refused = CliRunner().invoke(lockstep, [*words, str(make(tmp_path))]).exception
        assert isinstance(refused, BadArgument)
        assert sentence in str(refused)


def test_a_step_that_was_not_recorded_is_refused_in_a_sentence(run: Launch) -> None:
    refused = explain(str(run.run_dir), "--step", "99").exception
    assert isinstance(refused, BadArgument)
    assert "does not show step 99" in str(refused)
