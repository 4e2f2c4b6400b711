"""The script that engines run in these tests, and what is read from its runs."""

import time
from pathlib import Path

SCRIPT = Path(__file__).parent / "engine_script.py"


def digest_in(output: str) -> str:
    """The digest that a run printed at its last step."""
    found = [line.split()[-1] for line in output.splitlines() if "step 48 digest " in line]
    assert len(found) == 1, output
    return found[0]


def await_file(path: Path, limit_s: float = 120.0) -> None:
    """A run has come to where it writes this file."""
    until_s = time.monotonic() + limit_s
    while not path.exists():
        assert time.monotonic() < until_s, f"{path.name} did not come"
        time.sleep(0.05)
