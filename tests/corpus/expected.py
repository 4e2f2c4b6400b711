"""What is said of the scripts of the corpus that do not go through every fault without a word."""

from typing import NamedTuple


class Said(NamedTuple):
    """A pattern that is found in what a refused run, or a newcomer that leaves, says; and what to write instead."""

    pattern: str
    instead: str


ALWAYS = {
    "a_draw_by_rank": Said(
        "torch's random numbers outside of run.lanes.*Draw alike", "draw on every worker, or from a generator apart"
    ),
    "a_graph_kept_for_the_next_loop": Said(
        "made in another lane.*Compute it again in this loop, or detach it", "compute it again, or detach it"
    ),
    "a_group_of_strangers": Said(
        "optimizer updates 1 tensor.* belong to no replicated model", "give its model to `run.replicate`"
    ),
    "a_split_without_a_seed": Said(
        r"workers disagree on the data of loader 0 \(Subset.indices\).*Seed what draws it", "seed the split"
    ),
    "batches_drawn_after_an_evaluation": Said(
        "contents of the batch.*draw it alike everywhere", "evaluate on every worker, in lanes"
    ),
    "clipped_in_the_lanes": Said("changed inside a lane.*Clip after the loop", "clip after the lanes"),
    "data_changed_in_place": Said("changed the data of its lanes in place.*Change a copy", "change a copy"),
    "saves_behind_a_scheduler": Said(
        "run.save behind a change of the rates of optimizer.*Save at the end", "save at the end of the body"
    ),
    "sampler_without_a_seed": Said("samples of the batch.*fixed seed", "seed the sampler"),
}
"""Refused whatever happens: no number of workers, or no second loop, would be right."""

_COUNTS = "Count by run.step and run.epochs"
_BY_STEP = "count by `run.step`"
_SET_BY_STEP = "compute it from `run.step`, or from the epoch"
_KEEP = "Keep it in an object with a state_dict"
_TRACK = "give it a `state_dict`, and to `run.replicate`"
_OF_LANE = Said("disagree on the gradient of lane", _SET_BY_STEP)
_OF_STEP = Said(r"the gradient of step \d+ is not what it was", _SET_BY_STEP)
"""Where nothing in the script shows what begins anew."""

ANEW = {
    "a_data_set_changed_once": dict.fromkeys(
        ("joined", "resumed"),
        Said(r"Transformed.transform \(the data set of loader 0\) is None and was flipped", "set it in every epoch"),
    ),
    "a_data_set_shuffled_by_hand": dict.fromkeys(
        ("joined", "resumed"),
        Said(r"Listed.order \(the data set of loader 0\) had been changed.*other samples", "make it from the epoch"),
    ),
    "a_strength_before_each_batch": dict.fromkeys(
        ("joined", "resumed"), Said("drawn random numbers before it asked loader 0", "draw behind `next`")
    ),
    "a_strength_for_each_pass": {
        "joined": Said(f"`strength`.*goes into.*{_KEEP}", "count by `run.epochs`"),
        "resumed": Said("its script trains from the beginning|`strength`.*goes into", "count by `run.epochs`"),
    },
    "a_generator_for_what_is_shown": {"joined": Said("the random generator `chance`", "draw from `random`")},
    "a_generator_of_its_own": dict.fromkeys(
        ("joined", "resumed"),
        Said("the random generator `rng`.*begins anew.*make it anew where you draw", "make it anew, from `run.step`"),
    ),
    "a_global_that_samples_depend_on": dict.fromkeys(
        ("joined", "resumed"), Said("`strength`.*is read in Scaled.*set in every epoch", "set it in every epoch")
    ),
    "another_loss_once": dict.fromkeys(
        ("joined", "resumed"), Said("`criterion`.*goes into.*set in every epoch", "set it in every epoch")
    ),
    "a_curriculum_by_progress": {"resumed": Said("does not give the samples again", "derive the order from the epoch")},
    "a_rollback_to_the_best": dict.fromkeys(
        ("joined", "resumed"), Said(f"tensors in `best_state`.*model.load_state_dict.*{_KEEP}", _TRACK)
    ),
    "a_rate_at_the_head_of_an_epoch": {
        "joined": Said("group 0 of optimizer: .* has lr=", "set it at the end of the body"),
        "resumed": Said(
            "the rate of optimizer, group 0 to 0.005, .*head of the epoch", "set it at the end of the body"
        ),
    },
    "a_scheduler_at_the_head_of_an_epoch": dict.fromkeys(
        ("joined", "resumed"),
        Said("has changed `scheduler`, .*head of the epoch.*at the end of the body", "step it at the end of the body"),
    ),
    "evaluated_before_each_epoch": {
        "joined": Said("worker 1 has run.total, worker 0 has training step", "evaluate at the end of the body"),
        "resumed": Said("has changed `scheduler`, .*head of the epoch", "evaluate at the end of the body"),
    },
    "a_rate_halved_by_hand": dict.fromkeys(
        ("joined", "resumed"), Said(rf"`last`.*decides whether group\['lr'\] is set.*{_KEEP}", _TRACK)
    ),
    "a_rate_that_falls_with_epochs": dict.fromkeys(
        ("joined", "resumed"), Said(rf"`rate`.*goes into group\['lr'\].*{_KEEP}", _TRACK)
    ),
    "a_schedule_in_a_closure": dict.fromkeys(
        ("joined", "resumed"), Said(rf"`rate`.*calls=1\).*goes into group\['lr'\].*{_KEEP}", _TRACK)
    ),
    "a_teacher_at_the_head_of_an_epoch": dict.fromkeys(
        ("joined", "resumed"), Said("changed model2/.*head of the epoch", "do it at the end of the body")
    ),
    "a_teacher_that_follows": dict.fromkeys(
        ("joined", "resumed"),
        Said(
            "tensors in `teacher`.*goes into.*Give the module to run.replicate", "`run.replicate(..., teacher=teacher)`"
        ),
    ),
    "a_temperature_for_each_epoch": dict.fromkeys(
        ("joined", "resumed"),
        Said("model.temperature is 2.0 and was .*Compute it from run.step", "compute it from `run.step`"),
    ),
    "a_weight_from_a_method": dict.fromkeys(
        ("joined", "resumed"), Said(f"`k`.*goes into self.loss.*{_COUNTS}", _BY_STEP)
    ),
    "a_weight_between_two_closures": {"joined": _OF_LANE, "resumed": _OF_STEP},
    "dropout_from_the_optimizer": {"joined": _OF_LANE, "resumed": _OF_STEP},
    "slow_weights": dict.fromkeys(("joined", "resumed"), Said(f"`count`.*decides whether .*{_KEEP}", _TRACK)),
    "weights_by_next": dict.fromkeys(
        ("joined", "resumed"), Said(f"`weights`.*a generator at line.*{_KEEP}", _SET_BY_STEP)
    ),
    "weights_of_classes": dict.fromkeys(
        ("joined", "resumed"), Said(f"arrays in `weights`.*goes into.*{_KEEP}", _TRACK)
    ),
    "an_annealed_loss": dict.fromkeys(("joined", "resumed"), Said(f"`criterion`.*{_KEEP}", _TRACK)),
    "an_optimizer_that_is_forgotten": dict.fromkeys(
        ("joined", "resumed"),
        Said("AdamW trains a replicated model.*Write run.replicate", "`run.replicate(model, optimizer)`"),
    ),
    "callbacks": dict.fromkeys(("joined", "resumed"), Said(f"`global_step`.*{_COUNTS}", _BY_STEP)),
    "counter_of_its_own": dict.fromkeys(("joined", "resumed"), Said(f"`steps`.*{_COUNTS}", _BY_STEP)),
    "early_stopping": dict.fromkeys(("joined", "resumed"), Said(f"`best`.*{_KEEP}", _TRACK)),
    "early_stopping_object": dict.fromkeys(("joined", "resumed"), Said(f"`stopping`.*{_KEEP}", _TRACK)),
    "enumerated_accumulation": dict.fromkeys(("joined", "resumed"), Said(f"`i`.*{_COUNTS}", _BY_STEP)),
    "errors_that_are_caught": dict.fromkeys(("joined", "resumed"), Said(f"`count`.*{_COUNTS}", _BY_STEP)),
    "islice": dict.fromkeys(
        ("joined", "resumed"), Said("itertools.islice counts its batches by itself", "`break` by `run.step`")
    ),
    "lbfgs_closure": {"joined": Said("updates made by optimizer", "nothing: it is replaced by a copy, or not at all")},
    "range_of_steps": {
        "joined": Said(f"`step`.*{_COUNTS}", _BY_STEP),
        "resumed": Said("its script trains from the beginning", "`while run.step < n`"),
    },
    "rates_by_next": dict.fromkeys(("joined", "resumed"), Said(f"`rates`.*an iterator with.*{_KEEP}", _SET_BY_STEP)),
    "untracked_scheduler": dict.fromkeys(
        ("joined", "resumed"),
        Said("StepLR is a scheduler that run.replicate was not", "`run.replicate(..., scheduler=scheduler)`"),
    ),
    "warm_restarts": dict.fromkeys(("joined", "resumed"), Said(f"`i`.*{_COUNTS}", _BY_STEP)),
    "zipped_with_a_cycle": dict.fromkeys(
        ("joined", "resumed"),
        Said("together with a cycle|itertools.cycle gives again", "let `run.shard` load all of it"),
    ),
    "zipped_epochs": dict.fromkeys(
        ("joined", "resumed"),
        Said("run.epochs goes on in the middle.*with a list_iterator", "take it by the epoch's number"),
    ),
    "zipped_with_a_range": dict.fromkeys(("joined", "resumed"), Said(f"`_`.*{_COUNTS}", "`break` by `run.step`")),
}
"""Refused where the script runs from the top again: a newcomer goes away, a resumed run ends. By kinds of fault."""


def said_of(shape: str, kind: str) -> Said | None:
    """What is said of the script with such a fault; None if it goes through without a word."""
    return ALWAYS[shape] if shape in ALWAYS else ANEW.get(shape, {}).get(kind)
