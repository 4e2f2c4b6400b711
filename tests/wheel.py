"""Builds the wheel, and tries it in new environments, outside of the source tree: `make test-wheel`.

    python tests/wheel.py [PYTHON...]

Each PYTHON is a program; without any, those of 3.11, 3.12 and 3.13 that are found. An environment has no extra at
first, then all extras for which there are packages; the others are named. What fails ends the program with a sentence.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("3.11", "3.12", "3.13")
EXTRAS = ("fast", "notebook", "transformers", "lightning")
SOME_HAVE = ("ray", "cuda", "cudnn")
"""Extras for which some Pythons and machines have no packages."""

PUBLIC = ["LockstepError", "Run", "__version__", "launch", "optim", "start", "strategies", "sync_batchnorm"]
NAMES = "import lockstep, json; print(json.dumps([dir(lockstep), lockstep.__file__]))"
IMPORT = "import lockstep.integrations.{}"


def main(*pythons: str) -> None:
    with tempfile.TemporaryDirectory(prefix="lockstep-wheel-") as name:
        folder = Path(name)
        wheel = _build(folder)
        for python in pythons or _found():
            _try(python, wheel, folder)
            shutil.rmtree(folder / "environment")


def _found() -> list[str]:
    """The Pythons of this machine: those on the path, then pyenv's."""
    installed = sorted(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob("versions/*/bin/python3.*"))
    by_name = {path.name: str(path) for path in installed if path.name.count(".") == 1}
    places = [by_name.get(f"python{version}") or shutil.which(f"python{version}") for version in VERSIONS]
    found = [place for place in places if place is not None]
    _must(found != [], f"none of the Pythons {', '.join(VERSIONS)} is here")
    return found


def _build(folder: Path) -> Path:
    """From a copy: a build leaves folders in its source."""
    source = folder / "source"
    source.mkdir()
    for part in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / part, source)
    shutil.copytree(ROOT / "lockstep", source / "lockstep", ignore=shutil.ignore_patterns("__pycache__"))
    _run(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", folder, source, cwd=folder)
    shutil.rmtree(source)
    return next(folder.glob("*.whl"))


def _try(python: str, wheel: Path, folder: Path) -> None:
    _run(python, "-m", "venv", folder / "environment", cwd=folder)
    bin_ = folder / "environment" / "bin"
    pins = [line for line in (ROOT / "constraints.txt").read_text().split() if line.startswith("torch==")]
    _install(bin_, folder, *pins)
    _install(bin_, folder, str(wheel))
    _use(bin_, folder, {*EXTRAS, *SOME_HAVE})
    _install(bin_, folder, f"{wheel}[{','.join(EXTRAS)}]")
    has = [extra for extra in SOME_HAVE if _install(bin_, folder, f"{wheel}[{extra}]", may_fail=True)]
    missing = set(SOME_HAVE) - set(has)
    _use(bin_, folder, missing)
    version = _run(bin_ / "python", "--version", cwd=folder).strip()
    print(f"{version}: the wheel works, without extras and with {', '.join([*EXTRAS, *has])}.", flush=True)
    if missing:
        print(f"  There are no packages here for: {', '.join(sorted(missing))}.", flush=True)


def _use(bin_: Path, folder: Path, missing: set[str]) -> None:
    """What a user does first."""
    _must("Usage: lockstep" in _run(bin_ / "lockstep", "--help", cwd=folder), "lockstep --help shows no usage")
    found = json.loads(_run(bin_ / "lockstep", "doctor", "--json", cwd=folder))
    text = json.dumps(found)
    _must("a checkpoint can be saved and loaded" in text, f"doctor has not saved a checkpoint: {text}")
    for extra in missing & {"transformers", "lightning", "ray"}:
        _must(f"{extra} (" in text, f"doctor does not name the missing extra {extra}: {text}")
    names, home = json.loads(_run(bin_ / "python", "-c", NAMES, cwd=folder))
    _must(names == PUBLIC, f"dir(lockstep) is {names}")
    _must(str(folder) in home, f"lockstep was imported from {home}")
    for extra in ("transformers", "lightning"):
        done = _process([str(bin_ / "python"), "-c", IMPORT.format(extra)], folder)
        said = f"torch-lockstep[{extra}]" in done.stderr
        _must(said if extra in missing else done.returncode == 0, f"importing {extra}: {done.stderr}")
    shutil.copy(ROOT / "examples" / "02_lockstep.py", folder / "train.py")
    digests = {_digest(_run(bin_ / "lockstep", "run", "-n", n, "train.py", cwd=folder)) for n in (1, 2)}
    _must(len(digests) == 1, f"one and two workers come to different digests: {digests}")


def _digest(shown: str) -> str:
    return next(line for line in shown.splitlines() if "digest" in line)


def _install(bin_: Path, folder: Path, *what: str, may_fail: bool = False) -> bool:
    """Whether it is installed now."""
    done = _process([str(bin_ / "python"), "-m", "pip", "install", "--quiet", *what], folder)
    _must(done.returncode == 0 or may_fail, f"pip install {' '.join(what)}: {done.stderr}")
    return done.returncode == 0


def _run(*words: object, cwd: Path) -> str:
    done = _process([str(word) for word in words], cwd)
    _must(done.returncode == 0, f"{words[0]} {words[1]} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def _process(words: list[str], cwd: Path) -> "subprocess.CompletedProcess[str]":
    """Without the variables that lead back to the source tree."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYENV_VERSION"))}
    return subprocess.run(words, cwd=cwd, env=environ, capture_output=True, text=True)


def _must(is_so: bool, otherwise: str) -> None:
    if not is_so:
        sys.exit(otherwise)


if __name__ == "__main__":
    main(*sys.argv[1:])
