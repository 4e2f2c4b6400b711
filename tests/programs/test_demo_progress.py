"""Progress on a terminal and elsewhere."""

from io import StringIO

from rich.console import Console

from lockstep.observe.progress import show_progress


def shown(num_steps: int, terminal: bool) -> str:
    screen = StringIO()
    console = Console(file=screen, force_terminal=terminal, width=100)
    with show_progress(console, "2 workers", num_steps, clock=lambda: 0.0) as progress:
        progress.say("[start] line")
        for step in range(1, num_steps + 1):
            progress.at(step, f"loss {step}.5")
    return screen.getvalue()


def test_without_a_terminal_there_are_a_few_plain_lines() -> None:
    lines = shown(400, terminal=False).splitlines()
    assert lines[0] == "[start] line"
    assert lines[1] == "2 workers  step   1/400  loss 1.5"
    assert lines[-1] == "2 workers  step 400/400  loss 400.5"
    assert len(lines) == 12


def test_fewer_steps_than_lines_give_a_line_each() -> None:
    assert len(shown(3, terminal=False).splitlines()) == 4


def test_a_terminal_sees_the_last_step_however_fast_it_came() -> None:
    screen = shown(400, terminal=True)
    assert "400/400" in screen
    assert "loss 400.5" in screen
    assert "[start] line" in screen


def test_a_terminal_is_not_redrawn_for_every_step() -> None:
    assert "200/400" not in shown(400, terminal=True)
