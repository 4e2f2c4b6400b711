"""A roster: where living members of a run can be found by workers on other hosts, and whether the run is over.

`roster` knows what stands in one; `home` is the small interface to where it is kept, with a file
for each kind: `folder`, `tcp`, `dns`, `ray_actor`.
"""

from lockstep.elastic.roster.home import RosterHome, open_home
from lockstep.elastic.roster.roster import Roster, RunIsOver

__all__ = ["Roster", "RosterHome", "RunIsOver", "open_home"]
