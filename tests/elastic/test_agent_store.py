"""Workers of torchrun's agents meet those of their own start, whatever earlier ones have left in the store."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from lockstep.elastic.agent_store import meet
from lockstep.errors import BadEnvironment

LIMIT_S = 30.0


@dataclass
class Connection:
    """One worker's connection to a store that outlives it; after `end` it dies at its next use of it."""

    kept: dict[str, str]
    is_ended: bool = False

    def set(self, key: str, value: str) -> None:
        self._use()[key] = value

    def get(self, key: str) -> bytes:
        return self._use()[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self._use() for key in keys)

    def _use(self) -> dict[str, str]:
        if self.is_ended:
            raise ConnectionError("this worker was ended")
        return self.kept


Started = tuple["Future[str]", Connection]


def started(pool: ThreadPoolExecutor, kept: dict[str, str], rank: int, size: int) -> Started:
    connection = Connection(kept)
    return pool.submit(meet, connection, rank, size, LIMIT_S), connection


def end(worker: Started) -> None:
    worker[1].is_ended = True
    with pytest.raises(ConnectionError):
        worker[0].result(LIMIT_S)


def test_workers_of_one_start_agree_on_a_name_and_those_of_the_next_on_another() -> None:
    kept: dict[str, str] = {}
    names = []
    with ThreadPoolExecutor(3) as pool:
        for _ in range(2):
            workers = [started(pool, kept, rank, 3)[0] for rank in range(3)]
            names.append({worker.result() for worker in workers})
    assert [len(found) for found in names] == [1, 1]
    assert names[0] != names[1]


def test_workers_that_come_before_their_worker_0_wait_for_its_meeting() -> None:
    kept: dict[str, str] = {}
    with ThreadPoolExecutor(3) as pool:
        before = {started(pool, kept, rank, 3)[0] for rank in range(3)}
        (old,) = {worker.result() for worker in before}
        registered = dict(kept)
        others = [started(pool, kept, rank, 3)[0] for rank in (1, 2)]
        while sum(kept[key] != registered[key] for key in registered) < 2:  # both have looked at the old meeting
            time.sleep(0.01)
        found = {worker.result() for worker in (started(pool, kept, 0, 3)[0], *others)}
    assert len(found) == 1
    assert found != {old}


@pytest.mark.parametrize("gone", [0, 1])
def test_a_worker_that_was_ended_on_the_way_is_not_taken_for_its_successor(gone: int) -> None:
    kept: dict[str, str] = {}
    with ThreadPoolExecutor(8) as pool:
        meet(Connection(kept), 0, 1, LIMIT_S)  # an earlier start, of another size
        early = started(pool, kept, gone, 3)
        end(early)
        workers = [started(pool, kept, rank, 3)[0] for rank in (1, 2, 0)]
        assert len({worker.result(LIMIT_S) for worker in workers}) == 1


def test_a_meeting_that_a_dying_worker_0_has_opened_last_holds_nobody_up() -> None:
    kept: dict[str, str] = {}
    with ThreadPoolExecutor(8) as pool:
        first = started(pool, kept, 0, 2)
        dying = started(pool, kept, 0, 2)  # of a start before; its agent has not ended it yet
        end(dying)
        other = started(pool, kept, 1, 2)
        assert first[0].result(LIMIT_S) == other[0].result(LIMIT_S)


def test_a_worker_whom_nobody_joins_says_so() -> None:
    with pytest.raises(BadEnvironment, match="worker 1 of 2 has not met the others at the store of torchrun's agent"):
        meet(Connection({}), 1, 2, 0.3)
