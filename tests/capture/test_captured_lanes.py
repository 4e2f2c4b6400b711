"""Lanes that are recorded and replayed: everything but the GPU's part, which is played by running the work again.

A CUDA graph cannot exist on a CPU. Here a "graph" keeps the work and runs it when it is replayed, with the engine
recording, so that nothing but tensors changes: which is what a real one does. Real ones are tested in tests/gpu.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from workers import on_workers

import lockstep
from lockstep.capture import graph as capture_module
from lockstep.capture import lanes as lanes_module
from lockstep.capture.graph import CannotCapture
from lockstep.capture.lanes import CaptureContext, CapturedLanes, standing_like, unfit
from lockstep.chance import Generators
from lockstep.errors import BadArgument, Misuse
from lockstep.gradients import recorder as recorder_module
from lockstep.gradients.record import HostLoss
from lockstep.gradients.recorded_lane import Recording
from lockstep.gradients.step import StepInFlight
from lockstep.strategies.replicated import ReplicatedEngine

CPU = torch.device("cpu")


class Noted(Recording):
    """A recording without events and pinned memory."""

    last: "Noted"

    @classmethod
    def of(cls, num_buckets: int) -> "Noted":
        cls.last = cls([None] * num_buckets, [], torch.empty(0))  # type: ignore[list-item]
        return cls.last

    def bucket_is_full(self) -> None:
        self.num_full += 1

    def add_loss(self, loss: Tensor) -> Any:
        self.losses.append(HostLoss(loss.detach()))  # type: ignore[arg-type]
        return self.losses[-1]


class PlayedGraph:
    """Runs the work again at every replay; what it leaves goes to where it was when it was recorded."""

    def __init__(
        self,
        work: Callable[[], Any],
        recording: Noted,
        result: Any,
        buffers: Callable[[], list[Tensor]],
        weight: float,
    ) -> None:
        self._work, self._recording, self._result, self._buffers = work, recording, result, buffers
        self._noted = {name: copy.copy(value) for name, value in vars(recording).items()}
        self._weight = weight

    def replay(self) -> None:
        for name, value in self._noted.items():
            setattr(self._recording, name, [] if name == "losses" else 0 if name == "num_full" else copy.copy(value))
        written = tuple(self._buffers())
        versions = tuple(buffer._version for buffer in written)
        with patch.object(StepInFlight, "weight", self._weight):  # part of the work, not read again
            result = self._work()
        torch._C._autograd._unsafe_set_version_counter(written, versions)  # a graph does not count what it writes
        gradients, losses = self._recording.gradients, self._recording.losses
        for index, place in self._noted["gradients"].items():
            place.copy_(gradients[index])
        for place, loss in zip(self._noted["losses"], losses, strict=True):
            place.loss.copy_(loss.loss)
        self._result.detach().copy_(result.detach())
        for name, value in self._noted.items():
            setattr(self._recording, name, copy.copy(value))


def play(engine: ReplicatedEngine) -> Callable[..., tuple[PlayedGraph, Any]]:
    """In place of `capture`: afterwards tensors and generators are as if nothing had run."""

    def captured(work: Callable[[], Any], *_: Any) -> tuple[PlayedGraph, Any]:
        stacks = [flat.whole for bucket in engine._buckets.buckets for flat in bucket._stack]
        places = [*stacks, *(slot.read() for slot in engine.buffers.slots)]
        before, generators = [place.clone() for place in places], Generators.now()
        try:
            result = work()
        except RuntimeError as error:
            raise CannotCapture(str(error)) from error
        with torch.no_grad():
            for place, value in zip(places, before, strict=True):
                place.copy_(value)
        generators.restore()
        buffers, weight = engine.buffers, engine._in_flight().weight
        return PlayedGraph(work, Noted.last, result, lambda: [slot.read() for slot in buffers.slots], weight), result

    return captured


@contextmanager
def no_waits(_: torch.device) -> Iterator[list[str]]:
    yield []


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "Recording", Noted)
    monkeypatch.setattr(lanes_module, "unfit", lambda leaves: None)
    monkeypatch.setattr(lanes_module, "watching_for_waits", no_waits)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())


class Net(nn.Module):
    """Batch norm, dropout, and a layer that only every third step reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 3)
        self.seldom = nn.Linear(12, 3)

    def forward(self, x: Tensor, seldom: bool) -> Tensor:
        hidden = F.dropout(F.relu(self.norm(self.first(x))), 0.3, self.training)
        return self.last(hidden) + (self.seldom(hidden) if seldom else 0)


def train(captured: bool, lanes: int = 8, told: bool = True, steps: int = 14, **options: Any) -> dict[str, Any]:
    torch.manual_seed(3)
    with lockstep.start(lanes=lanes, noise_every=5, bucket_bytes=300, **options) as run:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        run.replicate(model, optimizer)

        def lane(x: Tensor, y: Tensor, seldom: bool) -> Tensor:
            loss = F.cross_entropy(model(x, seldom), y)
            run.backward(loss) if told else loss.backward()
            return loss

        engine, said = run._engine, []
        around = CaptureContext(engine, lambda: None, lambda: model.training, said.append, CPU)
        compute = CapturedLanes(lane, around) if captured else lane
        lanes_module.capture = play(engine)  # in this worker's own process
        losses, seen = [], []
        for step in range(steps):
            torch.manual_seed(step)
            number = 19 if step % 5 == 4 else 32
            for x, y in run.lanes((torch.randn(number, 6), torch.randint(0, 3, (number,)))):
                seen.append(float(compute(x, y, step % 3 == 2).detach()))
            losses.append(run.loss)
            optimizer.step()
            optimizer.zero_grad()
        graphs = compute.num_graphs if isinstance(compute, CapturedLanes) else 0
        return {"digest": run.digest(), "losses": losses, "seen": seen, "graphs": graphs, "said": said}


@pytest.mark.parametrize(("lanes", "told"), [(8, True), (8, False), (5, True), (1, True), (1, False)])
def test_lanes_that_are_replayed_leave_the_bits_of_lanes_that_run(played: None, lanes: int, told: bool) -> None:
    plain, captured = train(False, lanes, told), train(True, lanes, told)
    assert captured["graphs"] > 0
    assert [captured[what] for what in ("digest", "losses", "seen")] == [
        plain[what] for what in ("digest", "losses", "seen")
    ]


def test_lanes_that_are_replayed_give_one_digest_on_any_number_of_workers(played: None) -> None:
    alone = train(False)
    for num_workers in (2, 3):
        for told in on_workers(num_workers, train, True):
            assert told["graphs"] > 0
            assert [told["digest"], told["losses"]] == [alone["digest"], alone["losses"]]


def test_another_dtype_of_the_sum_is_replayed_too(played: None) -> None:
    plain, captured = (train(which, reduce_dtype="bfloat16") for which in (False, True))
    assert captured["graphs"] > 0
    assert captured["digest"] == plain["digest"]


def test_work_that_cannot_be_recorded_runs_as_it_is_and_says_why_once(played: None) -> None:
    with lockstep.start(lanes=2) as run:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        run.replicate(model, optimizer)
        model.register_buffer("count", torch.zeros(()))
        run.replicate(model, optimizer)

        def lane(x: Tensor) -> Tensor:
            model.count = model.count + 1  # a new tensor in its place
            loss = model(x, False).sum()
            loss.backward()
            return loss

        said: list[str] = []
        compute = CapturedLanes(lane, CaptureContext(run._engine, lambda: None, lambda: 0, said.append, CPU))
        lanes_module.capture = play(run._engine)
        for _ in range(4):
            for (x,) in run.lanes((torch.randn(8, 6),)):
                compute(x)
            optimizer.step()
        assert compute.num_graphs == 0
        assert len(said) == 1
        assert "lane runs as it is, because it puts a new tensor in the place of buffer count" in said[0]
        assert float(model.count) == 4


class Twice:
    """A run whose lanes are computed by what a test gives."""

    def __init__(self, run: Any, lane: Callable[..., Any] | None = None) -> None:
        self.run, self.said = run, []
        self.model = Net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        run.replicate(self.model, self.optimizer)
        around = CaptureContext(run._engine, lambda: None, lambda: 0, self.said.append, CPU)
        self.compute = CapturedLanes(lane or self.backward, around)
        lanes_module.capture = play(run._engine)

    def backward(self, x: Tensor) -> Tensor:
        loss = self.model(x, False).square().mean()
        loss.backward()
        return loss

    def steps(self, number: int, body: Callable[[Tensor], Any], size: int = 8) -> str:
        for step in range(number):
            torch.manual_seed(step)
            for (x,) in self.run.lanes((torch.randn(size, 6),)):
                body(x)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return str(self.run.digest())


def test_a_captured_function_that_is_called_twice_in_a_lane_is_refused(played: None) -> None:
    with lockstep.start(lanes=2) as run:
        stage = Twice(run)
        stage.steps(3, stage.compute)
        with pytest.raises(Misuse, match="called a second time in a lane of step 3"):
            stage.steps(1, lambda x: (stage.compute(x), stage.compute(x)))


def test_lanes_of_one_shape_and_different_weights_are_different_work(played: None) -> None:
    digests = []
    for captured in (False, True):
        with lockstep.start(lanes=2) as run:
            stage = Twice(run)
            for size in (8, 9) * 6:  # lanes of 4 and 4 samples, and of 4 and 5
                digest = stage.steps(1, stage.compute if captured else stage.backward, size)
            digests.append(digest)
    assert stage.compute.num_graphs > 2
    assert digests[0] == digests[1]


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_backward_pass_before_the_captured_one_is_not_lost(played: None, lanes: int) -> None:
    digests = []
    for captured in (False, True):
        with lockstep.start(lanes=lanes) as run:
            stage = Twice(run)
            compute = stage.compute if captured else stage.backward

            def body(x: Tensor, stage: Twice = stage, compute: Any = compute) -> None:
                with stage.run.no_sync():
                    stage.model.last.weight.square().sum().backward()
                compute(x)

            digests.append(stage.steps(6, body))
    assert digests[0] == digests[1]
    assert stage.compute.num_graphs == 0
    assert "because another backward pass of the lane ran before it" in stage.said[0]


def test_a_backward_pass_after_the_captured_one_is_refused_where_it_would_be_lost(played: None) -> None:
    with lockstep.start(lanes=2) as run:
        stage = Twice(run)
        stage.steps(3, stage.compute)

        def body(x: Tensor) -> None:
            stage.compute(x)
            stage.model.last.weight.square().sum().backward()

        with pytest.raises(Misuse, match=r"a second backward reached last\.weight"):
            stage.steps(1, body)


def test_data_of_ever_new_shapes_are_left_as_they_are(played: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_module, "MOST_SHAPES", 3)
    with lockstep.start(lanes=1) as run:
        stage = Twice(run)
        for size in (4, 5, 6, 7, 8):
            stage.steps(5, stage.compute, size)
        assert stage.compute.num_graphs == 0
        assert [text for text in stage.said if "data of more than 3 shapes" in text]


@pytest.mark.parametrize(
    "base", [torch.arange(120.0), torch.arange(120, dtype=torch.bfloat16)], ids=lambda b: str(b.dtype)
)
def test_inputs_of_a_recording_stand_as_those_that_were_given(base: Tensor) -> None:
    table = base.reshape(12, 10)
    for given in (
        table,
        table.t(),
        table[:, 1:9],
        table[3:, 2:],
        table[::2, ::3],
        table[0, 1],
        table[:0],
        table[5:, 3],
    ):
        copy = standing_like(given)
        assert copy.stride() == given.stride()
        assert (copy.data_ptr() - given.data_ptr()) % 16 == 0 or not given.numel()
        assert torch.equal(copy, given)
        assert copy.data_ptr() != given.data_ptr() or not given.numel()


def test_what_a_captured_lane_gives_back_holds_nothing_of_autograd(played: None) -> None:
    with lockstep.start(lanes=2) as run:
        stage = Twice(run)
        given: list[Tensor] = []
        stage.steps(6, lambda x: given.append(stage.compute(x)))
        assert stage.compute.num_graphs > 0
        assert not any(loss.requires_grad for loss in given)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("event", ["another recording breaks", "the models are replicated anew"])
def test_recordings_are_void_and_made_again_when(
    played: None, monkeypatch: pytest.MonkeyPatch, event: str, lanes: int
) -> None:
    with lockstep.start(lanes=lanes) as run:
        stage = Twice(run)
        stage.steps(5, stage.compute)
        before = set(map(id, stage.compute._graphs.values()))
        assert before
        if event == "another recording breaks":
            monkeypatch.setattr(capture_module, "_num_broken", capture_module.num_broken() + 1)
        else:
            run.replicate(stage.model, stage.optimizer)
            lanes_module.capture = play(run._engine)
        kept = list(stage.compute._graphs.values())  # so that no number is used twice
        stage.steps(3, stage.compute)
        assert stage.compute.num_graphs > 0
        assert not before & set(map(id, stage.compute._graphs.values()))
        assert kept


def test_nothing_is_recorded_before_the_order_of_gradients_is_known(played: None) -> None:
    with lockstep.start(lanes=8) as run:
        stage = Twice(run)
        stage.steps(1, stage.compute, size=16)
        assert stage.compute.num_graphs == 0
        stage.steps(1, stage.compute, size=16)
        assert stage.compute.num_graphs > 0


def test_arguments_that_no_graph_can_take_are_named() -> None:
    assert unfit([torch.zeros(2)]) == "it was given a tensor on cpu"
    assert unfit([1, "a", None, 2.5]) is None
    assert "given object" in str(unfit([object()]))


def test_on_the_cpu_a_captured_lane_runs_as_it_is_and_a_note_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    with lockstep.start(lanes=2) as run:
        model = Net()
        run.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
        step = run.captured(lambda x: model(x, False).sum().backward())
        for (x,) in run.lanes((torch.randn(8, 6),)):
            step(x)
    assert "runs as it is, because the run is on cpu, and graphs are for CUDA" in capfd.readouterr().err


def test_run_captured_refuses_what_is_no_function_and_a_stranger_for_an_optimizer() -> None:
    with lockstep.start(lanes=2) as run:
        model = Net()
        run.replicate(model)
        with pytest.raises(BadArgument, match="takes a function that computes a lane, not int"):
            run.captured(3)  # type: ignore[arg-type]
        with pytest.raises(BadArgument, match=r"an optimizer that run\.replicate was given before"):
            run.captured(print, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_recording_is_another_one_when_a_part_of_the_model_changes_its_mode_or_its_place() -> None:
    with lockstep.start(lanes=2) as run:
        model = Net()
        run.replicate(model)
        modes = run._captures._modes
        seen = [modes()]
        model.norm.eval()
        seen.append(modes())
        model.first.weight.data = model.first.weight.data.clone()
        seen.append(modes())
        model.norm.running_mean = model.norm.running_mean.clone()
        seen.append(modes())
        assert len(set(seen)) == 4
        assert modes() == seen[-1]
