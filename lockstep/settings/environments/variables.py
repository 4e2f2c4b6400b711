"""Reading whole numbers and ports from variables, with an error that names the variable."""

import hashlib
from collections.abc import Mapping

from lockstep.errors import BadEnvironment
from lockstep.settings.limits import as_whole

DERIVED_PORTS = range(20_000, 40_000)


def text(environ: Mapping[str, str], name: str) -> str:
    """The value of a variable that must be set and not be empty."""
    value = environ.get(name, "").strip()
    if not value:
        raise BadEnvironment(f"{name} is not set, but the launcher's other variables are: set it as well")
    return value


def whole(environ: Mapping[str, str], name: str, at_least: int = 0, at_most: int | None = None) -> int:
    """The value of a variable that must be a whole number, `at_least` or more and `at_most`."""
    value = text(environ, name)
    number = as_whole(value)
    if number is None or number < at_least or (at_most is not None and number > at_most):
        allowed = f"{at_least} or more" if at_most is None else f"{at_least} to {at_most}"
        raise BadEnvironment(f"{name}={value[:60]} cannot be used: it must be a whole number, {allowed}")
    return number


def optional(environ: Mapping[str, str], name: str, at_least: int = 0, at_most: int | None = None) -> int | None:
    """The same for a variable that may be missing or empty."""
    return whole(environ, name, at_least, at_most) if environ.get(name, "").strip() else None


def port(environ: Mapping[str, str], name: str = "MASTER_PORT") -> int:
    """The value of a variable that must be a port to connect to."""
    number = whole(environ, name, at_least=1)
    if number > 65_535:
        raise BadEnvironment(f"{name}={number} cannot be used: a port is between 1 and 65535")
    return number


def derived_port(job: str) -> int:
    """A port that every worker of `job` computes alike, and that two jobs on a host seldom share."""
    digest = hashlib.blake2b(job.encode(), digest_size=8).digest()
    return DERIVED_PORTS[int.from_bytes(digest, "big") % len(DERIVED_PORTS)]
