"""What lanes may not do or keep: any worker computes them, and each only its own.

- `body`            what the body of a loop over `run.steps` may not do
- `sums`            what a loop over `run.lanes` adds up that nobody totals
- `gradient_hooks`  hooks that change the gradient of each lane by more than a factor
- `state`           what the code of a lane keeps for the next lane; `notes`: what a user is told of it

`state` looks at the script's objects (`marks`), and asks the source what it does with them:

- `detours`         several statements that together go on from what they have left
- `tables`          rows that a lane writes by an index
- `draws`           what is drawn at random once and kept, and generators that are set in each lane
- `dependence`      whether what lanes train on depends on it
"""

from lockstep.script.lanes.body import IN_LANES, refused_in_body
from lockstep.script.lanes.gradient_hooks import hooks_that_are_not_linear
from lockstep.script.lanes.marks import KeptPlace
from lockstep.script.lanes.notes import listed, notes_on
from lockstep.script.lanes.state import LaneState
from lockstep.script.lanes.sums import spoilt_by_a_loss, untotalled

__all__ = [
    "IN_LANES",
    "KeptPlace",
    "LaneState",
    "hooks_that_are_not_linear",
    "listed",
    "notes_on",
    "refused_in_body",
    "spoilt_by_a_loss",
    "untotalled",
]
