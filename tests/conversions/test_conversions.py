"""Scripts in the manner of well-known ones, and the same on lockstep: how many lines are new, and one result."""

import ast
import difflib
from pathlib import Path

import pytest
from launches import launch

HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"

PRINTED = ("[", "epoch", "iter", "step", "test", "digest")

COUNTS = {"mnist": (7, 7), "nanogpt": (8, 8), "dcgan": (11, 11)}
"""New lines, and those among them that are not only indented; docs/start.md has them too."""


def _code(path: Path, *, stripped: bool) -> list[str]:
    """The lines of a script without its docstring and empty lines."""
    text = path.read_text()
    lines = text.splitlines()[ast.parse(text).body[0].end_lineno :]
    return [line.strip() if stripped else line for line in lines if line.strip()]


def _num_new(name: str, *, stripped: bool) -> int:
    plain, ours = (_code(SCRIPTS / f"{name}{kind}.py", stripped=stripped) for kind in ("_plain", ""))
    return sum(line.startswith("+ ") for line in difflib.ndiff(plain, ours))


@pytest.mark.parametrize("name", COUNTS)
def test_so_many_lines_are_new(name: str) -> None:
    assert (_num_new(name, stripped=False), _num_new(name, stripped=True)) == COUNTS[name]
    written, indented = COUNTS[name][1], COUNTS[name][0] - COUNTS[name][1]
    assert f"| {written} | {indented} |" in (HERE.parents[1] / "docs/start.md").read_text()


@pytest.mark.parametrize("name", COUNTS)
def test_a_converted_script_comes_to_the_same_on_several_workers(name: str, tmp_path: Path) -> None:
    script = (SCRIPTS / f"{name}.py").read_text() + '\nrun.print("digest", run.digest())\n'
    said = []
    for workers in (1, 3):
        (folder := tmp_path / str(workers)).mkdir()
        with launch(folder, script, "-n", str(workers)) as run:
            assert run.finish() == 0, run.shown()
        said.append([line for line in run.shown().splitlines() if line.startswith(PRINTED)])
    assert said[0] == said[1]
    assert len(said[0]) > 4
    assert said[0][-1].startswith("digest")
