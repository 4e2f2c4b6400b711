"""The lines of a script that change to make it a lockstep one, and the difference as text. Pure."""

import ast
import difflib
from dataclasses import dataclass

from lockstep.programs.conversion.shown import left_in_lanes, put, show
from lockstep.programs.conversion.source import CannotSee, Obstacle, TrainingScript, assigned_name, understand


@dataclass(frozen=True)
class Conversion:
    """The new text, and what its owner should look at."""

    text: str
    remarks: tuple[str, ...]


def convert(text: str) -> Conversion:
    """The script as a lockstep one; raises CannotSee where its source does not show how."""
    script = understand(text)
    lines = [line.encode() for line in text.splitlines(keepends=True)]
    if lines and not lines[-1].endswith(b"\n"):
        lines[-1] += b"\n"
    show(script, lines)
    put(lines, script.loop.iter, f"run.steps({ast.unparse(script.loop.iter)})")
    if script.epochs is not None:
        put(lines, script.epochs.iter, "run.epochs" + ast.unparse(script.epochs.iter).removeprefix("range"))
    _wrap(lines, script.loader.value)
    inserted = [*_after(script.scheduler or script.optimizer, _replicate(script)), *_start(script)]
    for after, line in sorted(inserted, key=lambda one: one[0], reverse=True):
        lines.insert(after, line.encode())
    converted = b"".join(lines).decode()
    try:
        ast.parse(converted)
    except SyntaxError as error:
        raise CannotSee(
            Obstacle(error.lineno or 0, "several statements share a line here: write each on its own")
        ) from error
    return Conversion(converted, (*_remarks(script), *left_in_lanes(script)))


def difference(before: str, after: str, name: str) -> str:
    """As `diff -u` writes it; `patch` takes it."""
    old, new = (one.splitlines(keepends=True) for one in (before, after))
    return "".join(difflib.unified_diff(old, new, name, name))


def _wrap(lines: list[bytes], call: ast.expr) -> None:
    """run.shard around an expression, which may take several lines: its end first."""
    assert call.end_lineno is not None
    for number, column, text in (
        (call.end_lineno - 1, call.end_col_offset, b")"),
        (call.lineno - 1, call.col_offset, b"run.shard("),
    ):
        lines[number] = lines[number][:column] + text + lines[number][column:]


def _replicate(script: TrainingScript) -> str:
    tracked = "" if script.scheduler is None else f", scheduler={assigned_name(script.scheduler)}"
    return f"run.replicate({script.model}, {assigned_name(script.optimizer)}{tracked})"


def _after(statement: ast.stmt, text: str) -> list[tuple[int, str]]:
    assert statement.end_lineno is not None
    return [(statement.end_lineno, " " * statement.col_offset + text + "\n")]


def _start(script: TrainingScript) -> list[tuple[int, str]]:
    """The import, and the run: a name of the module, which all functions see."""
    end = 0
    for number, node in enumerate(script.tree.body):
        is_docstring = number == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not is_docstring and not isinstance(node, ast.Import | ast.ImportFrom):
            break
        end = node.end_lineno or end
    return [(end, "import lockstep\n\nrun = lockstep.start()\n")]


def _remarks(script: TrainingScript) -> list[str]:
    remarks = ["lockstep.start(lanes=N) fixes the bits: choose N, the most workers that you will have"]
    if script.epochs is None:
        remarks.append("no `for epoch in range(N)` is around the training loop: loop by run.epochs(N) to resume a run")
    return remarks
