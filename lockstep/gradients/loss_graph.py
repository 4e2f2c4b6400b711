"""What the graph of a loss shows of it before its backward pass: whether lanes of it add up to the whole batch's.

# Note [A loss that is a sum]
# Lanes are averaged by their samples. A loss that is a sum over the samples of its lane would be averaged too, and come
# out as many times smaller as there are lanes. The graph shows it: from the root through arithmetic on single numbers
# (additions, signs, factors of 1 and more) to an operator that adds up as many numbers as the lane has samples. Below a
# division or a factor under 1 nothing is looked for: there a mean is made by hand. A sum over a parameter is a penalty.

# Note [A mean over a part]
# Lanes are weighted by their samples. A loss that is a mean over something else, such as the targets that are no
# padding, or targets weighted by their class, should be weighted by that: else the sum over lanes is not the mean over
# the batch. The graph shows three ways to write it: a loss operator that has counted less than its targets, a sum that
# is divided by a number that is no divisor of its length, and a mean of selected elements. If all samples have as many
# targets, as where a language model ignores the last one of each text, samples are what counts.

# Note [Samples that are compared]
# A contrastive loss compares the samples of a batch with each other, and others are made of statistics over the batch.
# In lanes they see the samples of one lane, which is another loss. The graph shows the usual ways to write them: a
# product of two matrices that were both computed from samples, whose rows and columns are samples, or that is summed
# over them; distances of all pairs; targets that number the samples.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node

from lockstep.gradients.autograd_graph import LEAF, children

MEAN, SUM = 1, 2
"""Values of a loss operator's `reduction`."""

_PASSED = ("Add", "Sub", "Rsub", "Neg", "ToCopy", "Clone", "View", "ReshapeAlias", "Squeeze", "Unsqueeze", "Alias")
_VIEWS = ("T", "Transpose", "Permute", "Slice", "View", "ReshapeAlias", "Squeeze", "Unsqueeze", "Expand", "Alias",
          "ToCopy", "Clone")  # fmt: skip
_KIND = re.compile(r"(\w+)Backward\d*$")


def summed_by(root: Node, num_samples: int) -> str | None:
    """The operator that makes the root a sum over so many samples or more, in words; None if it shows none.

    See Note [A loss that is a sum].
    """
    found = next((node for node in _walk([root], _terms) if _is_sum(node, num_samples)), None)
    if found is None:
        return None
    return _kind(found) if _reduction(found) != SUM else f'{_kind(found)} with reduction="sum"'


def partial_mean_by(root: Node, num_samples: int) -> str | None:
    """What makes the root a mean over something else than so many samples, in words; None if it shows nothing.

    See Note [A mean over a part].
    """
    for node in _walk([root], _operands):
        found = _counted_targets(node, num_samples) or _divided_sum(node) or _selected_mean(node, num_samples)
        if found:
            return found
    return None


def compared_by(roots: Sequence[Node], num_samples: int) -> str | None:
    """What compares the samples of a lane with each other, in words; None if the graph shows nothing.

    See Note [Samples that are compared].
    """
    if num_samples < 2:
        return None
    return next(filter(None, (_comparison(node, num_samples) for node in _walk(roots, children))), None)


# -- a sum ------------------------------------------------------------------------------------------------------


def _terms(node: Node) -> list[Node]:
    """What is added up to make the one number that the node gives, if it is as simple as that."""
    kind = _kind(node)
    if kind in _PASSED:
        return children(node)
    if kind == "Sum" and [_kind(child) for child in children(node)] == ["Stack"]:  # of a few numbers
        return children(children(node)[0])
    if kind == "Mul":
        edges = zip(node.next_functions, ("other", "self"), strict=False)
        return [child for (child, _), factor in edges if child is not None and _factor(node, factor) >= 1]
    return []


def _is_sum(node: Node, num_samples: int) -> bool:
    if _kind(node) != "Sum":
        return bool(_reduction(node) == SUM)
    shape = tuple(node._saved_self_sym_sizes)  # type: ignore[attr-defined]
    is_of_few = math.prod(shape) < num_samples or [_kind(child) for child in children(node)] == ["Stack"]
    return not is_of_few and not _is_of_parameters(node, shape)


def _is_of_parameters(node: Node, shape: tuple[int, ...]) -> bool:
    """Whether only parameters of the shape that is summed are below, a few operations away."""
    waiting, leaves = children(node), []
    for _ in range(8):
        if waiting:
            below = waiting.pop()
            if below._sequence_nr() == LEAF:
                leaves.append(tuple(below.variable.shape))  # type: ignore[attr-defined]
            waiting += children(below)
    return not waiting and set(leaves) == {shape}


def _factor(node: Node, name: str) -> float:
    """The size of what a multiplication multiplies by; 0 where it cannot be read."""
    value = _saved(node, name)
    return 0.0 if value is None else float(abs(value))


# -- a mean over a part -----------------------------------------------------------------------------------------


def _operands(node: Node) -> list[Node]:
    """What the one number that the node gives was computed from, if by arithmetic."""
    return children(node) if _kind(node) in (*_PASSED, "Mul", "Div") else []


def _counted_targets(node: Node, num_samples: int) -> str | None:
    """For the mean of cross_entropy or nll_loss: what it was divided by, unless that is the same for every sample."""
    if _kind(node) not in ("NllLoss", "NllLoss2D") or _reduction(node) != MEAN:
        return None
    if _saved(node, "weight") is not None:
        return "cross_entropy or nll_loss with weight=, the weights of classes"
    target, ignored = _saved(node, "target"), getattr(node, "_saved_ignore_index", None)
    if target is None or ignored is None:
        return None
    counts = target != (ignored if ignored < 2**63 else ignored - 2**64)
    if counts.numel() % num_samples == 0:
        by_sample = counts.reshape(num_samples, -1).sum(1)
        if by_sample[0] > 0 and bool((by_sample == by_sample[0]).all()):
            return None
    return f"cross_entropy or nll_loss over {int(counts.sum())} of {counts.numel()} targets"


def _divided_sum(node: Node) -> str | None:
    if _kind(node) != "Div" or len(children(node)) != 1:
        return None
    divisor, lengths = _saved(node, "other"), map(_summed_elements, _walk(children(node), _operands))
    length = next(filter(None, lengths), None)
    if divisor is None or length is None or (isinstance(divisor, torch.Tensor) and divisor.numel() != 1):
        return None
    number = float(divisor)
    is_typed_in = getattr(divisor, "dtype", torch.float64) == torch.float64  # as torch takes numbers of Python
    is_factor = is_typed_in and not number.is_integer()
    if is_factor or not 0 < number < length or length % number == 0:
        return None
    return f"a sum of {length} numbers that is divided by {number:g}"


def _summed_elements(node: Node) -> int | None:
    """How many numbers a sum adds up."""
    if _kind(node) == "Sum":
        return math.prod(node._saved_self_sym_sizes)  # type: ignore[attr-defined]
    if _kind(node) in ("NllLoss", "NllLoss2D") and _reduction(node) == SUM:
        target = _saved(node, "target")
        return None if target is None else target.numel()
    return None


def _selected_mean(node: Node, num_samples: int) -> str | None:
    length = getattr(node, "_saved_self_sym_numel", 0) if _kind(node) == "Mean" else 0
    is_selected = [_kind(child) for child in children(node)] in (["Index"], ["MaskedSelect"])
    return f"a mean of {length} selected numbers" if is_selected and length % num_samples else None


# -- samples that are compared ----------------------------------------------------------------------------------


def _comparison(node: Node, num_samples: int) -> str | None:
    kind = _kind(node)
    if kind == "NllLoss":
        return _numbered_targets(node, num_samples)
    shapes = _matrices(node, kind)
    if shapes is None or len(children(node)) != 2 or any(map(_is_parameter, children(node))):
        return None
    (rows, inner), columns = shapes[0], shapes[1][1 if kind != "Cdist" else 0]
    is_of_pairs = rows == columns and rows % num_samples == 0
    is_of_batch = kind != "Cdist" and inner in (num_samples, 2 * num_samples)
    if not is_of_pairs and not is_of_batch:
        return None
    what = "distances of" if kind == "Cdist" else "a product of"
    return f"{what} two matrices, {shapes[0][0]} x {shapes[0][1]} and {shapes[1][0]} x {shapes[1][1]}"


def _numbered_targets(node: Node, num_samples: int) -> str | None:
    target, scores = _saved(node, "target"), _saved(node, "self")
    if target is None or scores is None or scores.dim() != 2 or len(target) % num_samples:
        return None
    products = [one for one in _walk(children(node), _scored) if _kind(one) in ("Mm", "Bmm")]
    is_of_samples = any(not any(map(_is_parameter, children(product))) for product in products)
    is_numbered = scores.shape[1] == len(target) and bool((target == torch.arange(len(target)).to(target)).all())
    return f"cross_entropy with the targets 0 to {len(target) - 1}" if is_of_samples and is_numbered else None


def _scored(node: Node) -> list[Node]:
    """What scores were computed from, as far as element by element."""
    return children(node) if _kind(node) in (*_PASSED, *_VIEWS, "LogSoftmax", "Mul", "Div") else []


def _matrices(node: Node, kind: str) -> tuple[Sequence[int], Sequence[int]] | None:
    """The shapes of the two matrices that a node has multiplied, or whose rows it has compared."""
    if kind == "Mm":
        return node._saved_self_sym_sizes, node._saved_mat2_sym_sizes  # type: ignore[attr-defined]
    names = {"Bmm": ("self", "mat2"), "Cdist": ("x1", "x2")}.get(kind)
    tensors = [] if names is None else [_saved(node, name) for name in names]
    if not tensors or any(tensor is None or tensor.dim() > 3 for tensor in tensors):
        return None
    if any(tensor.dim() == 3 and len(tensor) > 1 for tensor in tensors):
        return None
    one, other = (tuple(tensor.shape[-2:]) for tensor in tensors)
    return one, other


def _is_parameter(node: Node) -> bool:
    """Whether it is a parameter, perhaps as a view or in another dtype."""
    while _kind(node) in _VIEWS and len(children(node)) == 1:
        node = children(node)[0]
    return bool(node._sequence_nr() == LEAF)


# -- nodes --------------------------------------------------------------------------------------------------------


def _walk(roots: Sequence[Node], onward: Callable[[Node], list[Node]]) -> Iterator[Node]:
    """The roots, and all that is reached from them, each once."""
    seen, waiting = set(roots), list(roots)
    while waiting:
        node = waiting.pop()
        yield node
        below = [child for child in onward(node) if child not in seen]
        seen.update(below)
        waiting += below


def _kind(node: Node) -> str:
    """`Add` for AddBackward0."""
    found = _KIND.match(node.name())
    return found[1] if found else ""


def _reduction(node: Node) -> Any:
    return getattr(node, "_saved_reduction", None)


def _saved(node: Node, name: str) -> Any:
    """What a node has saved under a name; None where it was freed, or cannot be read without computing it again."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    if raw is not None and getattr(raw, "unpack_hook", raw) is not None:
        return None
    try:
        return getattr(node, f"_saved_{name}", None)
    except RuntimeError:  # a backward pass has gone through it
        return None
