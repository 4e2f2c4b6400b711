"""One shell for all tests of the examples."""

import pytest
from example_shell import Shell


@pytest.fixture(scope="session")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    return Shell(tmp_path_factory.mktemp("examples"))
