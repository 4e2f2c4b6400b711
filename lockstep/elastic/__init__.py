"""Performs what membership decides: keeps this worker's door, meets the others at one, opens the next generation.

`door` is the store that each worker keeps, `guest` a visit at another's, `forming` opens the wire of a generation,
`recovery` runs the state machine of `lockstep.elastic.membership` with them.
"""

from lockstep.elastic.endpoint import Door
from lockstep.elastic.recovery import Recovery

__all__ = ["Door", "Recovery"]
