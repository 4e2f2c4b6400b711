"""The state that newcomers are given, and where in the script they stand when they take part.

See Note [Newcomers] in formation.py.
"""

from pathlib import Path

from lockstep.chance import Generators
from lockstep.data import GlobalBatch
from lockstep.determinism.hardware import recorded, refuse_difference
from lockstep.state.run_state import GRADIENT, RunState, check_fits
from lockstep.state.snapshot import Snapshot


class Handoff:
    """Both sides of it: what a member gives, and what a newcomer takes."""

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._given: Generators | None = None
        self._before_body: Generators | None = None

    def body_begins(self, may_be_joined: bool) -> None:
        """A loader is about to hand out a batch: what follows in the user's loop belongs to the next step.

        So this is where a newcomer must stand, with its generators, when it takes part in that step.
        """
        self.arrive()
        self._before_body = Generators.now() if may_be_joined else None

    @property
    def is_on_its_way(self) -> bool:
        """Whether this worker was given the state, and its script has not come to its first batch yet."""
        return self._given is not None

    def arrive(self) -> None:
        """What a newcomer's script drew on the way to its first batch does not count."""
        if self._given is not None:
            self._given.restore()
            self._given = None

    def state(self, batch: GlobalBatch | None, turns: int) -> Snapshot:
        """The state before the step under way, whose `batch` is to be handed out again by the newcomer's loader."""
        now = Generators.now()
        (self._before_body or now).restore()
        snapshot = self._run.capture()
        now.restore()
        snapshot.state["epoch"] = self._run.progress.epoch
        # What the newcomer does next is compared with what the members do: it needs no rhythm from before.
        snapshot.state["script"] |= {"turns": turns, "rhythm": []}
        if batch is not None and batch.loader is not None and batch.position is not None:
            snapshot.state["loaders"][str(batch.loader)] = [batch.position.epoch, batch.position.step]
            snapshot.state["drawn"][str(batch.loader)] = batch.drawn
        gradients = self._run.models.gradients()
        snapshot.tensors.update({f"{GRADIENT}{name}": gradient for name, gradient in gradients.items()})
        return snapshot

    def take(self, snapshot: Snapshot, rank: int) -> None:
        """This worker, a newcomer, stands where the members do."""
        check_fits(self._run.models, snapshot, Path("of the run under way"))
        here = recorded(self._run.device)
        refuse_difference(snapshot.state["hardware"], here, rank)
        self._run.install(snapshot)
        self._given = Generators.now()
