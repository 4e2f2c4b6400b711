"""A folder of checkpoints, `step-00000412` and the like: the newest good one, and how many are kept.

# Note [Newest]
# The newest checkpoint is the one that was written last: each has a serial number, one more than the highest in its
# folder. It need not have the highest step: a run that started again, or resumed from an earlier checkpoint, resumes
# from its own.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.errors import BadCheckpoint
from lockstep.state.checkpoints.file import is_checkpoint, read_manifest, verify
from lockstep.state.checkpoints.lock import leftovers, read_lock, remove_unless_locked

_NAME = re.compile(r"step-(\d{8,})")


class RefusedCheckpoint(NamedTuple):
    """A checkpoint that is not used, and why."""

    path: Path
    reason: str


class NewestGood(NamedTuple):
    """The newest good checkpoint of a folder, None where there is none, and those that were refused before it."""

    path: Path | None
    refused: list[RefusedCheckpoint]


class ListedCheckpoint(NamedTuple):
    """A checkpoint whose manifest is good; its other files were not read."""

    path: Path
    manifest: dict[str, Any]

    @property
    def serial(self) -> int:
        return int(self.manifest["serial"])


def name_of(step: int) -> str:
    return f"step-{step:08}"


def newest_good(folder: Path, usable: Callable[[Path], object] = verify) -> NewestGood:
    """The newest checkpoint in `folder` for which `usable` does not raise BadCheckpoint, and those refused before it.

    `verify` refuses those of which some file is not as it was written. They stay in the folder. See Note [Newest].
    """
    listed, refused = listing(folder)
    for entry in listed:
        try:
            with read_lock(entry.path):
                usable(entry.path)
            return NewestGood(entry.path, refused)
        except BadCheckpoint as error:
            refused.append(RefusedCheckpoint(entry.path, str(error)))
    return NewestGood(None, refused)


def listing(folder: Path) -> tuple[list[ListedCheckpoint], list[RefusedCheckpoint]]:
    """The checkpoints in `folder` by their manifests, newest first; and those whose manifest is damaged."""
    listed, refused = [], []
    for path in sorted(folder.glob("step-*"), reverse=True):
        if not _NAME.fullmatch(path.name):
            continue
        try:
            if path.is_symlink():
                raise BadCheckpoint(f"{path} is a link, which is not followed")
            listed.append(ListedCheckpoint(path, read_manifest(path)))
        except BadCheckpoint as error:
            refused.append(RefusedCheckpoint(path, str(error)))
    return sorted(listed, key=lambda entry: entry.serial, reverse=True), refused


def next_serial(folder: Path) -> int:
    """One more than that of any checkpoint in `folder`."""
    return 1 + max((entry.serial for entry in listing(folder)[0]), default=0)


def remove_leftovers(folder: Path) -> list[Path]:
    """Removes what killed writers and removers left, not what is being written; returns what it removed."""
    return [path for path in leftovers(folder) if remove_unless_locked(path)]


@dataclass
class Retention:
    """Keeps the newest `keep` good checkpoints of a folder. Those of other processes it verifies, once each."""

    folder: Path
    keep: int
    _good: set[str] = field(default_factory=set)

    def written(self, digest: str) -> None:
        """Records that this process has written the checkpoint with this manifest, so that it is good."""
        self._good.add(digest)

    def prune(self) -> list[Path]:
        """Removes what is older than the newest `keep` good ones and not being read; returns what it removed.

        Damaged ones do not count and stay, so the only good one is never removed.
        """
        listed, _ = listing(self.folder)
        good = 0
        for number, entry in enumerate(listed):
            good += self._is_good(entry)
            if good == self.keep:
                old = [entry.path for entry in listed[number + 1 :] if is_checkpoint(entry.path)]
                return [path for path in old if remove_unless_locked(path)]
        return []

    def _is_good(self, entry: ListedCheckpoint) -> bool:
        digest = entry.manifest["manifest_sha256"]
        if digest not in self._good:
            try:
                verify(entry.path)
            except BadCheckpoint:
                return False
            self._good.add(digest)
        return True
