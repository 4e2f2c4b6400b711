"""`run.checkpoints(...)`: goes on from the right checkpoint, and saves from then on."""

import time
from collections.abc import Callable

from lockstep.settings.options import Settings
from lockstep.state.checkpoints.checkpoints import Checkpoints, Who
from lockstep.state.checkpoints.moments import Saving
from lockstep.state.checkpoints.options import CheckpointPlan
from lockstep.state.checkpoints.selection import obtain
from lockstep.state.run_state import Parts, check, told_elsewhere
from lockstep.wire import Agreement, Proposal, Wire


def begin(
    plan: CheckpointPlan,
    parts: Parts,
    settings: Settings,
    wire: Wire,
    who: Who,
    clock: Callable[[], float] = time.monotonic,
) -> Saving:
    """Collective. The run stands where the chosen checkpoint was taken, or where it stood; afterwards it is saved.

    Nothing is touched unless the checkpoint is good and fits. A state that cannot be saved is refused now, not when
    the first checkpoint is due.
    """
    Agreement(wire.transport, Proposal({"operation": "run.checkpoints", **plan.facts})).check()
    parts.capture()
    obtained = obtain(plan, wire.transport, who.say)
    if obtained is not None:
        check(parts, obtained.snapshot, obtained.path, settings)
        parts.install(obtained.snapshot, wire.world.size)
        who.say(f"going on from {obtained.path.name} in {obtained.path.parent}")
        if elsewhere := told_elsewhere(obtained.snapshot, settings):
            who.say(elsewhere)
    every = plan.every
    checkpoints = Checkpoints(plan.folder, every.steps, every.minutes, plan.keep, who=who, clock=clock)
    checkpoints.starts_at(parts.stepping.step)
    return Saving(checkpoints, parts, who.say)
