"""The promise: the same bits on any number of workers, under any assignment of lanes."""

from functools import cache
from typing import Any

import pytest
from training import Job, digest_after
from workers import on_workers

from lockstep.wire import open as opening

JOBS = {
    "mlp with adamw": Job(),
    "mlp with sgd and momentum": Job(optimizer="sgd"),
    "mlp with adam": Job(optimizer="adam"),
    "mlp with rmsprop": Job(optimizer="rmsprop"),
    "convolutional net with batch norm and dropout": Job("conv"),
    "gpt with tied embeddings": Job("gpt"),
    "unused and frozen parameters": Job("partly", optimizer="sgd"),
    "bf16 autocast": Job("gpt", autocast=True),
    "augmented data": Job("dropout", augment=True),
    "batches smaller than the number of lanes": Job(batch=5, epochs=2),
}


CONV, PARTLY, GPT = Job("conv", epochs=4), Job("partly", optimizer="sgd", epochs=4), Job("gpt", epochs=2)
"""Eight or sixteen steps each: for what changes the way of a step and not its kind."""

SHORT = {
    "mlp with adamw": Job(epochs=5),
    "short convolutional net with batch norm and dropout": Job("conv", epochs=5),
    "short gpt with tied embeddings": Job("gpt", epochs=5),
    "unused and frozen parameters": Job("partly", optimizer="sgd", epochs=5),
    "short bf16 autocast": Job("conv", autocast=True, epochs=5),
    "augmented data": Job("dropout", augment=True, epochs=5),
    "batches smaller than the number of lanes": Job(batch=5, epochs=1),
}
"""Twenty steps or more. `make soak` has all of them long."""


@cache
def digest_alone(job: Job) -> list[Any]:
    """What the job comes to on one worker."""
    return on_workers(1, digest_after, job)[0]


@pytest.mark.parametrize("job", SHORT.values(), ids=SHORT.keys())
def test_one_digest_on_1_and_3_workers(job: Job) -> None:
    alone = digest_alone(job)
    assert alone[1] >= 20
    assert on_workers(3, digest_after, job) == [alone] * 3


def test_one_digest_on_2_workers() -> None:
    assert on_workers(2, digest_after, CONV) == [digest_alone(CONV)] * 2


def test_one_digest_on_4_workers() -> None:
    assert on_workers(4, digest_after, CONV) == [digest_alone(CONV)] * 4


@pytest.mark.parametrize(
    "assignment",
    [((7, 0, 3), (1, 6), (2, 4, 5)), ((), (0, 2, 4, 6), (1, 3, 5, 7))],
    ids=["scattered", "one idle"],
)
@pytest.mark.parametrize("job", [CONV, PARTLY], ids=["conv", "partly used"])
def test_any_assignment_of_lanes_gives_the_same_digest(job: Job, assignment: tuple[tuple[int, ...], ...]) -> None:
    alone = digest_alone(job)
    assert on_workers(3, digest_after, job, assignment=assignment) == [alone] * 3


def test_more_workers_than_lanes_give_the_same_digest() -> None:
    (alone,) = on_workers(1, digest_after, CONV, lanes=2)
    assert on_workers(3, digest_after, CONV, lanes=2) == [alone] * 3


def test_loader_processes_do_not_change_the_digest() -> None:
    quick = Job("dropout", augment=True, epochs=4)
    with_processes = Job("dropout", augment=True, epochs=4, num_workers=2)
    alone = digest_alone(quick)
    assert on_workers(3, digest_after, with_processes) == [alone] * 3


def test_bucket_size_does_not_change_the_digest() -> None:
    alone = digest_alone(GPT)
    assert on_workers(3, digest_after, GPT, bucket_bytes=1024) == [alone] * 3


WIRES = pytest.mark.parametrize("wire", ["gloo", "shared", "hierarchical"])


def _digest_on(wire: str, job: Job, **options: Any) -> list[Any]:
    """With `hierarchical` as if on two hosts, the last worker alone on its own."""

    def two_hosts(rank: int, size: int, store: object) -> tuple[tuple[int, ...], ...]:
        return (tuple(range(size - 1)), (size - 1,))

    opening.find_hosts = two_hosts  # in this forked process only
    return digest_after(job, wire=wire, **options)


@pytest.mark.parametrize("job", [CONV, PARTLY], ids=["conv", "partly used"])
@WIRES
def test_the_wire_does_not_change_the_digest(job: Job, wire: str) -> None:
    alone = digest_alone(job)
    assert on_workers(3, _digest_on, wire, job, bucket_bytes=2048) == [alone] * 3


@pytest.mark.parametrize(
    "wire", ["shared", *(pytest.param(w, marks=pytest.mark.soak) for w in ("gloo", "hierarchical"))]
)
def test_five_workers_and_chosen_buckets_give_the_same_digest(wire: str) -> None:
    alone = digest_alone(GPT)
    assert on_workers(5, _digest_on, wire, GPT) == [alone] * 5


@pytest.mark.soak
@pytest.mark.parametrize("algorithm", [pytest.param("direct", marks=pytest.mark.soak), "oneshot"])
def test_the_algorithm_does_not_change_the_digest(algorithm: str) -> None:
    alone = digest_alone(CONV)
    for wire in ("gloo", "hierarchical"):
        assert on_workers(3, _digest_on, wire, CONV, algorithm=algorithm) == [alone] * 3


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS.keys())
@WIRES
def test_every_model_has_one_digest_on_1_to_5_workers_and_two_sizes_of_buckets(job: Job, wire: str) -> None:
    alone = digest_alone(job)
    for num_workers in (2, 3, 4, 5):
        for bucket_bytes in (1024, 64 * 1024):
            found = on_workers(num_workers, _digest_on, wire, job, bucket_bytes=bucket_bytes)
            assert found == [alone] * num_workers


def test_another_seed_gives_another_digest() -> None:
    first, second = (on_workers(1, _with_seed, seed)[0] for seed in (1, 2))
    assert first != second


def _with_seed(seed: int) -> str:
    import lockstep

    with lockstep.start(lanes=4, seed=seed) as run:
        import training

        job = Job("dropout", epochs=1)
        model, optimizer = training.make(job)
        run.replicate(model, optimizer)
        training.train_epochs(run, job, model, optimizer, run.shard(training.loader_of(job)))
        return run.digest()
