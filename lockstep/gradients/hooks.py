"""When is a bucket full? Learned from the first backward pass, then watched with one hook per bucket.

# Note [One hook per bucket]
# A Python hook on every parameter costs small models several percent of a step. In the first lane that reaches
# a bucket, every parameter of it is hooked, and the order in which gradients arrive is written down. From then
# on the bucket is watched through the one parameter whose last gradient arrived last, counting how often it
# arrives in a lane (twice, if the user's code calls backward twice). When that hook fires, the bucket checks
# that all its other gradients are there too. If the order was different this time, the bucket simply leaves
# later, at the end of the lanes: never early, never never.
"""

from collections.abc import Callable, Sequence
from itertools import count

import torch


class BucketWatch:
    """Calls `on_arrival()` for every gradient it sees, and `on_full(bucket)` when a bucket should be full.

    `buckets` holds the parameters of each bucket. One owner, who calls `close`.
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[torch.nn.Parameter]],
        on_arrival: Callable[[], None],
        on_full: Callable[[int], None],
    ) -> None:
        self._on_arrival = on_arrival
        self._on_full = on_full
        self._watches = [_Watch(parameters, self._arrived(bucket)) for bucket, parameters in enumerate(buckets)]

    def lane_begins(self) -> None:
        for watch in self._watches:
            watch.forget()

    def lane_ended(self) -> None:
        for watch in self._watches:
            watch.learn()

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

    def __init__(self, parameters: Sequence[torch.nn.Parameter], arrived: Callable[[bool], None]) -> None:
        self._parameters = parameters
        self._arrived = arrived
        self._expected: int | None = None
        self._counts = [0] * len(parameters)
        self._last = [0] * len(parameters)
        self._clock = count(1)
        self._handles = [self._hook(place) for place in range(len(parameters))]

    def forget(self) -> None:
        """A new lane: nothing has arrived."""
        self._counts = [0] * len(self._parameters)

    def learn(self) -> None:
        """After the first lane that reached this bucket: keeps the hook of the parameter that came last."""
        if self._expected is None and any(self._counts):
            last = max(range(len(self._parameters)), key=self._last.__getitem__)
            self.unhook()
            self._expected = self._counts[last]
            self._handles = [self._hook(last)]

    def unhook(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, place: int) -> torch.utils.hooks.RemovableHandle:
        def arrived(_: torch.Tensor) -> None:
            self._counts[place] += 1
            self._last[place] = next(self._clock)
            self._arrived(self._counts[place] == self._expected)

        handle: torch.utils.hooks.RemovableHandle
        handle = self._parameters[place].register_post_accumulate_grad_hook(arrived)
        return handle
