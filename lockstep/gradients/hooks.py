"""When is a bucket full, and is a gradient still what arrived? Hooks on parameters show both.

# Note [One hook per bucket]
# A Python hook on every parameter costs small models several percent of a step. In the first lane that reaches
# a bucket, every parameter of it is hooked, and the order in which gradients arrive is written down. From then
# on the bucket is watched through the one parameter whose last gradient arrived last, counting how often it
# arrives in a lane (twice, if the user's code calls backward twice). When that hook fires, the bucket checks
# that all its other gradients are there too. If the order was different this time, the bucket simply leaves
# later, at the end of the lanes: never early, never never. Loops of one script may differ: a GAN's discriminator is
# reached by two passes in its own loop and by one in the generator's. So in the first lane of each loop's first turn
# buckets wait for the end, and the largest count of any loop is what fills a bucket, in later generations too.

# Note [A backward inside a backward]
# A re-entrant activation checkpoint runs a backward pass of its own in the middle of another one, as often as the lane
# has checkpoints. So no gradient is known to be the lane's last for its parameter, whatever lanes before have shown:
# where a lane makes such a checkpoint no bucket is full before the lane ends. Other functions that do so show when a
# gradient arrives inside of two passes: its bucket then waits for the end, and so does one with gradients that the
# user's code put into `p.grad` itself.

# Note [Changed after it arrived]
# The last lane's gradients are taken during its backward pass, so what the user's code does to `p.grad` after it would
# be done to some lanes only: to which, depends on the number of workers. A gradient's version and address are noted
# when it arrives and compared when the lane ends. Writes through `.data` show in neither: in the first lane, where
# every parameter is hooked, fingerprints are compared too.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import _engine_run_backward
from torch.utils.checkpoint import CheckpointFunction

from lockstep.gradients.fingerprint import fingerprints

_BACKWARD = _engine_run_backward.__code__
"""That of the frame below which torch runs a backward pass."""


@dataclass(frozen=True)
class GradientArrival:
    """When a parameter last got a gradient in a lane, and how often; 0 and 0 if it was not reached.

    `is_nested`: in a backward inside a backward. `by_hand`: it had a gradient that never arrived.
    """

    when: int = 0
    times: int = 0
    is_nested: bool = False
    by_hand: bool = False


class GradientMark(NamedTuple):
    """A gradient as it arrived. See Note [Changed after it arrived]."""

    version: int
    address: int
    fingerprint: int | None

    @classmethod
    def of(cls, gradient: torch.Tensor | None, closely: bool) -> "GradientMark | None":
        if gradient is None:
            return None
        if gradient.layout != torch.strided:
            return cls(gradient._version, 0, None)
        fingerprint = int(fingerprints({"": gradient})) if closely else None
        return cls(gradient._version, gradient.data_ptr(), fingerprint)


class BucketWatch:
    """Calls `on_arrival()` for every gradient it sees, and `on_full(bucket)` when a bucket should be full.

    `buckets` holds the parameters of each bucket; `known` is what was learned of them in another layout, and `most` how
    often each has arrived in a lane at most, which is kept up to date. One owner, who calls `close`.
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[torch.nn.Parameter]],
        on_arrival: Callable[[], None],
        on_full: Callable[[int], None],
        known: Mapping[torch.nn.Parameter, GradientArrival] | None = None,
        most: dict[torch.nn.Parameter, int] | None = None,
    ) -> None:
        clock, known, most = count(1), known or {}, {} if most is None else most
        self._buckets = [
            _BucketHooks(
                [(p, known.get(p, GradientArrival())) for p in parameters], on_arrival, on_full, bucket, clock, most
            )
            for bucket, parameters in enumerate(buckets)
        ]

    def lane_begins(self, closely: bool = False) -> None:
        """`closely`: writes through `.data` to a gradient are looked for too, and no bucket is full before the end."""
        thread = threading.get_ident()
        for hooks in self._buckets:
            hooks.forget(thread, closely)

    def lane_ends(self) -> None:
        """Before the lane's gradients are taken."""
        for hooks in self._buckets:
            hooks.learn()

    def changed(self, bucket: int) -> int | None:
        """The first parameter, by its place in the bucket, whose gradient is not the one that arrived in the lane."""
        return self._buckets[bucket].changed()

    def has_own(self, bucket: int) -> bool:
        """Whether the user's code has put gradients of the bucket into `p.grad` itself, as far as was seen."""
        return self._buckets[bucket].has_own()

    def arrivals(self) -> dict[torch.nn.Parameter, GradientArrival]:
        """What was seen of every parameter in the lane in which its bucket was learned."""
        return {
            parameter: arrival
            for hooks in self._buckets
            for parameter, arrival in zip(hooks.parameters, hooks.learned, strict=True)
        }

    def close(self) -> None:
        for hooks in self._buckets:
            hooks.unhook()


class _BucketHooks:
    """The hooks of one bucket: on every parameter while learning, on one afterwards."""

    def __init__(
        self,
        known: Sequence[tuple[torch.nn.Parameter, GradientArrival]],
        on_arrival: Callable[[], None],
        on_full: Callable[[int], None],
        bucket: int,
        clock: Iterator[int],
        most: dict[torch.nn.Parameter, int],
    ) -> None:
        self._most = most
        self.parameters = [parameter for parameter, _ in known]
        self.learned = [arrival for _, arrival in known]
        self.counts = [arrival.times for arrival in self.learned]
        self.last = [arrival.when for arrival in self.learned]
        self._nested = [arrival.is_nested for arrival in self.learned]
        self._by_hand = False
        self._seen: dict[int, GradientMark | None] = {}
        self._closely = False
        self._thread = threading.get_ident()
        self._on_arrival, self._on_full, self._bucket = on_arrival, on_full, bucket
        self._expected: int | None = None
        """How often the hooked parameter arrives until the bucket is full; 0: it is never full early."""
        self._clock = clock
        self._handles = [self._hook(place) for place in range(len(self.parameters))]
        if any(self.counts):
            self._settle()

    def forget(self, thread: int, closely: bool) -> None:
        """A new lane, on a thread: nothing has arrived."""
        self.counts = [0] * len(self.parameters)
        self._seen = {}
        self._thread, self._closely = thread, closely

    def learn(self) -> None:
        """In the first lane that reached this bucket: keeps the hook of the parameter that came last.

        Later, a loop in whose first turn that one arrives more often makes the bucket wait for it.
        """
        for place, times in enumerate(self.counts if self._closely or self._expected is None else ()):
            if times > self._most.get(self.parameters[place], 0):
                self._most[self.parameters[place]] = times
                self._expected = self._expected and max(self._expected, times)
        if self._expected is None and any(self.counts):
            self.learned = [self._learned(place) for place in range(len(self.parameters))]
            self._settle()

    def changed(self) -> int | None:
        for place, seen in self._seen.items():
            if GradientMark.of(self.parameters[place].grad, self._closely) != seen:
                return place
        return None

    def has_own(self) -> bool:
        if self._expected is None:  # nothing has arrived
            return any(parameter.grad is not None for parameter in self.parameters)
        return self._by_hand

    def unhook(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _learned(self, place: int) -> GradientArrival:
        times = self.counts[place]
        by_hand = times == 0 and self.parameters[place].grad is not None
        return GradientArrival(self.last[place], times, self._nested[place], by_hand)

    def _settle(self) -> None:
        last = max(range(len(self.parameters)), key=self.last.__getitem__)
        self.unhook()
        self._by_hand = any(arrival.by_hand for arrival in self.learned)
        waits = self._by_hand or any(arrival.is_nested for arrival in self.learned)
        self._expected = 0 if waits else max(self.counts[last], self._most.get(self.parameters[last], 0))
        self._handles = [self._hook(last)]

    def _hook(self, place: int) -> torch.utils.hooks.RemovableHandle:
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def arrived(parameter: torch.Tensor) -> None:
            self.counts[place] += 1
            self.last[place] = next(self._clock)
            self._seen[place] = GradientMark.of(parameter.grad, self._closely)
            is_last = self.counts[place] == self._expected and not self._closely
            if (is_last or self._expected is None) and _is_nested(self._thread):
                self._nested[place], is_last = True, False
            self._on_arrival()
            if is_last:
                self._on_full(self._bucket)

        handle: torch.utils.hooks.RemovableHandle
        handle = self.parameters[place].register_post_accumulate_grad_hook(arrived)
        return handle


class CheckpointWatch:
    """Between `begin` and `end`, `notice` is called whenever a re-entrant checkpoint is made.

    See Note [A backward inside a backward].
    """

    def __init__(self, notice: Callable[[], None]) -> None:
        @partial(torch.compiler.disable, recursive=False)
        def forward(*args: Any) -> Any:
            notice()
            return self._own.__func__(*args)

        self._own: staticmethod[..., Any] = vars(CheckpointFunction)["forward"]
        self._noticing = staticmethod(forward)

    def begin(self) -> None:
        self._own = vars(CheckpointFunction)["forward"]
        CheckpointFunction.forward = self._noticing  # type: ignore[method-assign, assignment]

    def end(self) -> None:
        CheckpointFunction.forward = self._own  # type: ignore[method-assign]


def _is_nested(lane_thread: int) -> bool:
    """Whether the backward pass that calls stands inside of another one. See Note [A backward inside a backward].

    The thread of the lane stands below the pass that its own code began; other threads are those of devices.
    """
    passes, frame = 0, sys._getframe()
    while frame is not None:
        passes += frame.f_code is _BACKWARD
        frame = frame.f_back  # type: ignore[assignment]
    return passes > (threading.get_ident() == lane_thread)
