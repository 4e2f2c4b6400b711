"""What a reader of the examples is told holds for the files themselves."""

import ast
import difflib
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = sorted((REPOSITORY / "examples").glob("*.py"))


def code_lines(path: Path) -> list[str]:
    """The lines of a script without its docstring, empty lines and comments."""
    text = path.read_text()
    docstring = ast.parse(text).body[0]
    lines = text.splitlines()[docstring.end_lineno :]
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def num_new_lines(old: list[str], new: list[str]) -> int:
    """How many lines one must write, or write anew, to get from the old text to the new one."""
    return sum(line.startswith("+ ") for line in difflib.ndiff(old, new))


def test_at_most_twelve_lines_of_the_lockstep_script_are_not_in_the_plain_one():
    plain, lockstep = EXAMPLES[:2]
    assert 0 < num_new_lines(code_lines(plain), code_lines(lockstep)) <= 12


def test_eight_lines_of_the_script_whose_body_stays_are_not_in_the_plain_one():
    plain, plain_body = EXAMPLES[0], REPOSITORY / "examples" / "plain_body.py"
    assert num_new_lines(code_lines(plain), code_lines(plain_body)) == 8


def test_the_examples_are_numbered_from_one():
    numbered = [path.name[:3] for path in EXAMPLES if path.name[0].isdigit()]
    assert numbered == [f"{number:02}_" for number in range(1, len(numbered) + 1)]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_says_how_to_run_it_and_what_to_look_at(path):
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert f"    python examples/{path.name}" in docstring
    assert "Look at" in docstring


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_table_of_examples_has_a_row_for_each(path):
    table = (path.parent / "README.md").read_text()
    assert f"| [{path.name}]({path.name}) |" in table


def test_every_example_that_the_tutorial_names_exists():
    named = re.findall(r"examples/\w+\.py", (REPOSITORY / "docs/tutorial.md").read_text())
    assert named
    assert set(named) <= {f"examples/{path.name}" for path in EXAMPLES}
