"""Where a step is in the user's script: what every worker must agree on before the step is committed.

# Note [The place of a step]
# Lanes make the numbers independent of the workers. A script's own Python is not: loop counters, a second loop over a
# batch, an untracked scheduler. So the place of a step is one explicit value: the line of `run.lanes`, the number of
# the loop in its turn, the batch and its samples, the epoch, the updates that each optimizer has made, the numbers in
# its groups, the position of every loader, and the generators outside of lanes. Its fingerprint is sent with the step's
# plan. A difference is named before anything is added.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lockstep.data import GlobalBatch
from lockstep.data.contents import contents, sampled_contents
from lockstep.errors import Disagreement
from lockstep.script.random_streams import Streams, is_detail_of_streams, is_of_streams, tolerated
from lockstep.state.models import Models
from lockstep.wire.agreement import OPERATION, Facts, first_difference

LINE = "the line of run.lanes"
LOOP = "the number of the loop in its turn"
BATCH = "the batch"
SAMPLES = "the samples of the batch"
CONTENTS = "the contents of the batch"
EPOCH = "the epoch"
UPDATES = "updates made by {label}"
GROUP = "group {number} of {label}"
DATA = "the data of loader {number} ({part})"
LOADERS = "where the loaders stand (pass:batch)"
STATE = "the state"
_BETWEEN = "; "
"""Between the numbers of a group."""
ENTRY = "state of "
COUNTER = "counter "

SEED_DATA = (
    "Seed what draws it (random_split(..., generator=torch.Generator().manual_seed(0))), or draw after lockstep.start; "
    "sort what has no order (sorted(set(names)))."
)
ADVICE = {
    LINE: "They are in different loops of the script.",
    LOOP: "They have made different numbers of loops over run.lanes with this batch.",
    BATCH: "They have come to different batches: a loop that skips, ends or starts by the rank, or by a counter of its "
    "own, does so. Loop by run.epochs, or count by run.step.",
    SAMPLES: "A sampler draws other samples on each worker: it must draw from torch's global generator, or from one of "
    "its own with a fixed seed, or derive the order from the epoch (set_epoch).",
    CONTENTS: "Every worker must hold the same whole batch: draw it alike everywhere, or let run.shard load it.",
    "the data of loader": "The data set is another one on each worker: some samples would be trained on twice, others "
    f"never. {SEED_DATA} Do not divide it by the rank: run.shard does.",
    EPOCH: "Count epochs by run.epochs.",
    "updates": "An optimizer.step() depends on the rank, or on a counter of the script's own (enumerate): count by "
    "run.step, which is the same on every worker and after a resume.",
    "group": "A rate was changed on some workers only, or by a scheduler that was not tracked: give it to "
    "run.replicate(model, optimizer, scheduler=scheduler).",
    LOADERS: "A sharded loader must be iterated by every worker alike, and not by a thread that reads ahead: let its "
    "processes do that (num_workers).",
    STATE: "A worker that came later was not given all that the training depends on: give schedulers, averages of "
    "weights and anything else with a state_dict to run.replicate(model, optimizer, name=object).",
    "random": "A worker drew, or seeded, where the others did not (`if run.rank == 0`), and now they draw different "
    "numbers. Draw alike on every worker, or from a generator of your own (torch.Generator, random.Random).",
}


@dataclass(frozen=True)
class StepPlace:
    """The place of one step, as this worker sees it. See Note [The place of a step]."""

    facts: Callable[[], dict[str, str]]
    """What must be equal on all workers, in the order in which a difference should be named."""
    details: Callable[[], dict[str, str]]
    """What helps to explain a difference: computed only if there is one."""
    streams: Streams
    settled: dict[str, int] = field(default_factory=dict)
    """Workers that have a generator to themselves (slot by kind), as soon as the step is committed."""

    def judge(self, here: int, everyone: Sequence[Facts]) -> Disagreement | None:
        """The error that worker `here` raises; None if the workers differ only in what may differ."""
        compared = [_without(facts, _is_detail) for facts in everyone]
        first, *others = (_without(facts, is_of_streams) for facts in compared)
        alone = tolerated(everyone, self.streams.owners) if all(facts == first for facts in others) else None
        if alone:
            self.settled.update(alone)
            return None
        difference = _in_short(first_difference(here, compared))
        return replace(difference, what=_named(difference, everyone), advice=_advice(difference, everyone))


def _without(facts: Facts, is_left_out: Callable[[str], bool]) -> Facts:
    return {name: fact for name, fact in facts.items() if not is_left_out(name)}


def _is_detail(name: str) -> bool:
    """Whether it helps to judge or to explain a difference, and is none itself."""
    return is_detail_of_streams(name) or name.startswith((COUNTER, ENTRY))


def _in_short(difference: Disagreement) -> Disagreement:
    """Of a group, the numbers that differ."""
    if not difference.what.startswith("group"):
        return difference
    mine, theirs = difference.mine.split(_BETWEEN), difference.theirs.split(_BETWEEN)
    return replace(
        difference,
        mine=_BETWEEN.join(one for one in mine if one not in theirs),
        theirs=_BETWEEN.join(one for one in theirs if one not in mine),
    )


def _named(difference: Disagreement, everyone: Sequence[Facts]) -> str:
    """What the workers differ in; of a state, the first part that differs."""
    mine, theirs = everyone[difference.here], everyone[difference.there]
    entries = (name for name in mine if name.startswith(ENTRY) and mine[name] != theirs.get(name))
    entry = next(entries, None) if difference.what == STATE else None
    return difference.what if entry is None else f"{STATE} of {entry.removeprefix(ENTRY)}"


def _advice(difference: Disagreement, everyone: Sequence[Facts]) -> str:
    """What to write instead, and which counters of the script are elsewhere."""
    beginnings = ("updates", "group", "the data of loader")
    key = next((word for word in beginnings if difference.what.startswith(word)), difference.what)
    usual = ADVICE.get("random" if is_of_streams(difference.what) else key, difference.advice)
    if difference.what == OPERATION:  # the other one is in no step, and has no place
        return usual
    mine, theirs = everyone[difference.here], everyone[difference.there]
    names = [name for name in {**mine, **theirs} if name.startswith(COUNTER) and theirs.get(name) != mine.get(name)]
    values = [(name.removeprefix(COUNTER), *(f.get(name, "as at first") for f in (mine, theirs))) for name in names]
    elsewhere = [f"{name} is {here} here and {there} there" for name, here, there in values[:3]]
    return usual + (f" In the script, {'; '.join(elsewhere)}." if elsewhere else "")


class Groups:
    """The numbers in the groups of the optimizers, as text; written again only where they have changed."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._seen: dict[str, tuple[list[Any], dict[str, str]]] = {}

    def facts(self) -> dict[str, str]:
        facts: dict[str, str] = {}
        for label, optimizer in self._models.optimizers.items():
            now = [_numbers(group) for group in optimizer.param_groups]
            before, words = self._seen.get(label, (None, {}))
            if now != before:
                words = {GROUP.format(number=n, label=label): _in_words(group) for n, group in enumerate(now)}
                self._seen[label] = now, words
            facts |= words
        return facts


def _numbers(group: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, len(group[name]) if name == "params" else _plain(group[name])) for name in sorted(group)]


def _plain(value: Any) -> Any:
    """A tensor on a GPU is not read: the host would wait for it."""
    if isinstance(value, torch.Tensor):
        return f"a tensor on {value.device}" if value.device.type != "cpu" else value.tolist()
    return value if isinstance(value, bool | int | float | str | tuple | list | None) else type(value).__name__


def _in_words(group: list[tuple[str, Any]]) -> str:
    return _BETWEEN.join(f"{'parameters' if name == 'params' else name}={value}" for name, value in group)


def batch_facts(batch: GlobalBatch, looks_at_all: bool) -> dict[str, str]:
    """Of a batch that is the script's own, with `looks_at_all` all its contents, else some."""
    if batch.position is not None:
        words = f"batch {batch.position.step} of pass {batch.position.epoch} of loader {batch.loader}"
        return {BATCH: words, SAMPLES: batch.digest}
    return {CONTENTS: (contents if looks_at_all else sampled_contents)(batch.whole)}
