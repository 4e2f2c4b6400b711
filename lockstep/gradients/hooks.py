"""When is a bucket full? Learned from the first backward pass, then watched with one hook per bucket.

# Note [One hook per bucket]
# A Python hook on every parameter costs small models several percent of a step. In the first lane that reaches
# a bucket, every parameter of it is hooked, and the order in which gradients arrive is written down. From then
# on the bucket is watched through the one parameter whose last gradient arrived last, counting how often it
# arrives in a lane (twice, if the user's code calls backward twice). When that hook fires, the bucket checks
# that all its other gradients are there too. If the order was different this time, the bucket simply leaves
# later, at the end of the lanes: never early, never never.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import torch


@dataclass(frozen=True)
class Arrival:
    """When a parameter last got a gradient in a lane, and how often; 0 and 0 if it was not reached."""

    when: int = 0
    times: int = 0


class BucketWatch:
    """Calls `on_arrival()` for every gradient it sees, and `on_full(bucket)` when a bucket should be full.

    `buckets` holds the parameters of each bucket; `known` is what was learned of them in another layout. One owner, who
    calls `close`.
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[torch.nn.Parameter]],
        on_arrival: Callable[[], None],
        on_full: Callable[[int], None],
        known: Mapping[torch.nn.Parameter, Arrival] | None = None,
    ) -> None:
        self._on_arrival = on_arrival
        self._on_full = on_full
        clock = count(1)
        self._watches = [
            _Watch(parameters, self._arrived(bucket), clock, [(known or {}).get(p, Arrival()) for p in parameters])
            for bucket, parameters in enumerate(buckets)
        ]

    def lane_begins(self) -> None:
        for watch in self._watches:
            watch.forget()

    def lane_ended(self) -> None:
        for watch in self._watches:
            watch.learn()

    def arrivals(self) -> dict[torch.nn.Parameter, Arrival]:
        """What was seen of every parameter in the lane in which its bucket was learned."""
        return {
            parameter: arrival
            for watch in self._watches
            for parameter, arrival in zip(watch.parameters, watch.learned, strict=True)
        }

    def close(self) -> None:
        for watch in self._watches:
            watch.unhook()

    def _arrived(self, bucket: int) -> Callable[[bool], None]:
        def arrived(is_last: bool) -> None:
            self._on_arrival()
            if is_last:
                self._on_full(bucket)

        return arrived


class _Watch:
    """The hooks of one bucket: on every parameter while learning, on one afterwards."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        arrived: Callable[[bool], None],
        clock: Iterator[int],
        known: Sequence[Arrival],
    ) -> None:
        self.parameters = parameters
        self.counts = [arrival.times for arrival in known]
        self.last = [arrival.when for arrival in known]
        self.learned = list(known)
        self._arrived = arrived
        self._expected: int | None = None
        self._clock = clock
        self._handles = [self._hook(place) for place in range(len(parameters))]
        self.learn()

    def forget(self) -> None:
        """A new lane: nothing has arrived."""
        self.counts = [0] * len(self.parameters)

    def learn(self) -> None:
        """After the first lane that reached this bucket: keeps the hook of the parameter that came last."""
        if self._expected is None and any(self.counts):
            last = max(range(len(self.parameters)), key=self.last.__getitem__)
            self.unhook()
            self.learned = [Arrival(when, times) for when, times in zip(self.last, self.counts, strict=True)]
            self._expected = self.counts[last]
            self._handles = [self._hook(last)]

    def unhook(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, place: int) -> torch.utils.hooks.RemovableHandle:
        def arrived(_: torch.Tensor) -> None:
            self.counts[place] += 1
            self.last[place] = next(self._clock)
            self._arrived(self.counts[place] == self._expected)

        handle: torch.utils.hooks.RemovableHandle
        handle = self.parameters[place].register_post_accumulate_grad_hook(arrived)
        return handle
