"""A snapshot that was written well and means nothing is refused by name, whatever is wrong with it."""

import copy
import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from workers import on_workers, outcomes

import lockstep
from lockstep.errors import BadArgument, BadCheckpoint
from lockstep.run.run import Run
from lockstep.state.checkpoints.file import read, write
from lockstep.state.checkpoints.folder import name_of, next_serial
from lockstep.state.run_state import check
from lockstep.state.schema import LATER, STATE, check_form
from lockstep.state.snapshot import DEEPEST, Snapshot, check_packed, pack, unpack


def begun() -> Run:
    """A run after one step, with all that a state can have an entry for."""
    run = lockstep.start(lanes=2, seed=3)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
    run.replicate(model, optimizer, schedule=schedule)
    loader = run.shard(DataLoader(TensorDataset(torch.randn(12, 3)), batch_size=4, shuffle=True))
    for (x,) in run.lanes(next(iter(loader))):
        run.backward(model(x).square().mean())
    optimizer.step()
    schedule.step()
    return run


@pytest.fixture
def run() -> Iterator[Run]:
    with begun() as run:
        yield run


def good(run: Run) -> Snapshot:
    """As it comes from a file."""
    taken = run._state.capture()
    tensors = {name: tensor.clone() for name, tensor in taken.tensors.items()}
    return Snapshot(tensors, json.loads(json.dumps(taken.state)))


@pytest.fixture(scope="module")
def whole() -> Snapshot:
    with begun() as run:
        return good(run)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value; of long lists the first entries and the last."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        if not isinstance(value, list) or key < 4 or key == len(value) - 1:
            yield from places(item, (*path, key))


def changed(snapshot: Snapshot, path: tuple[Any, ...], value: Any) -> Snapshot:
    state = copy.deepcopy(snapshot.state)
    holder = state
    for key in path[:-1]:
        holder = holder[key]
    if not path:
        return Snapshot(snapshot.tensors, value)
    holder[path[-1]] = value
    return Snapshot(snapshot.tensors, state)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, 10**400])
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([{"tensor": "model/weight"}, {"tensor": "generators/torch"}, {"float": "nan"}, {"tensor": "no"}]),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text(max_size=5) | st.sampled_from(["list", "tuple", "dict", "tensor"]), inner, max_size=2)
        | st.lists(inner, max_size=3).map(lambda items: {"list": items})
        | st.lists(st.tuples(inner, inner).map(list), max_size=2).map(lambda items: {"dict": items})
    ),
    max_leaves=6,
)


def load(run: Run, snapshot: Snapshot) -> None:
    """What a resume does with a snapshot once it is read."""
    check_form(snapshot, "checkpoint c")
    check(run._state, snapshot, Path("c"), run._settings)
    run._state.install(snapshot)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_at_any_place_of_a_state_loads_or_is_a_bad_checkpoint(
    run: Run, whole: Snapshot, data: st.DataObject
) -> None:
    path = data.draw(st.sampled_from(sorted(places(whole.state), key=str)))
    odd = changed(whole, path, data.draw(json_values))
    with suppress(BadCheckpoint):
        load(run, odd)


@pytest.mark.parametrize("name", sorted(STATE))
def test_an_entry_that_is_missing_is_named(whole: Snapshot, name: str) -> None:
    state = {key: value for key, value in whole.state.items() if key != name}
    with pytest.raises(BadCheckpoint, match=f"checkpoint c: state/{name} is missing"):
        check_form(Snapshot(whole.tensors, state), "checkpoint c")


@pytest.mark.parametrize("name", sorted(LATER))
def test_entries_that_came_later_may_be_missing_and_others_may_come(run: Run, whole: Snapshot, name: str) -> None:
    state = {key: value for key, value in whole.state.items() if key != name}
    load(run, Snapshot(whole.tensors, state | {"of a later version": [1, {"a": None}]}))


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (("epoch",), -5, "state/epoch is -5, not a whole number of 0 or more"),
        (("step",), "3", "state/step is '3', not a whole number"),
        (("step",), 2**63, "state/step is 9223372036854775808, not 9223372036854775807 at most"),
        (("num_lanes",), True, "state/num_lanes is True"),
        (("loaders",), None, "state/loaders is None, not a table by number"),
        (("loaders", "0", 1), 1.5, "state/loaders/0/1 is 1.5, not a whole number"),
        (("loaders",), {"first": [0, 0]}, "state/loaders is {'first': .*, not a table by number"),
        (("made", "total"), -1, "state/made/total is -1, not a whole number of 0 or more"),
        (("script", "numbers"), [["train.py"]], "state/script/numbers/0 is .*, not a list of 5"),
        (("carried",), {"0": {"list": []}}, r"state/carried/0 is \[\], not a table by name"),
        (("batches",), [None, None], "state/batches is .*, not one entry for each of 1 loaders"),
        (("optimizers",), float("nan"), "state/optimizers is nan, not a table"),
        (("optimizers", "optimizer"), {"tensor": "nowhere"}, "state/optimizers/optimizer names the tensor 'nowhere'"),
        (("optimizers", "optimizer"), {"dict": []}, "state/optimizers/optimizer is {}, not the state of an optimizer"),
        (("tracked", "schedule"), [1], r"state/tracked/schedule is \[1\], which is no packed value"),
        (
            ("optimizers", "optimizer", "dict", 0, 1, "dict", 0, 1),
            {"list": []},
            r"state/optimizers/optimizer/state/0 is \[\], not a table",
        ),
        (("tracked", "schedule"), {"dict": [[{"list": []}, 1]]}, "state/tracked/schedule/0 has the key"),
        (("tracked", "schedule"), {"dict": [[{"tensor": "model/weight"}, 1]]}, "state/tracked/schedule/0 has the key"),
        (("generators", "dict", 0, 1), {"tensor": "model/bias"}, "state/generators/torch is not the state of a gen"),
        (("generators", "dict", 2, 1), {"tuple": [3, {"tuple": []}, None]}, "state/generators/python is not the state"),
        (("noise", 0, "count"), None, "state/noise/0/count is None, not a number"),
        (("hardware", "device type"), 1, "state/hardware/device type is 1, not a text"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(whole: Snapshot, path: tuple[Any, ...], value: Any, told: str) -> None:
    with pytest.raises(BadCheckpoint, match=f"^checkpoint c: {told}"):
        check_form(changed(whole, path, value), "checkpoint c")


def test_the_state_of_a_gpus_generator_does_no_harm_where_there_is_no_gpu(run: Run, whole: Snapshot) -> None:
    load(run, changed(whole, ("generators", "dict", 1), ["cuda", {"tensor": "generators/torch"}]))


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def test_a_state_that_is_nested_as_deeply_as_allowed_comes_back_and_a_deeper_one_is_refused_when_it_is_saved() -> None:
    packed = pack(nested(DEEPEST), "here", {})
    check_packed(packed, "here", {})
    assert unpack(packed, {}) == nested(DEEPEST)
    with pytest.raises(BadArgument, match="stands in 60 containers"):
        pack(nested(DEEPEST + 1), "here", {})
    with pytest.raises(BadCheckpoint, match="no packed value"):
        check_packed({"list": [packed]}, "here", {})


def test_tensors_under_keys_that_read_alike_are_told_apart() -> None:
    tensors: dict[str, torch.Tensor] = {}
    packed = pack(
        {1: torch.tensor(1), "1": torch.tensor(2), "a": {"b": torch.tensor(3)}, "a/b": torch.tensor(4)}, "s", tensors
    )
    back = unpack(packed, tensors)
    assert [int(back[1]), int(back["1"]), int(back["a"]["b"]), int(back["a/b"])] == [1, 2, 3, 4]


def test_a_tensor_as_a_key_is_refused_when_it_is_saved() -> None:
    for key in (torch.tensor(1), (1, torch.tensor(1))):
        with pytest.raises(BadArgument, match="average has a tensor as a key, and nothing would be found by it"):
            pack({key: 1}, "average", {})


def sign_anew(place: Path, name: str, value: str) -> None:
    """The entry of the manifest is another JSON text now, and the digest fits."""
    manifest = json.loads((place / "manifest.json").read_text()) | {"manifest_sha256": "0" * 64}
    text = json.dumps(manifest | {name: "HERE"}, indent=1).replace('"HERE"', value)
    (place / "manifest.json").write_text(text.replace("0" * 64, hashlib.sha256(text.encode()).hexdigest()))


@pytest.mark.parametrize("value", ['"x"', "null", "[" * 100_000 + "]" * 100_000], ids=["text", "nothing", "deep"])
@pytest.mark.parametrize("name", ["serial", "files", "state", "format"])
def test_a_well_signed_manifest_of_another_form_is_refused(
    name: str, value: str, whole: Snapshot, tmp_path: Path
) -> None:
    write(tmp_path / "c", whole)
    sign_anew(tmp_path / "c", "step", "1")
    read(tmp_path / "c")
    sign_anew(tmp_path / "c", name, value)
    with pytest.raises(BadCheckpoint, match="c"):
        read(tmp_path / "c")


def save_and_spoil(folder: str) -> None:
    """Three checkpoints, of which the newer two are well signed and mean nothing."""
    run = begun()
    for step, spoilt in ((1, {}), (2, {"epoch": -5}), (3, {"loaders": None})):
        taken = good(run)
        write(Path(folder) / name_of(step), Snapshot(taken.tensors, taken.state | spoilt), next_serial(Path(folder)))


def go_on(folder: str) -> list[Any]:
    run = begun()
    said: list[str] = []
    run._events.subscribe(lambda event: said.append(getattr(event, "text", "")))
    return [run.checkpoints(folder), *said]


def go_on_from(path: str) -> int:
    return begun().resume(path)


def test_the_newest_checkpoint_that_means_something_is_taken_and_the_others_are_said(tmp_path: Path) -> None:
    on_workers(1, save_and_spoil, str(tmp_path))
    first, second = on_workers(2, go_on, str(tmp_path))
    assert first[0] == second[0] == 1
    told = "\n".join(first[1:])
    assert f"{name_of(3)}: state/loaders is None, not a table by number" in told
    assert f"{name_of(2)}: state/epoch is -5" in told
    for found in outcomes(2, go_on_from, str(tmp_path / name_of(3))):
        assert (found.error, "state/loaders is None" in found.message) == ("BadCheckpoint", True)
