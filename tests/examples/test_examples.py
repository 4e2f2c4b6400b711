"""Every example runs alone, and prints the same on several workers."""

import re

import pytest
from example_shell import Shell, alone, on


def numbers_after(word: str, printed: str) -> list[float]:
    """Every number that stands behind `word`, in order; at least one, or the test looks at nothing."""
    found = [float(number) for number in re.findall(rf"{word} +(-?[0-9.]+(?:e[-+]?\d+)?)", printed)]
    assert found, f"no number after {word!r} in:\n{printed}"
    return found


@pytest.mark.parametrize(
    ("num_workers", "example", "arguments"),
    [
        pytest.param(2, "02_lockstep", (), marks=pytest.mark.soak),
        (3, "02_lockstep", ()),
        pytest.param(2, "03_accumulation", (), marks=pytest.mark.soak),
        pytest.param(2, "04_uneven", (), marks=pytest.mark.soak),
        pytest.param(3, "05_evaluation", (), marks=pytest.mark.soak),
        pytest.param(2, "07_mixed_precision", ("--dtype", "float16"), marks=pytest.mark.soak),
        pytest.param(2, "08_two_optimizers", (), marks=pytest.mark.soak),
        (2, "09_stream", ()),
        pytest.param(2, "13_lars", (), marks=pytest.mark.soak),
        pytest.param(3, "13_lars", (), marks=pytest.mark.soak),
        pytest.param(2, "14_lamb", (), marks=pytest.mark.soak),
        pytest.param(3, "14_lamb", (), marks=pytest.mark.soak),
        pytest.param(2, "15_grow", (), marks=pytest.mark.soak),
        pytest.param(3, "15_grow", (), marks=pytest.mark.soak),
        pytest.param(3, "16_adviser", (), marks=pytest.mark.soak),
        (2, "17_captured", ()),
        (3, "23_wgan", ()),
        (3, "19_sharded", ()),
        (2, "20_timeline", ("traced",)),
        (3, "18_carried", ()),
    ],
)
def test_an_example_prints_the_same_on_several_workers_as_alone(shell: Shell, num_workers, example, arguments):
    printed_alone, printed = shell(alone(example, *arguments), on(num_workers, example, *arguments))
    assert printed_alone
    assert printed == printed_alone


@pytest.mark.parametrize(
    "example",
    [
        "02_lockstep",
        "03_accumulation",
        "08_two_optimizers",
        "04_uneven",  # this one, and each fourth after it, other tests run too
        "09_stream",
        "13_lars",
        "14_lamb",
        "15_grow",
        "17_captured",
        "19_sharded",
        "23_wgan",
        "18_carried",
    ],
)
def test_an_example_ends_with_the_digest_of_its_training(shell: Shell, example):
    (printed,) = shell(alone(example))
    assert re.fullmatch(r"digest [0-9a-f]{64}", printed.splitlines()[-1])


@pytest.mark.parametrize(
    "command",
    [alone("02_lockstep"), pytest.param(on(1, "02_lockstep", options=("--lanes", "1")), marks=pytest.mark.soak)],
)
def test_the_lockstep_script_has_the_losses_of_the_plain_one_to_rounding(shell: Shell, command):
    plain, lockstep = shell(alone("01_plain"), command)
    assert numbers_after("batch", lockstep) == pytest.approx(numbers_after("batch", plain), rel=1e-4)


def test_no_forward_pass_of_the_accumulation_holds_more_than_a_lane(shell: Shell):
    (printed,) = shell(alone("03_accumulation"))
    assert numbers_after("largest forward pass:", printed) == [256 / 16]


def test_token_weights_give_the_gradient_of_the_whole_batch(shell: Shell):
    (printed,) = shell(alone("04_uneven"))
    assert numbers_after("weighted by tokens +error of the gradient", printed)[0] < 1e-5


def test_counting_all_lanes_alike_gives_another_gradient(shell: Shell):
    (printed,) = shell(alone("04_uneven"))
    assert numbers_after("all lanes alike +error of the gradient", printed)[0] > 0.01


def test_evaluation_counts_every_sample_once(shell: Shell):
    (printed,) = shell(on(3, "05_evaluation"))
    assert set(numbers_after("samples", printed)) == {1003}


@pytest.mark.parametrize("command", [alone("06_sync_batchnorm"), on(2, "06_sync_batchnorm")])
def test_synchronised_batch_norm_stays_with_a_network_trained_alone(shell: Shell, command):
    (printed,) = shell(command)
    assert numbers_after("synchronised", printed)[0] < 1e-5


def test_ordinary_batch_norm_on_two_workers_leaves_a_network_trained_alone(shell: Shell):
    (printed,) = shell(on(2, "06_sync_batchnorm"))
    assert numbers_after("ordinary", printed)[0] > 0.01


def test_training_in_bfloat16_learns_and_skips_nothing(shell: Shell):
    (printed,) = shell(alone("07_mixed_precision"))
    losses = numbers_after("loss", printed)
    assert losses[-1] < losses[0] / 2
    assert numbers_after("skipped", printed) == [0]


def test_a_scale_that_is_too_large_makes_two_workers_skip_steps_and_then_train(shell: Shell):
    (printed,) = shell(on(2, "07_mixed_precision", "--dtype", "float16"))
    losses, skipped = numbers_after("loss", printed), numbers_after("skipped", printed)
    assert 0 < skipped[0] < 16
    assert losses[-1] < losses[0] / 2


@pytest.mark.soak
def test_the_generated_points_come_nearer_to_the_circle(shell: Shell):
    (printed,) = shell(alone("08_two_optimizers"))
    away = numbers_after("away", printed)
    assert away[-1] < away[0] / 2


def test_two_workers_together_read_a_stream_once_per_epoch(shell: Shell):
    (printed,) = shell(on(2, "09_stream"))
    assert numbers_after("readings", printed) == [1000, 1000]


@pytest.mark.soak
def test_an_unchanged_ddp_script_trains_to_the_same_bits_on_this_backend_as_on_gloo(shell: Shell):
    ours, theirs = shell(
        alone("ddp_unchanged"), on(2, "ddp_unchanged", "--backend", "gloo", options=("--torch-distributed",))
    )
    assert re.fullmatch(r"weights [0-9a-f]{64}", ours.splitlines()[-1])
    assert ours == theirs


def test_a_run_stopped_on_two_workers_and_resumed_on_three_ends_with_the_digest_of_one_never_stopped(
    shell: Shell,
):
    whole, first = shell(alone("10_save_resume", "whole"), on(2, "10_save_resume", "parts", "--stop-at", "25"))
    (second,) = shell(on(3, "10_save_resume", "parts"))
    assert "stopped at step 25" in first
    assert "going on from step 25" in second
    assert second.splitlines()[-2:] == whole.splitlines()[-2:]


def test_a_run_that_left_between_checkpoints_goes_on_from_the_newest_and_ends_with_the_same_digest(shell: Shell):
    whole, _ = shell(alone("11_checkpoints", "kept"), on(2, "11_checkpoints", "kept-parts", "--stop-at", "25"))
    newest = max(int(path.name.removeprefix("step-")) for path in (shell.folder / "kept-parts").glob("step-*"))
    assert newest in range(20, 25)  # due at 20; later where the one before was still being written
    (second,) = shell(on(3, "11_checkpoints", "kept-parts"))
    assert f"going on from step {newest}\n" in second
    assert second.splitlines()[-2:] == whole.splitlines()[-2:]


@pytest.mark.soak
def test_a_run_that_loses_a_worker_ends_with_the_digest_of_one_that_loses_none(shell: Shell):
    disturbed = on(3, "12_lost_worker", "--kill-at", "20", options=("--copies",))
    whole, lost = shell(alone("12_lost_worker"), disturbed)
    assert "lanes 2, 3 and 4 move to" in lost  # told by a survivor: somebody was lost, indeed
    assert re.fullmatch(r"digest [0-9a-f]{64}", whole.splitlines()[-1])
    assert lost.splitlines()[-1] == whole.splitlines()[-1]


@pytest.mark.parametrize(("example", "below"), [("13_lars", 0.2), ("14_lamb", 1.5), ("15_grow", 0.2)])
def test_a_training_with_large_batches_learns(shell: Shell, example, below):
    (printed,) = shell(alone(example))
    assert numbers_after("loss", printed)[-1] < below


def test_the_grown_batch_has_eight_times_the_rate_and_a_warm_up_is_missed_until_it_is_there(shell: Shell):
    (printed,) = shell(alone("15_grow"))
    assert "batch 32 → 256 (×8): lr 0.02 → 0.16" in printed
    assert "before: warm-up:" in printed
    assert numbers_after("findings with the schedule:", printed) == [0]


@pytest.mark.soak
def test_the_adviser_is_sure_of_the_critical_batch_in_the_end(shell: Shell):
    (printed,) = shell(alone("16_adviser"))
    assert re.findall(r"sure (\w+)", printed)[-1] == "True"
    low, high = numbers_after("between", printed)[-1], numbers_after("and", printed)[-1]
    assert low < numbers_after("critical batch", printed)[-1] < high


def test_a_state_that_lanes_carry_answers_what_a_piece_alone_cannot(shell: Shell):
    (printed,) = shell(alone("18_carried"))
    assert numbers_after("loss", printed)[-1] < 0.1  # without it 0.34 at least: ln 2 for half of the answers


def test_a_body_that_stays_as_it_was_prints_the_losses_of_the_loop_over_lanes(shell: Shell):
    plain_body, over_lanes = shell(on(2, "plain_body"), alone("02_lockstep"))
    losses = numbers_after("batch", plain_body)
    assert losses == numbers_after("batch", over_lanes)
    assert len(losses) == 6
