"""What the demo reads from its workers, and what it concludes."""

import json
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from lockstep.programs.demo.demonstration import Demonstration
from lockstep.programs.demo.recipe import Recipe
from lockstep.programs.demo.report import as_json, readable, show_report
from lockstep.programs.demo.result import DemoResult, Reader, judge, listed

ABOUT = {"torch": "2.11.0", "parameters": 1234}
END = {"steps": 3, "digest": "ab" * 32, "held_out_loss": 2.5, "written": "def f():\n    return 1"}


def result(num_workers: int, losses: tuple[float, ...] = (5.5, 4.0, 3.0), **end: object) -> DemoResult:
    times = {"first_step_s": 10.0, "last_step_s": 14.0}
    return DemoResult(num_workers, 100, 6.0, ABOUT, list(losses), {**END, **end}, **times)


def demonstration(*results: DemoResult) -> Demonstration:
    return Demonstration(replace(Recipe(), steps=3), results, judge(results))


def output_of_a_run() -> bytes:
    steps = [{"step": step, "loss": loss} for step, loss in enumerate((5.5, 4.0, 3.0), start=1)]
    facts = [{"about": ABOUT}, *steps, {"end": END}]
    return "lockstep 0.1 · 2 workers\n".encode() + b"".join(json.dumps(f).encode() + b"\n" for f in facts)


@pytest.mark.parametrize("piece_bytes", [1, 7, 10_000])
def test_output_is_read_alike_in_pieces_of_any_size(piece_bytes: int) -> None:
    found, others, clock = DemoResult(2, 100), [], iter([10.0, 12.0, 14.0])
    reader = Reader(found, lambda: next(clock), lambda _: None, others.append)
    output = output_of_a_run()
    for begin in range(0, len(output), piece_bytes):
        reader(output[begin : begin + piece_bytes])
    assert replace(found, seconds=6.0) == result(2)
    assert others == ["lockstep 0.1 · 2 workers"]


def told(*steps: int) -> DemoResult:
    """What a reader makes of these steps, each with half its number as loss."""
    found = DemoResult(2, 100)
    reader = Reader(found, lambda: 0.0, lambda _: None, lambda _: None)
    reader(b"".join(json.dumps({"step": step, "loss": step / 2}).encode() + b"\n" for step in steps))
    return found


def test_a_step_that_nobody_told_is_left_out_and_known_to_be() -> None:
    found = told(1, 2, 4)
    assert [loss for step, loss in enumerate(found.losses, start=1) if step not in found.unreported] == [0.5, 1.0, 2.0]
    assert found.unreported == {3}
    assert found.lost_steps == 0


def test_a_step_that_two_workers_told_counts_once_and_is_not_lost() -> None:
    assert (told(1, 2, 2, 3).losses, told(1, 2, 2, 3).lost_steps) == ([0.5, 1.0, 1.5], 0)


def test_steps_that_are_trained_once_more_are_lost_ones() -> None:
    assert (told(1, 2, 3, 1, 2).losses, told(1, 2, 3, 1, 2).lost_steps) == ([0.5, 1.0, 1.5], 2)


def test_tokens_per_second_count_the_steps_after_the_first() -> None:
    assert result(2).tokens_per_s == 2 * 100 / 4.0


def test_runs_with_equal_losses_and_digests_are_equal() -> None:
    verdict = judge([result(1), result(2), result(3)])
    assert verdict.equal
    assert "1, 2 and 3 workers" in verdict.sentence


def test_another_digest_is_told_with_both_digests() -> None:
    verdict = judge([result(1), result(2), result(3, digest="cd" * 32)])
    assert not verdict.equal
    assert "On 3 workers" in verdict.sentence
    assert "abab" in verdict.sentence
    assert "cdcd" in verdict.sentence


def test_one_bit_in_one_loss_is_told_with_its_step() -> None:
    verdict = judge([result(1), result(2, losses=(5.5, 4.000000000000001, 3.0))])
    assert not verdict.equal
    assert "from step 2 on" in verdict.sentence


def test_other_text_after_training_is_a_difference() -> None:
    assert not judge([result(1), result(2, written="import this")]).equal


def test_losses_that_are_no_numbers_everywhere_are_equal() -> None:
    nan = float("nan")
    assert judge([result(1, losses=(5.5, nan)), result(2, losses=(5.5, float("nan")))]).equal


def test_one_run_alone_claims_nothing() -> None:
    assert "nothing to be compared with" in judge([result(1)]).sentence


def test_the_object_for_machines_is_json() -> None:
    found = json.loads(json.dumps(as_json(demonstration(result(1), result(2)))))
    assert found["equal"] is True
    assert [run["losses"] for run in found["runs"]] == [[5.5, 4.0, 3.0]] * 2


def test_the_terminal_shows_the_digests_and_the_verdict_in_80_columns() -> None:
    screen = StringIO()
    show_report(demonstration(result(1), result(2)), Console(file=screen, width=80))
    assert screen.getvalue().count("abababababababab…") == 2
    assert "✓" in screen.getvalue()


def test_written_text_cannot_move_the_cursor() -> None:
    assert readable("a\x1b[2Jb\r\n\tc") == "a�[2Jb�\n�c"


@pytest.mark.parametrize(("words", "text"), [(["1"], "1"), (["1", "2"], "1 and 2"), (["1", "2", "3"], "1, 2 and 3")])
def test_lists_read_like_english(words: list[str], text: str) -> None:
    assert listed(words) == text


def test_a_recipe_survives_its_way_to_the_worker() -> None:
    recipe = replace(Recipe(), steps=7, learning_rate=0.1 + 0.2)
    assert Recipe.read(recipe.write()) == recipe
