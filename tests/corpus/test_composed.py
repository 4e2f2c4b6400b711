"""Scripts that nobody has thought of: the bits of the calm run, or a sentence. Never silence."""

import random
from collections import Counter
from pathlib import Path

import pytest
from composed import composition
from corpus import KINDS, Fault, calm, disturbed, verdict
from test_corpus import random_fault

NUM_SEEDS = 500
FOUND = {7: "resumed", 115: "joined", 218: "resumed", 261: "joined"}
"""Those that once went on with other bits in silence, and how."""


def fault_of(chance: random.Random, kind: str) -> Fault:
    while True:
        fault = random_fault(chance)
        if fault.kind == kind:
            return fault


def check(folder: Path, seed: int, kind: str | None = None) -> str:
    chance = random.Random(seed)
    composed = composition(chance)
    fault = random_fault(chance) if kind is None else fault_of(chance, kind)
    script = f'"""{composed}"""\n{composed.script()}'
    assert calm(script).exit_code == 0, calm(script).shown
    folder.mkdir(exist_ok=True)
    came_to = verdict(script, disturbed(folder, script, fault))
    return f"{fault.kind}: {came_to}"


@pytest.mark.parametrize(("seed", "kind"), FOUND.items())
def test_a_composed_script_gives_the_bits_of_the_calm_one_or_a_sentence(tmp_path: Path, seed: int, kind: str) -> None:
    """What it comes to depends on the step at which it is stopped or joined; it is never other bits without a word."""
    check(tmp_path / "run", seed, kind)


@pytest.mark.soak
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("kind", KINDS[1:])
def test_hundreds_of_composed_scripts(tmp_path: Path, kind: str) -> None:
    counts = Counter(check(tmp_path / str(seed), seed, kind) for seed in range(NUM_SEEDS))
    for came_to, count in sorted(counts.items()):
        print(f"{came_to:30} {count:5}")


def test_what_is_composed_can_be_compiled_and_is_the_same_for_the_same_seed() -> None:
    for seed in range(300):
        script = composition(random.Random(seed)).script()
        compile(script, "train.py", "exec")
        assert script == composition(random.Random(seed)).script()
