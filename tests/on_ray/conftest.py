"""Tests on real Ray clusters. They take minutes, and are skipped where Ray is not installed."""

import sys
from pathlib import Path

import pytest
from ray_clusters import HAS_RAY

sys.path.append(str(Path(__file__).parents[1] / "recovery"))  # disturbed runs are watched as those of one host are

collect_ignore_glob = [] if HAS_RAY else ["test_train*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Nodes start in tens of seconds on a small machine."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(600))
