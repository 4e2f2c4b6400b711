"""What a batch is made of: its samples counted, cut along dimension 0, copied; what an object is made of. Pure.

# Note [Structure or samples]
# Tensors and arrays hold one sample per row. Mappings, dataclasses and named tuples are structure: each of
# their parts is cut. A list or tuple is structure when it holds tensors or containers, as `[images, labels]`
# does, and a sequence of samples when it holds plain values only, as `["a.png", "b.png"]` does. A list of
# lists of numbers is therefore structure: token lists have to be padded into a tensor before they are cut.
"""

import copy
import dataclasses
import sys
from collections.abc import Callable, Hashable, Mapping, MutableMapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from functools import lru_cache
from types import MemberDescriptorType
from typing import Any, NamedTuple, cast

import torch
from torch.nn.utils.rnn import PackedSequence

from lockstep.errors import CannotCut

PLAIN = (str, bytes, int, float, bool, complex, type(None))


def num_samples(batch: Any) -> int:
    """How many samples a whole batch holds; every part of it holds that many."""
    counts: list[tuple[str, int]] = []
    _note_counts(batch, "batch", counts)
    if not counts:
        raise CannotCut(f"{_describe('batch', batch)} and holds nothing to count samples by. Put a tensor in it.")
    first_path, first = counts[0]
    for path, count in counts:
        if count != first:
            raise CannotCut(
                f"{first_path} holds {first} samples and {path} holds {count}; to be cut into lanes, every "
                "part needs the same number. Give each one row per sample along dimension 0, or leave it out."
            )
    return first


def take(batch: Any, positions: range) -> Any:
    """The samples at `positions`, in containers of the same types; tensors and arrays are views."""
    return _take(batch, positions, "batch")


class Structure(NamedTuple):
    """A container seen as its parts: how each is written after the container's name, and the way back."""

    parts: list[tuple[str, Any]]
    rebuilt: Callable[[list[Any]], Any]


def _note_counts(part: Any, path: str, counts: list[tuple[str, int]]) -> None:
    structure = opened(part)
    if structure is None:
        counts.append((path, _count(part, path)))
        return
    for suffix, inner in structure.parts:
        _note_counts(inner, path + suffix, counts)


def _take(part: Any, positions: range, path: str) -> Any:
    structure = opened(part)
    if structure is not None:
        return structure.rebuilt([_take(inner, positions, path + suffix) for suffix, inner in structure.parts])
    _count(part, path)
    rows = part[positions.start : positions.stop]
    return rows if type(rows) is type(part) or not isinstance(part, list | tuple) else type(part)(rows)


def opened(part: Any) -> Structure | None:
    """The parts of a container; None for what is sliced, or cannot be. See Note [Structure or samples]."""
    kind = type(part)
    if kind is tuple or kind is list:  # the usual ones first: this runs in every step
        return None if all(map(_is_plain, part)) else Structure([(f"[{i}]", x) for i, x in enumerate(part)], kind)
    if isinstance(part, torch.Tensor | PackedSequence):
        return None
    if isinstance(part, Mapping):
        return Structure([(f"[{_quoted(key)}]", part[key]) for key in part], lambda new: _mapping_like(part, new))
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        names = [field.name for field in dataclasses.fields(part)]
        return Structure([(f".{name}", getattr(part, name)) for name in names], lambda new: _dataclass_like(part, new))
    if isinstance(part, tuple) and hasattr(part, "_fields"):
        fields = zip(part._fields, part, strict=True)
        return Structure([(f".{name}", inner) for name, inner in fields], lambda new: type(part)(*new))
    if isinstance(part, list | tuple) and not all(map(_is_plain, part)):
        return Structure([(f"[{i}]", inner) for i, inner in enumerate(part)], lambda new: type(part)(new))
    return None


def copied(part: Any) -> Any:
    """The same structure with tensors and arrays of its own; plain values are shared."""
    if isinstance(part, torch.Tensor):
        return part.clone()
    structure = opened(part)
    if structure is not None:
        return structure.rebuilt([copied(inner) for _, inner in structure.parts])
    return part.copy() if hasattr(part, "tobytes") and hasattr(part, "copy") else part


def versions_of(part: Any) -> list[int]:
    """A number for each tensor, which a write in place changes; arrays and plain values have none."""
    if isinstance(part, torch.Tensor):
        return [] if part.is_inference() else [part._version]
    structure = opened(part)
    return [] if structure is None else [version for _, inner in structure.parts for version in versions_of(inner)]


def requiring_grad(part: Any, path: str = "batch") -> str | None:
    """Where in it the first tensor is that requires a gradient; None if there is none."""
    if isinstance(part, torch.Tensor):
        return path if part.requires_grad else None
    structure = opened(part)
    inner = () if structure is None else structure.parts
    return next((found for suffix, one in inner if (found := requiring_grad(one, path + suffix)) is not None), None)


def _count(part: Any, path: str) -> int:
    """The rows of something that can be sliced; CannotCut for anything else."""
    if isinstance(part, torch.Tensor) and part.dim() > 0 and part.layout is torch.strided and not part.is_nested:
        return part.shape[0]
    if is_numpy_array(part) and part.ndim > 0:
        return int(part.shape[0])
    if isinstance(part, list | tuple) and not isinstance(part, PackedSequence):
        return len(part)
    raise CannotCut(f"{_describe(path, part)}, which cannot be cut into lanes. {_advice(part)}")


def _mapping_like(part: Mapping[Any, Any], new: list[Any]) -> Any:
    items = dict(zip(part, new, strict=True))
    if isinstance(part, MutableMapping):
        clone = copy.copy(part)  # keeps what type(part)(items) would lose, such as a default factory
        clone.update(items)
        return clone
    return type(part)(items)  # type: ignore[call-arg]


def _dataclass_like(part: Any, new: list[Any]) -> Any:
    clone = copy.copy(part)
    for field, value in zip(dataclasses.fields(part), new, strict=True):
        object.__setattr__(clone, field.name, value)  # also where frozen; __post_init__ has had its turn
    return clone


def is_numpy_array(part: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(part, numpy.ndarray)


def _is_plain(part: Any) -> bool:
    if isinstance(part, torch.Tensor):
        return False
    numpy = sys.modules.get("numpy")
    return isinstance(part, PLAIN) or (numpy is not None and isinstance(part, numpy.generic))


def _quoted(key: Any) -> str:
    return f'"{key}"' if isinstance(key, str) else repr(key)


def _describe(path: str, part: Any) -> str:
    if part is None:
        return f"{path} is None"
    if isinstance(part, torch.Tensor) and part.layout is torch.strided and not part.is_nested:
        return f"{path} is a tensor of shape {tuple(part.shape)}"
    if isinstance(part, torch.Tensor):
        return f"{path} is a {'nested' if part.is_nested else str(part.layout).removeprefix('torch.')} tensor"
    return f"{path} is of type {type(part).__name__}"


def _advice(part: Any) -> str:
    if isinstance(part, PackedSequence):
        return "Put the padded tensor and the lengths in the batch; pack inside the loop over run.lanes(batch)."
    if isinstance(part, AbstractSet):
        return "A set has no order: use a list with one entry per sample."
    if isinstance(part, torch.Tensor) and (part.layout is not torch.strided or part.is_nested):
        return "Put a dense (padded) tensor in the batch and convert inside the loop over run.lanes(batch)."
    if _is_plain(part) or isinstance(part, torch.Tensor) or is_numpy_array(part):
        return "Give it one entry per sample along dimension 0, or keep it outside the batch."
    return "A batch is made of tensors, arrays, lists, tuples, dicts, dataclasses; keep the rest outside it."


def attributes(holder: Any) -> Mapping[str, Any]:
    """Those of an object itself, those in its slots too."""
    own, kind = getattr(holder, "__dict__", None), cast(Hashable, type(holder))
    found = own if isinstance(own, Mapping) else {}
    if not (slots := _slots_of(kind)):
        return found
    in_slots = dict(found)
    for name, slot in slots:
        with suppress(AttributeError):  # nothing is in it
            in_slots[name] = slot.__get__(holder)
    return in_slots


@lru_cache(maxsize=4096)
def _slots_of(kind: Any) -> tuple[tuple[str, MemberDescriptorType], ...]:
    """Of Python's own types, whose parts are no attributes, none."""
    kinds = [one for one in kind.__mro__ if "__slots__" in vars(one)]
    return tuple((name, one) for base in kinds for name, one in vars(base).items() if type(one) is MemberDescriptorType)
