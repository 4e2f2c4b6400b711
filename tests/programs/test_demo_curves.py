"""The picture of the loss curves."""

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.programs.demo.curves import BOTTOM, LEFT, RIGHT, TOP, LossCurve, draw, ticks

SVG = "{http://www.w3.org/2000/svg}"
FALLING = [5.5, 4.0, 3.2, 2.9]
THREE = [LossCurve(f"{count} workers", FALLING) for count in (1, 2, 3)]


def parsed(curves: list[LossCurve], title: str = "Loss") -> ElementTree.Element:
    return ElementTree.fromstring(draw(curves, title, "all alike"))


def lines(picture: ElementTree.Element) -> list[ElementTree.Element]:
    return [path for path in picture.iter(f"{SVG}path") if path.get("class") == "curve"]


def points(line: ElementTree.Element) -> list[tuple[float, float]]:
    words = line.attrib["d"].replace("M", "L").split("L")[1:]
    return [(float(x), float(y)) for x, y in (word.split() for word in words)]


def test_equal_curves_are_drawn_on_the_same_points() -> None:
    first, *others = [line.attrib["d"] for line in lines(parsed(THREE))]
    assert others == [first, first]


def test_each_of_three_equal_curves_can_be_seen_beside_the_others() -> None:
    widths = [float(line.attrib["stroke-width"]) for line in lines(parsed(THREE))]
    assert widths == sorted(set(widths), reverse=True)
    assert len({line.attrib["stroke"] for line in lines(parsed(THREE))}) == 3


def test_the_legend_names_every_curve() -> None:
    legend = [text.text for text in parsed(THREE).iter(f"{SVG}text") if text.get("class") == "legend"]
    assert legend == ["1 workers", "2 workers", "3 workers"]


def test_a_smaller_loss_lies_lower_and_a_later_step_further_right() -> None:
    (line,) = lines(parsed([LossCurve("one", FALLING)]))
    across, down = zip(*points(line), strict=True)
    assert list(across) == sorted(set(across))
    assert list(down) == sorted(set(down))


def test_a_title_with_signs_that_xml_reserves_stays_a_title() -> None:
    assert parsed(THREE, "1 < 2 & 3").findtext(f"{SVG}title") == "1 < 2 & 3"


def test_a_loss_that_is_not_a_number_leaves_a_gap() -> None:
    (line,) = lines(parsed([LossCurve("one", [3.0, float("nan"), 2.0, float("inf"), 2.5, 2.4])]))
    assert line.attrib["d"].count("M") == 3
    assert len(points(line)) == 4


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30))
def test_every_point_lies_between_the_axes(values: list[float]) -> None:
    (line,) = lines(parsed([LossCurve("one", values)]))
    assert len(points(line)) == len(values)
    assert all(LEFT <= x <= RIGHT and TOP <= y <= BOTTOM for x, y in points(line))


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 500, [0, 100, 200, 300, 400, 500]), (2, 6, [2, 3, 4, 5, 6]), (0, 2, [0, 0.5, 1, 1.5, 2])],
)
def test_ticks_are_round_numbers(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


@given(st.floats(-1e5, 1e5), st.floats(0.01, 1e6))
def test_there_are_a_few_ticks_and_all_are_inside(low: float, length: float) -> None:
    found = ticks(low, low + length)
    slack = length * 1e-6
    assert 2 <= len(found) <= 8
    assert low - slack <= found[0]
    assert found[-1] <= low + length + slack
