"""Where a turn of the script begins."""

import torch

from lockstep.data import GlobalBatch, Position
from lockstep.script.call_site import Site
from lockstep.script.turns import Turn

A, B, C = (Site("train.py", line) for line in (3, 9, 20))


def loaded(step: int, loader: int = 0) -> GlobalBatch:
    return GlobalBatch(4, {}, Position(0, step), loader)


def own(whole: object) -> GlobalBatch:
    return GlobalBatch(4, {}, whole=whole)


def numbered(*loops: tuple[GlobalBatch, Site, int]) -> list[tuple[int, int]]:
    """The turn and the loop in it of each loop: its batch, its line, and the updates made before."""
    turn, found = Turn(), []
    for batch, site, updates in loops:
        turn.enter(batch, site, updates)
        found.append((turn.number, len(turn.sites)))
    return found


def test_one_loop_over_each_batch_is_a_turn_each() -> None:
    assert numbered(*((loaded(k), A, k) for k in range(3))) == [(0, 1), (1, 1), (2, 1)]


def test_a_second_loop_over_a_batch_belongs_to_the_turn() -> None:
    loops = [(loaded(k), site, 0) for k in range(2) for site in (A, B)]
    assert numbered(*loops) == [(0, 1), (0, 2), (1, 1), (1, 2)]


def test_loops_over_the_batches_of_two_loaders_are_one_turn() -> None:
    loops = [(loaded(k, loader), site, 0) for k in range(2) for loader, site in ((0, A), (1, B))]
    assert numbered(*loops) == [(0, 1), (0, 2), (1, 1), (1, 2)]


def test_several_loops_at_one_line_over_a_loaders_batch_are_one_turn_whatever_is_updated() -> None:
    loops = [(loaded(k), A, 2 * k + again) for k in range(2) for again in range(2)]
    assert numbered(*loops) == [(0, 1), (0, 2), (1, 1), (1, 2)]


def test_the_same_whole_batch_is_another_one_after_an_update() -> None:
    whole = torch.zeros(4)
    assert numbered(*((own((whole, k)), A, k) for k in range(3))) == [(0, 1), (1, 1), (2, 1)]


def test_a_closure_that_loops_several_times_before_an_update_is_one_turn() -> None:
    whole = torch.zeros(4)
    loops = [(own(whole), A, updates) for updates in (1, 1, 1, 2, 2)]
    assert numbered(*loops) == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2)]


def test_batches_of_the_scripts_own_are_known_by_their_first_tensor() -> None:
    one, other = torch.zeros(4), torch.zeros(4)
    assert numbered((own(one), A, 0), (own(other), A, 0)) == [(0, 1), (1, 1)]
    assert numbered((own((3, {"x": one})), A, 0), (own((4, {"x": one})), A, 0)) == [(0, 1), (0, 2)]
    assert numbered((own(("a", "b")), A, 0), (own(("a", "b")), A, 0)) == [(0, 1), (1, 1)]


def test_a_batch_of_the_scripts_own_is_another_one_than_that_of_a_loader() -> None:
    assert numbered((loaded(1), A, 0), (own(torch.zeros(4)), A, 0), (loaded(1), A, 0)) == [(0, 1), (1, 1), (2, 1)]


def test_a_script_that_goes_on_to_another_loop_has_turns_there_too() -> None:
    loops = [(loaded(0), A, 0), (loaded(1), A, 1), (loaded(2), B, 2), (loaded(3), B, 3), (loaded(4), B, 4)]
    assert numbered(*loops) == [(0, 1), (1, 1), (1, 2), (2, 1), (3, 1)]
