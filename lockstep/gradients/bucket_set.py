"""The buckets of all replicated models as they are laid out now, and when they are laid out anew.

# Note [The order of filling]
# The first layout guesses that gradients arrive in reverse order of registration. After the first step, one worker
# passes to all the order in which its gradients did arrive, and from the second step on the buckets are filled in that
# order. The sum of an element does not depend on its bucket, so the bits do not change. A new generation learns anew.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from lockstep.gradients.bucket import Bucket
from lockstep.gradients.hooks import BucketWatch, GradientArrival
from lockstep.gradients.layout import Layout, Spec, make_layout
from lockstep.wire import Wire, broadcast


@dataclass(frozen=True)
class NamedParameter:
    """A parameter of a replicated model. `model` counts the models."""

    name: str
    parameter: torch.nn.Parameter
    model: int


@dataclass(frozen=True)
class BucketOptions:
    """How large buckets are, and the dtype in which they are added up; None: as the layout and the parameters say."""

    bucket_bytes: int | None = None
    reduce_dtype: torch.dtype | None = None


MakeBuckets = Callable[[Wire, Layout, Sequence[torch.nn.Parameter]], Sequence[Bucket]]


def own_buckets(wire: Wire, layout: Layout, parameters: Sequence[torch.nn.Parameter]) -> list[Bucket]:
    """Each with memory of its own, where the sum stands too."""
    return [Bucket(bucket, parameters, wire.reducer) for bucket in layout.buckets]


class BucketSet:
    """The buckets of all replicated models, in the memory of one wire. One owner, who calls `close`.

    `on_arrival` and `on_full` are called in the middle of a backward pass, see `BucketWatch`. `make` makes the buckets
    of a layout.
    """

    def __init__(
        self,
        wire: Wire,
        named: Sequence[NamedParameter],
        options: BucketOptions,
        on_arrival: Callable[[], None],
        on_full: Callable[[int], None],
        make: MakeBuckets = own_buckets,
    ) -> None:
        self._wire, self._named, self._options, self._make = wire, named, options, make
        self._on_arrival, self._on_full = on_arrival, on_full
        self._parameters = [one.parameter for one in named]
        self._order: list[int] | None = None
        self._arrivals: dict[torch.nn.Parameter, GradientArrival] = {}
        self._most: dict[torch.nn.Parameter, int] = {}
        """How often each has arrived in a lane at most."""
        self.number = 0
        """How often buckets have been laid out: what was recorded of lanes holds for one layout."""
        self._lay_out()

    @property
    def knows_order(self) -> bool:
        """See Note [The order of filling]."""
        return self._order is not None

    def renew(self, wire: Wire) -> None:
        """Before a step over `wire`: lays the buckets out anew if the wire or the parameters are others, or the order
        in which gradients arrive has been learned."""
        if wire is not self._wire or self._traits != self._current_traits():
            self._wire, self._order, self._arrivals = wire, None, {}
        elif not self._order_is_news:
            return
        self.close()
        self._lay_out()

    def learn_order(self, source: int) -> None:
        """Collective. Afterwards all know in which order gradients arrived on worker `source`."""
        self._arrivals = self.watch.arrivals()
        guessed = [slot.index for bucket in self.layout.buckets for slot in bucket.slots]
        known = {index: self._arrivals[self._parameters[index]] for index in guessed}
        arrived = sorted(known, key=lambda index: known[index].when or math.inf)
        order = torch.tensor(arrived, dtype=torch.int64, device="cpu")
        broadcast(self._wire.transport, order, source)
        self._order = [int(index) for index in order]
        self._order_is_news = self._order != guessed

    # -- what stands in `p.grad` around a step --------------------------------------------------------------

    def keep_gradients(self) -> None:
        """What stands there may be a view of a bucket, which a step writes to, or lays out anew: now a copy."""
        for parameter in self._parameters:
            if parameter.requires_grad and parameter.grad is not None:
                parameter.grad = parameter.grad.clone().detach()

    def set_aside(self) -> dict[int, torch.Tensor]:
        """What stands there, by the number of the parameter; then nothing does."""
        kept = {index: grad for bucket in self.buckets for index, grad in bucket.numbered_gradients().items()}
        for bucket in self.buckets:
            bucket.forget_gradients()
        return kept

    def put_back(self, kept: Mapping[int, torch.Tensor]) -> None:
        """What was set aside stands there again, and nothing else."""
        for bucket in self.buckets:
            bucket.forget_gradients()
            bucket.give_gradients(kept)

    def add_kept(self, kept: Mapping[int, torch.Tensor]) -> None:
        """Nothing went through the buckets: the gradient there, which is only read, is added to what was set aside.

        See Note [Gradients are only read] in fold.py.
        """
        for index, before in kept.items():
            grad = self._parameters[index].grad
            self._parameters[index].grad = before if grad is None else before.add_(grad)

    def copy_own_gradients(self) -> None:
        """Nothing goes through the buckets: a gradient that is a tensor of the user's becomes a copy."""
        for number, bucket in enumerate(self.buckets):
            if self.watch.has_own(number):
                bucket.copy_gradients()

    def close(self) -> None:
        """Removes hooks and frees the buckets' memory; what stands in `p.grad` stays."""
        self.watch.close()
        for bucket in self.buckets:
            bucket.close()

    def _current_traits(self) -> list[tuple[object, ...]]:
        """What may change between steps and asks for another layout; read at every step, so kept cheap."""
        return [(parameter.requires_grad, parameter.dtype, parameter.shape) for parameter in self._parameters]

    def _lay_out(self) -> None:
        self.number += 1
        self._traits = self._current_traits()
        self._order_is_news = False
        sizes = {} if self._options.bucket_bytes is None else {"bucket_bytes": self._options.bucket_bytes}
        self.layout: Layout = make_layout(self._specs(), order=self._order, **sizes)
        self.buckets = self._make(self._wire, self.layout, self._parameters)
        self.must_fold = any(bucket.layout.converts for bucket in self.buckets)
        """Whether gradients must go through buckets even if there is nothing to add."""
        parameters = [bucket.parameters for bucket in self.buckets]
        self.watch: BucketWatch = BucketWatch(parameters, self._on_arrival, self._on_full, self._arrivals, self._most)

    def _specs(self) -> list[Spec]:
        return [Spec.of(one.name, one.parameter, one.model, self._options.reduce_dtype) for one in self._named]
