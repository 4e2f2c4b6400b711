"""The script that engines run in these tests, and what is read from its runs."""

import time
from collections.abc import Callable
from pathlib import Path

SCRIPT = Path(__file__).parent / "engine_script.py"


def digest_in(output: str) -> str:
    """The digest that a run printed at its last step."""
    found = [line.split()[-1] for line in output.splitlines() if "step 48 digest " in line]
    assert len(found) == 1, output
    return found[0]


def assert_resumed(found: tuple[int, str], calm: str, *steps: str) -> None:
    """A run, of which `found` are the exit code and the output, has begun at one of these steps and come to its end.

    Without any, at a step after the first.
    """
    code, output = found
    assert (code, digest_in(output)) == (0, calm), output
    if steps:
        assert any(f"begins at step {step}" in output for step in steps), output
    else:
        assert "begins at step 0" not in output


def await_file(path: Path, limit_s: float = 200.0) -> None:
    """A run has come to where it writes this file."""
    await_that(path.exists, lambda: f"{path.name} did not come", limit_s)


def await_that(holds: Callable[[], object], otherwise: Callable[[], str], limit_s: float = 120.0) -> None:
    """Files and other processes can only be looked at again and again."""
    until_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < until_s, otherwise()
        time.sleep(0.05)
