"""Begins the loops over lanes of a script: each is a step, a pass that moves buffers alone, or an evaluation."""

from collections import Counter
from collections.abc import Callable, Iterator, Set
from types import FrameType
from typing import Any

import torch

from lockstep.data import GlobalBatch
from lockstep.data.structure import requiring_grad
from lockstep.elastic.guard import Guard
from lockstep.errors import Misuse
from lockstep.events import Events
from lockstep.gradients.autograd_graph import ShownBackward
from lockstep.gradients.batchnorm import lane_norm_note
from lockstep.gradients.buffers import buffer_places, refuse_new_buffers
from lockstep.gradients.plan import StepPlan
from lockstep.lanes import present_lanes
from lockstep.script.call_site import Site, calling_frame, looping_frame, site_of, whole_numbers
from lockstep.script.lanes import KeptPlace, LaneState, hooks_that_are_not_linear, listed, notes_on, untotalled
from lockstep.script.schedulers import is_fresh, untracked
from lockstep.script.turns import LaneLoop
from lockstep.state.models import RegistrationWatch, refuse_new_parameters
from lockstep.step.step_loop import StepLoop
from lockstep.strategies import StepEngine

MOST_LOOKS = 8
"""After how many lanes a loop is looked at: some of what is handed on changes seldom, as the best value so far."""


class LaneLoops:
    """The loops over `run.lanes` on one worker, with what is checked before and after. One owner, who calls `close`.

    `train` is called before each step: the run is taken up there if it was not; `trained` after it. `end` closes the
    run, where `stop_after` steps are done.
    """

    def __init__(
        self,
        loop: StepLoop,
        engine: StepEngine,
        guard: Guard,
        events: Events,
        train: Callable[[], None],
        trained: Callable[[], None],
        stop_after: int | None,
        end: Callable[[], None],
    ) -> None:
        self._loop, self._engine, self._guard, self._events = loop, engine, guard, events
        self._models, self._progress = loop.state.models, loop.state.progress
        self._train, self._trained, self._stop_after, self._end = train, trained, stop_after, end
        self._watch, self._shown_backward = RegistrationWatch(), ShownBackward(events)
        self._sites: set[Site] = set()
        self._turns: set[tuple[Site, int, bool]] = set()
        """Those in which this worker has had lanes, with the passes over the body of each, and whether there were
        several lanes: one alone shows less."""
        self._read: set[tuple[Site, bool]] = set()
        """Those whose source, and whose first lane, were looked at, and whether there were several workers then."""
        self._suspects: dict[tuple[Site, bool], Set[KeptPlace]] = {}
        """What the first lane of such a one has changed, where a later one must show whether it is handed on."""
        self._looks = Counter[tuple[Site, bool]]()
        self._noted: set[str] = set()
        self._has_looked_for_schedulers = False
        self._has_noted_norms = False

    @property
    def has_trained(self) -> bool:
        """Whether the script has begun a loop in training mode."""
        return bool(self._sites)

    def trains(self) -> bool:
        """Whether a loop over lanes that begins now is a training step."""
        return self._in_training_mode and torch.is_grad_enabled()

    def begin(self, batch: GlobalBatch, train: bool | None) -> Iterator[Any]:
        """The lanes of a loop; `train` is what the script says of it, None where it says nothing."""
        frame = calling_frame()
        site = site_of(frame)
        is_step = train or (train is None and self.trains())
        # Forward passes in training mode without gradients move BatchNorm's statistics: they are averaged.
        if is_step or (self._in_training_mode and self._engine.buffers.slots):
            lanes = self._training(batch, LaneLoop(site, whole_numbers(frame), is_step=bool(is_step)))
        else:
            lanes = self._evaluating(batch)
        frame = looping_frame(frame)
        loop = site_of(frame), self._has_peers
        if not batch.shares or (loop in self._read and loop not in self._suspects):
            return lanes
        if loop not in self._read:
            self._read.add(loop)
            self._note_sums(loop[0])
        return self._looked_at(lanes, frame, loop, bool(is_step))

    def look_at_models(self) -> None:
        """The next loop looks whether the models have parameters and buffers that the engine does not know."""
        self._watch.noticed = True

    def close(self) -> None:
        self._watch.close()

    def _training(self, batch: GlobalBatch, loop: LaneLoop) -> Iterator[Any]:
        self._models.require("this")
        self._look_at_models()
        if loop.is_step:
            self._begin_step(batch)
        present = present_lanes(batch.num_samples, self._loop.state.steps.num_lanes, batch.least)
        turn = loop.site, self._loop.body_pass.number
        is_first_turn = (*turn, len(present) > 1) not in self._turns
        self._sites.add(loop.site)
        if batch.shares:
            self._turns |= {(*turn, False), (*turn, len(present) > 1)}
        return self._watched(self._step(batch, loop), is_first_turn)

    def _step(self, batch: GlobalBatch, loop: LaneLoop) -> Iterator[Any]:
        yield from self._loop.training(batch, loop)
        if loop.is_step:
            self._trained()

    def _begin_step(self, batch: GlobalBatch) -> None:
        if self._stop_after is not None and self._loop.step >= self._stop_after:
            self._end()
            raise SystemExit(0)
        if (name := requiring_grad(batch.whole)) is not None:
            raise Misuse(
                f"{name} requires a gradient, and each worker would have that of its own lanes. Give run.lanes the "
                f"data alone ({name}.detach()), and write x.requires_grad_() for the data of a lane, in the loop."
            )
        self._train()
        self._look_for_schedulers()
        self._note_norms(batch)
        self._progress.trains_on(batch.loader)

    def _evaluating(self, batch: GlobalBatch) -> Iterator[Any]:
        self._progress.evaluates(batch)
        self._loop.places.resumption.evaluates(batch)
        lanes = self._loop.evaluating(batch)
        return self._watched(lanes, is_first_turn=False) if self._models.modules else lanes

    def _watched(self, lanes: Iterator[Any], is_first_turn: bool) -> Iterator[Any]:
        """The lanes of a loop; buffers that they have added to the models are refused when they are done."""
        engine, modules = self._engine, list(self._models.modules.values())
        known = buffer_places(modules) if self._watch.noticed else None
        with self._shown_backward.inside():
            engine.begin_loop(is_first_turn)
            try:
                yield from lanes
            finally:
                engine.end_loop()
        if self._watch.noticed:
            known = engine.buffers.places if known is None else known
            refuse_new_buffers(modules, self._models.name_prefixes(), known)

    @property
    def _in_training_mode(self) -> bool:
        return any(module.training for module in self._models.modules.values())

    def _look_at_models(self) -> None:
        if self._watch.noticed:
            refuse_new_parameters(self._models, self._engine.replicas.parameters)
            self._models.check_optimizers_cover_known_parameters()
            self._engine.look_at_buffers()
            self._watch.noticed = False

    def _note_norms(self, batch: GlobalBatch) -> None:
        """Once, in the first step, by worker 0."""
        formation = self._guard.formation
        if not self._has_noted_norms and formation.is_first:
            plan = StepPlan(self._loop.step, batch.num_samples, formation.generation.assignment, least=batch.least)
            text = lane_norm_note(self._models.modules.values(), plan.shares.values(), self._loop.state.steps.num_lanes)
            if text:
                self._events.note(text)
        self._has_noted_norms = True

    def _looked_at(
        self, lanes: Iterator[Any], frame: FrameType, loop: tuple[Site, bool], is_step: bool
    ) -> Iterator[Any]:
        """The lanes; notes say what the first ones have kept. See Note [Kept by a lane] in lanes/state.py."""
        models = self._models.modules.values()
        for lane in lanes:
            state = LaneState(frame, loop[0], models, self._suspects.pop(loop, frozenset()))
            yield lane
            self._note_kept(state, is_step)
            self._note_hooks(is_step)
            self._looks[loop] += 1
            if not state.suspects or self._looks[loop] == MOST_LOOKS:
                break
            self._suspects[loop] = state.suspects
        else:
            return
        del state, frame  # they hold the script's own
        yield from lanes

    def _note_kept(self, state: LaneState, is_step: bool) -> None:
        for text in notes_on(state, is_step, self._loop.state.steps.num_lanes, self._has_peers):
            self._note_once(text)

    def _note_hooks(self, is_step: bool) -> None:
        """See Note [Hooks that are not linear] in gradient_hooks.py."""
        if not is_step or self._loop.state.steps.num_lanes == 1:
            return
        found = hooks_that_are_not_linear(self._models.modules.values())
        if found:
            self._note_once(
                f"a hook changes the gradient of each lane, {listed(found)}: where it is more than a factor, their "
                "mean is not what a plain loop gets, whose hook is called with the gradient of the batch. Change "
                "p.grad after the loop over lanes, or call run.clip_grad_value_ or run.clip_grad_norm_ there."
            )

    def _note_once(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            self._events.note(text)

    @property
    def _has_peers(self) -> bool:
        return self._guard.formation.generation.world.size > 1

    def _note_sums(self, site: Site) -> None:
        """Where there are several workers. See Note [Sums of one worker] in lanes/sums.py."""
        found = untotalled(site.path, site.line) if self._has_peers else None
        if found is not None:
            self._events.note(
                f"{found.words} in {site.file} adds up what the lanes of one worker hold, and nothing totals it: "
                f"another number of workers gives another number. run.total({found.name}) is that of all lanes, "
                "run.gather of a list has the entries of all, and run.loss is the loss of the batch."
            )

    def _look_for_schedulers(self) -> None:
        """Once, when training begins: one that nobody tracks is named, and refused where it cannot be right."""
        if self._has_looked_for_schedulers:
            return
        self._has_looked_for_schedulers = True
        for scheduler in untracked(self._models.optimizers.values(), self._models.tracked.values()):
            text = (
                f"{type(scheduler).__name__} is a scheduler that run.replicate was not given: it is not saved, and a "
                "worker that joins has another one. Write run.replicate(model, optimizer, scheduler=scheduler)."
            )
            if self._loop.step > 0 and is_fresh(scheduler):
                self._guard.refuse(f"the run goes on from step {self._loop.step}, and {text}")
            self._events.note(text)
