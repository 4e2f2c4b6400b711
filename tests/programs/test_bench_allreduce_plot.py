"""The picture of an all-reduce benchmark. Nothing is measured here."""

import itertools
import math
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.programs.bench.allreduce.plot import BOTTOM, LEFT, RIGHT, TOP, LogAxis, decades, draw

NAMESPACE = {"svg": "http://www.w3.org/2000/svg"}
MACHINE = {"cores": 2, "cpu": 'An <Odd> & "Quoted" Processor', "torch": "2.13.0"}


def report(*sizes: int, workers: tuple[int, ...] = (2, 4)) -> dict[str, Any]:
    rows = [
        {"workers": count, "bytes": size, "lockstep_ms": size / 1e6, "gloo_ms": size / 1e5, "floor_ms": size / 1e7}
        for count in workers
        for size in sizes
    ]
    return {"machine": MACHINE, "algorithm": "shared", "rows": rows}


def drawn(*sizes: int, workers: tuple[int, ...] = (2, 4)) -> ElementTree.Element:
    return ElementTree.fromstring(draw(report(*sizes, workers=workers)))


def texts(picture: ElementTree.Element) -> list[str]:
    return ["".join(text.itertext()) for text in picture.findall(".//svg:text", NAMESPACE)]


def test_every_side_has_a_line_and_a_place_in_the_legend_for_each_number_of_workers() -> None:
    picture = drawn(4096, 65536)
    assert len(picture.findall(".//svg:polyline[@class='curve']", NAMESPACE)) == 6
    expected = [f"{side}, {count} workers" for count in (2, 4) for side in ("Gloo", "lockstep", "copy (floor)")]
    assert [text for text in texts(picture) if text.endswith(" workers")] == expected


def test_both_axes_say_what_they_show_and_in_which_unit() -> None:
    words = texts(drawn(4096, 2**20))
    assert {"milliseconds for one all-reduce", "size of the tensor", "4 KiB", "1 MiB", "0.0001", "100"} <= set(words)


@pytest.mark.parametrize("sizes", [(4,), (4, 8, 12, 16, 20), (4096, 2**27)])
def test_all_points_lie_inside_of_the_axes(sizes: tuple[int, ...]) -> None:
    circles = drawn(*sizes).findall(".//svg:circle", NAMESPACE)
    assert len(circles) == 6 * len(sizes)
    assert all(LEFT <= float(circle.attrib["cx"]) <= RIGHT for circle in circles)
    assert all(TOP <= float(circle.attrib["cy"]) <= BOTTOM for circle in circles)


def test_the_picture_grows_with_a_long_legend() -> None:
    picture = drawn(4096, workers=tuple(range(2, 12)))
    lowest = max(float(text.attrib["y"]) for text in picture.findall(".//svg:text[@class='legend']", NAMESPACE))
    assert lowest < float(picture.attrib["height"])


def test_a_curve_runs_from_the_smallest_size_to_the_largest() -> None:
    curves = drawn(65536, 4096, workers=(2,)).findall(".//svg:polyline[@class='curve']", NAMESPACE)
    for curve in curves:
        (x1, y1), (x2, y2) = (map(float, point.split(",")) for point in curve.attrib["points"].split())
        assert x1 < x2
        assert y1 > y2


def test_equal_factors_are_equal_distances() -> None:
    axis = LogAxis(1, 10_000, begin=0, end=100)
    assert [axis.at(value) for value in (1, 10, 100, 10_000)] == pytest.approx([0, 25, 50, 100])


@given(st.floats(1e-5, 1e5), st.floats(1, 1e4))
def test_powers_of_ten_enclose_the_values(low: float, factor: float) -> None:
    marks = decades(low, low * factor)
    rounding = 1 + 1e-9
    assert marks[0] <= low * rounding
    assert low * factor <= marks[-1] * rounding
    assert len(marks) >= 2
    assert all(math.isclose(high / below, 10) for below, high in itertools.pairwise(marks))
