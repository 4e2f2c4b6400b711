"""The trail of a checkpoint: what the run before has come to, and what a run that goes on makes of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.errors import Misuse
from lockstep.state.checkpoints.trail import FILE, GRADIENT, STATE, UPDATE, Footprint, Trail, TrailFollower
from lockstep.state.models import Models

SAME = {"train.py": "1234", "version of torch": "2.13.0"}


class Worker:
    """A model whose weight each update makes smaller by its gradient, and who follows it."""

    def __init__(self, circumstances: dict[str, str] = SAME, *, exact: bool = True) -> None:
        self.module = torch.nn.Linear(3, 1, bias=False)
        with torch.no_grad():
            self.module.weight.fill_(8.0)
        models = Models()
        models.add(self.module, (), {})
        self.notes: list[str] = []
        self.follower = TrailFollower(models, lambda: circumstances, self.notes.append, exact)

    def train(self, steps: range, gradient: float = 1.0, update: float = 1.0) -> None:
        for step in steps:
            self.follower.step_begins(step)
            self.module.weight.grad = torch.full_like(self.module.weight, gradient)
            self.follower.step_ends(step)
            with torch.no_grad():
                self.module.weight -= self.module.weight.grad * update
            self.follower.update_ends(step)

    def goes_on(self, checkpoint: Path, from_step: int) -> None:
        with torch.no_grad():
            self.module.weight.fill_(8.0 - from_step)
        self.follower.go_on(Trail.read(checkpoint))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Of step 2; the run before came to step 9."""
    before = Worker()
    before.train(range(2))
    before.follower.saved(2, lambda: tmp_path)
    before.train(range(2, 9))
    return tmp_path


def test_it_has_the_gradient_and_the_update_of_the_first_step_and_states_at_powers_of_two(checkpoint: Path) -> None:
    trail = Trail.read(checkpoint)
    assert trail is not None
    assert [(one.kind, one.step) for one in trail.footprints] == [
        (GRADIENT, 2), (UPDATE, 2), (STATE, 3), (STATE, 4), (STATE, 6),
    ]  # fmt: skip
    assert trail.circumstances == SAME


def test_a_run_that_does_the_same_goes_on_without_a_word(checkpoint: Path) -> None:
    again = Worker()
    again.goes_on(checkpoint, 2)
    again.train(range(2, 12))
    assert again.notes == []


@pytest.mark.parametrize(
    ("other", "where"),
    [
        ({"gradient": 2.0}, "the gradient of step 2 is not"),
        ({"update": 0.5}, "what the update of step 2 has made is not"),
    ],
)
def test_a_run_that_does_something_else_is_refused_where_it_shows(
    checkpoint: Path, other: dict[str, Any], where: str
) -> None:
    again = Worker()
    again.goes_on(checkpoint, 2)
    with pytest.raises(Misuse, match=where):
        again.train(range(2, 3), **other)
    if "gradient" in other:
        assert again.module.weight[0, 0].item() == 6.0, "it was applied"


def test_a_difference_in_a_later_step_shows_in_a_later_state(checkpoint: Path) -> None:
    again = Worker()
    again.goes_on(checkpoint, 2)
    again.train(range(2, 5))
    with pytest.raises(Misuse, match="the state before step 6 is not"):
        again.train(range(5, 7), gradient=2.0)


def test_where_something_else_was_changed_too_a_note_names_it_once(checkpoint: Path) -> None:
    again = Worker({**SAME, "train.py": "5678"})
    again.goes_on(checkpoint, 2)
    again.train(range(2, 9), gradient=2.0)
    assert len(again.notes) == 1
    assert "the gradient of step 2 is not what it was" in again.notes[0]
    assert "train.py is not as in that run" in again.notes[0]


def test_a_file_that_only_one_of_both_has_loaded_is_no_difference(checkpoint: Path) -> None:
    again = Worker({**SAME, "late.py": "1"})
    again.goes_on(checkpoint, 2)
    with pytest.raises(Misuse):
        again.train(range(2, 3), gradient=2.0)


@pytest.mark.parametrize("when", ["before", "after"])
def test_operators_that_are_not_deterministic_show_nothing(checkpoint: Path, when: str) -> None:
    again = Worker(exact=when == "after")
    again.goes_on(checkpoint, 2)
    again.follower.give_up()
    again.train(range(2, 9), gradient=2.0)
    assert again.notes == []


def test_the_first_of_several_updates_counts(tmp_path: Path) -> None:
    before = Worker()
    before.follower.saved(0, lambda: tmp_path)
    before.train(range(1))
    before.follower.update_ends(0)
    trail = Trail.read(tmp_path)
    assert trail is not None
    assert [one.kind for one in trail.footprints] == [GRADIENT, UPDATE]


def test_nothing_is_written_before_the_checkpoint_is_there_and_then_all_of_it(tmp_path: Path) -> None:
    there: list[Path] = []
    before = Worker()
    before.follower.saved(0, lambda: there[0] if there else None)
    before.train(range(3))
    assert not (tmp_path / FILE).exists()
    there.append(tmp_path)
    before.follower.close()
    trail = Trail.read(tmp_path)
    assert trail is not None
    assert [one.step for one in trail.footprints] == [0, 0, 1, 2]


def test_a_folder_that_has_gone_ends_no_training(tmp_path: Path) -> None:
    before = Worker()
    before.follower.saved(0, lambda: tmp_path / "gone")
    before.train(range(3))


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[1]\n", "null\n", '{"circumstances": 3}\n', '{"kind": "state"}\n', "\xff", "[" * 100_000,
        '{"circumstances": {"a": "b"}}\n', '{"kind": "state", "step": 3, "fingerprint": "00"}\n',
    ],
)  # fmt: skip
def test_what_is_no_trail_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_bytes(text.encode("latin-1"))
    assert Trail.read(tmp_path) is None


def test_a_line_that_was_cut_off_is_left_out(checkpoint: Path) -> None:
    whole = (checkpoint / FILE).read_text()
    (checkpoint / FILE).write_text(whole[:-20])
    trail = Trail.read(checkpoint)
    assert trail is not None
    assert len(trail.footprints) == 4


def test_a_link_is_not_followed(checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / FILE).symlink_to(checkpoint / FILE)
    assert Trail.read(other) is None


def test_a_footprint_is_a_line_of_json(checkpoint: Path) -> None:
    lines = [json.loads(line) for line in (checkpoint / FILE).read_text().splitlines()]
    assert lines[0] == {"circumstances": SAME}
    assert Footprint(**lines[1]).kind == GRADIENT
