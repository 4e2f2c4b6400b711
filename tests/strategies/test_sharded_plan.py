"""Who updates which elements: every element once, in equal parts, cut where no kernel notices."""

from itertools import chain

from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.strategies.sharded.plan import GRANULE, cut, whole

SIZES = st.lists(st.integers(0, 7 * GRANULE), min_size=1, max_size=9)


@settings(deadline=None)
@given(SIZES, st.integers(1, 9))
def test_every_element_is_updated_by_one_worker_and_cuts_are_between_granules(sizes: list[int], workers: int) -> None:
    for dealt in (cut(sizes, workers), whole(sizes, workers), whole(sizes, workers, with_empty=True)):
        chunks = sorted((c for c in chain(*chain(*dealt)) if c.num_elements), key=lambda c: (c.parameter, c.start))
        for number, size in enumerate(sizes):
            own = [chunk for chunk in chunks if chunk.parameter == number]
            assert [chunk.start for chunk in own] == [0, *(chunk.stop for chunk in own)][: len(own)]
            assert sum(chunk.num_elements for chunk in own) == size
            assert all(chunk.start % GRANULE == 0 for chunk in own)


@settings(deadline=None)
@given(SIZES, st.integers(1, 9))
def test_every_worker_has_an_equal_part_and_a_chunk_of_every_tensor(sizes: list[int], workers: int) -> None:
    dealt = cut(sizes, workers)
    parts = [sum(chunk.num_elements for chunk in chain(*own)) for own in dealt]
    assert max(parts) - min(parts) <= 2 * GRANULE
    for own in dealt:
        assert {chunk.parameter for chunk in chain(*own)} == set(range(len(sizes)))
        assert all(chunk.num_elements for batch in own[:-1] for chunk in batch)
