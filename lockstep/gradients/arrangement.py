"""All buckets as they are laid out now, and when they are laid out anew.

# Note [The order of filling]
# The first layout guesses that gradients arrive in reverse order of registration. After the first step, one worker
# tells all in which order its gradients did arrive, and from the second step on the buckets are filled in that
# order. The sum of an element does not depend on its bucket, so the bits do not change. A new generation learns anew.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lockstep.gradients.bucket import Bucket
from lockstep.gradients.hooks import BucketWatch, GradientArrival
from lockstep.gradients.layout import Layout, Spec, make_layout
from lockstep.gradients.updates import FlatUpdates
from lockstep.wire import Wire, broadcast


@dataclass(frozen=True)
class Named:
    """A parameter of a replicated model. `model` counts the models."""

    name: str
    parameter: torch.nn.Parameter
    model: int


@dataclass(frozen=True)
class Wanted:
    """How buckets are to be laid out."""

    bucket_bytes: int | None = None
    reduce_dtype: torch.dtype | None = None
    flat: FlatUpdates | None = None


class Arrangement:
    """The buckets of all replicated models. One owner, who calls `close`.

    `on_arrival` and `on_full` are called in the middle of a backward pass, see `BucketWatch`.
    """

    def __init__(
        self,
        wire: Wire,
        named: Sequence[Named],
        wanted: Wanted,
        on_arrival: Callable[[], None],
        on_full: Callable[[int], None],
    ) -> None:
        self._wire, self._named, self._wanted = wire, named, wanted
        self._on_arrival, self._on_full = on_arrival, on_full
        self._parameters = [one.parameter for one in named]
        self._order: list[int] | None = None
        self._arrivals: dict[torch.nn.Parameter, GradientArrival] = {}
        self._traits: list[tuple[object, ...]] = []
        self.layout: Layout
        self.buckets: list[Bucket]
        self.watch: BucketWatch
        self.number = 0
        """How often buckets have been laid out: what was recorded of lanes holds for one layout."""
        self.folds_always: bool
        """Whether gradients must go through buckets even if there is nothing to add."""
        self._lay_out()

    @property
    def knows_order(self) -> bool:
        """See Note [The order of filling]."""
        return self._order is not None

    def renew(self) -> None:
        """Before a step: lays the buckets out anew if that is asked for."""
        if self._traits != self._current_traits():
            self._order, self._arrivals = None, {}
        elif not self._order_is_news:
            return
        self.close()
        self._lay_out()

    def rewire(self) -> None:
        """The wire is another one: the next step lays its buckets out there. See Note [The order of filling]."""
        self._traits = []

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

    def close(self) -> None:
        """Lets go of hooks and of the buckets' memory; what stands in `p.grad` stays."""
        self.watch.close()
        for bucket in self.buckets:
            bucket.close()

    def _current_traits(self) -> list[tuple[object, ...]]:
        """What may change between steps and asks for another layout; read at every step, so kept cheap."""
        return [(parameter.requires_grad, parameter.dtype, parameter.shape) for parameter in self._parameters]

    def _lay_out(self) -> None:
        wanted = self._wanted
        self.number += 1
        self._traits = self._current_traits()
        self._order_is_news = False
        sizes = {} if wanted.bucket_bytes is None else {"bucket_bytes": wanted.bucket_bytes}
        self.layout = make_layout(self._specs(), order=self._order, **sizes)
        self.buckets = [Bucket(layout, self._parameters, self._wire.reducer) for layout in self.layout.buckets]
        self.folds_always = wanted.flat is not None or any(bucket.layout.converts for bucket in self.buckets)
        parameters = [bucket.parameters for bucket in self.buckets]
        self.watch = BucketWatch(parameters, self._on_arrival, self._on_full, self._arrivals)
        if wanted.flat is not None:
            wanted.flat.follow(self.buckets)

    def _specs(self) -> list[Spec]:
        flat, dtype = self._wanted.flat, self._wanted.reduce_dtype
        groups = [0] * len(self._named) if flat is None else flat.groups(self._parameters)
        return [
            Spec.of(one.name, one.parameter, one.model, dtype, group)
            for one, group in zip(self._named, groups, strict=True)
        ]
