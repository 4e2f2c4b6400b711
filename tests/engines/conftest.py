"""The script that engines run, and what it comes to on one worker."""

import subprocess
import sys
from pathlib import Path

import pytest
from machines import worker_environment

SCRIPT = Path(__file__).parent / "engine_script.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.timeout(400))


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of one worker to which nothing happened."""
    folder = tmp_path_factory.mktemp("calm")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder)],
        env=worker_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    return digest_in(done.stdout)


def digest_in(output: str) -> str:
    """The digest that a run printed at its last step."""
    found = [line.split()[-1] for line in output.splitlines() if "step 48 digest " in line]
    assert len(found) == 1, output
    return found[0]
