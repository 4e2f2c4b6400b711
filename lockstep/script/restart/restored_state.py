"""Whether a script changes what a snapshot has restored before it trains on, in the middle of a pass.

# Note [What an epoch does at its head]
# `teacher.load_state_dict(model.state_dict())` at the head of an epoch's body, a new last layer, a rate for the epoch
# and `optimizer.zero_grad()` are done again when a run goes on inside the epoch. The snapshot has what came of them,
# and of the batches since. So where the pass that goes on is asked for its next batch, models, the state of optimizers,
# gradients that no update has used, and what is tracked must be as they were restored: the snapshot was taken at that
# place. Where a pass begins, the head is done for the first time. A rate may be set again after that, before each
# update: it is looked at where the first one is made. A tracked object of the script's own, as a mean that begins anew
# in each epoch, may be of no consequence for the training: that it was changed is noted.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lockstep.gradients.fingerprint import fingerprints
from lockstep.script.restart.difference import Difference
from lockstep.state.models import Models

TRACKED = "tracked "
"""Before the names of what was given to run.replicate besides models and optimizers."""
ADVICE = (
    "the run goes on in the middle of an epoch, and what stands at the head of the epoch's body is done again. Do it "
    "at the end of the body, for the next epoch, or go on from a checkpoint that was saved at the end of an epoch"
)


def trains(tracked: Any) -> bool:
    """Whether the training depends on an object that was given to run.replicate besides models and optimizers."""
    return isinstance(tracked, (LRScheduler, ReduceLROnPlateau, GradScaler, nn.Module))


def _changed_state(name: str, is_wrong: bool) -> Difference:
    """What is not as it was restored; wrong if the training depends on it."""
    tracked = name.removeprefix(TRACKED)
    shown = name if tracked == name else f"`{tracked}`"
    return Difference(f"the script has changed {shown}, which was restored: {ADVICE}.", is_wrong)


def evaluated_again(loader: int) -> Difference:
    """The script has evaluated on a loader, before the batch at which its pass goes on."""
    words = (
        f"the run goes on in the middle of an epoch, and the script has evaluated on loader {loader} before it came "
        "there, as it does in every epoch: what it shows of that is of the model as it is now, and not as it was then."
    )
    return Difference(words, is_wrong=False)


class RestoredState:
    """See Note [What an epoch does at its head]."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._expected: dict[str, int] | None = None
        self._rates: dict[str, float] = {}
        """Those that were restored."""
        self._others: dict[str, float] = {}
        """Those that the script had set otherwise when the pass went on, until the first update."""
        self._changed: list[Difference] = []
        self._has_gradients = False

    def loaded(self, *, has_gradients: bool) -> None:
        """A snapshot was loaded. `has_gradients`: no update had used those that it has."""
        self._has_gradients, self._rates, self._others = has_gradients, self._models.rates(), {}
        self._expected = self._now()

    def asked(self, *, at_start: bool) -> bool:
        """A loader that is trained on is about to load a batch: the first of a pass, or another one. Returns whether it
        goes on where the snapshot was taken, in the middle of a pass."""
        expected, self._expected = self._expected, None
        if expected is None or at_start:
            return False
        now = self._now()
        changed = (name for name in expected | now if expected.get(name) != now.get(name))
        found = [_changed_state(name, is_wrong=self._trains(name)) for name in changed]
        self._changed = sorted(found, key=lambda one: not one.is_wrong)[:1]
        rates = self._models.rates()
        self._others = {name: rate for name, rate in rates.items() if self._rates.get(name, rate) != rate}
        return True

    def changed(self) -> list[Difference]:
        """What a training loop that begins goes on with, and should not."""
        self._expected, changed, self._changed = None, self._changed, []
        return changed

    def at_update(self, label: str) -> str | None:
        """Before an update of an optimizer: the rate that the script had set when the pass went on, and not since.

        Rates are read, for which a host may wait for its GPU, only before the first update after that.
        """
        self._expected = None
        mine = [name for name in self._others if name.startswith(f"{label}, ")]
        now = self._models.rates() if mine else {}
        wrong = [name for name in mine if self._others.pop(name) == now.get(name)]
        if not wrong:
            return None
        set_to, restored = now[wrong[0]], self._rates[wrong[0]]
        return f"the script has set the rate of {wrong[0]} to {set_to:g}, and {restored:g} was restored: {ADVICE}."

    def _trains(self, name: str) -> bool:
        """Whether the training depends on what has this name."""
        tracked = self._models.tracked.get(name.removeprefix(TRACKED)) if name.startswith(TRACKED) else None
        return tracked is None or trains(tracked)

    def _now(self) -> dict[str, int]:
        models = self._models
        gradients = models.gradients() if self._has_gradients else {}
        state: Mapping[str, Any] = {
            **models.everything(),
            **{f"the gradient of {name}": one for name, one in gradients.items()},
            **{f"{TRACKED}{name}": one.state_dict() for name, one in models.tracked.items()},
        }
        return dict(zip(sorted(state), fingerprints(state).tolist(), strict=True))
