"""What benchmarks measure, as values. Without torch, so that a wrong argument is refused at once."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from lockstep.errors import BadArgument

CPU, CUDA = "cpu", "cuda"
NUM_BATCHES = 4  # how many different batches a model is trained on, over and over
_RESULT = "result.json"


@dataclass(frozen=True)
class BenchRecord:
    """What one process of a benchmark passes to another, as JSON. Its sequences are tuples."""

    def written(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Self:
        fields = json.loads(text)
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})

    def leave(self, folder: Path) -> None:
        """Writes it into the folder, for `find`."""
        (folder / _RESULT).write_text(self.written(), encoding="utf-8")

    @classmethod
    def find(cls, folder: Path) -> Self:
        return cls.read((folder / _RESULT).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class BenchResult(BenchRecord):
    """What worker 0 leaves: `refused`, a sentence, or the rows of the report; and where they were measured."""

    refused: str | None
    rows: tuple[dict[str, Any], ...]
    machine: dict[str, Any]


@dataclass(frozen=True)
class ReferenceModel:
    """A model as a plan needs it; `steps` make a block of about a second, on a GPU of a few tenths."""

    batch_size: int
    steps: int
    package: str | None = None


REFERENCES = {
    "mlp": ReferenceModel(64, steps=20),
    "wide": ReferenceModel(256, steps=15),
    "gpt": ReferenceModel(8, steps=3),
    "cnn": ReferenceModel(64, steps=5),
}


def models_named(words: Iterable[str], references: Mapping[str, ReferenceModel], where: str) -> list[str]:
    """Each once; "all" are all. Raises if one is not measured there."""
    names = list(dict.fromkeys(words))
    odd = [name for name in names if name not in (*references, "all")]
    if odd:
        known = ", ".join(references)
        raise BadArgument(
            f"the model {odd[0]!r} is not measured {where}: choose from {known} or all, or another --device"
        )
    return list(references) if "all" in names else names


def refuse_unequal_shares(model: str, batch_size: int, workers: int, allowed: str) -> None:
    """Raises, with the numbers of workers that are `allowed`, if the batch cannot be cut evenly."""
    if batch_size % workers:
        raise BadArgument(
            f"the global batch of {model}, {batch_size} samples, cannot be cut into {workers} "
            f"equal shares, and DDP counts unequal ones as equal: use {allowed}"
        )


def refuse_unless_gpu(device: str, **given: bool) -> None:
    """Raises if an option that is only for a GPU was given for another device."""
    odd = [f"--{name.replace('_', '-')}" for name, is_given in given.items() if is_given]
    if device != CUDA and odd:
        raise BadArgument(f"{' and '.join(odd)} is for a GPU alone: add --device cuda, or leave it out")


def require_gpu() -> None:
    """Raises if torch finds no GPU, with the reason. Loads torch."""
    from lockstep.settings.device import choose, count_gpus

    choose(CUDA, 0, 1, count_gpus())
