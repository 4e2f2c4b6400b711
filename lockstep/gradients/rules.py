"""What a lane may not do, since lanes on other workers would not see it, and how it shows: refused by name.

# Note [The first turn]
# Some of what a lane may not do shows only in values, or in autograd's graph, and looking there costs too much for
# every step. A script does the same at every step, so it is looked for in the first turn of each loop over lanes in it:
# the graph below each backward pass, and, in this worker's first lane, the values of parameters and gradients. One lane
# alone on one worker is looked at like any other: with more workers the same script would be refused. But one lane does
# not show how lanes add up: where the first batch fills no more, the first turn of several lanes is looked at too.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch.autograd.graph import Node

from lockstep.errors import Misuse
from lockstep.gradients.autograd_graph import LaneSpans, looking
from lockstep.gradients.bucket_set import BucketSet, NamedParameter
from lockstep.gradients.fingerprint import fingerprints
from lockstep.gradients.loss_graph import compared_by, partial_mean_by, summed_by
from lockstep.gradients.plan import StepPlan
from lockstep.gradients.step import StepInFlight


class LaneRules:
    """The rules for the lanes of one engine. `note` is called with what the user should know once.

    `begin_loop` and `end_loop` stand around all lanes of a step, or of an evaluation; in a step `begin_step`, then for
    each lane `begin_lane`, and `end_lane` before its gradients are taken.
    """

    def __init__(self, named: Sequence[NamedParameter], note: Callable[[str], None]) -> None:
        self._named, self._note = named, note
        self._spans = LaneSpans()
        self._closely = False
        self._prints: torch.Tensor | None = None
        """Fingerprints of the parameters when a lane began that is looked at closely."""
        self._versions: list[tuple[int, int, int]] = []
        """Those of the parameters when the step began, if it has several lanes or workers."""
        self._warned_of_sum = self._warned_of_part = self._warned_of_pairs = False
        self.partial_mean: str | None = None
        """What makes the loss of a lane of this worker a mean over something else than its samples, if it was seen."""
        self._first_turn = ExitStack()

    def begin_loop(self, look: Callable[[Sequence[Node]], None] | None = None) -> None:
        """In its first turn `look` is given the roots of backward passes, for `look_at`."""
        self._spans.begin_loop()
        self._closely = look is not None
        if look is not None:
            self._first_turn.enter_context(looking(look))

    def end_loop(self) -> None:
        self._first_turn.close()
        self._spans.end_loop()

    def begin_step(self, plan: StepPlan) -> None:
        self._versions = [] if plan.has_nothing_to_add else self._parameter_versions()

    def begin_lane(self, buckets: BucketSet) -> None:
        buckets.watch.lane_begins(self._closely)
        self._spans.begin_lane()
        self._prints = fingerprints(self._values()) if self._closely else None

    def end_lane(self, step: StepInFlight, buckets: BucketSet) -> None:
        """Raises if the lane has done what it may not."""
        _refuse_late_gradients(step)
        buckets.watch.lane_ends()
        if not step.keeps_gradients:
            _refuse_changed_gradients(step, buckets)
        changed = self._changed_parameter()
        if changed is not None:
            raise Misuse(
                f"parameter {changed} was changed inside a lane of step {step.plan.step}, in place or by .data "
                "(nn.Embedding with max_norm does so): lanes on other workers would not see it. Change parameters "
                "outside run.lanes, where all workers do the same; where a layer sets itself up in its first forward "
                "pass, run one before run.replicate."
            )
        self._closely = False

    def look_at(self, step: StepInFlight, roots: Sequence[Node]) -> None:
        """Raises if a backward pass that is about to begin goes through the graph of another lane."""
        made = self._spans.made_before(roots)
        if made is not None:
            raise Misuse(
                f"a backward pass of step {step.plan.step} goes through {made}, a part of the graph that was made in "
                "another lane: a graph made in one loop over run.lanes cannot be used in another, for lanes may be on "
                "other workers by then. Compute it again in this loop, or detach it."
            )
        if len(step.plan.present) == 1:
            return
        if not self._warned_of_pairs:
            self._warn_of_pairs(step, roots)
        if step.record.weights[step.lane] is None and len(roots) == 1:
            if self._closely and not self._warned_of_sum:
                self._warn_of_sum(step, roots[0])
            if self.partial_mean is None:
                self.partial_mean = partial_mean_by(roots[0], step.plan.shares[step.lane])

    def warn_of_part(self) -> None:
        """On every worker, at the end of a step in which one has seen it. See Note [A mean over a part]."""
        if self._warned_of_part:
            return
        self._warned_of_part = True
        seen = "" if self.partial_mean is None else f" ({self.partial_mean})"
        self._note(
            f"the loss of a lane is a mean over something else than its samples{seen}, and lanes are weighted by their "
            "samples: unless every lane divides by as much, the gradient is not that of the whole batch's mean in a "
            "plain loop. Write run.backward(loss, weight=...) with what the mean is divided by, such as "
            "weight=int((y != -100).sum())."
        )

    def _warn_of_sum(self, step: StepInFlight, root: Node) -> None:
        """See Note [A loss that is a sum] in loss_graph.py."""
        found = summed_by(root, step.plan.shares[step.lane])
        if found is not None:
            self._warned_of_sum = True
            self._note(
                f"the loss of lane {step.lane} is a sum over its samples ({found}), and lanes are averaged: the "
                f"gradient is about 1/{len(step.plan.present)} of that of the whole batch. Write run.backward(loss, "
                'reduction="sum") to have lanes added up, or make the loss a mean.'
            )

    def _warn_of_pairs(self, step: StepInFlight, roots: Sequence[Node]) -> None:
        """See Note [Samples that are compared] in loss_graph.py."""
        num_samples = step.plan.shares[step.lane]
        found = compared_by(roots, num_samples)
        if found is not None:
            self._warned_of_pairs = True
            self._note(
                f"the loss of lane {step.lane} seems to compare samples with each other ({found}): each meets those of "
                f"its own lane, {num_samples} of the {step.plan.num_samples} of the batch, on any number of workers. "
                "That is another loss than on the whole batch; fewer lanes, or larger batches, come nearer to it."
            )

    def _changed_parameter(self) -> str | None:
        """A lane that writes to a parameter changes it for the lanes after it on this worker, and for no other."""
        if self._versions:  # one lane alone has none
            versions = self._parameter_versions()
            if versions != self._versions:
                pairs = zip(self._named, versions, self._versions, strict=True)
                return next(one.name for one, now, before in pairs if now != before)
        if self._prints is None:
            return None
        values = self._values()
        same = (fingerprints(values) == self._prints).tolist()
        return next((name for name, is_same in zip(sorted(values), same, strict=True) if not is_same), None)

    def _parameter_versions(self) -> list[tuple[int, int, int]]:
        """One is another after a write to its parameter, unless that went through `.data`."""
        parameters = (one.parameter for one in self._named)
        return [(one._version, one.untyped_storage()._cdata, int(one.storage_offset())) for one in parameters]

    def _values(self) -> dict[str, torch.Tensor]:
        """The parameters that have a fingerprint."""
        return {one.name: one.parameter for one in self._named if one.parameter.layout == torch.strided}


def refuse_outside() -> None:
    """For a backward pass that no lane has begun."""
    raise Misuse(
        "backward() outside of the lanes of a training step: its gradient would be this worker's own and never "
        "be reduced. Write `for x, y in run.lanes(batch): ... loss.backward()` with the model in training mode "
        "(or run.lanes(batch, train=True)), or `with run.no_sync():` if that is meant."
    )


def _refuse_late_gradients(step: StepInFlight) -> None:
    for bucket in step.buckets[: step.folded]:
        for parameter, slot in zip(bucket.parameters, bucket.layout.slots, strict=True):
            if parameter.grad is not None:
                raise Misuse(
                    f"a second backward reached {slot.spec.name} in step {step.plan.step} after its gradient was "
                    "reduced. Add the losses and call backward once, or put the backward passes of a lane inside "
                    "`with run.no_sync():`."
                )


def _refuse_changed_gradients(step: StepInFlight, buckets: BucketSet) -> None:
    """See Note [Changed after it arrived] in hooks.py."""
    for number, bucket in enumerate(buckets.buckets[step.folded :], step.folded):
        place = buckets.watch.changed(number)
        if place is not None:
            raise Misuse(
                f"the gradient of {bucket.layout.slots[place].spec.name} was changed inside a lane of step "
                f"{step.plan.step}, after its backward pass (clipped, unscaled, set to None): a worker's last lane has "
                "no gradients left by then, so lanes would be treated differently. Clip after the loop over run.lanes; "
                "for gradients of a single lane put its backward passes in `with run.no_sync():`."
            )
