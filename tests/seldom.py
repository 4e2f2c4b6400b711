"""Which tests `make test` runs, and in which order.

Of tests with many cases, each of which costs seconds of processor time, `make test` runs some, and `make soak` all.
Their claims hold for all cases alike; those that are run always are spread over the list.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

ALWAYS_RUN = {
    # a kill, at each point, on each wire
    "test_a_kill_costs_nothing_on_any_wire": 4,
    "test_a_kill_at_any_point_of_a_step_costs_nothing": 4,
    "test_a_kill_in_the_first_the_second_or_the_last_step_costs_nothing": 3,
    "test_two_killed_in_one_step_cost_nothing": 2,
    "test_one_of_five_goes_on_alone": 1,
    "test_buffers_and_random_numbers_survive_a_kill": 2,
    "test_twenty_workers_killed_at_random_cost_nothing": 1,
    "test_a_step_that_is_skipped_leaves_the_state_untouched_on_every_worker": 2,
    "test_in_a_slurm_job_a_signal_to_all_saves_and_ends_the_run_and_it_goes_on_from_there": 2,
    # a kill while others recover, join or are healed
    "test_a_step_that_some_hold_is_settled_although_another_dies": 2,
    "test_the_second_host_is_killed_after_the_first": 1,
    "test_the_one_at_whose_door_all_meet_is_killed_at_any_action": 2,
    "test_one_that_comes_to_the_door_is_killed_at_any_action": 2,
    "test_the_one_that_gives_the_state_is_killed_while_giving": 1,
    "test_the_host_is_killed_while_it_admits_another": 1,
    "test_one_that_joins_is_killed_while_it_is_given_the_state": 1,
    "test_one_that_joins_is_killed_before_it_has_the_state": 1,
    "test_one_joins_in_the_slot_of_a_worker_that_was_lost": 1,
    "test_one_is_lost_in_the_step_in_which_another_leaves": 1,
    "test_a_worker_is_lost_in_the_first_step_of_one_that_joined": 1,
    "test_a_flipped_bit_is_found_named_and_healed": 2,
    "test_a_kill_while_a_drifted_worker_is_healed_costs_nothing": 1,
    # scripts: the corpus has more of them
    "test_any_script_is_joined": 2,
    "test_a_kill_costs_nothing_in_any_script": 3,
    "test_a_worker_that_joins_draws_what_the_others_draw": 1,
    "test_a_worker_that_comes_goes_on_with_the_same_bits": 1,
    "test_a_kill_that_leaves_one_worker_costs_nothing": 1,
    # the same bits
    "test_the_wire_does_not_change_the_digest": 3,
    "test_any_assignment_of_lanes_gives_the_same_digest": 2,
    "test_a_run_killed_while_saving_resumes_on_other_workers_with_the_same_bits": 1,
    "test_any_assignment_on_any_wire_gives_the_bits_of_one_worker": 4,
    "test_digest_and_noise_are_the_same_on_any_number_of_workers": 3,
    "test_the_number_of_checkpoints_may_differ_by_lane": 3,
    "test_gradients_that_share_memory_have_the_same_bits_and_stay_as_they_are": 6,
    "test_buffers_may_be_held_in_two_places": 3,
    "test_a_buffer_first_made_in_an_evaluation_is_refused_by_name": 3,
    "test_every_flipped_bit_of_a_small_tensor_changes_its_entry": 17,
    "test_survivors_and_newcomers_of_any_history_go_on_together": 2,
    "test_resume_on_another_number_of_workers_ends_with_the_same_bits": 2,
    "test_a_slow_worker_is_named_with_its_cause_and_the_bits_stay_the_same": 2,
    "test_buffers_that_are_written_without_a_sign_are_averaged_like_others": 2,
    "test_inside_no_sync_every_lane_is_changed_alike": 3,
    # several hosts
    "test_when_a_worker_or_a_whole_host_is_killed_the_others_go_on_to_the_same_bits": 5,
    "test_when_a_link_falls_silent_the_larger_half_or_the_lowest_slot_goes_on_to_the_same_bits": 5,
    "test_when_a_link_falls_silent_the_others_leave_and_commit_nothing_more": 5,
    "test_a_link_that_falls_silent_is_noticed_by_the_kernel_long_before_gloo_gives_up": 5,
    "test_of_hosts_that_do_not_all_reach_one_another_at_most_one_training_goes_on": 3,
    "test_of_two_halves_the_one_that_asks_the_witness_first_goes_on": 1,
    "test_training_on_several_hosts_has_the_bits_of_one_worker": 2,
    "test_all_are_killed_and_the_next_ones_resume": 1,
    "test_workers_found_join_die_and_come_back_to_the_bits_of_one": 1,
    # the wire
    "test_a_chain_of_blame_ends_at_the_one_that_died": 8,
    "test_whom_another_lets_go_names_the_one_it_accuses_before_anybody_has_hung_up": 8,
    "test_who_is_accused_of_silence_and_lives_accuses_nobody_in_turn": 8,
    "test_every_schedule_gives_the_right_result_for_any_number_of_workers": 9,
    # benchmarks of the tests' own machine, and hangs that take their time
    "test_whoever_hangs_is_named_and_the_others_end": 1,
    "test_two_workers_of_a_side_hold_the_same_bits_and_the_first_one_compares": 2,
}
"""How many cases of a test are always run."""


LONG_FILES = (
    "recovery/test_rosters.py",
    "examples/test_examples.py",
    "strategies/test_sharded.py",
    "exactness/test_compiled_models.py",
    "exactness/test_same_bits.py",
    "elastic/membership/test_membership_mutations.py",
    "exactness/test_resume_auto.py",
    "recovery/test_joining.py",
    "elastic/membership/test_membership_histories.py",
    "programs/test_bench_step.py",
    "recovery/test_kill_points.py",
    "recovery/test_kills_in_updates.py",
    "launch/test_supervisor.py",
    "recovery/test_models_and_loops_that_recover.py",
    "verify/test_verify_faults.py",
    "recovery/test_signals_of_engines.py",
    "optim/test_lamb.py",
    "capture/test_captured_lanes.py",
    "cli/test_doctor.py",
    "strategies/test_gradients_once.py",
    "exactness/test_resume.py",
    "elastic/membership/test_membership_kill_points.py",
    "run/test_steps.py",
    "recovery/test_kills_while_recovering.py",
    "torch_backend/test_backend_training.py",
    "recovery/test_hosts.py",
    "recovery/test_drift.py",
    "run/test_without_numpy.py",
    "torch_backend/test_backend_registration.py",
    "recovery/test_partitions.py",
    "recovery/test_draws_outside_of_lanes.py",
    "programs/test_demo.py",
    "recovery/test_not_finite.py",
    "exactness/test_unusual_programs.py",
    "strategies/test_strategy_conformance.py",
    "recovery/test_slow.py",
    "elastic/membership/test_membership_partitions.py",
    "observe/test_page_in_chromium.py",
    "run/test_written_in_lanes.py",
    "exactness/test_batchnorm_by_lane.py",
    "recovery/test_batchnorm_over_all_lanes.py",
    "data/test_grown_training.py",
    "data/test_loader_processes.py",
    "recovery/test_nothing_of_a_run_is_left.py",
    "recovery/test_launched_endings.py",
    "torch_backend/test_backend_reductions.py",
    "gradients/test_reentrant_checkpoints.py",
    "corpus/test_corpus.py",
)
"""Those that take the longest, longest first."""


def spread(count: int, kept: int) -> set[int]:
    """`kept` of so many numbers, from the first on, at even distances."""
    return {number * count // kept for number in range(kept)}


def mark_seldom(items: Sequence[pytest.Item]) -> None:
    """Gives all other cases the mark of those that only `make soak` runs."""
    for name, kept in ALWAYS_RUN.items():
        cases = [item for item in items if item.name.partition("[")[0] == name]
        always = spread(len(cases), min(kept, len(cases)))
        for number, item in enumerate(cases):
            if number not in always:
                item.add_marker(pytest.mark.soak)


def long_files_first(items: list[pytest.Item]) -> None:
    """Each of two processes takes a whole file: a long one that began last would run alone at the end."""
    places = {TESTS / name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
