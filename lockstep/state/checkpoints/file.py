"""One checkpoint on disk: a folder of safetensors files and `manifest.json`, whole or not there at all.

# Note [Whole or not there]
# A checkpoint is written to a temporary folder beside its place, every file and the folder are synced to the disk, and
# then the folder takes its place by one rename. Where a checkpoint exists already, the two folders are exchanged in one
# system call, so that at every moment the name holds a whole checkpoint.

# Note [Every bit counts]
# The manifest holds the SHA-256 of every other file, and of its own text with 64 zeros in the digest's place. It is
# taken over the text, not over what the text means, so that no flipped bit goes unnoticed, not even 1e-08 to 1E-08.
"""

import ctypes
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from lockstep.errors import BadArgument, BadCheckpoint
from lockstep.state.checkpoints.lock import MANIFEST, new_partial, read_lock
from lockstep.state.schema import check_form
from lockstep.state.snapshot import Snapshot, Tensors
from lockstep.state.tensor_file import write_tensors
from lockstep.version import VERSION

FORMAT = 2
FILE_BYTES = 1024 * 1024 * 1024

_DIGEST_KEY, _NO_DIGEST, _END = '"manifest_sha256": "', "0" * 64, '"\n}'


def write(
    path: Path,
    snapshot: Snapshot,
    serial: int = 0,
    file_bytes: int = FILE_BYTES,
    wall_clock: Callable[[], float] = time.time,
) -> str:
    """Writes a checkpoint to `path`, replacing one that exists there; returns the manifest's SHA-256.

    See Note [Whole or not there]. Of two checkpoints in a folder, the one with the higher `serial` was written later:
    clocks may be set back.
    """
    _check_place(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_partial(path) as partial:
        about = {"serial": serial, "when": datetime.fromtimestamp(wall_clock(), UTC).isoformat(timespec="seconds")}
        digest = _write_files(partial, snapshot, about, file_bytes)
        _take_place(partial, path)
    return digest


def read(path: Path) -> Snapshot:
    """The checkpoint at `path`; raises BadCheckpoint if a file does not match the manifest."""
    with read_lock(path):
        manifest = verify(path)
        tensors: Tensors = {}
        for name in manifest["files"]:
            try:
                tensors |= load_file(path / name)
            except (SafetensorError, OSError) as error:
                raise BadCheckpoint(f"checkpoint {path}: {name} cannot be read: {error}") from error
    return Snapshot(tensors, manifest["state"])


def read_state(path: Path) -> Snapshot:
    """The checkpoint at `path`; raises BadCheckpoint if it is damaged, or its state is not that of a run."""
    snapshot = read(path)
    check_form(snapshot, f"checkpoint {path}")
    return snapshot


def verify(path: Path) -> dict[str, Any]:
    """The manifest of the checkpoint at `path`; raises BadCheckpoint if a file is not as it was written."""
    manifest = read_manifest(path)
    for name, expected in manifest["files"].items():
        if Path(name).name != name or (path / name).is_symlink():
            raise BadCheckpoint(f"checkpoint {path}: the manifest names a file outside of its folder: {name!r}")
        if not (path / name).is_file():
            raise BadCheckpoint(f"checkpoint {path}: {name} is missing")
        if _sha256(path, name) != expected:
            raise BadCheckpoint(f"checkpoint {path}: {name} is damaged (its SHA-256 is not the manifest's)")
    return manifest


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest alone, checked against its own digest. The form of its state is not checked.

    See Note [Every bit counts].
    """
    if not path.is_dir():
        raise BadCheckpoint(f"there is no checkpoint at {path}" + _nearby(path))
    try:
        text = (path / MANIFEST).read_bytes().decode()
        body, digest = _split(text)
        manifest = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise BadCheckpoint(f"checkpoint {path}: {MANIFEST} is missing or damaged ({error})") from error
    if digest != hashlib.sha256(body.encode()).hexdigest():
        raise BadCheckpoint(f"checkpoint {path}: {MANIFEST} is damaged (its SHA-256 does not fit)")
    written = manifest.get("format")
    if written != FORMAT:
        raise BadCheckpoint(f"checkpoint {path} has format {written!r:.40}; this version reads {FORMAT}")
    for name, kind in (("serial", int), ("files", dict), ("state", dict)):
        if type(manifest.get(name)) is not kind:
            raise BadCheckpoint(f"checkpoint {path}: {MANIFEST} has no usable entry {name!r}")
    return dict(manifest)


def is_checkpoint(path: Path) -> bool:
    """Whether a folder looks like a checkpoint, good or damaged."""
    return path.is_dir() and not path.is_symlink() and (path / MANIFEST).is_file()


def _write_files(folder: Path, snapshot: Snapshot, about: Mapping[str, Any], file_bytes: int) -> str:
    files = {}
    for number, tensors in enumerate(_in_files(snapshot.tensors, file_bytes)):
        name = f"tensors-{number:03}.safetensors"
        files[name] = write_tensors(folder / name, tensors)
        _sync(folder / name)
    state = snapshot.state
    run = {"lanes": state.get("num_lanes"), "seed": state.get("seed")}
    versions = {"lockstep": VERSION, "torch": torch.__version__}
    manifest = {"format": FORMAT, "step": state.get("step"), **about, "run": run, "versions": versions, "files": files}
    text = _with_digest({**manifest, "state": state})
    (folder / MANIFEST).write_bytes(text.encode())
    _sync(folder / MANIFEST)
    _sync(folder)
    return _split(text)[1]


def _in_files(tensors: Mapping[str, torch.Tensor], file_bytes: int) -> list[dict[str, torch.Tensor]]:
    """Tensors in the order they come, in groups of at most `file_bytes`; a larger one has a file of its own."""
    groups: list[dict[str, torch.Tensor]] = [{}]
    room = file_bytes
    for name, tensor in tensors.items():
        if groups[-1] and tensor.nbytes > room:
            groups.append({})
            room = file_bytes
        groups[-1][name] = tensor
        room -= tensor.nbytes
    return groups


def _with_digest(manifest: Mapping[str, Any]) -> str:
    text = json.dumps({**manifest, "manifest_sha256": _NO_DIGEST}, indent=1)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return text.removesuffix(_NO_DIGEST + _END) + digest + _END


def _split(text: str) -> tuple[str, str]:
    """A manifest's text without its digest, and the digest."""
    digest = text[-len(_NO_DIGEST + _END) : -len(_END)]
    front = text.removesuffix(digest + _END)
    if not front.endswith(_DIGEST_KEY) or len(digest) != len(_NO_DIGEST):
        raise ValueError("it does not end with its SHA-256")
    return front + _NO_DIGEST + _END, digest


def _take_place(temporary: Path, path: Path) -> None:
    temporary.chmod(0o777 & ~_umask())
    if path.exists():
        _exchange(temporary, path)
    else:
        temporary.rename(path)
    _sync(path.parent)


def _umask() -> int:
    """That of this process, which Python can only read by setting another one for a moment, for all threads."""
    with suppress(OSError, ValueError):
        lines = Path("/proc/self/status").read_text().splitlines()
        found = [line for line in lines if line.startswith("Umask:")]
        return int(found[0].split()[1], 8) if found else 0o022
    return 0o022


def _exchange(one: Path, other: Path) -> None:
    """Swaps two folders in one system call (Linux); elsewhere by two renames, with a moment between them."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    at_cwd, exchange = -100, 2
    if renameat2 and renameat2(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), exchange) == 0:
        return
    aside = one.with_suffix(".old")
    other.rename(aside)
    one.rename(other)
    shutil.rmtree(aside, ignore_errors=True)


def _check_place(path: Path) -> None:
    if path.is_symlink():
        raise BadArgument(f"{path} is a link; give the folder itself")
    if path.exists() and not (path / MANIFEST).is_file():
        raise BadArgument(f"{path} exists and is not a checkpoint; lockstep does not overwrite it")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(folder: Path, name: str) -> str:
    try:
        with (folder / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BadCheckpoint(f"checkpoint {folder}: {name} cannot be read: {error.strerror}") from error


def _nearby(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    names = sorted(place.parent.name for place in path.parent.glob(f"[!.]*/{MANIFEST}"))
    return f"; checkpoints in {path.parent}: {', '.join(names[:5])}" if names else ""
