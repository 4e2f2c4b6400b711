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
    "test_a_kill_costs_nothing_on_any_wire": 1,
    "test_a_kill_at_any_point_of_a_step_costs_nothing": 2,
    "test_a_kill_in_the_first_the_second_or_the_last_step_costs_nothing": 1,
    "test_two_killed_in_one_step_cost_nothing": 1,
    "test_a_kill_in_the_middle_of_an_exchange_costs_nothing": 1,
    "test_a_kill_at_any_point_of_an_update_on_gpus_costs_nothing": 2,
    "test_one_of_five_goes_on_alone": 1,
    "test_buffers_and_random_numbers_survive_a_kill": 1,
    "test_twenty_workers_killed_at_random_cost_nothing": 1,
    "test_a_step_that_is_skipped_leaves_the_state_untouched_on_every_worker": 1,
    "test_in_a_slurm_job_a_signal_to_all_saves_and_ends_the_run_and_it_goes_on_from_there": 1,
    # histories of what has tests of its own: a kill at any point of an update, one joins, two join together, one
    # leaves, one joins in the slot of another
    "test_three_workers_killed_at_random_under_a_sharded_strategy_cost_nothing": 0,
    "test_the_slot_of_a_worker_that_joined_and_was_lost_is_taken_again": 0,
    "test_three_workers_killed_at_random_where_state_is_divided_cost_nothing": 0,
    "test_from_one_worker_to_four_to_two_to_three": 0,
    # a kill while others recover, join or are healed
    "test_a_step_that_some_hold_is_settled_although_another_dies": 1,
    "test_the_second_host_is_killed_after_the_first": 1,
    "test_the_one_at_whose_door_all_meet_is_killed_at_any_action": 1,
    "test_one_that_comes_to_the_door_is_killed_at_any_action": 1,
    "test_the_one_that_gives_the_state_is_killed_while_giving": 1,
    "test_the_host_is_killed_while_it_admits_another": 1,
    "test_one_that_joins_is_killed_while_it_is_given_the_state": 1,
    "test_one_that_joins_is_killed_before_it_has_the_state": 1,
    "test_one_joins_in_the_slot_of_a_worker_that_was_lost": 1,
    "test_one_is_lost_in_the_step_in_which_another_leaves": 1,
    "test_a_worker_is_lost_in_the_first_step_of_one_that_joined": 1,
    "test_a_flipped_bit_is_found_named_and_healed": 1,
    "test_a_kill_while_a_drifted_worker_is_healed_costs_nothing": 1,
    # scripts: the corpus has more of them
    "test_any_script_is_joined": 1,
    "test_a_kill_costs_nothing_in_any_script": 2,
    "test_a_worker_that_joins_draws_what_the_others_draw": 1,
    "test_a_worker_that_comes_goes_on_with_the_same_bits": 1,
    "test_a_kill_that_leaves_one_worker_costs_nothing": 1,
    "test_a_broken_rule_is_noticed": 3,
    # the same bits
    "test_its_digest_is_that_of_replicated_on_one_worker_on_1_and_3": 2,
    "test_the_wire_does_not_change_the_digest": 1,
    "test_any_assignment_of_lanes_gives_the_same_digest": 1,
    "test_a_pass_begun_anywhere_gives_what_an_undisturbed_loader_gives": 5,
    "test_the_noise_is_the_same_bits_on_any_number_of_workers": 1,
    "test_a_run_killed_while_saving_resumes_on_other_workers_with_the_same_bits": 1,
    "test_any_assignment_on_any_wire_gives_the_bits_of_one_worker": 2,
    "test_digest_and_noise_are_the_same_on_any_number_of_workers": 1,
    "test_the_number_of_checkpoints_may_differ_by_lane": 1,
    "test_gradients_that_share_memory_have_the_same_bits_and_stay_as_they_are": 1,
    "test_buffers_may_be_held_in_two_places": 1,
    "test_a_buffer_first_made_in_an_evaluation_is_refused_by_name": 3,
    "test_every_flipped_bit_of_a_small_tensor_changes_its_entry": 17,
    "test_survivors_and_newcomers_of_any_history_go_on_together": 1,
    "test_resume_on_another_number_of_workers_ends_with_the_same_bits": 1,
    "test_a_slow_worker_is_named_with_its_cause_and_the_bits_stay_the_same": 1,
    "test_buffers_that_are_written_without_a_sign_are_averaged_like_others": 1,
    "test_inside_no_sync_every_lane_is_changed_alike": 1,
    "test_an_example_prints_the_same_on_several_workers_as_alone": 2,
    "test_whatever_lanes_reach_and_weigh_the_digest_is_that_of_replicated": 1,
    "test_every_optimizer_has_the_digest_of_replicated": 1,
    "test_every_optimizer_on_gpus_has_the_digest_of_replicated": 1,
    "test_what_a_script_does_before_an_update_on_gpus_is_done_once": 1,
    # several hosts
    "test_when_a_worker_or_a_whole_host_is_killed_the_others_go_on_to_the_same_bits": 5,
    "test_when_a_link_falls_silent_the_larger_half_or_the_lowest_slot_goes_on_to_the_same_bits": 0,
    "test_when_a_link_falls_silent_the_others_leave_and_commit_nothing_more": 0,
    "test_a_link_that_falls_silent_is_noticed_by_the_kernel_long_before_gloo_gives_up": 0,
    "test_of_hosts_that_do_not_all_reach_one_another_at_most_one_training_goes_on": 0,
    "test_of_two_halves_the_one_that_asks_the_witness_first_goes_on": 1,
    "test_training_on_several_hosts_has_the_bits_of_one_worker": 1,
    "test_all_are_killed_and_the_next_ones_resume": 1,
    "test_workers_found_join_die_and_come_back_to_the_bits_of_one": 1,
    # the wire
    "test_a_chain_of_blame_ends_at_the_one_that_died": 8,
    "test_whom_another_lets_go_names_the_one_it_accuses_before_anybody_has_hung_up": 8,
    "test_who_is_accused_of_silence_and_lives_accuses_nobody_in_turn": 8,
    "test_every_schedule_gives_the_right_result_for_any_number_of_workers": 9,
    # scripts as people write them
    "test_a_script_with_a_fault_gives_the_bits_of_the_calm_one_or_a_sentence": 6,
    "test_a_script_ends_when_nothing_happens": 6,
    # waits for as long as a user would
    "test_who_cannot_join_a_run_says_why_within_ten_seconds": 1,
    # what takes long by itself: it loads torch anew, compiles, or runs a script under every fault
    "test_workers_share_what_is_loaded_and_have_the_bits_of_those_that_load_it_each": 0,
    "test_a_worker_that_is_killed_while_it_loads_for_the_others_makes_all_start_again": 0,
    "test_a_spare_has_loaded_torch_when_it_gets_its_part": 0,
    "test_a_kill_while_the_host_gets_the_parameters_costs_nothing": 0,
    "test_parameters_of_a_script_that_compiles_stay_and_that_is_said": 0,
    "test_a_weight_of_the_loss_that_the_script_raises_itself_is_not_known_to_workers_that_come_later": 0,
    "test_a_tensor_whose_name_the_loop_sets_is_told_in_the_words_of_the_run": 0,
    "test_a_plain_value_that_goes_into_the_loss_is_told_in_the_words_of_the_run": 0,
    "test_a_counter_of_the_scripts_own_is_told_in_the_words_of_the_run": 0,
    # benchmarks of the tests' own machine, and hangs that take their time
    "test_whoever_hangs_is_named_and_the_others_end": 1,
    "test_two_workers_of_a_side_hold_the_same_bits_and_the_first_one_compares": 1,
}
"""How many cases of a test are always run; with 0, the test is one of `make soak`."""

A_QUARTER = {
    "test_a_data_set_that_draws_from_its_own_gives_the_same_bits_on_any_workers",
    "test_lanes_that_are_replayed_leave_the_bits_of_lanes_that_run",
    "test_a_newcomer_need_not_have_made_the_loaders_of_epochs_that_are_over",
    "test_a_training_on_grown_batches_resumed_in_the_middle_of_an_epoch_has_the_same_bits",
    "test_growing_is_a_loader_with_batches_that_much_larger_bit_for_bit",
    "test_lanes_that_move_within_a_step_get_what_they_would_have_had_from_the_start",
    "test_a_kill_at_any_point_of_a_step_costs_no_step",
    "test_a_second_kill_at_any_point_of_the_recovery_costs_no_step",
    "test_exactly_one_side_goes_on_wherever_and_whenever_the_cut_falls",
    "test_synchronised_batch_norm_agrees_with_batch_norm_on_the_whole_batch",
    "test_lanes_agree_with_the_whole_batch_up_to_rounding",
    "test_one_digest_on_1_and_3_workers",
    "test_models_in_half_precision_whatever_the_weights_of_lanes",
    "test_an_example_ends_with_the_digest_of_its_training",
    "test_synchronised_batch_norm_stays_with_a_network_trained_alone",
    "test_a_training_with_large_batches_learns",
    "test_statistics_are_averaged_and_counters_come_from_the_lowest_lane",
    "test_what_happens_to_every_lane_before_its_last_gradient_arrives_is_legal",
    "test_a_graph_of_one_loop_is_refused_in_the_next",
    "test_so_may_that_of_checkpoints_that_are_not_torchs",
    "test_sums_are_added_up_as_in_a_plain_loop_and_have_the_same_bits_on_any_workers",
    "test_the_noise_scale_of_a_quadratic_is_found_within_5_percent",
    "test_the_preconditioned_noise_scale_is_found_within_5_percent",
    "test_one_digest_on_1_2_and_3_workers",
    "test_a_resume_on_another_number_of_workers_gives_the_digest_of_one_run",
    "test_every_schedule_is_right_for_1_to_64_workers",
    "test_what_stands_in_a_buffer_when_a_process_is_copied_is_written_once",
    "test_data_that_a_lane_has_changed_in_place_are_fresh_when_the_step_is_computed_again",
    "test_a_worker_that_joins_ends_with_the_bits_of_the_others",
    "test_a_worker_joins_on_any_wire",
    "test_two_that_joined_go_on_when_all_others_are_lost_in_their_first_step",
    "test_a_kill_in_the_first_update_costs_nothing",
    "test_a_kill_at_any_point_of_an_update_costs_nothing",
    "test_a_kill_in_the_first_update_on_gpus_costs_nothing",
    "test_one_that_dies_while_it_finishes_for_another_on_gpus_costs_nothing",
    "test_a_kill_while_the_gradient_that_stands_once_is_added_costs_nothing",
    "test_one_that_dies_while_it_finishes_for_another_costs_nothing",
    "test_a_kill_in_the_step_that_is_computed_again_costs_nothing",
    "test_a_worker_killed_while_the_others_import_start_or_replicate_makes_all_start_again",
    "test_lane_worker_and_step_of_the_first_one_are_said_and_no_later_one",
    "test_the_sentence_names_lane_worker_parameter_and_samples",
    "test_a_run_that_is_disturbed_leaves_nothing",
    "test_workers_that_start_together_found_one_run",
    "test_a_run_that_resumes_in_the_third_epoch_draws_what_it_would_have_drawn",
    "test_replacements_go_on_with_the_metrics_where_those_before_were_killed",
    "test_when_the_worker_that_writes_is_killed_the_next_goes_on_and_nothing_is_there_twice",
    "test_a_kill_in_either_pass_over_a_body_costs_nothing",
    "test_a_replacement_goes_on_in_the_middle_of_an_epoch",
    "test_the_digest_is_that_of_the_explicit_loop_on_any_number_of_workers",
    "test_a_large_buffer_that_is_written_without_a_sign_is_averaged_like_others",
    "test_after_one_forward_pass_the_buffer_is_one_like_others",
    "test_one_lane_alone_is_refused_as_with_others_beside_it",
    "test_a_newcomer_says_that_its_average_begins_anew",
    "test_all_targets_receive_the_bits_that_were_sent",
    "test_several_members_send_and_the_state_is_that_of_the_first",
    "test_a_resumed_run_gives_it_back_and_ends_like_one_that_was_never_stopped",
    "test_a_kernel_that_is_given_one_batch_after_the_other_has_the_bits_of_replicated",
    "test_every_exchange_gives_what_gloo_gives",
    "test_a_random_sequence_of_collectives_gives_every_result",
    "test_exchanges_of_several_chunks_are_whole",
    "test_a_tensor_of_several_chunks_is_reduced_whole",
    "test_every_reduction_of_every_dtype_is_that_of_a_loop_over_the_members",
    "test_reduce_scatter_gives_each_rank_the_sum_of_its_parts",
    "test_what_gloo_can_reduce_is_reduced_to_the_same",
    "test_two_ranks_train_to_the_same_bits_as_on_gloo",
    "test_gradients_that_stand_once_on_each_host_have_the_bits_of_one_worker",
    "test_a_worker_killed_on_another_host_is_named_with_its_step",
    "test_every_schedule_gives_the_right_result_between_processes",
    "test_sums_in_opened_memory_have_the_brackets_of_the_tree",
    "test_many_threads_send_receive_and_wait_at_once",
    "test_sums_by_collectives_have_the_brackets_of_the_tree",
    "test_every_worker_receives_all_records_in_rank_order",
    "test_every_worker_has_every_record_by_rank_directly_and_in_rounds",
    "test_two_optimizers_in_turn_on_gpus_have_the_digest_of_replicated",
    "test_gradients_that_scripts_have_changed_differently_are_refused_in_the_first_update",
    "test_whatever_a_script_does_to_a_tensor_it_has_another_mark",
    "test_the_last_one_left_holds_all_of_the_state_and_divides_it_with_one_that_joins",
    "test_who_joins_after_a_kill_in_an_update_on_gpus_has_its_part",
    "test_a_worker_that_is_killed_in_training_is_replaced_by_a_copy_as_others_are",
    "test_a_change_after_the_backward_pass_is_refused_by_name_in_the_first_step",
    "test_what_is_made_once_is_not_noted",
    "test_a_converted_script_comes_to_the_same_on_several_workers",
    "test_what_stands_against_a_copy_is_named_and_a_new_process_takes_the_place",
    "test_entries_that_came_later_may_be_missing_and_others_may_come",
    "test_the_weight_is_rounded_as_by_a_multiplication",
    "test_what_lanes_would_not_agree_on_is_refused_by_name",
    "test_an_average_of_the_weights_that_nobody_tracks_is_told_after_a_resume",
}
"""Tests of which a quarter of the cases is always run."""


LONG_FILES = (
    "strategies/test_sharded_on_gpu.py",
    "verify/test_verify_faults.py",
    "strategies/test_sharded.py",
    "examples/test_examples.py",
    "recovery/test_joining.py",
    "recovery/test_rosters.py",
    "corpus/test_corpus.py",
    "recovery/test_kills_in_updates_on_gpus.py",
    "step/test_written_in_lanes.py",
    "script/test_lane_state.py",
    "recovery/test_load_once.py",
    "wire/test_reducer_conformance.py",
    "recovery/test_hosts.py",
    "launch/test_supervisor.py",
    "elastic/membership/test_membership_mutations.py",
    "recovery/test_kill_points.py",
    "step/test_steps.py",
    "step/test_body_passes.py",
    "exactness/test_same_bits.py",
    "exactness/test_resume_auto.py",
    "programs/test_bench_step.py",
    "elastic/membership/test_membership_histories.py",
    "recovery/test_kills_in_updates.py",
    "launch/test_launch.py",
    "strategies/test_strategy_conformance.py",
    "observe/test_page_in_chromium.py",
    "strategies/test_gradients_once.py",
    "recovery/test_models_and_loops_that_recover.py",
    "elastic/membership/test_membership_partitions.py",
    "cli/test_doctor.py",
    "wire/test_route.py",
    "recovery/test_kills_while_recovering.py",
    "recovery/test_launched_endings.py",
    "programs/test_bench_gpu_turns.py",
    "run/test_without_numpy.py",
    "optim/test_lamb.py",
    "wire/test_wires.py",
    "recovery/test_not_finite.py",
    "cli/test_run_command.py",
    "determinism/test_compiler.py",
    "elastic/membership/test_membership_kill_points.py",
    "optim/test_lars.py",
    "exactness/test_compiled_models.py",
    "data/test_loader_processes.py",
    "torch_backend/test_backend_training.py",
    "gradients/test_losses.py",
    "wire/test_between_hosts.py",
    "recovery/test_partitions.py",
    "torch_backend/test_backend_exchanges.py",
    "launch/test_function.py",
    "programs/test_demo.py",
    "recovery/test_batchnorm_over_all_lanes.py",
    "wire/test_executor.py",
)
"""Those that take the longest, longest first."""


def spread(count: int, kept: int) -> set[int]:
    """`kept` of so many numbers, at even distances, the last among them: three workers come after one and two."""
    return {(number + 1) * count // kept - 1 for number in range(kept)}


def mark_seldom(items: Sequence[pytest.Item]) -> None:
    """Gives all other cases the mark of those that only `make soak` runs."""
    cases: dict[str, list[pytest.Item]] = {name: [] for name in (*ALWAYS_RUN, *A_QUARTER)}
    for item in items:
        if (name := item.name.partition("[")[0]) in cases and item.get_closest_marker("soak") is None:
            cases[name].append(item)
    for name, alike in cases.items():
        always = spread(len(alike), min(len(alike), ALWAYS_RUN.get(name, -(-len(alike) // 4))))
        for number, item in enumerate(alike):
            if number not in always:
                item.add_marker(pytest.mark.soak)


def long_files_first(items: list[pytest.Item]) -> None:
    """Each of two processes takes a whole file: a long one that began last would run alone at the end."""
    places = {TESTS / name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
