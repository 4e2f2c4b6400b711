"""What the file says that a run leaves in its folder when it has come to its end."""

import pytest

from lockstep.events import Closed
from lockstep.observe.finish import FILE, Finish, FinishMark, read_finish, verdict


def finished(folder):
    (folder / FILE).write_text('{"step": 48, "num_workers": 2}')
    return folder


def test_the_code_of_a_lost_worker_is_made_good_by_a_run_that_came_to_its_end(tmp_path):
    code, sentence = verdict(finished(tmp_path), 137)
    assert code == 0
    assert "at step 48 on 2 workers" in sentence


@pytest.mark.parametrize("code", [1, 2, 3, 4, 143])
def test_no_other_code_is_made_good(code, tmp_path):
    assert verdict(finished(tmp_path), code)[0] == code


@pytest.mark.parametrize(("code", "found"), [(0, 1), (137, 137), (143, 143)])
def test_a_run_that_did_not_come_to_its_end_is_never_done(code, found, tmp_path):
    assert verdict(tmp_path, code)[0] == found


@pytest.mark.parametrize("text", ["", "{", "[]", '{"step": 1}', '{"a": 1}'])
def test_half_a_file_says_nothing(text, tmp_path):
    (tmp_path / FILE).write_text(text)
    assert read_finish(tmp_path) is None


def test_a_file_that_cannot_be_written_is_told_and_leaves_nothing(tmp_path):
    (tmp_path / FILE).mkdir()  # in its place
    said = []
    FinishMark(tmp_path, lambda: True, lambda: Finish(48, 2), said.append)(Closed())
    assert ["cannot be written" in text for text in said] == [True]
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
