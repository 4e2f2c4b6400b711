"""The screen tells of noise when there is news, and advises at the end; a logger hears every measurement."""

import io
import logging
import math
from pathlib import Path

import pytest
from measured_noise import measured, noise

from lockstep.events import Closed, Event, NoiseMeasured
from lockstep.observe.console import Console
from lockstep.observe.noise_lines import usual

END = Closed(step=500)


def shown(*events: Event, run_dir: Path | None = None, has_failed: bool = False) -> list[str]:
    screen = io.StringIO()
    console = Console(screen, run_dir=run_dir, has_failed=lambda: has_failed)
    for event in events:
        console(event)
    return screen.getvalue().splitlines()


def test_the_first_sure_estimate_is_a_line() -> None:
    assert shown(measured(), measured()) == [
        "  noise: critical batch about 812 (606 to 1,090, 40 measurements); the batch is 256"
    ]


def test_an_adam_is_told_what_it_sees() -> None:
    (line,) = shown(measured(adam=noise(3000, preconditioned=True)))
    assert "critical batch as Adam sees it about 3,000" in line


def test_an_adam_whose_own_noise_is_unknown_is_told_so_in_the_line_and_at_the_end() -> None:
    line, *advice = shown(NoiseMeasured(8, "adam", noise(), None, step=500), END)
    assert "critical batch (plain, not as Adam sees it) about 812" in line
    assert "Only the plain noise scale is known" in advice[-1]


@pytest.mark.parametrize("factor", [2, 0.5])
def test_an_estimate_that_doubled_or_halved_is_told_again(factor: float) -> None:
    assert len(shown(measured(), measured(plain=noise(812 * factor)))) == 2


@pytest.mark.parametrize("factor", [1.9, 0.55])
def test_an_estimate_that_changed_by_less_is_not_told_again(factor: float) -> None:
    assert len(shown(measured(), measured(plain=noise(812 * factor)))) == 1


def test_a_change_is_counted_from_the_last_line_not_from_the_last_measurement() -> None:
    grown = [measured(plain=noise(812 * factor)) for factor in (1, 1.5, 2.1, 3)]
    assert len(shown(*grown)) == 2


@pytest.mark.parametrize("unsure", [noise(count=19), noise(width=3), noise(width=math.inf), noise(math.inf)])
def test_a_run_that_is_never_sure_shows_nothing(unsure) -> None:
    assert shown(measured(plain=unsure), END) == []


def test_a_run_that_measures_nothing_shows_nothing_at_its_end() -> None:
    assert shown(END) == []


def test_the_end_of_a_run_shows_where_the_batch_stands_what_to_do_and_where_there_is_more() -> None:
    assert shown(measured(), END, run_dir=Path("/runs/my train-1"))[1:] == [
        "  advice: Batch 256 is below the critical batch, about 812 (95 % sure: 606 to 1,090, from 40 measurements).",
        "    Grow the batch with the workers, up to about 812.",
        "    More: lockstep advise --run '/runs/my train-1'",
    ]


def test_without_a_run_folder_no_command_is_named() -> None:
    assert "lockstep advise" not in "".join(shown(measured(), END))


def test_a_run_that_failed_gets_no_advice() -> None:
    assert len(shown(measured(), END, has_failed=True)) == 1


def test_the_short_last_batch_of_an_epoch_is_not_taken_for_the_batch() -> None:
    epoch = [measured(plain=noise(batch=batch)) for batch in (256, 256, 256, 12)]
    assert "Batch 256 is" in shown(*epoch, END)[1]


@pytest.mark.parametrize(("batches", "middle"), [([5], 5), ([256, 12], 256), ([12, 256, 256], 256), ([8, 64, 64], 64)])
def test_the_usual_batch_is_the_middle_one(batches: list[float], middle: float) -> None:
    assert usual(batches) == middle


def test_who_takes_over_does_not_repeat_what_was_told() -> None:
    screen, speaks = io.StringIO(), [False]
    console = Console(screen, lambda: speaks[0])
    console(measured())
    speaks[0] = True
    console(measured())
    assert screen.getvalue() == ""


def test_the_logger_hears_every_measurement_sure_or_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lockstep.noise"):
        shown(measured(plain=noise(count=1, width=math.inf)), measured(), measured())
    assert caplog.messages == [
        "noise: critical batch about 812 (0 to infinity, 1 measurement, not sure yet); the batch is 256",
        *["noise: critical batch about 812 (606 to 1,090, 40 measurements); the batch is 256"] * 2,
    ]
