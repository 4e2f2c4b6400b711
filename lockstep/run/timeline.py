"""This worker's part of the run's timeline, from `run.timeline` or `lockstep run --timeline` to the end of the run."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import BadArgument, BadEnvironment
from lockstep.events import Events
from lockstep.observe.timeline.file import has_timeline, write_trace
from lockstep.observe.timeline.part import PartWriter
from lockstep.settings.paths import as_path


@dataclass
class RunTimeline:
    """Owns the writer of this worker's part.

    `folder` is the run's, if it has one. Where no launcher puts the parts together at the end, as `launcher_merges`
    says, the first worker does.
    """

    events: Events
    folder: Path | None
    device: str
    generation: Callable[[], int]
    launcher_merges: bool
    _writer: PartWriter | None = None

    def begin(self, steps: int | None, folder: str | os.PathLike[str] | None) -> None:
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise BadArgument(f"run.timeline takes steps=, 1 or more, or None for all that come, not {steps!r:.60}")
        if folder is not None:
            self.folder, self.launcher_merges = as_path("run.timeline(folder=...)", folder).absolute(), False
        if self.folder is None:
            raise BadArgument(
                "run.timeline has no folder to write to: give run.timeline(steps=20, folder=...), or start the script "
                "with `lockstep run`, which makes one"
            )
        if self._writer is not None:
            self._writer.close()
        self._writer = PartWriter(self.events, self.folder, self.device, self.generation, self.events.note)
        self._writer.begin(steps)

    def close(self, is_first: bool) -> None:
        """After all workers have ended their runs. `is_first`: this one is the first of them."""
        if self._writer is None or self.folder is None:
            return
        self._writer.close()
        if is_first and not self.launcher_merges and has_timeline(self.folder):
            try:
                self.events.note(f"timeline: {write_trace(self.folder)} (open it in ui.perfetto.dev)")
            except (BadArgument, BadEnvironment) as error:
                self.events.note(str(error))
