"""Time reversal: a way to gather, run backwards, is a way to reduce."""

from dataclasses import replace

from lockstep.wire.schedules.schedule import Round


def backwards(rounds: tuple[Round, ...]) -> tuple[Round, ...]:
    """The same sends from last to first, each the other way round and adding.

    In an all-gather a part spreads from its owner along a tree. Backwards, that tree brings every worker's value
    of the part to the owner, each exactly once: a reduce-scatter with as many rounds and as many bytes.
    """
    return tuple(
        Round(tuple(replace(send, source=send.target, target=send.source, adds=True) for send in moves.sends))
        for moves in reversed(rounds)
    )
