"""`lockstep verify` with real processes, on scripts that are right and on scripts broken on purpose."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from launches import start_lockstep

from lockstep.cli.run import WorkerCounts

SCRIPT = """
import numpy, torch, lockstep
from torch.nn import BatchNorm1d, Dropout, Linear
run = lockstep.start(seed=3)
model = torch.nn.Sequential(Linear(4, 8), BatchNorm1d(8), Dropout(0.1), Linear(8, 2))
run.replicate(model)
data = torch.utils.data.TensorDataset(torch.randn(50, 4))
loader = run.shard(torch.utils.data.DataLoader(data, batch_size=21, shuffle=True))
print("hello from the script")
for epoch in run.epochs(100):
    for batch in loader:
        for (x,) in run.lanes(batch):
            loss = model(x).square().mean()
            {in_lane}
            loss.backward()
        for p in model.parameters():  # not torch.optim, whose first use costs every worker a second
            p.data -= 0.1 * p.grad
            p.grad = None
        {after_step}
"""


def script(in_lane: str = "pass", after_step: str = "pass") -> str:
    return SCRIPT.format(in_lane=in_lane, after_step=after_step)


@dataclass(frozen=True)
class Outcome:
    exit_code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        return dict(json.loads(self.stdout))


@dataclass(frozen=True)
class Bench:
    """A folder with a script, and a way to verify it."""

    folder: Path

    def verify(self, text: str, *options: str) -> Outcome:
        (self.folder / "train.py").write_text(text)
        return self.command(*options, "train.py")

    def verify_broken(self, *options: str, in_lane: str) -> dict[str, Any]:
        """The JSON report on the script with a line put in; it must say that the runs are not equal."""
        broken = script(in_lane)
        done = self.verify(broken, *options, "--lanes", "2", "--steps", "2", "--no-distance", "--json")
        assert done.exit_code == 1, done.stderr
        assert done.json["equal"] is False
        return done.json

    def command(self, *words: str) -> Outcome:
        verifying = start_lockstep("verify", *words, cwd=self.folder)
        out, err = verifying.communicate(timeout=170)
        return Outcome(verifying.returncode, out, err)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_an_exact_script_is_equal_on_1_and_3_workers_and_says_so_in_json(bench: Bench) -> None:
    done = bench.verify(script(), "-n", "1,3", "--lanes", "4", "--steps", "3", "--json")
    assert done.exit_code == 0, done.stderr
    report = done.json
    assert list(report["digests"]) == ["1", "3"]
    everything = {*report["digests"].values(), *report["interleaved"].values()}
    assert len(everything) == 1
    assert len(everything.pop()) == 64
    assert (report["equal"], report["steps"], report["lanes"]) == (True, 3, 4)
    distance = report["distance_to_one_lane"]
    assert list(distance) == ["0.bias", "0.weight", "1.bias", "1.weight", "3.bias", "3.weight"]
    assert all(0 < value < 10 for value in distance.values())
    assert not any(key in report for key in ("first_step", "first_parameter", "cause", "explanation"))


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on the CPU")
def test_what_the_compiler_bakes_in_is_listed(bench: Bench) -> None:
    text = script().replace("model(x)", "net(x)").replace("run.replicate", "net = torch.compile(model); run.replicate")
    done = bench.verify(text, "-n", "1,2", "--lanes", "4", "--steps", "2", "--no-distance", "--no-faults", "--json")
    assert done.exit_code == 0, done.stderr
    assert all("random numbers by dropout" in graph for graph in done.json["compiled"])


@pytest.mark.soak
def test_a_loss_that_depends_on_the_rank_is_named(bench: Bench) -> None:
    report = bench.verify_broken("-n", "1,2", in_lane="loss = loss * (1 + run.rank)")
    assert report["cause"] == "code that depends on the rank"
    assert (report["first_step"], report["first_parameter"]) == (1, "0.weight")
    assert "lane 1 (worker 0 with 1 worker, worker 1 with 2 workers)" in report["explanation"]


@pytest.mark.soak
def test_an_unseeded_generator_in_the_forward_pass_is_named(bench: Bench) -> None:
    report = bench.verify_broken("-n", "1,2", in_lane="loss = loss * numpy.random.default_rng().uniform(1, 2)")
    assert report["cause"] == "random numbers"
    assert "lane 0" in report["explanation"]


@pytest.mark.soak
def test_a_buffer_written_outside_of_lanes_by_one_worker_is_named_to_people_too(bench: Bench) -> None:
    broken = script(after_step="model[1].running_mean += run.rank")
    done = bench.verify(broken, "-n", "2", "--lanes", "2", "--steps", "2", "--no-distance")
    assert done.exit_code == 1, done.stderr
    assert "✗ not the same bits: first difference after 1 step, in 1.running_mean, between" in done.stdout
    assert "likely cause: a buffer" in done.stdout
    assert "worker 1 of 2 workers" in done.stdout
    assert "hello from the script" not in done.stdout + done.stderr
    assert "hello from the script" in (bench.folder / "runs/verify-train-1/2/worker-0.log").read_text()


@pytest.mark.soak
def test_an_exact_script_bears_all_faults_in_processes_that_run_it_from_the_top(bench: Bench) -> None:
    done = bench.verify(script(), "-n", "2", "--lanes", "2", "--steps", "14", "--no-distance", "--json")
    assert done.exit_code == 0, done.stderr
    assert [(fault["kind"], fault["equal"]) for fault in done.json["faults"]] == [
        ("kill", True),
        ("replace", True),
        ("stop", True),
    ]


def test_a_run_that_fails_is_shown_as_lockstep_run_shows_it(bench: Bench) -> None:
    done = bench.verify("def f():\n    raise ValueError('bad sample 7')\nf()\n", "-n", "2", "--json")
    assert done.exit_code == 1
    assert "failed: ValueError: bad sample 7" in done.stderr
    assert done.json["equal"] is False
    assert "bad sample 7" in done.json["failure"]


def test_a_device_that_is_not_there_is_an_environment_and_not_a_failure_of_the_script(bench: Bench) -> None:
    done = bench.verify("import lockstep\nlockstep.start()", "-n", "1,2", "--device", "cuda")
    assert done.exit_code == 3
    assert "BadEnvironment: device='cuda' was asked for" in done.stderr


def test_every_run_has_the_strategy_that_was_asked_for(bench: Bench) -> None:
    text = "import os, lockstep\nlockstep.start()\nraise ValueError(os.environ['LOCKSTEP_STRATEGY'])"
    done = bench.verify(text, "-n", "1,2", "--strategy", "sharded:gradients")
    assert (done.exit_code, "ValueError: sharded:gradients" in done.stderr) == (1, True), done.stderr


def test_a_script_that_never_starts_a_run_is_told_so(bench: Bench) -> None:
    done = bench.verify("print('nothing')", "-n", "1,2")
    assert done.exit_code == 1
    assert "train.py never called lockstep.start()" in done.stderr


def test_a_script_without_a_training_step_is_told_so(bench: Bench) -> None:
    done = bench.verify("import lockstep\nlockstep.start()", "-n", "1,2")
    assert done.exit_code == 1
    assert "train.py made no training step" in done.stderr


@pytest.mark.parametrize(
    ("text", "counts"),
    [("1,2,3", (1, 2, 3)), ("1-4", (1, 2, 3, 4)), ("4, 1-2,2", (4, 1, 2)), ("2", (2,)), ("1 - 3", (1, 2, 3))],
)
def test_numbers_of_workers_are_read_from_lists_and_spans(text: str, counts: tuple[int, ...]) -> None:
    assert WorkerCounts().convert(text, None, None) == counts


@pytest.mark.parametrize("text", ["", "0,1", "3-1", "two", "1,,2", "1-", "-2", "1.5", "1", "99999999999", "²"])
def test_other_numbers_of_workers_are_refused_with_usage(bench: Bench, text: str) -> None:
    from click.testing import CliRunner

    from lockstep.cli.verify import command

    done = CliRunner().invoke(command, [f"--workers={text}", "train.py"])
    assert done.exit_code == 2
    assert "such as 1,2" in done.output or "write 1,2,3 or 1-4" in done.output
