"""Generators of the script's own that its source sets in each lane: what they give does not depend on other lanes."""

import ast
from collections.abc import Iterator, Set
from functools import lru_cache

from lockstep.script.source.lane_loops import lane_loops
from lockstep.script.source.syntax import called_on, functions_of, parsed, walked, written

_SEEDS = frozenset({"manual_seed", "seed", "set_state", "setstate"})


@lru_cache(maxsize=1024)
def seeded_in_lanes(path: str) -> Set[str]:
    """Names and attributes of generators that the file sets in each lane: in a loop over lanes, or in a function
    without such a loop that draws from them too."""
    in_loops = {name for loop in lane_loops(parsed(path)) for name, _ in _seeded(loop)}
    functions = [one for one in functions_of(path) if not lane_loops(one)]
    return in_loops | {name for one in functions for name, uses in _seeded(one) if uses > 1}


def _seeded(part: ast.AST) -> Iterator[tuple[str, int]]:
    """The names that are set in it, and how often it mentions them."""
    names = [_last_name(node) for node in walked(part) if isinstance(node, ast.Name | ast.Attribute)]
    owners = (owner for node in walked(part) if (owner := called_on(node, _SEEDS)) is not None)
    yield from ((_last_name(owner), names.count(_last_name(owner))) for owner in owners)


def _last_name(node: ast.AST) -> str:
    return (written(node) or "").rpartition(".")[2]
