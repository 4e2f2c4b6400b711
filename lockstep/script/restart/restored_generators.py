"""The generators outside of lanes, where a script goes on: as they stood there.

# Note [Draws that are made again]
# A script that goes on inside an epoch runs from its top, and then the epoch's body from its head. It may draw or seed
# before its epochs (`torch.manual_seed(0)`), and at the head (`strength = random.random()`). So the generators are set
# twice. Where the body begins, they are set to what they were there, and the head draws what it drew. Where the pass
# that goes on is asked for its next batch, they are set to those of the snapshot, which was taken at that place. A
# snapshot that was taken between two epochs has only the first place: what is drawn after it is drawn for the first
# time.
#
# What the body draws before each `next(batches)` cannot be drawn again: the snapshot was taken behind it. Such a body
# shows in a calm run, by generators that have moved between a batch's lanes and the request for the next one. If they
# do, and the script has drawn on its way to where it goes on, what it has drawn there may be for the batch: it is
# refused. A `for` statement over the loader draws nothing before its batch. A newcomer whose batches come from no
# loader is refused alike: it is given the generators as they are at the lanes.
"""

from lockstep.chance import Generators
from lockstep.script.restart.difference import Difference


def drawn_ahead(loader: int | None) -> Difference:
    """Random numbers that the script has drawn ahead of the batch at which it goes on; None: a batch of its own."""
    if loader is None:
        words = (
            "the script draws random numbers outside of lanes for each of its batches, and has drawn others for "
            "this one than those who go on have: draw them from a generator that is seeded by run.step."
        )
    else:
        words = (
            f"the run goes on in the middle of a pass, and the script has drawn random numbers before it asked loader "
            f"{loader} for a batch, as it does from batch to batch. Those of this batch cannot be drawn again: "
            "draw behind next(...), or from a generator that is seeded by run.step."
        )
    return Difference(words, is_wrong=True)


class RestoredGenerators:
    """See Note [Draws that are made again]."""

    def __init__(self) -> None:
        self.head: Generators | None = None
        """What they were where the body of the epoch under way began."""
        self._saved: Generators | None = None
        """Those of the snapshot, until they are where the script goes on."""
        self._is_inside = self._has_begun = False
        self._at_lanes: Generators | None = None
        """What they were at the lanes of the step before, if that was in this epoch."""
        self.draws_between = False
        """Whether the script has ever drawn between the lanes of a step and the next batch."""

    def at_lanes(self, now: Generators, *, is_own_batch: bool) -> None:
        """The lanes of a step begin. `is_own_batch`: its batch comes from no loader."""
        before, self._at_lanes = self._at_lanes, now
        if is_own_batch and before is not None and not self.draws_between:
            self.draws_between = now.has_moved_since(before)

    def before_batch(self) -> None:
        """A loader in the middle of a pass that is trained on is about to be asked for its next batch."""
        if self._at_lanes is not None and not self.draws_between:
            self.draws_between = Generators.now().has_moved_since(self._at_lanes)

    @property
    def has_drawn_ahead(self) -> bool:
        """Whether the script has drawn on its way to where it goes on, and draws between batches."""
        start = self.head if self._has_begun else self._saved
        return self.draws_between and self.is_before and start is not None and Generators.now().has_moved_since(start)

    def loaded(self, head: Generators | None) -> None:
        """They are as in a snapshot. `head` has them where the body of the epoch began that runs again; None: the
        snapshot was taken between two epochs, or the script has none."""
        self.head, self._saved, self._at_lanes = head, Generators.now(), None
        self._is_inside, self._has_begun = head is not None, False

    def epoch_begins(self) -> None:
        """The body of an epoch is about to begin: the first one after a snapshot was loaded, or another one."""
        if self._has_begun:
            self._saved = None
        if self._saved is not None:
            (self.head if self._is_inside and self.head is not None else self._saved).restore()
        self._has_begun = True
        self.head, self._at_lanes = Generators.now(), None  # what is drawn at the head is drawn again

    @property
    def is_done_again(self) -> bool:
        """Whether the script is between the head of an epoch's body and the place where it goes on."""
        return self.is_before and self._has_begun

    @property
    def is_before(self) -> bool:
        """Whether the script has not come to the place where it goes on, or to the epoch that is to begin."""
        return self._saved is not None and (self._is_inside or not self._has_begun)

    def asked(self, *, in_pass: bool, is_trained_on: bool) -> None:
        """A loader is about to load a batch. `in_pass`: not the first of a pass."""
        goes_on = self._is_inside or (in_pass and not self._has_begun)
        if self._saved is not None and goes_on and is_trained_on:
            self._saved.restore()
            self._saved = None

    def epochs_are_over(self) -> None:
        """No epoch was left after the snapshot was taken: the script goes on behind them."""
        if self.is_before and self._saved is not None:
            self._saved.restore()
        self._saved = None

    def step_begins(self) -> None:
        """The script has gone on: what it draws from now on, it draws for the first time."""
        self._saved = None
