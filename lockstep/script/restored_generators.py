"""The generators outside of lanes, where a script goes on: as they stood there.

# Note [Draws that are made again]
# A script that goes on inside an epoch runs from its top, and then the epoch's body from its head. It may draw or seed
# before its epochs (`torch.manual_seed(0)`), and at the head (`strength = random.random()`). So the generators are set
# twice. Where the body begins, they are set to what they were there, and the head draws what it drew. Where the pass
# that goes on is asked for its next batch, they are set to those of the snapshot, which was taken at that place. A
# snapshot that was taken between two epochs has only the first place: what is drawn after it is drawn for the first
# time. What the body draws before each `next(batches)` cannot be drawn again: the snapshot was taken behind it.
"""

from dataclasses import dataclass

from lockstep.chance import Generators


@dataclass(frozen=True)
class DrawnAhead:
    """Random numbers that the script has drawn ahead of the batch at which its pass goes on."""

    loader: int
    is_wrong: bool = False

    def __str__(self) -> str:
        return (
            f"the run goes on in the middle of the pass over loader {self.loader}, and the script has drawn random "
            "numbers between iter(loader) and its first batch. If it draws them for each batch, this batch has others "
            "than it would have had: draw behind next(...)."
        )


class RestoredGenerators:
    """See Note [Draws that are made again]."""

    def __init__(self) -> None:
        self.head: Generators | None = None
        """What they were where the body of the epoch under way began."""
        self._saved: Generators | None = None
        """Those of the snapshot, until they are where the script goes on."""
        self._is_inside = self._has_begun = False

    def loaded(self, head: Generators | None) -> None:
        """They are as in a snapshot. `head` has them where the body of the epoch began that runs again; None: the
        snapshot was taken between two epochs, or the script has none."""
        self.head, self._saved = head, Generators.now()
        self._is_inside, self._has_begun = head is not None, False

    def epoch_begins(self) -> None:
        """The body of an epoch is about to begin: the first one after a snapshot was loaded, or another one."""
        if self._has_begun:
            self._saved = None
        if self._saved is not None:
            (self.head if self._is_inside and self.head is not None else self._saved).restore()
        self._has_begun = True
        self.head = Generators.now()

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
