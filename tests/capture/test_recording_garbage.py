"""Nothing is collected while a graph is recorded. That recordings are made so is seen on a GPU (tests/gpu)."""

import gc
from collections.abc import Iterator

import pytest

from lockstep.capture.graph import without_collecting


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    yield
    gc.enable()


class Cycle:
    """Garbage that only the collector finds."""

    def __init__(self, gone: list[str]) -> None:
        self._itself, self._gone = self, gone

    def __del__(self) -> None:
        self._gone.append("gone")


def test_garbage_is_let_go_of_after_the_recording_not_during_it() -> None:
    gone: list[str] = []
    with without_collecting():
        Cycle(gone)
        for _ in range(100_000):  # many times what makes Python collect
            [].append([])
        assert gone == []
    gc.collect()
    assert gone == ["gone"]


@pytest.mark.parametrize("collects", [True, False])
def test_afterwards_python_collects_as_it_did_before_also_when_the_recording_broke(collects: bool) -> None:
    (gc.enable if collects else gc.disable)()
    with pytest.raises(RuntimeError, match="broken"), without_collecting():
        raise RuntimeError("broken")
    assert gc.isenabled() is collects
