"""Versions that are installed against those that lockstep needs."""

import re
import sys
from types import MappingProxyType

from lockstep.programs.doctor.facts import Facts
from lockstep.programs.doctor.finding import Finding, not_known, ok, problem, warning

PYTHON = (3, 11)
NEEDED = MappingProxyType({"torch": (2, 11), "click": (8, 1), "rich": (13,), "safetensors": (0, 5), "psutil": (5, 9)})
"""The oldest version of each that works, as in pyproject.toml."""
FAST = (0, 45)
OURS = "torch-lockstep"


def python(facts: Facts) -> Finding:
    version = _text(facts.software.python)
    if facts.software.python < PYTHON:
        return problem(
            "python",
            f"Python {version} is too old, lockstep needs {_text(PYTHON)}",
            f"make an environment with a newer one: python{_text(PYTHON)} -m venv .venv",
        )
    return ok("python", f"Python {version}")


def lockstep(facts: Facts) -> Finding:
    running, installed = facts.software.running, facts.software.installed.get(OURS)
    if installed is None:
        return warning(
            "lockstep",
            f"lockstep {running} runs from its source folder and is not installed: scripts elsewhere cannot import it",
            "pip install -e .",
        )
    if installed != running:
        return warning(
            "lockstep",
            f"the code is lockstep {running} and the installation says {installed}: one of them is left from before",
            "pip install --force-reinstall --no-deps torch-lockstep (or `pip install -e .` in its source folder)",
        )
    return ok("lockstep", f"lockstep {running}")


def distributions(facts: Facts) -> Finding:
    wrong = [text for name in NEEDED if (text := _complaint(name, facts.software.installed.get(name)))]
    if wrong:
        needed = " ".join(f'"{name}>={_text(version)}"' for name, version in NEEDED.items())
        return problem("packages", "; ".join(wrong), f"{sys.executable} -m pip install {needed}")
    return ok("packages", ", ".join(f"{name} {facts.software.installed[name]}" for name in NEEDED))


def llvmlite(facts: Facts) -> Finding:
    installed = facts.software.installed.get("llvmlite")
    if installed is None or _numbers(installed) < FAST:
        have = "is not installed" if installed is None else f"{installed} is older than {_text(FAST)}"
        return warning(
            "llvmlite",
            f"llvmlite {have}: gradients are added by plain torch operations, which gives the same bits more slowly",
            "pip install 'torch-lockstep[fast]'",
        )
    return ok("llvmlite", f"llvmlite {installed}: additions are compiled")


def saving(facts: Facts) -> Finding:
    if facts.saving.error is None:
        return not_known("saving", "whether checkpoints can be saved")
    if facts.saving.error:
        return problem(
            "saving",
            f"a checkpoint cannot be saved and loaded: {facts.saving.error}",
            f"{sys.executable} -m lockstep.programs.doctor.gathering.saving (shows where it fails)",
        )
    return ok("saving", "a checkpoint can be saved and loaded")


def _complaint(name: str, installed: str | None) -> str:
    if installed is None:
        return f"{name} is not installed"
    if _numbers(installed) < NEEDED[name]:
        return f"{name} {installed} is too old, lockstep needs {_text(NEEDED[name])}"
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    """2.13.0+cpu is (2, 13, 0). What does not begin with numbers is taken for new."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else (sys.maxsize,)


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
