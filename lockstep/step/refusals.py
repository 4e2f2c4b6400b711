"""What a step says where a script is not where it should be, and what to write instead."""

from collections.abc import Mapping

from lockstep.data import GlobalBatch
from lockstep.errors import Disagreement
from lockstep.gradients.marks import Marks
from lockstep.script.restart import Changed
from lockstep.world import World

KEEP_IN_STATE = (
    "Keep it in an object with a state_dict and give it to run.replicate(..., name=object); what is set in one epoch "
    "can be set in every epoch (`if epoch >= 3`)."
)
KEEP_TENSORS = (
    "If they are to go on, make them buffers of a replicated model, or keep them in an object with a state_dict and "
    "give it to run.replicate(..., name=object)."
)
KEEP_MODULE = "Give the module to run.replicate by a name (run.replicate(model, optimizer, teacher=teacher))."
KEEP_GENERATORS = (
    "Draw from torch's, Python's or NumPy's own, which the run saves, or make it anew where you draw: "
    "numpy.random.default_rng([seed, run.step])."
)
COUNT_BY_STEP = (
    "Count by run.step and run.epochs, which go on after a resume, or keep the number in an object with a state_dict "
    "and give it to run.replicate(..., name=object)."
)


COMPUTED_OTHERWISE = (
    "The newcomer runs the script from the top, and something that its lanes depend on is another thing there than in "
    "the script that has trained so far: a variable or an attribute that training changes. Compute it from run.step, "
    "or keep it in an object with a state_dict and give that to run.replicate(..., name=object)."
)


def other_lanes(world: World, otherwise: Mapping[int, int], known: Marks, marks: Marks) -> Disagreement:
    """What a worker raises where newcomers, by rank, have got other `marks` for a lane than are `known`."""
    others = tuple(rank for rank in range(world.size) if rank not in otherwise)
    newcomer = world.rank if world.rank in otherwise else min(otherwise)
    lane, sides = otherwise[newcomer], (others, tuple(sorted(otherwise)))
    right, wrong = (f"the fingerprint {one[lane] or 0:013.0f}" for one in (known, marks))
    what, advice = f"the gradient of lane {lane}", COMPUTED_OTHERWISE
    if world.rank == newcomer:
        return Disagreement(what, world.rank, wrong, others[0], right, advice, sides)
    return Disagreement(what, world.rank, right, newcomer, wrong, advice, sides)


def out_of_rhythm(event: str, due: str, step: int) -> str:
    """An `event` of the script came where another one was due."""
    return (
        f"the script is out of its rhythm at step {step}: {event} came where {due} was due, as it was again and again "
        f"before the snapshot from which this worker goes on. It counts by itself, and has begun anew. {COUNT_BY_STEP}"
    )


def how_to_keep(value: Changed) -> str:
    """What to write so that the value goes on."""
    if value.is_generator:
        return KEEP_GENERATORS
    if value.is_module:
        return KEEP_MODULE
    return KEEP_TENSORS if value.is_of_tensors and not value.is_wrong else KEEP_IN_STATE


def begins_anew(anew: str, batch: GlobalBatch, step: int) -> str:
    """Something around a pass that goes on in its middle has begun `anew`."""
    assert batch.position is not None
    return (
        f"the pass over loader {batch.loader} goes on at its batch {batch.position.step}, at step {step}, and {anew}: "
        "other batches would be trained than without the interruption. End the loop by a number that goes on "
        "(`if (run.step + 1) % 4 == 0: break`), and let run.shard load all that belongs to a batch."
    )
