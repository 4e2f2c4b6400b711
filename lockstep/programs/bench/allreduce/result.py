"""What worker 0 of an all-reduce benchmark leaves for the process that launched it. Without torch."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_FILE = "result.json"


@dataclass(frozen=True)
class Times:
    """The times of one size, all in ms per operation and of the slowest worker.

    `rounds` has for each round the mean of every side's block, `p95` of every side that of its single operations, and
    `repetitions` how many operations a block of it has.
    """

    num_bytes: int
    rounds: list[dict[str, float]]
    p95: dict[str, float]
    repetitions: dict[str, int]


@dataclass(frozen=True)
class Result:
    """Either `refused`, a sentence, or the times of every size."""

    refused: str | None
    sizes: list[Times]
    machine: dict[str, Any]

    def write(self, folder: Path) -> None:
        (folder / _FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Result":
        fields = json.loads((folder / _FILE).read_text(encoding="utf-8"))
        return cls(fields["refused"], [Times(**times) for times in fields["sizes"]], fields["machine"])
