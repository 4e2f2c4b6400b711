"""Checkpoints on disk: a folder with `tensors.safetensors` and `manifest.json`, whole or not there at all.

# Note [Whole or not there]
# A checkpoint is written to a temporary folder beside its place, every file and the folder are forced to the disk, and
# then the folder takes its place by one rename. Where a checkpoint stands already, the two folders are exchanged in one
# system call, so that at every moment the name holds a whole checkpoint.
"""

import ctypes
import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from lockstep.errors import BadArgument, BadCheckpoint

FORMAT = 1
MANIFEST, TENSORS = "manifest.json", "tensors.safetensors"


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds: tensors by name, and everything else as JSON values."""

    tensors: dict[str, torch.Tensor]
    state: dict[str, Any]


def write(path: Path, snapshot: Snapshot) -> None:
    """Puts a checkpoint at `path`, replacing one that stands there. See Note [Whole or not there]."""
    _check_place(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent))
    try:
        _write_files(temporary, snapshot)
        _take_place(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def read(path: Path) -> Snapshot:
    """The checkpoint at `path`, every file checked against the manifest; else BadCheckpoint."""
    manifest = read_manifest(path)
    for name, expected in manifest["files"].items():
        if Path(name).name != name:
            raise BadCheckpoint(f"checkpoint {path}: the manifest names a file outside of its folder: {name!r}")
        if not (path / name).is_file():
            raise BadCheckpoint(f"checkpoint {path}: {name} is missing")
        if _sha256(path / name) != expected:
            raise BadCheckpoint(f"checkpoint {path}: {name} is damaged (its SHA-256 is not the manifest's)")
    try:
        return Snapshot(load_file(path / TENSORS), manifest["state"])
    except SafetensorError as error:
        raise BadCheckpoint(f"checkpoint {path}: {TENSORS} cannot be read: {error}") from error


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest alone, checked against its own digest."""
    if not path.is_dir():
        raise BadCheckpoint(f"there is no checkpoint at {path}" + _nearby(path))
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        known = manifest.pop("manifest_sha256")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise BadCheckpoint(f"checkpoint {path}: {MANIFEST} is missing or damaged ({error})") from error
    if known != _manifest_digest(manifest):
        raise BadCheckpoint(f"checkpoint {path}: {MANIFEST} is damaged (its SHA-256 does not fit)")
    if manifest["format"] != FORMAT:
        raise BadCheckpoint(f"checkpoint {path} has format {manifest['format']}; this version reads {FORMAT}")
    return dict(manifest)


def _write_files(folder: Path, snapshot: Snapshot) -> None:
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in snapshot.tensors.items()}
    save_file(tensors, folder / TENSORS)
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "files": {TENSORS: _sha256(folder / TENSORS)},
        "state": snapshot.state,
    }
    manifest["manifest_sha256"] = _manifest_digest(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for place in (folder / TENSORS, folder / MANIFEST, folder):
        _sync(place)


def _take_place(temporary: Path, path: Path) -> None:
    if path.exists():
        _exchange(temporary, path)
    else:
        temporary.rename(path)
    path.chmod(0o755)
    _sync(path.parent)


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


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _manifest_digest(manifest: dict[str, Any]) -> str:
    content = {key: value for key, value in manifest.items() if key != "manifest_sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _nearby(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    found = sorted(place.parent.name for place in path.parent.glob(f"*/{MANIFEST}"))
    return f"; checkpoints in {path.parent}: {', '.join(found[:5])}" if found else ""
