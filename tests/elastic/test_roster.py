"""Rosters: their homes, who founds, who joins, and what a worker says that may do neither."""

import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from lockstep.elastic.roster import Roster, RosterHome, RunIsOver, open_home, roster
from lockstep.elastic.roster.roster import MEMBERS, MemberRecord, Search, Sighting
from lockstep.elastic.roster.tcp import RosterServer
from lockstep.errors import BadEnvironment
from lockstep.settings.environment import find_place

SECRET = b"of this run"
Open = Callable[[], RosterHome]


@pytest.fixture(params=["folder", "tcp"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Each call opens the same home once more, as another worker would."""
    if request.param == "folder":
        yield lambda: open_home(str(tmp_path / "roster"), SECRET)
        return
    with closing(RosterServer("127.0.0.1", 0, SECRET)) as server:
        yield lambda: open_home(f"tcp://127.0.0.1:{server.port}", SECRET)


# -- homes ------------------------------------------------------------------------------------------------------------


def test_what_one_worker_writes_the_others_read(opened: Open) -> None:
    with closing(opened()) as one, closing(opened()) as two:
        assert two.entries() == {}
        one.put("members", "first")
        one.put("run-1/members", "second")
        assert two.entries() == {"members": "first", "run-1/members": "second"}
        two.put("members", "third")
        assert one.entries() == {"members": "third", "run-1/members": "second"}


def test_of_many_who_write_first_one_does(opened: Open) -> None:
    found: list[str] = []

    def write(number: int) -> None:
        with closing(opened()) as home:
            found.append(home.put_first("founder/0", f"worker {number}"))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12
    assert len(set(found)) == 1


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(BadEnvironment, match="taken"):
        open_home(str(tmp_path / "taken" / "roster"), SECRET)


def test_nobody_else_can_read_a_roster_in_a_folder(tmp_path: Path) -> None:
    open_home(str(tmp_path / "roster"), SECRET).put("secret", "of this run")
    assert (tmp_path / "roster").stat().st_mode & 0o077 == 0
    assert (tmp_path / "roster" / "secret").stat().st_mode & 0o077 == 0


def test_a_roster_that_nobody_keeps_is_named() -> None:
    with (
        closing(RosterServer("127.0.0.1", 0, SECRET)) as server,
        pytest.raises(BadEnvironment, match="LOCKSTEP_SECRET"),
    ):
        open_home(f"tcp://127.0.0.1:{server.port}", b"of another run")
    with pytest.raises(BadEnvironment, match="lockstep roster"):
        open_home(f"tcp://127.0.0.1:{server.port}", SECRET)


@pytest.mark.parametrize("url", ["ftp://somewhere", "tcp://host", "tcp://host:port", "dns://name", "dns://:1"])
def test_a_name_that_is_no_roster_is_an_error_that_says_what_is_one(url: str) -> None:
    with pytest.raises(BadEnvironment, match=r"LOCKSTEP_ROSTER=.* cannot be used"):
        open_home(url, SECRET)


def test_a_store_that_was_restarted_is_reached_again() -> None:
    server = RosterServer("127.0.0.1", 0, SECRET)
    with closing(open_home(f"tcp://127.0.0.1:{server.port}", SECRET)) as home:
        home.put("a", "1")
        server.close()
        with pytest.raises(OSError, match="does not answer"):
            home.put("a", "2")
        with closing(RosterServer("127.0.0.1", server.port, SECRET)):
            home.put("a", "3")
            assert home.entries() == {"a": "3"}


def test_names_are_asked_at_their_port() -> None:
    home = open_home("dns://localhost:4711", SECRET)
    assert json.loads(home.entries()[MEMBERS])["addresses"] == ["127.0.0.1:4711"]
    assert home.endpoint_port == 4711
    assert json.loads(open_home("dns://nobody.invalid:4711", SECRET).entries()[MEMBERS])["addresses"] == []


# -- members ----------------------------------------------------------------------------------------------------------


class Clock:
    """Time passes only where somebody waits; `at` happens then."""

    def __init__(self, at: dict[float, Callable[[], None]] | None = None) -> None:
        self.now_s, self._at = 0.0, at or {}

    def __call__(self) -> float:
        return self.now_s

    def pause(self, seconds: float) -> None:
        self.now_s += seconds
        for moment in [moment for moment in self._at if moment <= self.now_s]:
            self._at.pop(moment)()


class Worker:
    """A view of a roster, and which addresses answer or do not."""

    def __init__(self, opened: Open) -> None:
        self.notes: list[str] = []
        self.roster = Roster(opened(), "the roster", self.notes.append)
        self.alive: set[str] = set()
        self.silent: set[str] = set()

    def search(self, clock: Clock) -> Search:
        return Search(self.roster, self.look, clock, clock.pause)

    def look(self, addresses: Iterable[str]) -> Sighting:
        listed = list(addresses)
        return Sighting(
            tuple(address for address in listed if address in self.alive),
            {address: "does not answer" for address in listed if address in self.silent},
        )

    def close(self) -> None:
        self.roster.close()


@pytest.fixture
def worker(opened: Open) -> Iterator[Worker]:
    with closing(Worker(opened)) as worker:
        yield worker


def write(opened: Open, generation: int, beat: int, *addresses: str, founding: int = 1) -> None:
    with closing(opened()) as home:
        home.put(MEMBERS, MemberRecord(founding, generation, beat, addresses).to_json())


def await_members(worker: Worker, is_right: Callable[[MemberRecord], bool]) -> MemberRecord:
    done = threading.Event()
    for _ in range(500):
        record = worker.roster.members()
        if is_right(record):
            return record
        done.wait(0.02)
    raise AssertionError(f"the record stays {record}")


def test_nobody_is_there_at_first(worker: Worker) -> None:
    assert worker.search(Clock()).living() == ()


def test_a_living_member_is_found_at_once(worker: Worker, opened: Open) -> None:
    write(opened, 3, 8, "a:1", "b:1", "c:1")
    worker.alive, worker.silent = {"b:1"}, {"c:1"}
    clock = Clock()
    assert worker.search(clock).living() == ("b:1",)
    assert clock.now_s == 0


def test_members_whose_hosts_refuse_are_dead_at_once(worker: Worker, opened: Open) -> None:
    write(opened, 3, 8, "a:1", "b:1")
    clock = Clock()
    assert worker.search(clock).living() == ()
    assert clock.now_s == 0


def test_members_that_give_no_sign_of_life_are_gone_after_a_while(worker: Worker, opened: Open) -> None:
    write(opened, 3, 8, "a:1")
    worker.silent = {"a:1"}
    clock = Clock()
    assert worker.search(clock).living() == ()
    assert roster.LEASE_S < clock.now_s < 2 * roster.LEASE_S
    assert [note for note in worker.notes if "a:1" in note and "sign of life" in note] == worker.notes


def test_of_two_halves_the_one_that_asks_first_wins_and_wins_again(opened: Open) -> None:
    with closing(Worker(opened)) as one, closing(Worker(opened)) as two:
        assert two.roster.wins("3-w0", ["d", "c"])
        assert not one.roster.wins("3-w0", ["a", "b"])
        assert two.roster.wins("3-w0", ["c", "d"])
        assert one.roster.wins("4-w0", ["a", "b"])


def test_a_witness_that_does_not_answer_is_not_waited_for_long(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "HOME_S", 0.05)
    over = threading.Event()
    with closing(Worker(opened)) as worker:
        monkeypatch.setattr(worker.roster, "elect", lambda name, text: str(over.wait(5.0)))
        with pytest.raises(TimeoutError, match="does not answer"):
            worker.roster.wins("3-w0", ["a"])
        over.set()
        for thread in threading.enumerate():
            if thread.name == "lockstep-witness":
                thread.join()


def test_members_that_live_and_cannot_be_reached_are_named_within_ten_seconds(worker: Worker, opened: Open) -> None:
    write(opened, 3, 8, "a:1")
    worker.silent = {"a:1"}
    clock = Clock({2.0: lambda: write(opened, 3, 9, "a:1")})
    with pytest.raises(BadEnvironment, match=r"a:1.*firewall.*LOCKSTEP_ADDRESS"):
        worker.search(clock).living()
    assert clock.now_s < 10


def test_a_member_that_can_be_reached_after_all_is_joined(worker: Worker, opened: Open) -> None:
    write(opened, 3, 8, "a:1")
    worker.silent = {"a:1"}
    clock = Clock({2.0: lambda: write(opened, 4, 1, "a:1", "b:1"), 3.0: lambda: worker.alive.add("b:1")})
    assert worker.search(clock).living() == ("b:1",)


def test_the_coordinator_counts_on_and_another_one_takes_over(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "BEAT_S", 0.02)
    with closing(Worker(opened)) as one, closing(Worker(opened)) as two:
        one.roster.publish(1, ["a:1"])
        await_members(two, lambda record: record.beat > 3)
        two.roster.publish(2, ["a:1", "b:1"])
        await_members(one, lambda record: record.generation == 2)
        one.roster.rest()
        record = await_members(one, lambda record: record.generation == 2 and record.beat > 3)
        assert record.addresses == ("a:1", "b:1")


def test_one_who_was_left_behind_does_not_write_over_those_who_went_on(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster, "BEAT_S", 0.02)
    write(opened, 5, 1, "b:1")
    with closing(Worker(opened)) as behind:
        behind.roster.publish(4, ["a:1"])
        threading.Event().wait(0.3)
        assert behind.roster.members() == MemberRecord(1, 5, 1, ("b:1",))


def test_a_run_that_is_founded_anew_counts_generations_from_one_and_those_before_learn_of_it(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster, "BEAT_S", 0.02)
    with closing(Worker(opened)) as before, closing(Worker(opened)) as after:
        before.roster.publish(7, ["a:1"])
        await_members(after, lambda record: record.generation == 7)
        assert after.search(Clock()).living() == ()
        after.roster.publish(1, ["b:1"])
        await_members(after, lambda record: record.addresses == ("b:1",) and record.beat > 13)
        assert before.roster.superseded_by == 2
        assert not after.roster.superseded_by


def test_a_coordinator_that_cannot_write_says_so_once_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster, "BEAT_S", 0.02)
    folder = tmp_path / "roster"
    with closing(Worker(lambda: open_home(str(folder), SECRET))) as worker:
        worker.roster.publish(1, ["a:1"])
        await_members(worker, lambda record: record.generation == 1)
        folder.rename(tmp_path / "elsewhere")
        folder.write_text("in its place")
        for _ in range(500):
            if worker.notes:
                break
            threading.Event().wait(0.02)
        threading.Event().wait(0.2)
        assert len(worker.notes) == 1
        assert "Training goes on" in worker.notes[0]


def test_members_that_change_and_end_do_not_wait_for_a_home_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("HOME_S", "CLOSE_S"):
        monkeypatch.setattr(roster, limit, 0.05)
    over = tmp_path / "roster" / "over"
    worker = Worker(lambda: open_home(str(over.parent), SECRET))
    os.mkfifo(over)  # a worker that reads the roster waits for this file's writer
    worker.roster.publish(1, ["a:1"])
    with open(over, "w"):  # opens when the thread of the signs of life reads it, and keeps that waiting
        worker.roster.publish(2, ["a:1", "b:1"])
        worker.roster.end("it ended after step 5")
        worker.close()
    assert worker.notes == [
        "the roster the roster does not know that the run is over: it does not answer within 0.05 s"
    ]
    for thread in threading.enumerate():
        if thread.name in ("lockstep-roster", "lockstep-witness"):
            thread.join()


# -- founding ---------------------------------------------------------------------------------------------------------


def test_one_founds_and_the_other_waits_for_it(opened: Open) -> None:
    with closing(Worker(opened)) as one, closing(Worker(opened)) as two:
        assert one.search(Clock()).found_or_wait("uid one", "a:1")
        two.alive = {"a:1"}
        clock = Clock({5.0: lambda: write(opened, 1, 1, "a:1")})
        assert not two.search(clock).found_or_wait("uid two", "b:1")
        assert clock.now_s >= 5


def test_a_founder_that_died_is_succeeded(opened: Open) -> None:
    with closing(Worker(opened)) as one, closing(Worker(opened)) as two, closing(Worker(opened)) as three:
        assert one.search(Clock()).found_or_wait("uid one", "a:1")
        assert two.search(Clock()).found_or_wait("uid two", "b:1")
        three.alive = {"b:1"}
        clock = Clock({1.0: lambda: write(opened, 1, 1, "b:1")})
        assert not three.search(clock).found_or_wait("uid three", "c:1")


def test_a_run_that_is_over_says_so_and_runs_of_one_script_are_apart(opened: Open) -> None:
    with closing(Worker(opened)) as one:
        one.roster.end("it ended after step 66")
        with pytest.raises(RunIsOver, match="after step 66"):
            one.search(Clock()).living()
        second = Roster(opened(), "the roster", one.notes.append, "run-1/")
        assert second.members().addresses == ()
        second.close()


# -- what the environment says ----------------------------------------------------------------------------------------


def test_a_worker_with_a_roster_may_have_others_on_other_hosts() -> None:
    place = find_place({"LOCKSTEP_ROSTER": "/shared/run", "LOCKSTEP_SLOT": "3"})
    assert (place.roster, place.slot, place.world.size, place.world.on_one_host) == ("/shared/run", 3, 1, False)


def test_a_worker_with_a_roster_and_no_number_is_told_to_have_one() -> None:
    with pytest.raises(BadEnvironment, match="LOCKSTEP_SLOT"):
        find_place({"LOCKSTEP_ROSTER": "/shared/run"})


def test_the_secret_is_read_from_a_file_and_an_empty_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("of this run\n")
    assert find_place({"LOCKSTEP_SECRET_FILE": str(path)}).secret == SECRET
    assert find_place({"LOCKSTEP_SECRET_FILE": str(path), "LOCKSTEP_SECRET": "given"}).secret == b"given"
    path.write_text("\n")
    for bad in (str(path), str(tmp_path / "missing")):
        with pytest.raises(BadEnvironment, match="LOCKSTEP_SECRET_FILE"):
            find_place({"LOCKSTEP_SECRET_FILE": bad})
    assert "of this run" not in repr(find_place({"LOCKSTEP_SECRET": "of this run"}))
