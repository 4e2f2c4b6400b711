"""Buckets are filled in the order in which gradients arrive, learned in the first step and agreed by all."""

import torch
import torch.nn.functional as F
from workers import on_workers

import lockstep
from lockstep.gradients.layout import Spec, make_layout

X = torch.linspace(-1, 1, 48).reshape(6, 8)
Y = torch.arange(6) % 4


class Backwards(torch.nn.Module):
    """Layers registered in the order opposite to that of their use, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.out = torch.nn.Linear(8, 4)
        self.unused = torch.nn.Linear(8, 8)
        self.middle = torch.nn.Linear(8, 8)
        self.first = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.middle(torch.relu(self.first(x)))))


def _spec(name: str, dtype: torch.dtype = torch.float32) -> Spec:
    return Spec(name, (64,), (1,), dtype, "cpu", True)


def _names(specs: list[Spec], order: list[int] | None) -> list[list[str]]:
    layout = make_layout(specs, bucket_bytes=512, first_bucket_bytes=256, order=order)
    return [[slot.spec.name for slot in bucket.slots] for bucket in layout.buckets]


def test_without_a_known_order_the_last_registered_parameter_goes_first() -> None:
    assert _names([_spec(name) for name in "abcd"], None) == [["d"], ["c", "b"], ["a"]]


def test_buckets_are_filled_in_the_known_order() -> None:
    assert _names([_spec(name) for name in "abcd"], [1, 3, 0, 2]) == [["b"], ["d", "a"], ["c"]]


def test_buckets_of_several_kinds_leave_in_the_order_in_which_they_fill() -> None:
    specs = [_spec("a"), _spec("b", torch.float64), _spec("c"), _spec("d", torch.float64), _spec("e")]
    assert _names(specs, [0, 1, 2, 3, 4]) == [["a"], ["b"], ["d"], ["c", "e"]]


def _train(bucket_bytes: int, lanes: int = 3, calibrated: bool = False) -> list[object]:
    torch.manual_seed(0)
    run = lockstep.start(lanes=lanes, seed=1, bucket_bytes=bucket_bytes)
    model = Backwards()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.replicate(model, optimizer)
    if calibrated:
        with torch.no_grad():
            for x, _ in run.lanes((X, Y), train=True):
                model(x)
    orders = []
    for _ in range(4):
        for x, y in run.lanes((X, Y)):
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        layout = run._engine._buckets.layout  # type: ignore[union-attr]
        orders.append([slot.spec.name.removeprefix("0.") for bucket in layout.buckets for slot in bucket.slots])
    return [orders, run.digest()]


def test_the_order_of_the_first_backward_is_used_by_all_workers_from_the_second_step_on() -> None:
    for orders, _ in on_workers(3, _train, 300):
        assert orders[0][0].startswith("first")  # the guess
        assert [name.split(".")[0] for name in orders[1][::2]] == ["out", "middle", "first", "unused"]
        assert orders[1] == orders[2] == orders[3]


def _layers(order: list[str]) -> list[str]:
    return [name.split(".")[0] for name in order[::2]]


def test_several_lanes_on_a_worker_learn_the_same_order_as_one() -> None:
    for orders, _ in on_workers(2, _train, 300, lanes=6):
        assert _layers(orders[1]) == ["out", "middle", "first", "unused"]


def test_lanes_without_gradients_before_the_first_step_teach_no_order() -> None:
    for orders, _ in on_workers(2, _train, 300, calibrated=True):
        assert _layers(orders[1]) == ["out", "middle", "first", "unused"]


def test_the_bits_do_not_depend_on_the_order_or_the_size_of_buckets() -> None:
    digests = {
        digest for size in (64, 300, 2**20) for workers in (1, 2, 3) for _, digest in on_workers(workers, _train, size)
    }
    assert len(digests) == 1
