"""Faults on purpose, by LOCKSTEP_FAULT, under `lockstep run`."""

from pathlib import Path

from launches import launch

from lockstep.settings.faults import has_happened

CORPUS = Path(__file__).parents[1] / "corpus"


def shape(name: str) -> str:
    return f"import sys; sys.path[:0] = [{str(CORPUS)!r}]\n" + (CORPUS / "shapes" / f"{name}.py").read_text()


def test_a_run_that_is_stopped_between_two_loops_over_a_batch_ends_after_the_second_and_is_saved(
    tmp_path: Path,
) -> None:
    with launch(tmp_path, shape("two_loops_on_a_batch"), "-n", "2", LOCKSTEP_FAULT="stop 0 at 7") as run:
        assert run.finish() == 143, run.shown()
    assert has_happened(run.run_dir)
    assert [path.name for path in (run.run_dir / "checkpoints").iterdir()] == ["step-00000010"], run.shown()
    assert "to go on: lockstep run" in run.shown()


def test_a_fault_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    with launch(tmp_path, shape("epochs"), LOCKSTEP_FAULT="kill all") as run:
        assert run.finish() == 3
    assert "LOCKSTEP_FAULT cannot be used: 'kill all' is no fault" in run.shown()
