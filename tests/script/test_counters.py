"""Which numbers of a script count, and which stand elsewhere after a resume."""

from pathlib import Path

from lockstep.script.restart.counters import Moment, Number, ScriptCounters, out_of_step

PLACE = ("train.py", "main")


def _watched(num_passes: int, batches: int = 5) -> tuple[ScriptCounters, dict[str, int], int]:
    """A script that counts batches, steps and passes, with a flag that changes and a number that does not."""
    counters, step, numbers = ScriptCounters(), 0, {}
    for epoch in range(num_passes):
        for i in range(batches):
            numbers = {"i": i, "steps": step, "epoch": epoch, "batch_size": 64, "patience": epoch // 2}
            counters.note({PLACE: numbers}, Moment(step, step, i, epoch))
            step += 1
    return counters, numbers, step


def _learned(num_passes: int) -> dict[str, dict[str, int]]:
    counters, numbers, _ = _watched(num_passes)
    return {number.name: dict(number.offsets) for number in counters.learned({PLACE: numbers})}


def test_after_two_passes_it_is_known_what_each_number_counts() -> None:
    learned = _learned(3)
    assert learned["i"] == {"batch": 0}
    assert learned["steps"] == {"step": 0, "turn": 0}
    assert learned["epoch"] == {"passes": 0}
    assert learned["patience"] == {}


def test_a_number_that_never_changed_is_not_kept() -> None:
    assert "batch_size" not in _learned(3)


def test_in_the_first_pass_steps_and_batches_count_alike() -> None:
    assert _learned(1)["i"] == {"step": 0, "turn": 0, "batch": 0}


def test_a_number_that_stands_where_it_should_is_not_told() -> None:
    counters, numbers, step = _watched(3)
    learned = counters.learned({PLACE: numbers})
    here = {"i": 2, "steps": step + 2, "epoch": 3, "patience": 1}
    assert out_of_step(learned, {PLACE: here}, Moment(step + 2, step + 2, 2, 3)) == []


def test_numbers_that_have_begun_anew_are_told_with_what_they_should_be() -> None:
    counters, numbers, step = _watched(3)
    learned = counters.learned({PLACE: numbers})
    here = {"i": 0, "steps": 0, "epoch": 0, "patience": 0}
    found = out_of_step(learned, {PLACE: here}, Moment(step + 2, step + 2, 2, 3))
    assert {one.number.name: max(one.number.expected(one.at)) for one in found} == {
        "i": 2,
        "steps": step + 2,
        "epoch": 3,
        "patience": 1,
    }


def test_the_source_tells_a_counter_of_steps_from_one_of_batches_at_the_end_of_the_first_pass(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("def main():\n  steps = 0\n  for i, b in enumerate(loader):\n    steps += 1\n")
    alike = {"step": 0, "turn": 0, "batch": 0}
    learned = [Number("train.py", "main", name, 4, alike) for name in ("i", "steps")]
    found = out_of_step(learned, {(str(script), "main"): {"i": 0, "steps": 0}}, Moment(5, 5, 0, 1))
    assert [one.number.name for one in found] == ["steps"]


def test_a_number_of_another_function_or_file_is_not_compared() -> None:
    learned = [Number("train.py", "main", "i", 4, {"step": 0})]
    assert (
        out_of_step(learned, {("other.py", "main"): {"i": 0}, ("train.py", "go"): {"i": 0}}, Moment(5, 5, 0, 1)) == []
    )


def _counts(values: list[int], passes: list[int], now: int) -> dict[str, int] | None:
    """What a number counts that has had these values at loops one step after the other; None if it is not kept."""
    counters = ScriptCounters()
    for step, (value, number) in enumerate(zip(values, passes, strict=True)):
        counters.note({PLACE: {"n": value}}, Moment(step, step, step - passes.index(number), number))
    found = [dict(number.offsets) for number in counters.learned({PLACE: {"n": now}})]
    return found[0] if found else None


def test_a_number_that_has_stood_still_counts_no_steps_although_it_catches_up() -> None:
    assert _counts([0, 0, 2, 3], [0, 0, 0, 0], 3) == {}
    assert _counts([0, 1, 1], [0, 0, 0], 1) == {}
    assert _counts([0, 1, 2], [0, 0, 0], 2) == {"step": 0, "turn": 0, "batch": 0}


def test_a_number_that_stays_in_another_pass_counts_no_passes() -> None:
    assert _counts([0, 0, 1, 1], [0, 0, 1, 1], 1) == {"passes": 0}
    assert _counts([0, 0, 1, 1, 1], [0, 0, 1, 1, 2], 1) == {}


def test_a_number_that_has_changed_since_the_last_loop_alone_is_kept_and_counts_nothing() -> None:
    assert _counts([0, 0], [0, 0], 0) is None
    assert _counts([0], [0], 1) == {}


def test_a_number_that_is_wrong_is_told_with_what_depends_on_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("def main():\n  while n < 9:\n    n += 1\n    optimizer.step()\n    print(m)\n    m += 1\n")
    learned = [Number("train.py", "main", name, 4, {"step": 0}) for name in ("m", "n")]
    found = out_of_step(learned, {(str(script), "main"): {"m": 0, "n": 0}}, Moment(5, 5, 5, 0))
    should = "(train.py) is 0 and should be 5, as steps go on at 5."
    assert [str(one) for one in found] == [
        f"`m` {should}",
        f"`n` {should} It decides whether optimizer.step() is called (train.py:2).",
    ]


def test_a_number_that_counts_nothing_and_is_set_in_every_turn_is_not_compared(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "def main():\n  m = 0\n  for b in loader:\n    m += f(b)\n    n = f(b)\n    if m > n: optimizer.step()\n"
    )
    learned = [Number("train.py", "main", *one) for one in (("m", 4, {}), ("n", 4, {}), ("n", 4, {"step": 0}))]
    found = out_of_step(learned, {(str(script), "main"): {"m": 0, "n": 0}}, Moment(5, 5, 5, 0))
    assert [(one.number.name, dict(one.number.offsets)) for one in found] == [("m", {}), ("n", {"step": 0})]
    assert all(one.depends is not None for one in found)
    assert out_of_step(learned, {(str(script), "main"): {"other": 0}}, Moment(5, 5, 5, 0)) == []


def test_a_loop_variable_shows_nothing_unless_it_counts(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("def main():\n  for n in picked:\n    if n > 1: optimizer.step()\n")
    learned = [Number("train.py", "main", "n", 4, offsets) for offsets in ({}, {"batch": 0}, {"step": 0, "turn": 0})]
    found = out_of_step(learned, {(str(script), "main"): {"n": 0}}, Moment(5, 5, 5, 0))
    assert [one.depends is not None for one in found] == [False, True, True]
    assert [dict(one.number.offsets) for one in found] == [{}, {"batch": 0}, {"step": 0, "turn": 0}]
