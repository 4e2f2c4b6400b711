"""The folder of a run."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from lockstep.errors import BadArgument, BadEnvironment
from lockstep.launch.host.folder import check_name, name_from, new_run_folder


def test_a_run_folder_takes_the_number_after_the_highest(tmp_path):
    (tmp_path / "mnist-3").mkdir()
    assert new_run_folder(tmp_path, "mnist") == tmp_path / "mnist-4"


def test_launchers_that_start_at_once_get_different_folders(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: new_run_folder(tmp_path / "runs", "mnist"), range(40)))
    assert len(set(folders)) == 40


def test_a_link_in_the_place_of_a_run_folder_is_not_followed(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base/mnist-1").symlink_to(tmp_path / "elsewhere")
    assert new_run_folder(tmp_path / "base", "mnist") == tmp_path / "base/mnist-2"
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("name", ["", ".", "..", "../up", "a/b", "-n", ".hidden", "with space", "a\n"])
def test_a_name_that_could_leave_the_base_is_refused(tmp_path, name):
    with pytest.raises(BadArgument, match="letters, digits"):
        new_run_folder(tmp_path, name)


def test_a_base_that_is_a_file_is_a_bad_environment(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(BadEnvironment, match="give another one"):
        new_run_folder(tmp_path / "runs", "mnist")


@pytest.mark.parametrize("program", ["train.py", "my script.py", "a/b/.py", "pkg.train", "größe.py", "--", "..."])
def test_every_program_gives_a_usable_name(program):
    check_name(name_from(program))
