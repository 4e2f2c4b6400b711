"""Writes snapshots beside the training, one at a time; an error is told and never ends the training.

# Note [Errors of the writer]
# A full disk, a folder without permission, a file system that went away: the checkpoint before stays, one line says
# what happened, and the next that is due is tried again. The line is said once for the same error in a row. Any other
# error comes from the program or its environment and will come again: it is said once, as what it means for the run.
# The line waits in `news` for the thread that trains, for those who listen to a run need not know of threads.
"""

import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.state.checkpoints.file import Snapshot, write
from lockstep.state.checkpoints.folder import Retention, name_of, next_serial, remove_leftovers


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
            self._tell(path.name, error)

    def _tell(self, name: str, error: Exception) -> None:
        """Says it, unless the last save failed alike."""
        kind = str(error.strerror) if isinstance(error, OSError) else type(error).__name__
        if kind != self._last_error:
            self._last_error = kind
            self.news.append(self._said(name, error))

    def _said(self, name: str, error: Exception) -> str:
        if isinstance(error, OSError):
            kept = f"; {self.last_good.name} stays" if self.last_good is not None else ""
            why = error.strerror or error
            return f"{name} could not be saved: {why} ({self.folder}){kept}, and the next that is due is tried again"
        return (
            f"{name} could not be saved in {self.folder}: {type(error).__name__}: {error}. The disk is not the cause, "
            "so every later checkpoint fails in the same way, until that is mended. Training goes on without new ones."
        )
