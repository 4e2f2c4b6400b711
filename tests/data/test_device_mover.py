"""Data come to the run's device in the containers they were in. The meta device stands where a second one is needed."""

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.data import GlobalBatch, ShardedLoader
from lockstep.data.device import DeviceMover, pinned, to_device
from lockstep.data.fetch import Loaded
from lockstep.data.inner_loader import Pinnable, unpacked
from lockstep.data.structure import copied

CPU, META = torch.device("cpu"), torch.device("meta")


class Pair(NamedTuple):
    x: torch.Tensor
    y: Any


@dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    name: str


class Encoding(UserDict[str, torch.Tensor]):
    """A mapping that moves itself, as those of tokenizers do."""

    def to(self, device: torch.device) -> "Encoding":
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


def ones() -> torch.Tensor:
    return torch.ones(4, 2)


STRUCTURES = [
    (ones(), ones()),
    [ones(), 3],
    {"x": ones(), "names": ["a", "b"]},
    OrderedDict(x=ones()),
    defaultdict(list, x=ones()),
    Pair(ones(), (ones(), "word")),
    Sample(ones(), "a"),
]


def tensors_in(part: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    to_device(part, META, lambda leaf: found.append(leaf) if isinstance(leaf, torch.Tensor) else None)
    return found


@pytest.mark.parametrize("part", STRUCTURES, ids=lambda part: type(part).__name__)
def test_to_the_cpu_the_very_same_object_comes_back(part: Any) -> None:
    assert to_device(part, CPU) is part
    assert DeviceMover()(part, copied) is part


@pytest.mark.parametrize("part", STRUCTURES, ids=lambda part: type(part).__name__)
def test_containers_keep_their_types(part: Any) -> None:
    assert type(to_device(part, META)) is type(part)


@pytest.mark.parametrize("part", STRUCTURES, ids=lambda part: type(part).__name__)
def test_all_tensors_of_a_structure_go(part: Any) -> None:
    there = to_device(part, META)
    assert tensors_in(there)  # those that are not on the CPU
    assert {tensor.device.type for tensor in tensors_in(there)} == {"meta"}


@pytest.mark.parametrize("part", STRUCTURES, ids=lambda part: type(part).__name__)
def test_what_is_moved_stays_where_it_was_too(part: Any) -> None:
    to_device(part, META)
    assert tensors_in(part) == []


def test_what_is_no_tensor_is_left_alone() -> None:
    array, words = np.ones(3), ["a", "b"]
    there = to_device({"array": array, "words": words, "none": None}, META)
    assert there["array"] is array
    assert there["words"] is words
    assert there["none"] is None


def test_a_tensor_that_is_on_another_device_already_is_left_alone() -> None:
    there = torch.ones(2, device=META)
    assert to_device([there], META)[0] is there


def test_what_is_left_alone_can_be_copied_instead() -> None:
    there, array = torch.ones(2, device=META), np.ones(2)
    own = to_device({"there": there, "array": array}, META, copied)
    assert own["there"] is not there
    assert own["array"] is not array


def test_a_packed_sequence_moves_by_its_own_way() -> None:
    packed = pack_padded_sequence(torch.ones(2, 3, 1), torch.tensor([3, 2]), batch_first=True)
    there = to_device(packed, META)
    assert isinstance(there, PackedSequence)
    assert there.data.device == META


def test_a_mapping_with_a_way_of_its_own_moves_by_it() -> None:
    there = to_device([Encoding(ids=torch.ones(2))], META)[0]
    assert (type(there), there["ids"].device) == (Encoding, META)


# -- pinning ---------------------------------------------------------------------------------------------------------


class Noted:
    """Something that can be pinned, and knows that it was."""

    def __init__(self, is_pinned: bool = False) -> None:
        self.is_pinned = is_pinned

    def pin_memory(self) -> "Noted":
        return Noted(True)


@pytest.mark.parametrize("make", [lambda x: (x, 1), lambda x: Pair(x, "a"), lambda x: Sample(x, "a"), lambda x: {0: x}])
def test_pinning_keeps_types_and_reaches_all_parts(make: Any) -> None:
    part = pinned(make(Noted()))
    assert type(part) is type(make(None))
    found: list[Any] = []
    to_device(part, META, found.append)
    assert [thing.is_pinned for thing in found if isinstance(thing, Noted)] == [True]


def test_a_tensor_with_memory_of_its_own_device_is_not_pinned() -> None:
    there = torch.ones(2, device=META)
    assert pinned([there])[0] is there


def test_what_torchs_loader_pins_comes_out_as_it_was_loaded() -> None:
    given = Pinnable(Loaded(5, {0: (Noted(), "a")}, "a remark")).pin_memory()
    assert isinstance(given, Pinnable)
    num_samples, shares, remark = unpacked(given) or (0, {}, "")
    assert (num_samples, type(shares[0]), shares[0][0].is_pinned, remark) == (5, tuple, True, "a remark")


def test_the_end_of_the_data_can_be_pinned_too() -> None:
    assert unpacked(Pinnable(None).pin_memory()) is None


# -- loaders and lanes -----------------------------------------------------------------------------------------------


class Elsewhere(DeviceMover):
    """Brings to the meta device, as a run on a GPU brings to it."""

    def __init__(self) -> None:
        super().__init__(META)


def sharded(mover: DeviceMover, **options: Any) -> ShardedLoader:
    loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4, **options)
    return ShardedLoader(loader, seed=0, num_lanes=2, lanes=lambda: (0,), index=0, say=print, mover=mover)


def devices(batch: GlobalBatch) -> dict[int, str]:
    return {lane: share[0].device.type for lane, share in batch.shares.items()}


def test_shares_of_a_loader_arrive_on_the_device() -> None:
    assert [devices(batch) for batch in sharded(Elsewhere())] == [{0: "meta"}, {0: "meta"}]


def test_shares_that_are_got_again_arrive_there_too() -> None:
    batch = next(iter(sharded(Elsewhere())))
    assert devices(batch.for_lanes([0, 1])) == {0: "meta", 1: "meta"}
    assert devices(batch.reload([1])) == {1: "meta"}


def test_the_users_word_on_pinning_stays_visible() -> None:
    assert sharded(Elsewhere()).pin_memory is False
    assert sharded(Elsewhere(), pin_memory=True).pin_memory is True


class Pins(Elsewhere):
    pins = True  # type: ignore[assignment]


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator")
def test_loader_processes_hand_over_what_is_to_be_pinned() -> None:
    """Where nothing can be pinned, torch leaves the wrapping as it is: it must still be taken off."""
    loader = sharded(Pins(), num_workers=1)
    assert [devices(batch) for batch in loader] == [{0: "meta"}, {0: "meta"}]
    loader.close()


def test_lanes_of_a_plain_batch_are_moved_one_by_one() -> None:
    with lockstep.start(lanes=2) as run:
        model = torch.nn.Linear(2, 2)
        run.replicate(model)
        run._loop.moving = Elsewhere()
        with torch.no_grad():
            model.eval()
            assert [x.device.type for x in run.lanes(ones())] == ["meta", "meta"]


def test_a_share_on_the_device_is_copied_in_training() -> None:
    batch = torch.ones(4, 2, device=META)
    with lockstep.start(lanes=2) as run:
        run._loop.moving = Elsewhere()
        assert run._loop._own(batch, trains=True) is not batch
        assert run._loop._own(batch, trains=False) is batch
