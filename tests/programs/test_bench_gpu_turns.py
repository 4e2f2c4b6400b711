"""Children take turns. Most children here are real processes that say what they were written to say, without torch."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from launches import FORKING
from marked import MARK, survivors
from workers import on_workers

from lockstep.errors import BadEnvironment
from lockstep.programs.bench import launch
from lockstep.programs.bench.gpu import child
from lockstep.programs.bench.gpu import plan as gpu
from lockstep.programs.bench.gpu.children import JsonConnection, SideProcess, last_lines, meet, start_sides
from lockstep.programs.bench.gpu.plan import GpuOutcome, GpuStepPlan
from lockstep.programs.bench.gpu.turns import SideTurns
from lockstep.programs.bench.mps import multi_process_service
from lockstep.programs.bench.rounds import RoundsDone

REPOSITORY = Path(__file__).parents[2]

TINY = {"batch_size": 4, "context": 8, "width": 24, "num_blocks": 1, "num_tokens": 16}

SCRIPT = """
import json, os, signal, sys
from pathlib import Path
from lockstep.programs.bench.gpu.children import JsonConnection
folder, side, answers, dies_at = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), sys.argv[4]
if dies_at == "start":
    sys.exit("it never came")
connection = JsonConnection.to(folder / "turns")
connection.send(side=side, rank=0)
print(2 * (sys.argv[5] + chr(10)), file=sys.stderr, flush=True)
num_blocks = 0
while (words := connection.receive()) is not None:
    num_blocks += words["word"] == "block"
    if dies_at == f"interrupt in round {num_blocks}":
        os.kill(os.getppid(), signal.SIGINT)
    with (folder / "heard").open("a") as log:
        log.write(side + " " + words["word"] + chr(10))
    if words["word"] == dies_at:
        sys.exit("it had no more memory")
    connection.send(**answers[words["word"]])
"""

ANSWERS: dict[str, dict[str, Any]] = {
    "open": {"coarse": False},
    "prepare": {"parameters": 7, "machine": {"cores": 2}},
    "write": {"gradients": 0.0, "movement": 0.0, "length": 1.0, "digest": None},
    "compare": {"gradients": 1e-6, "movement": 1e-6, "length": 1.0, "digest": None},
    "block": {"seconds": 4.0, "reserved_bytes": 100, "allocated_bytes": 50, "host_bytes": 25},
}


class Scripted:
    """Starts children that answer as told, in one folder."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self.listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        self.listener.bind(str(folder / "turns"))
        self.listener.listen()
        self.children: list[SideProcess] = []
        self.progress: list[RoundsDone] = []

    def child(self, name: str, dies_at: str = "", says: str = "", **changed: dict[str, Any]) -> SideProcess:
        answers = {word: {**answer, **changed.get(word, {})} for word, answer in ANSWERS.items()}
        log = self.folder / f"{len(self.children)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", SCRIPT, str(self.folder), name, json.dumps(answers), dies_at, says],
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
                stderr=output,
                start_new_session=True,
            )
        made = SideProcess(name, process, log, num_members=1)
        self._stack.callback(made.end)
        self.children.append(made)
        return made

    def outcome(self, rounds: int = 2) -> GpuOutcome:
        meet(self.listener, self.children, time.monotonic)
        names = tuple(child.name for child in self.children)
        return SideTurns(GpuStepPlan("mlp", 1, names, 4, rounds), self.children, self.progress.append).taken()

    def heard(self) -> list[str]:
        return (self.folder / "heard").read_text().splitlines()


@pytest.fixture
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    with ExitStack() as stack:
        yield Scripted(tmp_path_factory.mktemp("t"), stack)


def test_blocks_of_all_sides_are_interleaved_round_by_round(scripted: Scripted) -> None:
    for name in (gpu.FUSED, gpu.DDP, gpu.LOCKSTEP):
        scripted.child(name)
    outcome = scripted.outcome(rounds=3)
    blocks = [line.removesuffix(" block") for line in scripted.heard() if line.endswith("block")]
    assert [sorted(blocks[start : start + 3]) for start in (0, 3, 6)] == 3 * [
        sorted((gpu.FUSED, gpu.DDP, gpu.LOCKSTEP))
    ]
    assert outcome.seconds == {name: [1.0, 1.0, 1.0] for name in (gpu.FUSED, gpu.DDP, gpu.LOCKSTEP)}
    assert (outcome.reference, outcome.parameters, outcome.reasons) == (gpu.FUSED, 7, {})
    assert outcome.peaks[gpu.DDP] == {"reserved_bytes": 100, "allocated_bytes": 50, "host_bytes": 25}


@pytest.mark.parametrize("moment", ["start", "open", "prepare", "compare", "block"])
def test_a_child_that_dies_is_named_with_its_last_words_and_the_others_go_on(scripted: Scripted, moment: str) -> None:
    scripted.child(gpu.FUSED)
    scripted.child(gpu.DDP, dies_at=moment)
    outcome = scripted.outcome()
    words = "it never came" if moment == "start" else "it had no more memory"
    assert outcome.reasons == {gpu.DDP: f"failed: ended with exit code 1: {words}"}
    assert list(outcome.seconds) == [gpu.FUSED]
    assert len(outcome.seconds[gpu.FUSED]) == 2


def test_a_side_that_disagrees_is_never_timed(scripted: Scripted) -> None:
    scripted.child(gpu.FUSED)
    scripted.child(gpu.LOCKSTEP, compare={"gradients": 0.9})
    outcome = scripted.outcome()
    assert outcome.reasons[gpu.LOCKSTEP].startswith("refused: lockstep disagrees with plain fused")
    assert f"{gpu.LOCKSTEP} block" not in scripted.heard()


def test_a_captured_side_with_other_bits_than_lockstep_is_never_timed(scripted: Scripted) -> None:
    scripted.child(gpu.LOCKSTEP, write={"digest": "a"})
    scripted.child(gpu.CAPTURED, compare={"digest": "b"})
    outcome = scripted.outcome()
    assert "both are exact" in outcome.reasons[gpu.CAPTURED]
    assert list(outcome.seconds) == [gpu.LOCKSTEP]


def test_where_the_reference_dies_another_takes_its_place(scripted: Scripted) -> None:
    scripted.child(gpu.FUSED, dies_at="write")
    scripted.child(gpu.LOCKSTEP)
    scripted.child(gpu.DDP)
    outcome = scripted.outcome()
    assert outcome.reference == gpu.DDP
    assert sorted(outcome.seconds) == sorted((gpu.LOCKSTEP, gpu.DDP))


def test_sides_that_compile_are_told_to_prepare_before_the_others(scripted: Scripted) -> None:
    fused, compiled = scripted.child(gpu.FUSED), scripted.child(gpu.COMPILED)
    assert scripted.outcome().reasons == {}
    assert (fused.failure, compiled.failure) == (None, None)


def test_where_every_child_dies_there_is_a_reason_for_each(scripted: Scripted) -> None:
    scripted.child(gpu.FUSED, dies_at="prepare")
    scripted.child(gpu.DDP, dies_at="start")
    outcome = scripted.outcome()
    assert outcome.reasons.keys() == {gpu.FUSED, gpu.DDP}
    assert outcome.reference is None


def test_what_was_not_captured_is_remarked_once(scripted: Scripted) -> None:
    scripted.child(gpu.CAPTURED, says="run.captured: lane runs as it is, because it waits for the GPU")
    sentence = "run.captured: lane runs as it is, because it waits for the GPU"
    assert scripted.outcome().remarks == {gpu.CAPTURED: [sentence]}


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C is an exception here, also where the tests run in the background and a shell has switched it off."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_keeps_the_rounds_that_were_whole(scripted: Scripted) -> None:
    names = (gpu.FUSED, gpu.DDP, gpu.LOCKSTEP)
    for name in names:
        scripted.child(name, dies_at="interrupt in round 3" if name == gpu.DDP else "")
    outcome = scripted.outcome(rounds=5)
    assert outcome.stopped
    assert outcome.seconds == {name: [1.0, 1.0] for name in names}
    assert outcome.reasons == {}


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_before_any_round_was_whole_is_passed_on(scripted: Scripted) -> None:
    scripted.child(gpu.FUSED)
    scripted.child(gpu.DDP, dies_at="interrupt in round 1")
    with pytest.raises(KeyboardInterrupt):
        scripted.outcome(rounds=5)


def test_what_is_done_before_the_first_round_is_shown(scripted: Scripted) -> None:
    scripted.child(gpu.FUSED)
    scripted.child(gpu.DDP)
    scripted.outcome(rounds=2)
    assert [progress.doing for progress in scripted.progress] == [
        "making models and optimizers",
        "warming up plain fused",
        "warming up ddp",
        "computing the reference",
        "comparing ddp with it",
        *("", "", ""),
    ]
    assert [progress.done for progress in scripted.progress][-3:] == [0, 1, 2]


def test_only_the_end_of_a_log_is_shown(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("\n".join(f"line {number}" for number in range(100)) + "\n\n")
    assert last_lines(tmp_path / "log").splitlines() == [f"line {number}" for number in range(94, 100)]


# -- with torch -----------------------------------------------------------------------------------------------


@contextmanager
def measured(num_workers: int, sides: Sequence[str], folder: Path, mark: str) -> Iterator[GpuOutcome]:
    plan = GpuStepPlan("gpt10m", num_workers, tuple(sides), steps=1, rounds=1, device="cpu", sizes=TINY)
    with start_sides(plan, folder, {MARK: mark}) as children:
        yield SideTurns(plan, children, lambda progress: None).taken()


def test_a_real_side_is_timed_and_one_that_cannot_be_is_named(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "subprocess", FORKING)
    with measured(1, (gpu.FUSED, gpu.BY_HAND), tmp_path_factory.mktemp("t"), "turns-1") as outcome:
        assert outcome.seconds.keys() == {gpu.FUSED}
        assert "the side 'graph by hand' is a CUDA graph" in outcome.reasons[gpu.BY_HAND]
    assert survivors("turns-1") == []


@pytest.mark.soak
def test_workers_under_the_launcher_take_turns_as_one(tmp_path_factory: pytest.TempPathFactory) -> None:
    sides = (gpu.DDP_GLOO, gpu.LOCKSTEP, gpu.NOT_EXACT)
    with measured(2, sides, tmp_path_factory.mktemp("t"), "turns-2") as outcome:
        assert outcome.reasons == {}
        assert outcome.seconds.keys() == set(sides)
    assert survivors("turns-2") == []


class Driver(threading.Thread):
    """Tells two workers the same words, one after the other, and keeps what they answer."""

    def __init__(self, listener: socket.socket, words: Sequence[dict[str, Any]]) -> None:
        super().__init__()
        self._listener, self._words = listener, words
        self.answers: list[list[dict[str, Any] | None]] = []

    def run(self) -> None:
        connections = [JsonConnection(self._listener.accept()[0]) for _ in range(2)]
        ranks = [hello["rank"] for connection in connections if (hello := connection.receive(60)) is not None]
        connections = [
            connection for _, connection in sorted(zip(ranks, connections, strict=True), key=lambda pair: pair[0])
        ]
        for words in self._words:
            for connection in connections:
                connection.send(**words)
            self.answers.append([connection.receive(60) for connection in connections])
        for connection in connections:
            connection.close()


def answers_of(name: str, folder: Path, *words: str) -> list[list[dict[str, Any]]]:
    """What two real workers of a side answer, by word and by rank."""
    plan = GpuStepPlan("gpt10m", 2, (name,), steps=1, rounds=1, device="cpu", sizes=TINY)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "turns"))
        listener.listen()
        driver = Driver(listener, [{"word": word, **({"steps": 2} if word == "block" else {})} for word in words])
        driver.start()
        on_workers(2, child.main, plan, name, folder)
        driver.join()
    (folder / "turns").unlink()
    return [[answer for answer in answers if answer is not None] for answers in driver.answers]


@pytest.mark.parametrize("name", [gpu.LOCKSTEP, gpu.DDP_GLOO])
def test_two_workers_of_a_side_hold_the_same_bits_and_the_first_one_compares(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    found = answers_of(name, tmp_path_factory.mktemp("t"), "open", "prepare", "write", "compare", "block")
    _, _, written, compared, blocks = found
    assert all(len(answers) == 2 for answers in found)
    assert written[0]["digest"] == written[1]["digest"] == compared[0]["digest"] == compared[1]["digest"]
    assert (compared[0]["gradients"], "gradients" in compared[1]) == (0.0, False)
    assert all(block["seconds"] > 0 and block["host_bytes"] > 2**20 for block in blocks)


def test_sharded_sides_that_start_anew_hold_the_bits_of_lockstep(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("t")
    digests = {answers_of(gpu.LOCKSTEP, folder, "open", "write")[-1][0]["digest"]}
    for name in gpu.SHARDED:
        digests |= {answer["digest"] for answer in answers_of(name, folder, "open", "block", "compare")[-1]}
    assert len(digests) == 1


def test_what_torch_divides_is_compared_whole(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("t")
    answers_of(gpu.DDP_GLOO, folder, "open", "write")
    for name in (gpu.ZERO, gpu.FSDP):
        first, second = answers_of(name, folder, "open", "block", "compare")[-1]
        assert max(first["gradients"], first["movement"]) < 1e-3, name
        assert first["digest"] == second["digest"], name


# -- MPS ------------------------------------------------------------------------------------------------------

CONTROL = """#!/bin/sh
read told
echo "$@" $told $CUDA_MPS_PIPE_DIRECTORY >> {log}
test -d "$CUDA_MPS_PIPE_DIRECTORY" && test -d "$CUDA_MPS_LOG_DIRECTORY" && exit {code}
"""


def install_control(folder: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of that name that writes down how it was called: NVIDIA's own needs a GPU."""
    program, log = folder / "nvidia-cuda-mps-control", folder / "calls"
    program.write_text(CONTROL.format(log=log, code=code))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return log


def test_mps_is_started_for_the_workers_and_told_to_quit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = install_control(tmp_path, 0, monkeypatch)
    with multi_process_service(True) as variables:
        pipe = variables["CUDA_MPS_PIPE_DIRECTORY"]
        assert log.read_text() == f"-d {pipe}\n"
    assert log.read_text() == f"-d {pipe}\nquit {pipe}\n"
    assert not Path(pipe).exists()


def test_mps_that_does_not_start_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_control(tmp_path, 1, monkeypatch)
    with pytest.raises(BadEnvironment, match="did not start: exit code 1"):
        multi_process_service(True).__enter__()
