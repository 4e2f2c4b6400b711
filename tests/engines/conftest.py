"""What the script that engines run comes to on one worker, and when these tests are run."""

import subprocess
import sys
from pathlib import Path

import pytest
from engine_runs import SCRIPT, digest_in
from machines import worker_environment


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Before those are left out that have not the mark which the command line asks for."""
    is_asked_for = "engines" in config.option.markexpr
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.engines)
            item.add_marker(pytest.mark.timeout(400))
            if not is_asked_for:
                item.add_marker(pytest.mark.skip(reason="engines are started by make test-engines"))


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
