"""Checkpoints: plain data, checked, whole or not there."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lockstep
from lockstep.errors import BadArgument, BadCheckpoint
from lockstep.state.checkpoints.file import read, write
from lockstep.state.snapshot import Snapshot, pack, unpack

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
trees = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.integers() | st.text() | st.tuples(st.integers(), st.text()), inner)
    ),
    max_leaves=12,
)


@given(trees)
def test_a_state_comes_back_as_it_was_through_json(state: Any) -> None:
    packed = json.loads(json.dumps(pack(state, "here", {})))
    back = unpack(packed, {})
    assert back == state
    assert repr(back) == repr(state)  # 1 and True, (1,) and [1] are told apart


def test_tensors_in_a_state_come_back_bit_for_bit() -> None:
    state = {"a": [torch.tensor([1.5, float("nan")]), (torch.arange(3),)], 3: torch.tensor(2, dtype=torch.int8)}
    tensors: dict[str, torch.Tensor] = {}
    back = unpack(json.loads(json.dumps(pack(state, "here", tensors))), tensors)
    assert torch.equal(back["a"][0].view(torch.int32), state["a"][0].view(torch.int32))
    assert torch.equal(back["a"][1][0], torch.arange(3))
    assert back[3].dtype == torch.int8


def test_a_state_that_is_no_plain_data_is_refused_by_its_place() -> None:
    with pytest.raises(BadArgument, match="scheduler/hooks/0 is a function"):
        pack({"hooks": [lambda: None]}, "scheduler", {})


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [3, 5]),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o, [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.StepLR(o, 2)], [4]
        ),
    ],
    ids=["one cycle", "multi step", "cosine", "plateau", "sequential"],
)
def test_torchs_schedulers_are_saved_and_resumed(tmp_path: Path, make: Any) -> None:
    undisturbed = _rates(make, tmp_path / "c", save_at=2)
    assert _rates(make, tmp_path / "c", save_at=None) == undisturbed[3:]


def _rates(make: Any, place: Path, save_at: int | None) -> list[float]:
    """The learning rate after each of six steps; or, without `save_at`, after those that follow a resume."""
    with lockstep.start() as run:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        scheduler = make(optimizer)
        run.replicate(model, optimizer, scheduler=scheduler)
        if save_at is None:
            run.resume(place)
        rates = []
        for step in range(6 if save_at is not None else 3):
            optimizer.step()
            scheduler.step(*([1.0] if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else []))
            rates.append(optimizer.param_groups[0]["lr"])
            if step == save_at:
                run.save(place)
        return rates


def snapshot() -> Snapshot:
    return Snapshot({"w": torch.randn(40), "b": torch.arange(7)}, {"step": 3, "name": "é"})


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    written = snapshot()
    write(tmp_path / "c", written)
    found = read(tmp_path / "c")
    assert found.state == written.state
    assert all(torch.equal(found.tensors[name], written.tensors[name]) for name in written.tensors)


def test_a_new_checkpoint_replaces_the_old_one_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "c", snapshot())
    newer = Snapshot({"w": torch.zeros(1)}, {"step": 4})
    write(tmp_path / "c", newer)
    assert read(tmp_path / "c").state == {"step": 4}
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_failed_write_leaves_the_old_checkpoint_whole(tmp_path: Path) -> None:
    write(tmp_path / "c", snapshot())
    with pytest.raises(TypeError):
        write(tmp_path / "c", Snapshot({}, {"not json": object()}))
    assert read(tmp_path / "c").state["step"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_every_damage_to_a_checkpoint_is_noticed(tmp_path: Path) -> None:
    place = tmp_path / "c"
    write(place, snapshot())
    chance = random.Random(0)
    for name in ("manifest.json", "tensors-000.safetensors"):
        whole = (place / name).read_bytes()
        for _ in range(60):
            (place / name).write_bytes(_damaged(whole, chance))
            with pytest.raises(BadCheckpoint):
                read(place)
        (place / name).write_bytes(whole)
    read(place)


def _damaged(whole: bytes, chance: random.Random) -> bytes:
    if chance.random() < 0.3:
        return whole[: chance.randrange(len(whole))]
    place = chance.randrange(len(whole))
    return whole[:place] + bytes([whole[place] ^ (1 << chance.randrange(8))]) + whole[place + 1 :]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    write(tmp_path / "c", snapshot())
    (tmp_path / "c" / "tensors-000.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match=r"tensors-000\.safetensors is missing"):
        read(tmp_path / "c")


def test_a_link_in_place_of_a_checkpoint_is_not_followed(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere", snapshot())
    (tmp_path / "c").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadArgument, match="is a link"):
        write(tmp_path / "c", snapshot())


def test_weights_are_read_without_lockstep_as_the_page_on_checkpoints_says(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    code = page.split("## Read the weights elsewhere")[1].split("```python\n")[1].split("```")[0]
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    with lockstep.start(lanes=2) as run:
        run.replicate(net)
        run.save(tmp_path / "saved")
    names: dict[str, Any] = {}
    exec(code.replace("runs/train-1/checkpoints/step-00000412", str(tmp_path / "saved")), names)
    assert names["weights"].keys() == net.state_dict().keys()
    assert all(torch.equal(names["weights"][name], value) for name, value in net.state_dict().items())
