"""What the workers of a trial are told, and what they leave. Without torch."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_FILE = "result.json"


@dataclass(frozen=True)
class Task:
    """Train `model` for `steps` steps; the log of commits, the gate and the result are in `folder`.

    `save_every` is for the baseline: so many steps are between its checkpoints.
    """

    model: str
    steps: int
    folder: str
    save_every: int | None = None

    @property
    def place(self) -> Path:
        return Path(self.folder)

    def written(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> "Task":
        """What `written` wrote."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Result:
    """What the worker with rank 0 leaves at the end: a digest of everything trained, and where that was."""

    digest: str
    machine: dict[str, Any]

    def write(self, folder: Path) -> None:
        (folder / _FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Result":
        return cls(**json.loads((folder / _FILE).read_text(encoding="utf-8")))
