"""What a user should know of what a lane has kept, drawn or written, in words."""

from collections.abc import Iterator, Sequence

from lockstep.events import KEPT_BY_LANE
from lockstep.script.lanes.state import LaneState

_MOST_NAMED = 3


def notes_on(state: LaneState, is_step: bool, num_lanes: int, has_peers: bool) -> Iterator[str]:
    """What a user should know of what a lane has kept."""
    own = state.kept(by_models=True) if is_step and num_lanes > 1 else []
    if is_step and num_lanes > 1:
        if own:
            yield (
                f"{KEPT_BY_LANE}, by {listed(own)}: it moves once for each lane of this "
                "worker, not once for each batch. If the loss depends on it, another number of workers gives other "
                "bits. Change it after the loop over lanes, compute it from run.step, or keep it for each lane in "
                "run.carried."
            )
        drawn = state.drawn_once()
        if drawn:
            yield (
                f"{KEPT_BY_LANE}, by {listed(drawn)}: each worker draws it in its first lane, so another number of "
                "workers, or a run that is resumed, has other numbers. Draw it before training, into a buffer of a "
                "replicated model (register_buffer)."
            )
        written = state.buffers(of_models=True)
        if written:
            yield (
                f"lanes write {listed(written)}: after a step such a buffer is the mean of what the lanes have made "
                "of it, and a whole number advances as in one lane. That is right for a running average, and not for "
                'a sum, a queue or a table: docs/lanes.md, "Buffers that lanes write".'
            )
        strange = state.buffers(of_models=False)
        if strange:
            yield (
                f"lanes write {listed(strange)}, which is no model of the run (what run.replicate is given by a name, "
                "as in ema=ema, is only saved): each worker moves its buffers by its own lanes. Write "
                "run.replicate(module) for it too, or call its eval() before."
            )
    drawn_from = state.drawn_from() if num_lanes > 1 else []
    if drawn_from:
        yield (
            f"lanes draw from {listed(drawn_from)}, a random generator of the script's own: it goes on from lane to "
            "lane of this worker, so another number of workers gives other numbers. Draw from torch's, Python's or "
            "NumPy's own (without generator=), which the run sets for each lane, or make yours anew in each: "
            "torch.Generator().manual_seed(torch.initial_seed())."
        )
    rows = state.rows() if has_peers else []
    if rows:
        yield (
            f"{KEPT_BY_LANE}, by {listed(rows)}: a worker writes the rows of its own lanes only, and has old ones of "
            "others. Keep index and row in a list, rows.append((index, row)), and write what run.gather(rows) gives "
            "after the loop, the same on every worker."
        )
    matters = has_peers or (is_step and num_lanes > 1)
    others = state.kept(by_models=False, only_trained_from=not has_peers) if matters else []
    others = [one for one in others if one not in own]
    if others:
        yield (
            f"{KEPT_BY_LANE}, by {listed(others)}: a worker computes its own lanes only, so "
            "another number of workers gives another value. run.total adds up what all lanes hold, run.gather has the "
            "values of all, run.carried keeps something for each lane; what counts batches goes after the loop."
        )


def listed(words: Sequence[str]) -> str:
    return ", ".join(words[:_MOST_NAMED]) + (
        f" and {len(words) - _MOST_NAMED} more" if len(words) > _MOST_NAMED else ""
    )
