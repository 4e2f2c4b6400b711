"""`lockstep advise` reads what a run has recorded, also while it goes on, and says what to do with more workers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from measured_noise import measured, noise
from torch import nn
from workers import on_workers

import lockstep
from lockstep.errors import BadArgument
from lockstep.events import NoiseMeasured
from lockstep.observe.recorder import FILE, Recorder, line_of
from lockstep.optim.noise import NoiseScale
from lockstep.optim.noise.advice import TooLittle, advise
from lockstep.programs import advice
from lockstep.programs.advice import find, report_on, use_of

WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; "
COMMAND = "from lockstep.cli.main import main; sys.argv[0] = 'lockstep'; main()"


def advised(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", WITHOUT_TORCH + COMMAND, "advise", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def run_folder(folder: Path, *events: NoiseMeasured, torn: str = "") -> Path:
    record = Recorder(folder, lambda: True, lambda text: None)
    for event in events:
        record(event)
    with (folder / FILE).open("a") as file:
        file.write(torn)
    return folder


def test_the_command_prints_the_advice_and_needs_no_torch(tmp_path: Path) -> None:
    ended = advised("--run", str(run_folder(tmp_path, measured(412))))
    assert ended.returncode == 0, ended.stderr
    expected = advise(noise(), batch=256, lanes=8, optimizer="sgd").text()
    assert ended.stdout == f"Measured up to step 412.\n{expected}\n"


def _train(folder: str) -> list[float]:
    os.environ["LOCKSTEP_RUN_DIR"] = folder
    run = lockstep.start(lanes=8, noise_every=1)
    x = torch.randn(64, 4)
    y = x.sum(1, keepdim=True) + torch.randn(64, 1)
    model = nn.Linear(4, 1)
    run.replicate(model, torch.optim.SGD(model.parameters(), lr=1e-3))  # never updated: every step has the same noise
    for _ in range(30):
        rows = torch.randint(64, (32,))
        for inputs, targets in run.lanes((x[rows], y[rows])):
            run.backward(F.mse_loss(model(inputs), targets))
    return [run.noise.critical_batch, run.noise.count]


def test_a_real_run_is_advised_by_what_it_has_measured(tmp_path: Path) -> None:
    critical, count = on_workers(2, _train, str(tmp_path))[0]
    found = report_on(tmp_path).advice
    assert (found.critical_batch, found.count) == (critical, count)
    assert (found.batch, found.lanes, found.optimizer) == (32, 8, "sgd")


def test_json_is_one_object_with_the_workers_that_were_asked_about(tmp_path: Path) -> None:
    ended = advised("--run", str(run_folder(tmp_path, measured(412))), "--json", "--workers", "16")
    report = json.loads(ended.stdout)
    assert (report["step"], report["batch"], report["position"]) == (412, 256, "below")
    assert (report["crew"]["workers"], report["crew"]["what"]) == (16, "grow")


def test_too_little_is_exit_code_1_and_says_how_many_more(tmp_path: Path) -> None:
    ended = advised("--run", str(run_folder(tmp_path, measured(5, noise(count=5)))), "--json")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "Measure 15 more." in ended.stderr


def test_a_folder_that_does_not_exist_is_exit_code_2(tmp_path: Path) -> None:
    ended = advised("--run", str(tmp_path / "train-1"))
    assert ended.returncode == 2
    assert "there is no run in" in ended.stderr


def test_no_workers_are_refused(tmp_path: Path) -> None:
    ended = advised("--run", str(tmp_path), "--workers", "0")
    assert ended.returncode == 2
    assert "1 or more" in ended.stderr


def test_a_run_that_has_only_begun_is_too_little(tmp_path: Path) -> None:
    with pytest.raises(TooLittle, match="Measure 20 more"):
        report_on(run_folder(tmp_path, measured(0, NoiseScale().noise)))


def test_a_folder_without_a_record_is_no_run_with_noise(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match="no noise was recorded in"):
        find(tmp_path)


@pytest.mark.parametrize("text", ["", "\n\n", "nonsense\n{}\n", "[" * 100_000, line_of(measured())[:40]])
def test_a_record_without_a_line_that_can_be_read_is_told_as_that(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadArgument, match="has no line that can be read"):
        find(run_folder(tmp_path, torn=text))


def test_the_newest_line_counts_although_a_resumed_run_was_further_before(tmp_path: Path) -> None:
    resumed = measured(51, noise(3000))
    assert find(run_folder(tmp_path, measured(50), measured(99), resumed))[0] == resumed


def test_a_line_that_is_being_written_is_passed_over(tmp_path: Path) -> None:
    torn = line_of(measured(3))[:-1]
    assert find(run_folder(tmp_path, measured(1), measured(2), torn=torn))[0].step == 2


def test_a_record_longer_than_what_is_read_gives_its_newest_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advice, "TAIL_BYTES", 2000)
    assert find(run_folder(tmp_path, *map(measured, range(30))))[0].step == 29


def test_the_short_last_batch_of_a_run_is_not_advised_on(tmp_path: Path) -> None:
    batches = [256, 256, 256, 12]
    folder = run_folder(tmp_path, *(measured(step, noise(batch=batch)) for step, batch in enumerate(batches)))
    assert report_on(folder).advice.batch == 256


def test_the_batches_of_an_earlier_run_in_the_folder_do_not_count(tmp_path: Path) -> None:
    earlier = [measured(step, noise(batch=64)) for step in range(60)]
    now = [measured(step, noise(batch=512, count=step + 1)) for step in range(20)]
    assert find(run_folder(tmp_path, *earlier, *now))[1] == 512


def test_an_adam_is_advised_by_the_noise_it_sees(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, measured(adam=noise(3000, preconditioned=True)))
    found = report_on(folder).advice
    assert (found.critical_batch, found.preconditioned, found.caveat) == (3000, True, None)


def test_an_adam_whose_own_noise_is_unknown_is_warned(tmp_path: Path) -> None:
    event = NoiseMeasured(8, "adam", noise(), None, step=500)
    assert "Only the plain noise scale is known" in report_on(run_folder(tmp_path, event)).text()


def test_an_optimizer_of_neither_kind_is_given_both_rules(tmp_path: Path) -> None:
    event = NoiseMeasured(8, "", noise(), None, step=500)
    assert "linear for SGD, the square root of the growth for Adam" in report_on(run_folder(tmp_path, event)).text()


SGD = advise(noise(4000), batch=256, lanes=8, optimizer="sgd")
ADAM = advise(noise(4000, preconditioned=True), batch=256, lanes=8, optimizer="adam")


def test_as_many_workers_as_lanes_split_the_batch() -> None:
    crew = use_of(8, SGD)
    assert (crew.what, crew.batch, crew.rate) == ("split", 256, 1)
    assert (
        crew.text() == "8 workers: split the batch of 256 (1 lane each), with the same numbers; nothing else changes."
    )


def test_workers_that_do_not_divide_the_lanes_are_told_that_fewer_are_as_fast() -> None:
    assert "(2 lanes at most, so 4 are as fast)" in use_of(7, SGD).text()


def test_more_workers_than_lanes_grow_the_batch_up_to_the_critical_one() -> None:
    crew = use_of(125, SGD)
    assert (crew.what, crew.lanes, crew.batch, crew.rate) == ("grow", 125, 4000, 125 / 8)
    assert use_of(126, SGD).what == "cut"


def test_growing_by_half_is_what_the_model_of_steps_and_samples_says() -> None:
    crew = use_of(12, SGD)
    assert crew.steps == pytest.approx((1 + 4000 / 384) / (1 + 4000 / 256))
    assert crew.samples == pytest.approx((1 + 384 / 4000) / (1 + 256 / 4000))


def test_an_adam_grows_its_rate_by_the_square_root() -> None:
    assert use_of(32, ADAM).rate == 2
    assert "grow the batch to 1,024, learning rate × 2: " in use_of(32, ADAM).text()


def test_past_the_critical_batch_more_workers_cut_the_same_batch() -> None:
    crew = use_of(1000, SGD)
    assert (crew.lanes, crew.batch, crew.steps, crew.samples, crew.rate) == (1000, 256, 1, 1, 1)
    assert "start with lanes=1000 and keep the batch of 256" in crew.text()
