"""A roster in a folder that all hosts share."""

import os
import secrets
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, unquote

from lockstep.errors import BadEnvironment

_UNFINISHED = ".unfinished-"


class FolderHome:
    """A file per key. Files appear whole: they are written under another name, then renamed or linked."""

    is_private = True
    is_written = True
    endpoint_port = 0

    def __init__(self, path: str) -> None:
        self._folder = Path(path).expanduser().absolute()
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._written("", "").unlink()
        except OSError as error:
            raise BadEnvironment(
                f"the roster {path} cannot be used: {error.strerror} ({error.filename}). It is a folder that every "
                "worker can write to"
            ) from error

    def __str__(self) -> str:
        return str(self._folder)

    def entries(self) -> dict[str, str]:
        found = {}
        for path in self._folder.iterdir():
            if not path.name.startswith("."):
                with suppress(FileNotFoundError):  # removed since
                    found[unquote(path.name)] = path.read_text()
        return found

    def put(self, key: str, text: str) -> None:
        self._written(key, text).rename(self._path(key))

    def put_first(self, key: str, text: str) -> str:
        unfinished = self._written(key, text)
        try:
            os.link(unfinished, self._path(key))  # atomic on shared file systems too
        except FileExistsError:
            return self._path(key).read_text()
        finally:
            unfinished.unlink()
        return text

    def close(self) -> None:
        """It holds nothing."""

    def _path(self, key: str) -> Path:
        return self._folder / quote(key, safe="")

    def _written(self, key: str, text: str) -> Path:
        path = self._folder / f"{_UNFINISHED}{quote(key, safe='')}-{secrets.token_hex(8)}"
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        return path
