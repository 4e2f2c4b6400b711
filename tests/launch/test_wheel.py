"""The package as people install it: a wheel in an environment of its own, away from the source tree."""

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import click
import pytest

REPOSITORY = Path(__file__).parents[2]
SCRIPT = """
import torch
import lockstep
run = lockstep.start(lanes=4)
model = run.replicate(torch.nn.Linear(2, 1))
for x in run.lanes(torch.ones(8, 2)):
    run.backward(model(x).mean())
run.print("trained", run.size, lockstep.__file__)
"""

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with the wheel alone, and the dependencies of the tests' own environment."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a copy: what a build leaves behind would be in the next wheel
    shutil.copytree(REPOSITORY / "lockstep", source / "lockstep", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    _pip(sys.executable, "wheel", "--no-deps", "-w", str(folder), str(source))
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "env", with_pip=True)
    _pip(str(folder / "env" / "bin" / "python"), "install", "--no-deps", str(wheel))
    (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text(str(Path(click.__file__).parents[1]) + "\n")
    return folder / "env"


def _pip(python: str, *words: str) -> None:
    command = [python, "-m", "pip", "--disable-pip-version-check", "-q", *words]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": ""})


def _run(environment: Path, folder: Path, *words: str) -> str:
    command = [str(environment / "bin" / "lockstep"), *words]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_every_file_of_the_package_is_in_the_wheel(environment: Path) -> None:
    (installed,) = (environment / "lib").glob("python*/site-packages/lockstep")
    source = {path.relative_to(REPOSITORY / "lockstep") for path in (REPOSITORY / "lockstep").rglob("*.py")}
    assert source == {path.relative_to(installed) for path in installed.rglob("*.py")}
    assert (installed / "py.typed").exists()


def test_the_installed_command_trains_away_from_the_source_tree(environment: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    shown = _run(environment, tmp_path, "run", "-n", "2", "train.py")
    assert f"trained 2 {environment}" in shown


def test_the_doctor_finds_the_installation_whole(environment: Path, tmp_path: Path) -> None:
    found = json.loads(_run(environment, tmp_path, "doctor", "-n", "1", "--json"))
    levels = {one["check"]: one["level"] for one in found["findings"]}
    assert {levels[check] for check in ("python", "lockstep", "packages", "saving")} == {"ok"}
