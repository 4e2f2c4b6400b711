"""The passes over a loader's samplers: each may begin anywhere, and what was drawn is known by a digest.

# Note [Samplers with a memory]
# torch's own samplers draw every pass from generators that were set for it. A sampler of the user's may keep a
# generator of its own, which goes on from pass to pass. So where a pass begins that is not the samplers' next one
# (after a resume, or on a worker that joined), they are run through the passes before it first: indices only, and from
# their state when the loader was made, if that can be restored. There is a bound, because a sampler may be endless.

# Note [The same samples again]
# A snapshot has what was drawn in the pass under way, and in the one before it. A loader that is put there draws it
# again, and it must be the same; else some samples would be trained on twice, and others never. A sampler with a
# state_dict is then tried as it is, too: `run.replicate(..., sampler=s)` has restored its state of when it was saved,
# which is right between two passes.
"""

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any

from lockstep.data.batch import Position
from lockstep.data.order import Drawn, Keys, SampleOrder
from lockstep.data.samplers import Samplers
from lockstep.errors import BadCheckpoint

MOST_SAMPLES = 20_000_000
"""How many samples the samplers may draw before the pass that begins: less than a minute of Python."""
MOST_WITHOUT_LENGTH = 1_000_000
"""The same for samplers that have no length, and perhaps no end."""

_DRAWN = re.compile(r"(\d{1,18})\.(\d{1,18})=([0-9a-f]{16})")


class OtherSamples(Exception):  # noqa: N818
    """The samplers do not draw what they drew before, or not within the bound; the message names the place."""


class Passes:
    """Begins passes over the samplers of one loader, one at a time. `before` began some of the same samplers."""

    def __init__(
        self,
        samplers: Samplers,
        keys: Keys,
        *,
        count_uses: bool,
        say: Callable[[str], None],
        before: "Passes | None" = None,
    ) -> None:
        self._samplers, self._keys, self._count_uses, self._say = samplers, keys, count_uses, say
        self._next_epoch: int = 0 if before is None else before._next_epoch
        self._fresh: list[Any] = self._states() if before is None else before._fresh
        self._running: SampleOrder | None = None
        self._recorded: dict[int, Drawn] = {}
        self._ready: tuple[Position, SampleOrder] | None = None

    def begin(self, position: Position) -> SampleOrder:
        """The pass from `position` on. See Note [Samplers with a memory]."""
        ready, self._ready = self._ready, None
        if ready is not None and ready[0] == position:
            return ready[1]
        return self._opened(position, {}) if position.epoch == self._next_epoch else self._checked(position, {})

    def check(self, position: Position, expected: str, loader: int) -> None:
        """Runs the samplers to `position`; raises BadCheckpoint if what they draw before it is not `expected`.

        See Note [The same samples again].
        """
        self._running, self._recorded = None, parsed(expected)
        try:
            self._ready = position, self._checked(position, self._recorded)
        except OtherSamples as differs:
            raise BadCheckpoint(
                f"loader {loader} does not give the samples again that it gave before the snapshot was taken: "
                f"{differs}. Its data set has changed, or its sampler ({self._names}) gives another order every time: "
                "derive the order from the epoch (set_epoch(epoch) is called before every pass), or draw it from "
                "torch's global generator. A sampler that has a state_dict can be given to run.replicate(..., "
                "sampler=s), and is found again between two passes."
            ) from differs

    def drawn(self, position: Position) -> str:
        """What was drawn in the pass up to `position`, and in the one before it; empty where that is not known."""
        known = self._known()
        epochs = (position.epoch, position.epoch - 1) if position.step else (position.epoch - 1,)
        return " ".join(str(known[epoch]) for epoch in epochs if epoch in known)

    def _checked(self, position: Position, expected: Mapping[int, Drawn]) -> SampleOrder:
        """See Note [The same samples again]."""
        states = self._states()
        try:
            self._go_to(position.epoch, expected)
            return self._opened(position, expected)
        except OtherSamples:
            if not states:
                raise
        self._put(states)
        return self._opened(position, expected)

    def _opened(self, position: Position, expected: Mapping[int, Drawn]) -> SampleOrder:
        self._recorded = {epoch: drawn for epoch, drawn in self._known().items() if epoch == position.epoch - 1}
        self._next_epoch = position.epoch + 1
        self._running = order = SampleOrder(self._samplers, self._keys, position.epoch, count_uses=self._count_uses)
        order.skip(position.step)
        expected_here = expected.get(position.epoch)
        if position.step and expected_here is not None and expected_here != order.drawn:
            raise OtherSamples(f"the first {position.step} batches of pass {position.epoch} are others")
        return order

    def _go_to(self, epoch: int, expected: Mapping[int, Drawn]) -> None:
        """Brings the samplers to the beginning of pass `epoch`, as far as possible."""
        if self._fresh:
            self._put(self._fresh)
            self._next_epoch = 0
        left = MOST_SAMPLES if self._samplers.has_length else MOST_WITHOUT_LENGTH
        for number in range(self._next_epoch, epoch) if self._samplers.own else ():
            num_samples = self._run_through(number, expected.get(number), left)
            left -= num_samples
            if left < 0 or left < num_samples * (epoch - number - 1):
                self._give_up(number, epoch)
                break

    def _run_through(self, epoch: int, expected: Drawn | None, most_samples: int) -> int:
        """Runs the samplers through the pass; returns its number of samples."""
        order = SampleOrder(self._samplers, self._keys, epoch, count_uses=False)
        drawn = order.run_through(0 if expected is None else expected.num_samples, most_samples)
        if expected is not None and expected != drawn:
            raise OtherSamples(f"the samples of pass {epoch} are others")
        num_samples = order.drawn.num_samples
        if expected is not None and expected.num_samples < num_samples <= most_samples:
            self._warn(f"pass {epoch} was left before its end, and the sampler is taken to have drawn all of it")
        return num_samples

    def _give_up(self, reached: int, epoch: int) -> None:
        why = f"from pass {reached} on it gives too many samples to be run through up to pass {epoch}"
        if self._fresh:
            raise OtherSamples(why)
        self._warn(why)

    def _warn(self, why: str) -> None:
        """Warns, unless all samplers have a `set_epoch`: for others it is unknown whether it matters."""
        if not all(callable(getattr(sampler, "set_epoch", None)) for sampler in self._samplers.own):
            self._say(
                f"the order of samples may be another one from here on, if {self._names} draws from a generator of its "
                f"own: {why}. Derive the order from the epoch (set_epoch), or draw it from torch's global generator."
            )

    def _known(self) -> dict[int, Drawn]:
        running = [] if self._running is None else [self._running.drawn]
        return self._recorded | {drawn.epoch: drawn for drawn in running if drawn.num_samples}

    def _states(self) -> list[Any]:
        """The states of all samplers of the user's; none if one of them cannot be restored."""
        able = all(hasattr(one, "state_dict") and hasattr(one, "load_state_dict") for one in self._samplers.own)
        return [copy.deepcopy(one.state_dict()) for one in self._samplers.own] if able else []

    def _put(self, states: list[Any]) -> None:
        for sampler, state in zip(self._samplers.own, states, strict=True):
            sampler.load_state_dict(copy.deepcopy(state))

    @property
    def _names(self) -> str:
        return ", ".join(type(sampler).__name__ for sampler in self._samplers.parts)


def parsed(text: str) -> dict[int, Drawn]:
    """What `Passes.drawn` returned, by the number of the pass."""
    matches = [_DRAWN.fullmatch(part) for part in text.split()]
    if None in matches:
        raise BadCheckpoint(f"{text!r:.80} does not say what a loader has drawn")
    records = [Drawn(int(match[1]), int(match[2]), match[3]) for match in matches if match is not None]
    return {record.epoch: record for record in records}
