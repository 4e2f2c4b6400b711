"""What stands in a roster, and the rule by which workers found a run or join it.

# Note [Found or join]
# A worker that finds a living member joins; else it founds. Workers that know of one another (RANK and WORLD_SIZE)
# found together where they meet. Others found alone: the first to write its name under the next number of `founder`
# does, the others wait for it, and join. A founder that is found dead has its number used up.

# Note [Signs of life]
# The members of the latest generation stand under `members`, with a count that the coordinator goes on counting. A
# worker that finds nobody at these addresses knows that all are dead where their hosts refuse the connection. Where
# hosts do not answer at all they may be gone, or only unreachable from here. So it watches the count: if that moves,
# the members live, and this worker says what it cannot reach; if it stands still for LEASE_S, they are gone. No clocks
# are compared. A coordinator that cannot write its sign of life goes on, and says so.

# Note [Witness]
# Of two equal halves of a generation, the one that writes its members under the generation's name first goes on. The
# other one reads that, and ends; so does one that cannot ask. It is asked in no other case: a larger half needs nobody.
"""

import itertools
import json
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.elastic.roster.home import RosterHome
from lockstep.errors import BadEnvironment, LockstepError

BEAT_S = 2.0
LEASE_S = 20.0
"""How long members that cannot be reached may give no sign of life. See Note [Signs of life]."""
SAY_S = 4.0
"""After how long a worker says that it waits for a sign of life."""
LOOK_S = 0.2
PATIENCE_S = 8.0
"""How soon a worker that cannot reach living members gives up."""

HOME_S = 8.0
"""How long the home may take to answer a member that waits for it: a folder on a host that is gone never does."""
CLOSE_S = 30.0
"""How long the thread of the signs of life may take to end: longer than any home but a folder takes to give up."""

MEMBERS, OVER, FOUNDER, SECRET, HALF = "members", "over", "founder", "secret", "half"


class RunIsOver(LockstepError):  # noqa: N818
    """The run of a roster has come to its end before this worker came."""


@dataclass(frozen=True)
class MemberRecord:
    """The members of the latest generation that was written down, by the addresses of their endpoints.

    `founding` counts how often the run was founded: generations are counted from 1 each time.
    """

    founding: int
    generation: int
    beat: int
    addresses: tuple[str, ...]

    @property
    def age(self) -> tuple[int, int]:
        """Larger for later members."""
        return self.founding, self.generation

    @classmethod
    def from_json(cls, text: str) -> "MemberRecord":
        found = json.loads(text)
        return cls(found["founding"], found["generation"], found["beat"], tuple(found["addresses"]))

    def to_json(self) -> str:
        return json.dumps(vars(self))


NOBODY = MemberRecord(0, 0, 0, ())


class Roster:
    """One worker's view of a roster. One owner, who calls `close`. `note` is called with what people should know."""

    def __init__(self, home: RosterHome, name: str, note: Callable[[str], None], prefix: str = "") -> None:
        """Of several runs of one script, each has a `prefix` of its own."""
        self.name = name
        self.founding = 1
        """Which founding of the run this worker takes part in."""
        self.superseded_by = 0
        """A later founding that has written members down, although this one lives; 0 if there is none."""
        self.note = note
        self._home, self._prefix = home, prefix
        self._record: MemberRecord | None = None
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._is_closed = False
        self._beats: threading.Thread | None = None

    @property
    def endpoint_port(self) -> int:
        """Where members must listen; 0: anywhere."""
        return self._home.endpoint_port

    # -- finding members ------------------------------------------------------------------------------------

    def members(self) -> MemberRecord:
        """Those who were written down last. Raises RunIsOver."""
        entries = self._entries()
        if OVER in entries:
            raise RunIsOver(
                f"the run of the roster {self.name} is over: {entries[OVER]}. To train anew, name another roster or "
                "remove this one"
            )
        return MemberRecord.from_json(entries[MEMBERS]) if MEMBERS in entries else NOBODY

    def elect(self, name: str, text: str) -> str:
        """The text that was written first under this name: of all who ask, one has its own. May raise OSError."""
        return self._home.put_first(self._prefix + name, text)

    @property
    def is_witness(self) -> bool:
        """Whether it can decide which of two halves goes on."""
        return self._home.is_written

    def wins(self, generation: str, members: Sequence[str]) -> bool:
        """Whether these members are the half of the generation that asks first. May raise OSError.

        See Note [Witness].
        """
        text = json.dumps(sorted(members))
        return self._elect_in_time(f"{HALF}/{generation}", text) == text

    def _elect_in_time(self, name: str, text: str) -> str:
        """As `elect`, but not for longer than HOME_S. May raise OSError."""
        found = queue.SimpleQueue[str | OSError]()

        def ask() -> None:
            try:
                found.put(self.elect(name, text))
            except OSError as error:
                found.put(error)

        threading.Thread(target=ask, name="lockstep-witness", daemon=True).start()
        try:
            first = found.get(timeout=HOME_S)
        except queue.Empty:
            raise TimeoutError(f"it does not answer within {HOME_S:g} s") from None
        if isinstance(first, OSError):
            raise first
        return first

    def _entries(self) -> dict[str, str]:
        try:
            return self._own_entries()
        except OSError as error:
            raise BadEnvironment(f"the roster {self.name} cannot be read: {error}") from error

    def _own_entries(self) -> dict[str, str]:
        found = self._home.entries().items()
        return {key.removeprefix(self._prefix): text for key, text in found if key.startswith(self._prefix)}

    # -- being a member ---------------------------------------------------------------------------------------

    def publish(self, generation: int, addresses: Sequence[str]) -> None:
        """This worker coordinates: the members are these, and it gives signs of life for them."""
        with self._lock:
            self._record = MemberRecord(self.founding, generation, 0, tuple(addresses))
        if self._beats is None:
            self._beats = threading.Thread(target=self._beat, name="lockstep-roster", daemon=True)
            self._beats.start()
        self._wake.set()

    def rest(self) -> None:
        """Another worker coordinates."""
        with self._lock:
            self._record = None

    def end(self, text: str) -> None:
        """The run is over: a worker that comes later has nothing to do."""
        self.rest()
        try:
            self._elect_in_time(OVER, text)
        except OSError as error:
            self.note(f"the roster {self.name} does not know that the run is over: {error}")

    def close(self) -> None:
        self._is_closed = True
        self._wake.set()
        if self._beats is not None:
            self._beats.join(CLOSE_S)
        if self._beats is None or not self._beats.is_alive():  # else it hangs in the home, and ends with this process
            self._home.close()

    def _beat(self) -> None:
        """See Note [Signs of life]."""
        has_failed = False
        while not self._is_closed:
            self._wake.wait(BEAT_S)
            self._wake.clear()
            try:
                self._write()
                has_failed = False
            except (OSError, ValueError) as error:
                if not has_failed:
                    self.note(
                        f"the roster {self.name} cannot be written: {error}. Training goes on; nobody finds it to join"
                    )
                has_failed = True

    def _write(self) -> None:
        """The lock is not held while the home is asked: a member that publishes or rests would wait for the home."""
        record = self._record
        if record is None or self._is_closed:
            return
        entries = self._own_entries()
        written = MemberRecord.from_json(entries[MEMBERS]) if MEMBERS in entries else NOBODY
        if written.founding > record.founding:
            self.superseded_by = written.founding
        if written.age > record.age or OVER in entries:
            return  # others have gone on since
        counted = replace(record, beat=max(record.beat, written.beat) + 1)
        with self._lock:
            if self._record is not record:
                return  # the next turn writes what was published since
            self._record = counted
        self._home.put(self._prefix + MEMBERS, counted.to_json())


@dataclass(frozen=True)
class Sighting:
    """What a look at the members found: who answers as one, and why others do not although they may live."""

    alive: tuple[str, ...]
    unreachable: Mapping[str, str]


@dataclass
class Search:
    """How a worker finds living members of a run, or learns that there are none.

    `look` probes addresses. See Note [Found or join] and Note [Signs of life].
    """

    roster: Roster
    look: Callable[[Iterable[str]], Sighting]
    clock: Callable[[], float] = time.monotonic
    pause: Callable[[float], None] = time.sleep

    def living(self) -> tuple[str, ...]:
        """The addresses of living members; none if there are none. Raises RunIsOver, or BadEnvironment where members
        live that cannot be reached from here."""
        first = record = self.roster.members()
        began_s, moved_s, has_said = self.clock(), None, False
        while True:
            sighting = self.look(record.addresses)
            if sighting.alive or not sighting.unreachable:
                return self._settled(record, sighting.alive)
            if (record.age, record.beat) != (first.age, first.beat):
                moved_s = self.clock() if moved_s is None else moved_s
            waited_s = self.clock() - began_s
            if waited_s > SAY_S and not has_said:
                has_said = True
                self.roster.note(
                    f"the members that stand in the roster {self.roster.name} do not answer: "
                    f"{', '.join(sighting.unreachable)}. If they give no sign of life for {LEASE_S:g} s, they are gone"
                )
            if moved_s is not None and waited_s > PATIENCE_S:
                raise BadEnvironment(self._unreachable(sighting))
            if moved_s is None and waited_s > LEASE_S:
                return self._settled(record, ())
            self.pause(LOOK_S)
            record = self.roster.members()

    def _settled(self, record: MemberRecord, alive: tuple[str, ...]) -> tuple[str, ...]:
        """A worker that finds nobody alive takes part in the next founding."""
        self.roster.founding = record.founding if alive else record.founding + 1
        return alive

    def _unreachable(self, sighting: Sighting) -> str:
        found = "; ".join(f"{address} {why}" for address, why in sighting.unreachable.items())
        return (
            f"the run of the roster {self.roster.name} is under way, but none of its members can be joined from here: "
            f"{found}. Is a port closed by a firewall, or does a host give an address that others cannot use "
            "(LOCKSTEP_ADDRESS says at which one others reach a host), or has this worker another secret "
            "(LOCKSTEP_SECRET)?"
        )

    def found_or_wait(self, uid: str, address: str) -> bool:
        """Whether the worker at `address` founds the run; if not, another does, and can be joined now."""
        text = json.dumps({"uid": uid, "address": address})
        for number in itertools.count():
            try:
                first: dict[str, Any] = json.loads(self.roster.elect(f"{FOUNDER}/{number}", text))
            except OSError as error:
                raise BadEnvironment(f"the roster {self.roster.name} cannot be written: {error}") from error
            if first["uid"] == uid:
                return True
            if self._await_founder(first["address"]):
                return False
        raise AssertionError("there is always a next number")

    def _await_founder(self, address: str) -> bool:
        """Whether there are living members; waits as long as the founder lives, or may live."""
        began_s = self.clock()
        while not self.living():
            sighting = self.look([address])
            is_gone = not sighting.unreachable or self.clock() - began_s > LEASE_S
            if not sighting.alive and is_gone:
                return False
            self.pause(LOOK_S)
        return True
