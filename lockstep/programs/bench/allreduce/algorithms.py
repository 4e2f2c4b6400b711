"""The ways in which lockstep can add, by name."""

from lockstep.errors import BadArgument

SHARED = "shared"
"""What a run on one host uses: in place, in shared memory. All others are schedules of the catalogue, over Gloo."""


def parse_algorithm(text: str) -> str:
    """The algorithm's name as the catalogue has it; refuses another with the names there are."""
    name = text.strip().replace("_", "-")
    if name == SHARED:
        return name
    from lockstep.programs.explain.schedules.catalogue import (
        CATALOGUE,  # takes seconds, which the usual word need not wait for
    )

    known = (SHARED, *CATALOGUE["all_reduce"])
    if name not in known:
        raise BadArgument(f"there is no algorithm {text!r}: choose one of {', '.join(known)}")
    return name
