"""What a loop over lanes adds up that nobody totals is found in its source, and noted on several workers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from workers import on_workers

import lockstep
from lockstep.script.lanes.sums import LaneSum, spoilt_by_a_loss, untotalled

FORGOTTEN = {
    "a sum": """
        right = 0
        for x, y in run.lanes(batch):
            right += (model(x).argmax(1) == y).sum().item()
        print(right / 100)
    """,
    "a sum, by assignment": """
        right = 0
        for x, y in run.lanes(batch):
            right = right + (model(x).argmax(1) == y).sum()
        run.print(right)
    """,
    "a list": """
        right = []
        for x, y in run.lanes(batch):
            if len(x):
                right.append(model(x))
        print(torch.cat(right).mean())
    """,
    "an entry": """
        right = {"all": 0.0}
        for x, y in run.lanes(batch):
            right["all"] += model(x).mean().item()
        run.log(right)
    """,
    "the worst": """
        right = 0.0
        for x, y in run.lanes(batch):
            right = max(right, model(x).max().item())
        print(right)
    """,
    "a meter": """
        right = AverageMeter()
        for x, y in run.lanes(batch):
            right.update(model(x).mean().item(), len(x))
        print(right.avg)
    """,
    "a metric": """
        for x, y in run.lanes(batch):
            right.update(model(x), y)
        print(right.compute())
    """,
    "in a function": """
        def evaluate(run, model, batch):
            right = 0
            for x, y in run.lanes(
                batch, train=False
            ):
                right += model(x).sum()
            return right / 10
        print(evaluate(run, model, batch))
    """,
    "by steps": """
        right = 0
        for x, y in run.steps(loader):
            right += model(x).sum()
        print(right)
    """,
    "beside a barrier and a selection": """
        def evaluate(run, model, batch):
            right = 0
            for x, y in run.lanes(batch):
                right += model(x).gather(1, y).sum()
            run.total(0)
            return right
    """,
    "in one expression": """
        right = sum((model(x).argmax(1) == y).sum().item() for x, y in run.lanes(batch))
        print(right / 100)
    """,
    "in a list of all": """
        right = [
            model(x).mean().item()
            for x, y in run.lanes(batch)
        ]
        print(sum(right) / len(right))
    """,
    "in the mean of a list": """
        right = np.mean([model(x).mean().item() for x, y in run.lanes(batch)])
        print(right)
    """,
    "that is added": """
        right = 0
        for batch in loader:
            right += sum(len(x) for x, y in run.lanes(batch))
        print(right)
    """,
    "that extends": """
        right = []
        for batch in loader:
            right.extend(len(x) for x, y in run.lanes(batch))
        print(right)
    """,
    "where it is set before": """
        right, lanes = 0, tqdm(run.lanes(batch))  # in run.
        for x, y in lanes:
            right += len(x)
        print(right)
    """,
    "one of two": """
        right, count = 0, 0
        for x, y in run.lanes(batch):
            count += len(x)
            right += model(x).sum()
        print(right / run.total(count))
    """,
}
FINE = {
    "totalled": """
        right = 0
        for x, y in run.lanes(batch):
            right += (model(x).argmax(1) == y).sum().item()
        print(run.total(right) / 100)
    """,
    "in one expression, totalled": """
        right = run.total(sum(len(x) for x, y in run.lanes(batch)))
        print(right)
    """,
    "in a list of all, totalled": """
        right = [len(x) for x, y in run.lanes(batch)]
        print(run.total(right))
    """,
    "in a list that nobody reads": """
        [model(x).mean().backward() for x, y in run.lanes(batch)]
        right = [model(x).mean().backward() for x, y in run.lanes(batch)]
    """,
    "an expression, totalled by the caller": """
        def evaluate(run, model, batch):
            return sum(len(x) for x, y in run.lanes(batch))
        print(run.total(evaluate(run, model, batch)))
    """,
    "totalled by another name": """
        right = count = 0
        for x, y in run.lanes(batch):
            right += model(x).sum()
            count += len(x)
        sums = torch.tensor([right, count])
        right, count = run.total(sums)
        print(right / count)
    """,
    "totalled by the caller": """
        def evaluate(run, model, batch):
            right = 0
            for x, y in run.lanes(batch):
                right += model(x).sum()
            return right
        print(run.total(evaluate(run, model, batch)))
    """,
    "by torch.distributed": """
        right = torch.zeros(1)
        for x, y in run.lanes(batch):
            right += model(x).sum()
        dist.all_reduce(right)
        print(right)
    """,
    "the lane's own": """
        for x, y in run.lanes(batch):
            loss = model(x).mean()
            loss += model(y).mean()
            x += 1
            loss.backward()
        print(loss)
    """,
    "a progress bar": """
        for x, y in run.lanes(batch):
            bar.update(len(x))
        bar.close()
    """,
    "never read": """
        right = 0
        for x, y in run.lanes(batch):
            right += 1
    """,
    "over batches": """
        right = 0
        for batch in loader:
            for x, y in run.lanes(batch):
                model(x).mean().backward()
            right += run.loss
        print(right)
    """,
    "a state that is replaced": """
        right = None
        for x, y in run.lanes(batch):
            right = model(x, right)
        print(right)
    """,
}


def place_of(source: str, tmp_path: Path) -> tuple[str, int]:
    """The file that it is written to, and the line of its loop."""
    text = "if True:" + source
    path = tmp_path / "script.py"
    path.write_text(text)
    return str(path), next(number for number, one in enumerate(text.splitlines(), 1) if "in run." in one)


def found_in(source: str, tmp_path: Path) -> LaneSum | None:
    return untotalled(*place_of(source, tmp_path))


@pytest.mark.parametrize("name", FORGOTTEN)
def test_what_nobody_totals_is_found_by_its_name(name: str, tmp_path: Path) -> None:
    found = found_in(FORGOTTEN[name], tmp_path)
    assert found is not None
    assert found.name == "right"
    assert "right" in found.words
    assert "(line " in found.words


@pytest.mark.parametrize("name", FINE)
def test_what_is_right_on_any_number_of_workers_is_not(name: str, tmp_path: Path) -> None:
    assert found_in(FINE[name], tmp_path) is None


USED_AT_ONCE = {
    "shown": "print(sum(len(x) for x, y in run.lanes(batch)) / 100)",
    "returned": """def evaluate(run, batch):
        return max(len(x) for x, y in run.lanes(batch))""",
}


@pytest.mark.parametrize("name", USED_AT_ONCE)
def test_what_has_no_name_is_named_by_its_source(name: str, tmp_path: Path) -> None:
    found = found_in(f"\n    {USED_AT_ONCE[name]}\n", tmp_path)
    assert found is not None
    assert found.name.endswith("((len(x) for x, y in run.lanes(batch)))")


def lanes_of(run: lockstep.Run) -> Iterator[torch.Tensor]:
    yield from run.lanes(torch.ones(8, 3))


def given(run: lockstep.Run) -> Iterator[torch.Tensor]:
    return run.lanes(torch.ones(8, 3))


def one_by_one(run: lockstep.Run) -> Iterator[torch.Tensor]:
    for x in lanes_of(run):
        yield 2 * x


@pytest.mark.parametrize("helper", [lanes_of, given, one_by_one])
def test_a_loop_over_what_a_function_hands_on_is_looked_at(helper: Callable[[lockstep.Run], Any]) -> None:
    def evaluation() -> list[str]:
        said: list[str] = []
        with lockstep.start(lanes=4, seed=0) as run:
            run._events.subscribe(lambda event: said.append(event.text), lockstep.events.Note)
            run.replicate(nn.Linear(3, 2).eval())
            seen = 0
            for x in helper(run):
                seen += len(x)
            assert seen == 8 // run.size
        return said

    assert on_workers(1, evaluation) == [[]]
    for said in on_workers(2, evaluation):
        (note,) = said
        assert "`seen += len(x)` (line" in note


def test_a_source_that_cannot_be_read_shows_nothing(tmp_path: Path) -> None:
    assert untotalled(str(tmp_path / "not there"), 1) is None
    assert untotalled("<stdin>", 1) is None


TOTALLED_LIST = """
        right = []
        for x, y in run.lanes(batch):
            right.append(int((model(x).argmax(1) == y).sum()))
        print(run.total(right))
    """


def test_a_loss_spoils_sums_and_where_the_step_was_committed_lists_too(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("sum", "own", "list")]
    for folder in folders:
        folder.mkdir()
    sources = FINE["totalled"], FINE["the lane's own"], TOTALLED_LIST
    a_sum, own, a_list = (place_of(source, folder) for source, folder in zip(sources, folders, strict=True))
    for is_committed in (False, True):
        found = spoilt_by_a_loss(*a_sum, is_committed)
        assert found is not None
        assert found.name == "right"
        assert spoilt_by_a_loss(*own, is_committed) is None
    assert spoilt_by_a_loss(*a_list, is_committed=False) is None
    assert spoilt_by_a_loss(*a_list, is_committed=True) is not None


def evaluated(totals: bool) -> list[str]:
    said: list[str] = []
    with lockstep.start(lanes=4, seed=0) as run:
        run._events.subscribe(lambda event: said.append(event.text), lockstep.events.Note)
        model = nn.Linear(3, 2)
        run.replicate(model)
        model.eval()
        if totals:
            count = 0
            for x in run.lanes(torch.ones(8, 3)):
                count += len(x)
            assert run.total(count) == 8
            return said
        seen = 0
        for _ in range(2):
            for x in run.lanes(torch.ones(8, 3)):
                seen += len(x)
        assert seen == 2 * 8 // run.size
    return said


def test_it_is_noted_once_and_only_where_there_are_several_workers() -> None:
    assert on_workers(1, evaluated, False) == [[]]
    assert on_workers(2, evaluated, True) == [[], []]
    for said in on_workers(2, evaluated, False):
        (note,) = said
        assert "`seen += len(x)` (line" in note
        assert "test_lane_sums.py adds up what the lanes of one worker hold" in note
        assert "run.total(seen) is that of all lanes, run.gather of a list has the entries of all" in note
