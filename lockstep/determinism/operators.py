"""Names each operator without a deterministic kernel once, instead of torch's own warnings."""

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

WHAT_IT_MEANS = "results may differ in the last bits from run to run and between numbers of workers"
SILENCE = "exact=False silences this"

_KINDS = (
    (
        re.compile(r"(?P<name>.+?) does not have a deterministic implementation"),
        "{name} has no deterministic kernel",
        f"use another operator in its place; {SILENCE}",
    ),
    (
        # The warning comes where failing is not allowed (warn_only), and there torch takes the faster kernel.
        re.compile(r"(?P<name>.+?) defaults to a non-deterministic algorithm"),
        "{name} takes a kernel that is not deterministic",
        "call torch.use_deterministic_algorithms(True) after lockstep.start: it then takes one that is, and operators "
        f"that have none are refused; {SILENCE}",
    ),
    (
        re.compile(r"(?P<name>Deterministic behavior was enabled) .*because it uses CuBLAS"),
        "a matrix product of cuBLAS is not deterministic as the process was started",
        f"set CUBLAS_WORKSPACE_CONFIG=:4096:8 before the workers start; {SILENCE}",
    ),
)


@contextmanager
def named_once(say: Callable[[str], None]) -> Iterator[None]:
    """Inside, torch's warnings about such operators go to `say`, one for each operator; others are shown as before."""
    before = warnings.showwarning
    named: set[str] = set()

    def show(message: Warning | str, *where: Any, **further: Any) -> None:
        sentence = sentence_of(str(message))
        if sentence is None:
            before(message, *where, **further)
        elif sentence not in named:
            named.add(sentence)
            say(sentence)

    warnings.showwarning = show
    try:
        yield
    finally:
        if warnings.showwarning is show:  # else other code has replaced it since
            warnings.showwarning = before


def sentence_of(warning: str) -> str | None:
    """The operator, what it means and what to do; None for a warning about something else."""
    for pattern, what, advice in _KINDS:
        match = pattern.match(warning)
        if match is not None:
            return f"{what.format(name=match['name'])}: {WHAT_IT_MEANS}. {advice[0].upper()}{advice[1:]}"
    return None
