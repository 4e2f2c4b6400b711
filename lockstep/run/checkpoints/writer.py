"""Writes snapshots beside the training, one at a time; an error is told and never ends the training.

# Note [Errors of the writer]
# A full disk, a folder without permission, a file system that went away: the checkpoint before stays, one line says
# what happened, and the next that is due is tried again. The line is said once for the same error in a row. It waits in
# `news` for the thread that trains, for those who listen to a run need not know of threads.
"""

import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.run.checkpoint import Snapshot, write
from lockstep.run.checkpoints.folder import Retention, name_of, next_serial, remove_leftovers


@dataclass
class Writer:
    """The thread that writes, and what came of its last save."""

    folder: Path
    retention: Retention
    last_good: Path | None = None
    news: deque[str] = field(default_factory=deque)
    _thread: threading.Thread | None = None
    _last_error: str = ""

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, snapshot: Snapshot) -> None:
        """Begins to write `snapshot`, which nobody changes until `is_busy` is false. Only when it is not busy."""
        assert not self.is_busy, "one save at a time"
        # A daemon: a disk that never answers must not keep the process alive after `wait` has given up.
        self._thread = threading.Thread(target=self._save, args=(snapshot,), name="lockstep-checkpoint", daemon=True)
        self._thread.start()

    def wait(self, limit_s: float) -> bool:
        """Whether nothing is being written any more, after at most `limit_s`."""
        if self._thread is not None:
            self._thread.join(max(0.0, limit_s))
        return not self.is_busy

    def _save(self, snapshot: Snapshot) -> None:
        """See Note [Errors of the writer]."""
        path = self.folder / name_of(snapshot.state["step"])
        try:
            remove_leftovers(self.folder)
            digest = write(path, snapshot, next_serial(self.folder))
            self.last_good, self._last_error = path, ""
            self.retention.written(digest)
            self.retention.prune()
        except Exception as error:  # noqa: BLE001 - no failed save ends a training
            self._tell(f"{path.name} could not be saved: {_in_words(error)}")

    def _tell(self, problem: str) -> None:
        kind = problem.partition(" ")[2]
        if kind == self._last_error:
            return
        self._last_error = kind
        kept = f"; {self.last_good.name} stays" if self.last_good is not None else ""
        self.news.append(f"{problem} ({self.folder}){kept}, and the next checkpoint that is due is tried again")


def _in_words(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
