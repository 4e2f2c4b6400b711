"""Scripts as strangers write them, run calm and disturbed: what each comes to must be the bits of the calm run, or a
sentence."""

import json
import os
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from launches import launch
from workers import outcomes

HERE = Path(__file__).parent
SHAPES = sorted(path.stem for path in (HERE / "shapes").glob("*.py"))
PRELUDE = f"import sys; sys.path[:0] = [{str(HERE)!r}]; import corpus_prelude\n"

_SENTENCE = re.compile(
    r"^(?:✗ worker \d+ failed.*?: |! worker \d+ gives its place up: )"
    r"((?:Disagreement|Misuse|BadCheckpoint|BadArgument|CannotCut)?.*)$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Result:
    """What a run came to: the digests of all who came to the end, what the script has shown, and what was refused."""

    exit_code: int
    digests: frozenset[str]
    extra: tuple[str, ...]
    refusals: tuple[str, ...]
    shown: str


def script_of(shape: str) -> str:
    return PRELUDE + (HERE / "shapes" / f"{shape}.py").read_text()


@cache
def calm(shape: str) -> Result:
    """The script on one worker that nothing happens to."""
    with TemporaryDirectory() as folder:
        (outcome,) = outcomes(1, _alone, script_of(shape), folder)
        assert outcome.error is None, outcome
        return _read(Path(folder), 0, Path(folder, "shown").read_text())


def _alone(script: str, folder: str) -> None:
    os.chdir(folder)
    sys.stdout = open("shown", "w", buffering=1)  # noqa: SIM115
    exec(compile(script, "train.py", "exec"), {"__name__": "__main__"})


def disturbed(folder: Path, shape: str, workers: int, *options: str, **plan: Any) -> Result:
    """The script under `lockstep run`, disturbed as `plan` says (corpus_prelude.py)."""
    variables = {"CORPUS": json.dumps({"workers": workers, **plan})}
    with launch(folder, script_of(shape), "-n", str(workers), *options, **variables) as run:
        exit_code = run.finish()
    return _read(folder, exit_code, run.shown())


def _read(folder: Path, exit_code: int, shown: str) -> Result:
    digests = frozenset(path.read_text() for path in folder.glob("digest-*"))
    extra = tuple(line for line in shown.splitlines() if line.startswith("extra"))
    return Result(exit_code, digests, extra, tuple(_SENTENCE.findall(shown)), shown)


def has_happened(folder: Path, what: str) -> bool:
    return (folder / f"done {what}").exists()
