"""Whether this worker founds the run or joins it, and where. See Note [Found or join] in roster/roster.py."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from lockstep.elastic.endpoint import Endpoint
from lockstep.elastic.founders import MemberDirectory, known_to_launcher, look_at, open_endpoint
from lockstep.elastic.roster import Roster, RosterHome, open_home
from lockstep.elastic.roster.roster import SECRET, Search
from lockstep.elastic.store import Secret
from lockstep.errors import BadEnvironment
from lockstep.launch.channels.status import StatusReader
from lockstep.settings.environment import make_secret
from lockstep.settings.environments.place import LaunchPlace
from lockstep.settings.environments.roster import ROSTER


@dataclass(frozen=True)
class Entrance:
    """How this worker comes in. `directory` is where it finds the members that it joins; None: it founds the run.

    `place` is complete with the run's secret. `endpoint` is this worker's, if it had to be open to decide that.
    """

    place: LaunchPlace
    roster: Roster | None = None
    directory: MemberDirectory | None = None
    endpoint: Endpoint | None = None

    @property
    def has_witness(self) -> bool:
        """See Note [Witness] in roster/roster.py."""
        return self.roster is not None and self.roster.is_witness

    def open_endpoint(self, *, fresh: bool = False) -> Endpoint:
        """This worker's endpoint, where the workers of the run can reach it."""
        if self.endpoint is not None:
            return self.endpoint
        return open_endpoint(self.place, fresh=fresh, port=0 if self.roster is None else self.roster.endpoint_port)


def find_entrance(place: LaunchPlace, page: StatusReader | None, run: int, note: Callable[[str], None]) -> Entrance:
    """Looks for members that live, where a launcher or a roster knows them. `run` counts the runs of the script.

    Raises RunIsOver. The roster is the caller's to close.
    """
    if place.endpoints:
        return Entrance(place, directory=_directory(place, known_to_launcher(place, page)))
    if not place.roster:
        return Entrance(place)
    if place.launcher == "torchrun":
        raise BadEnvironment(
            f"{ROSTER} has no use under torchrun, whose agent ends all workers when one is lost: unset it, or "
            "start the workers by something else"
        )
    home = open_home(place.roster, place.secret)
    place = replace(place, secret=place.secret or _kept_secret(home))
    roster = Roster(home, place.roster, note, "" if run == 0 else f"run-{run}/")
    try:
        return _by_roster(place, roster)
    except BaseException:
        roster.close()
        raise


def _by_roster(place: LaunchPlace, roster: Roster) -> Entrance:
    search = Search(roster, partial(look_at, secret=Secret(place.secret)))
    directory = _directory(place, lambda: roster.members().addresses)
    if search.living():
        return Entrance(place, roster, directory)
    if place.port:  # the launcher has said who founds with this worker, and where they meet
        return Entrance(place, roster)
    endpoint = open_endpoint(place, port=roster.endpoint_port)
    try:
        if search.found_or_wait(endpoint.member.uid, endpoint.member.address):
            return Entrance(place, roster, endpoint=endpoint)
    except BaseException:
        endpoint.close()
        raise
    endpoint.become_newcomer()
    return Entrance(place, roster, directory, endpoint)


def _directory(place: LaunchPlace, addresses: Callable[[], Iterable[str]]) -> MemberDirectory:
    slot = place.world.rank if place.slot is None else place.slot
    return MemberDirectory(slot, Secret(place.secret), addresses)


def _kept_secret(home: RosterHome) -> bytes:
    """The first worker makes one where only workers of the same user can read it."""
    return home.put_first(SECRET, make_secret()).encode() if home.is_private else b""
