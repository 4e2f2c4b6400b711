"""A folder of checkpoints: the newest good one is found, the others are kept or go."""

import random
from pathlib import Path

import pytest
import torch

from lockstep.errors import BadCheckpoint
from lockstep.state.checkpoints.file import read, read_manifest, write
from lockstep.state.checkpoints.folder import Retention, name_of, newest_good, next_serial, remove_leftovers
from lockstep.state.checkpoints.lock import new_partial, read_lock
from lockstep.state.snapshot import Snapshot
from lockstep.version import VERSION


def put(folder: Path, *steps: int) -> None:
    for step in steps:
        tensors = {f"w{number}": torch.full((20,), float(step + number)) for number in range(3)}
        state = {"step": step, "num_lanes": 4, "seed": 7, "eps": 1e-08, "name": "é"}
        write(folder / name_of(step), Snapshot(tensors, state), next_serial(folder), file_bytes=200)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_the_manifest_says_what_is_in_the_checkpoint_and_where_it_comes_from(tmp_path: Path) -> None:
    snapshot = Snapshot({"w": torch.zeros(2)}, {"step": 412, "num_lanes": 4, "seed": 7})
    write(tmp_path / "c", snapshot, serial=5, wall_clock=lambda: 0.0)
    manifest = read_manifest(tmp_path / "c")
    assert manifest["versions"] == {"lockstep": VERSION, "torch": torch.__version__}
    assert manifest["run"] == {"lanes": 4, "seed": 7}
    assert [manifest["step"], manifest["serial"], manifest["when"]] == [412, 5, "1970-01-01T00:00:00+00:00"]
    assert set(manifest["files"]) == {"tensors-000.safetensors"}


def test_tensors_are_split_into_several_files_and_all_come_back(tmp_path: Path) -> None:
    put(tmp_path, 1)
    assert len(read_manifest(tmp_path / name_of(1))["files"]) == 2  # of 200 bytes each, for three times 80
    assert {name: float(t[0]) for name, t in read(tmp_path / name_of(1)).tensors.items()} == {"w0": 1, "w1": 2, "w2": 3}


def test_tensors_that_share_memory_are_saved_too(tmp_path: Path) -> None:
    shared = torch.arange(6.0)
    write(tmp_path / "c", Snapshot({"all": shared, "same": shared, "part": shared[2:4]}, {"step": 1}))
    assert read(tmp_path / "c").tensors["part"].tolist() == [2.0, 3.0]


def test_the_newest_checkpoint_is_the_one_that_was_written_last(tmp_path: Path) -> None:
    put(tmp_path, 100, 200, 50)  # the last one by a run that was begun anew
    assert newest_good(tmp_path) == (tmp_path / name_of(50), [])


def test_damaged_checkpoints_are_refused_by_name_and_stay(tmp_path: Path) -> None:
    put(tmp_path, 1, 2, 3)
    damage(tmp_path / name_of(3) / "tensors-001.safetensors")
    damage(tmp_path / name_of(2) / "manifest.json")
    found = newest_good(tmp_path)
    assert found.path == tmp_path / name_of(1)
    assert {refused.path.name for refused in found.refused} == {name_of(2), name_of(3)}
    assert any("tensors-001.safetensors is damaged" in refused.reason for refused in found.refused)
    assert names(tmp_path) == [name_of(1), name_of(2), name_of(3)]


def test_an_empty_folder_and_one_that_is_not_there_have_no_checkpoint(tmp_path: Path) -> None:
    assert newest_good(tmp_path) == newest_good(tmp_path / "absent") == (None, [])


def test_a_link_among_the_checkpoints_is_not_followed(tmp_path: Path) -> None:
    put(tmp_path / "elsewhere", 9)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / name_of(9)).symlink_to(tmp_path / "elsewhere" / name_of(9))
    found = newest_good(tmp_path / "c")
    assert found.path is None
    assert "is a link" in found.refused[0].reason


def test_the_newest_good_ones_are_kept(tmp_path: Path) -> None:
    put(tmp_path, 1, 2, 3, 4)
    Retention(tmp_path, keep=2).prune()
    assert names(tmp_path) == [name_of(3), name_of(4)]


def test_a_damaged_checkpoint_does_not_count_among_those_kept(tmp_path: Path) -> None:
    put(tmp_path, 1, 2, 3)
    damage(tmp_path / name_of(3) / "tensors-000.safetensors")
    Retention(tmp_path, keep=1).prune()
    assert names(tmp_path) == [name_of(2), name_of(3)]


def test_the_only_good_checkpoint_stays_among_damaged_ones(tmp_path: Path) -> None:
    put(tmp_path, 1, 2, 3)
    for step in (2, 3):
        damage(tmp_path / name_of(step) / "tensors-000.safetensors")
    Retention(tmp_path, keep=1).prune()
    assert newest_good(tmp_path).path == tmp_path / name_of(1)


def test_a_checkpoint_that_is_being_read_is_not_removed(tmp_path: Path) -> None:
    put(tmp_path, 1, 2)
    with read_lock(tmp_path / name_of(1)):
        Retention(tmp_path, keep=1).prune()
        assert names(tmp_path) == [name_of(1), name_of(2)]
    Retention(tmp_path, keep=1).prune()
    assert names(tmp_path) == [name_of(2)]


def test_a_checkpoint_that_is_replaced_while_it_is_read_stays_readable(tmp_path: Path) -> None:
    put(tmp_path, 1)
    with read_lock(tmp_path / name_of(1)):
        put(tmp_path, 1)
        assert len(names(tmp_path)) == 2  # the old one, which has lost its name
    remove_leftovers(tmp_path)
    assert names(tmp_path) == [name_of(1)]


def test_what_is_being_written_is_no_leftover(tmp_path: Path) -> None:
    with new_partial(tmp_path / name_of(1)) as partial:
        assert remove_leftovers(tmp_path) == []
        assert partial.is_dir()
    assert names(tmp_path) == []


@pytest.mark.parametrize("content", [(), ("manifest.json",), ("manifest.json", "tensors-000.safetensors")])
def test_what_a_killed_writer_left_is_removed(tmp_path: Path, content: tuple[str, ...]) -> None:
    left = tmp_path / ".step-00000001.abc.partial"
    left.mkdir()
    for name in content:
        (left / name).write_bytes(b"half")
    assert remove_leftovers(tmp_path) == [left]
    assert names(tmp_path) == []


def corrupt(path: Path, chance: random.Random) -> None:
    """Flips a bit of the file, or cuts it."""
    whole = path.read_bytes()
    place = chance.randrange(len(whole))
    flipped = whole[:place] + bytes([whole[place] ^ (1 << chance.randrange(8))]) + whole[place + 1 :]
    path.write_bytes(whole[:place] if chance.random() < 0.3 else flipped)


@pytest.mark.parametrize("times", [60, pytest.param(1000, marks=pytest.mark.soak)])
def test_every_corruption_of_any_file_is_detected_and_the_one_before_is_found(tmp_path: Path, times: int) -> None:
    put(tmp_path, 1, 2)
    newest = tmp_path / name_of(2)
    files = {path: path.read_bytes() for path in sorted(newest.iterdir())}
    chance = random.Random(times)
    for _ in range(times):
        path = chance.choice(list(files))
        corrupt(path, chance)
        with pytest.raises(BadCheckpoint):
            read(newest)
        found = newest_good(tmp_path)
        assert found.path == tmp_path / name_of(1)
        assert [refused.path for refused in found.refused] == [newest]
        path.write_bytes(files[path])
    assert newest_good(tmp_path).path == newest


def test_every_single_bit_of_a_manifest_counts(tmp_path: Path) -> None:
    put(tmp_path, 1)
    path = tmp_path / name_of(1) / "manifest.json"
    whole = path.read_bytes()
    for place in range(len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= 0x20  # the bit between 1e-08 and 1E-08
        path.write_bytes(flipped)
        with pytest.raises(BadCheckpoint):
            read_manifest(path.parent)
