"""Every script of the corpus with a fault of each kind: the bits of the calm run, or a sentence. Never silence.

`make test` runs every script with one kind of fault, another one for each script; `make soak` with all kinds, and with
1,000 random faults.
"""

import ast
import random
import re
from collections import Counter
from pathlib import Path

import pytest
from corpus import HERE, KINDS, SHAPES, USUAL, Fault, calm, disturbed, verdict
from expected import ALWAYS, ANEW, said_of

NUM_RANDOM = 1000
SELDOM = [(shape, KINDS[1 + number % (len(KINDS) - 1)]) for number, shape in enumerate(SHAPES)]
"""Each script with one kind of fault; every kind has its turn."""


def check(folder: Path, shape: str, fault: Fault) -> str:
    """What it comes to; fails where that is not what the table says."""
    folder.mkdir(exist_ok=True)
    result = disturbed(folder, shape, fault)
    came_to = verdict(shape, result)
    said = said_of(shape, fault.kind)
    if said is None:
        assert came_to == "same", result.shown
    else:
        heard = [*result.refusals, *result.left]
        assert any(re.search(said.pattern, one) for one in heard), f"{shape} was not told {said}:\n{result.shown}"
    assert shape in ALWAYS or fault.happened(folder), f"the fault never came:\n{result.shown}"
    return came_to


@pytest.mark.parametrize(("shape", "kind"), SELDOM)
def test_a_script_with_a_fault_gives_the_bits_of_the_calm_one_or_a_sentence(
    tmp_path: Path, shape: str, kind: str
) -> None:
    check(tmp_path / "run", shape, USUAL[kind])


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_every_script_with_such_a_fault(tmp_path: Path, kind: str) -> None:
    for shape in SHAPES:
        if (shape, kind) not in SELDOM:
            check(tmp_path / shape, shape, USUAL[kind])


@pytest.mark.soak
@pytest.mark.timeout(3 * 3600)
def test_a_thousand_random_faults(tmp_path: Path) -> None:
    chance, counts = random.Random(20), Counter[tuple[str, str]]()
    shapes = [shape for shape in SHAPES if shape not in ALWAYS]
    for number in range(NUM_RANDOM):
        shape, fault = chance.choice(shapes), random_fault(chance)
        folder = tmp_path / str(number)
        folder.mkdir()
        counts[fault.kind, verdict(shape, disturbed(folder, shape, fault))] += 1
    for (kind, came_to), count in sorted(counts.items()):
        print(f"{kind:10} {came_to:20} {count:5}")


def random_fault(chance: random.Random) -> Fault:
    kind = chance.choice(KINDS[1:])
    workers = chance.choice([2, 3, 4])
    match kind:
        case "scaled":
            first = chance.choice([number for number in (1, 2, 3, 4) if number != workers])
            second = chance.choice([number for number in (1, 2, 3, 4) if number != first])
            at = chance.randrange(1, 8)
            return Fault(kind, workers, scale=((at, first), (at + chance.randrange(4, 8), second)))
        case "resumed":
            return Fault(kind, workers, stop=chance.randrange(1, 16), then=chance.choice([1, 2, 3, 4]))
    slots = chance.sample(range(workers), k=chance.choice([1, 1, 2]) if workers > 2 else 1)
    return Fault(kind, workers, kills=tuple((slot, chance.randrange(1, 16)) for slot in slots))


@pytest.mark.parametrize("shape", sorted(set(SHAPES) - set(ALWAYS)))
def test_a_script_ends_when_nothing_happens(shape: str) -> None:
    result = calm(shape)
    assert result.exit_code == 0, result.shown
    assert len(result.digests) == 1


def test_the_documentation_has_the_table_of_scripts_and_outcomes() -> None:
    page = (Path(__file__).parents[2] / "docs" / "scripts.md").read_text()
    assert table() in page, f"docs/scripts.md should have\n{table()}"


def table() -> str:
    lines = [
        "| script | a worker is lost, or copied; scaling | a newcomer joins | stopped and resumed |",
        "| --- | --- | --- | --- |",
    ]
    for shape in SHAPES:
        cells = [cell(shape, kind) for kind in ("replaced", "joined", "resumed")]
        source = Path(HERE, "shapes", f"{shape}.py").read_text()
        lines.append(" | ".join([f"| {ast.get_docstring(ast.parse(source))}", *cells]) + " |")
    return "\n".join(lines)


def cell(shape: str, kind: str) -> str:
    said = said_of(shape, kind)
    if said is None:
        return "same bits"
    return (
        f"the newcomer leaves: {said.instead}"
        if kind == "joined" and shape not in ALWAYS
        else f"refused: {said.instead}"
    )


def test_expectations_are_of_scripts_that_exist() -> None:
    assert set(ALWAYS) | set(ANEW) <= set(SHAPES)
    assert not set(ALWAYS) & set(ANEW)
