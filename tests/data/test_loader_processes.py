"""Loader processes: torch's own, and without influence on a single bit."""

import gc
import multiprocessing
from typing import Any

import pytest
import torch
from noisy_data import Noisy, assert_same_bits, over_workers, passes, sharded, told_apart
from torch.utils.data import DataLoader, get_worker_info

from lockstep.data import Position


@pytest.mark.parametrize("settings", [{}, {"persistent_workers": True}, {"prefetch_factor": 1}], ids=str)
def test_loader_processes_do_not_change_a_bit(settings: dict[str, Any]) -> None:
    def make() -> "DataLoader[Any]":
        return DataLoader(Noisy(23), 7, shuffle=True, num_workers=2, **settings)

    alone = over_workers(lambda: DataLoader(Noisy(23), 7, shuffle=True), 1, num_passes=2)
    assert_same_bits(over_workers(make, 2, num_passes=2), alone)


def test_processes_leave_the_generators_of_the_training_process_untouched() -> None:
    torch.manual_seed(5)
    untouched = torch.rand(())
    torch.manual_seed(5)
    passes(sharded(DataLoader(Noisy(8), 4, shuffle=True, num_workers=1)))
    assert torch.rand(()) == untouched


def test_persistent_processes_live_over_epochs_and_end_when_closed() -> None:
    loader = sharded(DataLoader(Noisy(8), 4, num_workers=1, persistent_workers=True))
    processes = []
    for _ in range(2):
        list(loader)
        processes.append([process.pid for process in multiprocessing.active_children()])
    assert processes[0] == processes[1] != []
    loader.close()
    assert multiprocessing.active_children() == []


def test_a_loop_left_by_break_leaves_no_process_behind() -> None:
    loader = sharded(DataLoader(Noisy(8), 2, num_workers=1))
    for _ in loader:
        break
    assert multiprocessing.active_children() == []


def test_closing_in_the_middle_of_a_pass_ends_its_processes() -> None:
    loader = sharded(DataLoader(Noisy(8), 2, num_workers=1))
    running = iter(loader)
    next(running)
    loader.close()
    assert multiprocessing.active_children() == []


def test_a_closed_loader_can_be_read_again() -> None:
    loader = sharded(DataLoader(Noisy(4), 2, num_workers=1, persistent_workers=True))
    passes(loader)
    assert_same_bits(passes(loader), _second_pass())


def _second_pass() -> Any:
    loader = sharded(DataLoader(Noisy(4), 2))
    loader.seek(Position(1, 0))
    return passes(loader)


def test_persistent_processes_start_in_the_middle_of_a_pass() -> None:
    loader = sharded(DataLoader(Noisy(9), 2, shuffle=True, num_workers=1, persistent_workers=True))
    next(iter(loader))
    loader.seek(Position(0, 3))
    rest = passes(loader)
    whole = passes(sharded(DataLoader(Noisy(9), 2, shuffle=True)))
    assert_same_bits(rest, {place: whole[place] for place in whole if place[1] >= 3})


@pytest.mark.parametrize("persistent", [False, True])
def test_lanes_that_change_take_effect_for_batches_already_read_ahead(persistent: bool) -> None:
    carried = [[0, 1], [0, 1], [1, 2, 3], [3]]
    data: DataLoader[Any] = DataLoader(Noisy(16), 4, shuffle=True, num_workers=1, persistent_workers=persistent)
    loader = sharded(data, lanes=lambda: carried[loader.position.step % 4])
    batches = list(loader)
    loader.close()
    whole = passes(sharded(DataLoader(Noisy(16), 4, shuffle=True)))
    assert [sorted(batch.shares) for batch in batches] == carried
    assert_same_bits(told_apart(batches), {place: whole[place] for place in told_apart(batches)})


class Configured(Noisy):
    """Gives what its process was set up with, once that process sees this data set as its own."""

    offset = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        return torch.tensor([index + self.offset])


def set_up(worker_id: int) -> None:
    info: Any = get_worker_info()
    info.dataset.offset = 100
    assert (info.id, info.num_workers) == (worker_id, 1)


def test_worker_init_fn_sets_up_the_users_own_data_set() -> None:
    loader = sharded(DataLoader(Configured(2), 2, num_workers=1, worker_init_fn=set_up), num_lanes=1)
    assert [batch.shares[0].flatten().tolist() for batch in loader] == [[100, 101]]


def test_an_error_in_a_loader_process_keeps_its_type_and_shows_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)  # how long torch waits at the end

    class Broken(Noisy):
        def __getitem__(self, index: int) -> torch.Tensor:
            raise ZeroDivisionError("sample is broken")

    def read() -> None:
        with pytest.raises(ZeroDivisionError, match=r"(?s)Original Traceback.*in __getitem__.*sample is broken"):
            list(sharded(DataLoader(Broken(2), 2, num_workers=1)))

    read()
    gc.collect()  # the error holds the loader


def test_a_started_rather_than_forked_process_gives_the_same_bits() -> None:
    def make(**settings: Any) -> "DataLoader[Any]":
        return DataLoader(Noisy(6), 3, shuffle=True, **settings)

    spawned = passes(sharded(make(num_workers=1, multiprocessing_context="spawn")))
    assert_same_bits(spawned, passes(sharded(make())))
