"""Folds a lane's gradients onto the stacks of buckets: weighted, added in the order of the lanes.

# Note [One place for the weight]
# A lane's gradient is multiplied by its weight when it enters the stack, rounded, and only then added. Scaling
# the loss instead, or a fused multiply-add, would round differently, and the bits would depend on
# which lanes a worker happens to carry.

# Note [The dtype of the sum]
# Gradients are weighted, folded and added in the dtype of their parameter, or in the run's
# `reduce_dtype`. Then a lane's gradient is converted first, and from there on all is as in Note [One place
# for the weight]. Only the finished sum is converted back. A lane that is alone is converted too: its bits must
# not depend on whether there are other workers.

# Note [Gradients are only read]
# What stands in `p.grad` may be the user's: one tensor for two parameters, a view, an expanded number, or a tensor
# that the user's code reads again. So a gradient is never written to. It is weighted straight into the bucket, or
# into memory that is used again at once, in pieces that fit into a cache. Where nothing is folded (Note [Nothing to
# add] in plan.py) a gradient that never arrived from a backward pass is copied: it would go on being the user's.

# Note [Absent is plus zero]
# A parameter that a lane did not reach enters the sum as 0, which makes a -0 of another lane +0. A worker that
# carries both lanes adds nothing for the absent one, so it makes the -0 a +0 there.

# Note [Buckets together]
# On a GPU starting a kernel costs the host more than the kernel takes for a bucket of small gradients. So the buckets
# that a lane leaves at its end are folded by the same few kernels, whatever their number. What a kernel does to one
# element does not depend on the others, so the bits are those of one bucket after the other. A worker that is alone
# leaves all buckets of its last lane until the end too: there is nobody to send them to meanwhile.

# Note [Small gradients on a CPU]
# On a CPU calling an operation costs more than a small gradient takes. So a bucket of small gradients is copied in one
# call, then weighted and added as a whole: more passes over memory, which is in a cache, and a few calls instead of one
# or two for each gradient.
"""

from collections.abc import Iterable, Sequence

import torch

from lockstep.gradients.bucket import Bucket

SMALL, PIECE = 4 * 1024, 512 * 1024
"""In elements: gradients up to the first are weighted together, larger ones by themselves, in pieces."""

Gradients = Sequence[torch.Tensor | None]
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""A parameter's place in a buffer, and its gradient."""


@torch.no_grad()
def fold_lane(buckets: Sequence[Bucket], weight: float, merges: int) -> None:
    """Takes the lane's gradients out of `p.grad`, weighted, onto the stacks; then merges their topmost entries."""
    taken = [(bucket, bucket.take_lane()) for bucket in buckets]
    pushed = [(bucket, lane) for bucket, lane in taken if merges == 0 or _goes_whole(bucket)]
    added = [(bucket, lane) for bucket, lane in taken if merges > 0 and not _goes_whole(bucket)]
    _push(pushed, weight)
    _add_to_top(added, weight)
    _merge([bucket for bucket, _ in pushed], merges)
    _merge([bucket for bucket, _ in added], merges - 1)


def _goes_whole(bucket: Bucket) -> bool:
    """Whether the bucket's gradients are copied first, then weighted and added as one."""
    layout = bucket.layout
    are_small = layout.num_elements <= SMALL * len(layout.slots)
    return layout.converts or (are_small and layout.device.type == "cpu")


def _push(taken: Sequence[tuple[Bucket, Gradients]], weight: float) -> None:
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    unweighted = []
    for bucket, lane in taken:
        flat = bucket.push()
        reached = _present(flat.views, lane)
        if _goes_whole(bucket) or bucket.layout.device.type != "cpu" or weight == 1.0:
            if len(reached) < len(lane):
                flat.whole.zero_()
            pairs += reached
            unweighted.append(flat.whole)
        else:  # one pass over memory, one operation for each parameter
            _write_weighted(flat.views, lane, weight)
    if pairs:
        into, present = map(list, zip(*pairs, strict=True))
        torch._foreach_copy_(into, present)
    if weight != 1.0:
        _weigh(unweighted, weight)


def _weigh(wholes: Sequence[torch.Tensor], weight: float) -> None:
    """On the CPU `_foreach_mul_` would first round the weight itself to half precision."""
    for whole in wholes:
        if whole.device.type == "cpu":
            whole.mul_(weight)
    if elsewhere := [whole for whole in wholes if whole.device.type != "cpu"]:
        torch._foreach_mul_(elsewhere, weight)


def _write_weighted(views: Sequence[torch.Tensor], lane: Gradients, weight: float) -> None:
    for view, gradient in zip(views, lane, strict=True):
        if gradient is None:
            view.zero_()
        else:
            torch.mul(gradient, weight, out=view)


def _merge(buckets: Sequence[Bucket], times: int) -> None:
    for _ in range(times if buckets else 0):
        upper = [bucket.pop().whole for bucket in buckets]
        torch._foreach_add_([bucket.top.whole for bucket in buckets], upper)


def _add_to_top(taken: Sequence[tuple[Bucket, Gradients]], weight: float) -> None:
    together: list[tuple[torch.Tensor, torch.Tensor]] = []
    for bucket, lane in taken:
        _lose_minus_zero(bucket, lane)
        pairs = _present(bucket.top.views, lane)
        if weight != 1.0 and bucket.layout.device.type == "cpu":
            _add_weighted(pairs, weight)
        else:
            together += pairs
    if together:
        into, present = map(list, zip(*together, strict=True))
        torch._foreach_add_(into, present if weight == 1.0 else torch._foreach_mul(present, weight))


def _present(views: Sequence[torch.Tensor], lane: Gradients) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(view, gradient) for view, gradient in zip(views, lane, strict=True) if gradient is not None]


def _lose_minus_zero(bucket: Bucket, lane: Gradients) -> None:
    """See Note [Absent is plus zero]. What no lane of this worker has reached is +0 already."""
    trio = zip(bucket.top.views, lane, bucket.used, strict=True)
    absent = [view for view, gradient, used in trio if gradient is None and used]
    if absent:
        torch._foreach_add_(absent, 0.0)


def _add_weighted(pairs: Pairs, weight: float) -> None:
    """Adds each gradient, weighted as `torch.mul` rounds, to its view. See Note [Gradients are only read]."""
    into, weighted = [], []
    for view, gradient in pairs:
        if gradient.numel() <= SMALL:
            into.append(view)
            weighted.append(gradient.mul(weight))
        else:
            for part, values in _pieces(view, gradient):
                part.add_(values.mul(weight))
    if into:
        torch._foreach_add_(into, weighted)


def _pieces(view: torch.Tensor, gradient: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Both cut alike into pieces of PIECE elements, if they stand alike in memory; else as they are."""
    if gradient.numel() <= PIECE or gradient.stride() != view.stride():
        return [(view, gradient)]
    flat = (gradient.numel(),), (1,)  # a parameter's place in a bucket has no gaps
    return zip(view.as_strided(*flat).split(PIECE), gradient.as_strided(*flat).split(PIECE), strict=True)
