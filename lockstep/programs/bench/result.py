"""What worker 0 tells the process that launched the benchmark. Without torch."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_FILE = "result.json"
_MARK = "bench-progress "


@dataclass(frozen=True)
class Result:
    """Either `refused`, a sentence, or the times of every side in ms per step, round by round."""

    refused: str | None
    differences: dict[str, dict[str, Any]]
    rounds: list[dict[str, float]]
    parameters: int
    machine: dict[str, Any]

    def write(self, folder: Path) -> None:
        (folder / _FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Result":
        return cls(**json.loads((folder / _FILE).read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Progress:
    """Rounds done, of how many; `doing` says what is done before the first."""

    done: int
    total: int
    doing: str = ""

    def written(self) -> str:
        return f"{_MARK}{self.done} {self.total}"

    @classmethod
    def read(cls, line: str) -> "Progress | None":
        """What `written` wrote; None for any other line of a worker's output."""
        if not line.startswith(_MARK):
            return None
        done, total = line.removeprefix(_MARK).split()
        return cls(int(done), int(total))
