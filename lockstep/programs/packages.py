"""Packages that some models come from, and that need not be installed. Without torch."""

import importlib.util

from lockstep.errors import BadEnvironment


def require(package: str, model: str) -> None:
    """Raises if the package is not installed, with what to do about it."""
    if importlib.util.find_spec(package) is None:
        raise BadEnvironment(
            f"the model {model} is {package}'s, which is not installed: "
            f"pip install {package}, or choose another --model"
        )
