"""Loaded batches in pinned memory, from which a GPU copies beside its other work.

torch's loader pins what it loads, in a thread of its own, and lets an object with a `pin_memory` method do it itself.
It is handed such an object, because its own way leaves dataclasses out and does not keep every type of container.
"""

from dataclasses import dataclass
from typing import Any

from lockstep.data.cut import opened
from lockstep.data.fetch import Loaded


@dataclass(frozen=True)
class Pinnable:
    """What was loaded, on its way through torch's loader."""

    loaded: Loaded | None

    def pin_memory(self) -> "Pinnable":
        return self if self.loaded is None else Pinnable((self.loaded[0], pinned(self.loaded[1])))


def to_be_pinned(loaded: Any) -> Any:
    """In the place of a collate function: our data set collates by itself."""
    return Pinnable(loaded)


def pinned(part: Any) -> Any:
    """The same structure with its tensors in pinned memory; what cannot be pinned stays as it is."""
    structure = opened(part)
    if structure is not None:
        return structure.rebuilt([pinned(inner) for _, inner in structure.parts])
    return part.pin_memory() if _can_be_pinned(part) else part


def unpacked(given: Any) -> Loaded | None:
    """What was loaded, whether it had to be pinned or not."""
    loaded: Loaded | None = given.loaded if isinstance(given, Pinnable) else given
    return loaded


def _can_be_pinned(part: Any) -> bool:
    device = getattr(part, "device", None)  # a tensor on a GPU has its own memory
    return callable(getattr(part, "pin_memory", None)) and getattr(device, "type", "cpu") == "cpu"
