"""`lockstep explain`: what it prints, draws and refuses."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from lockstep.cli.main import lockstep
from lockstep.errors import BadArgument
from lockstep.programs import svg
from lockstep.programs.explain.schedules.catalogue import CATALOGUE
from lockstep.programs.explain.story import spans

SVG = "{http://www.w3.org/2000/svg}"
WORDS = {
    "all_reduce": "allreduce",
    "reduce_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "broadcast": "broadcast",
}
ALL = [
    pytest.param(WORDS[collective], name, id=f"{WORDS[collective]}-{name}")
    for collective, algorithms in CATALOGUE.items()
    for name in algorithms
]


def explain(*words: str) -> Result:
    return CliRunner().invoke(lockstep, ["explain", *words])


def printed(*words: str) -> str:
    ended = explain(*words)
    assert ended.exit_code == 0, ended.output
    return ended.output


def told(*words: str) -> dict[str, Any]:
    story: dict[str, Any] = json.loads(printed(*words, "--json"))
    return story


@pytest.mark.parametrize(("collective", "name"), ALL)
def test_every_algorithm_is_explained_with_its_cost(collective: str, name: str) -> None:
    output = printed(collective, "--algorithm", name, "-n", "5")
    cost = next(found[name].cost for key, found in CATALOGUE.items() if WORDS[key] == collective)
    assert f"Cost: {cost}" in output


@pytest.mark.parametrize(("collective", "name"), ALL)
def test_every_algorithm_can_be_drawn(collective: str, name: str, tmp_path: Path) -> None:
    file = tmp_path / "picture.svg"
    printed(collective, "--algorithm", name, "-n", "5", "--svg", str(file))
    ranks = [text.text for text in ElementTree.parse(file).iter(f"{SVG}text") if text.get("font-size") == "13"]
    assert ranks == ["0", "1", "2", "3", "4"]


def test_the_picture_in_the_documentation_is_what_the_command_draws(tmp_path: Path) -> None:
    printed("allreduce", "--algorithm", "ring", "-n", "4", "--svg", str(tmp_path / "ring.svg"))
    kept = Path(__file__).parents[2] / "docs" / "pictures" / "ring-4.svg"
    assert kept.read_text(encoding="utf-8") == (tmp_path / "ring.svg").read_text(encoding="utf-8")


def test_a_ring_of_four_sends_one_part_to_the_next_in_every_round() -> None:
    lines = printed("allreduce", "--algorithm", "ring", "-n", "4").splitlines()
    first = lines.index(next(line for line in lines if line.startswith("round 1"))) + 2
    assert [" ".join(line.split()) for line in lines[first : first + 4]] == [
        "0 ──▶ 1 part 3 (+) 1 1 2 1 of 4",
        "1 ──▶ 2 part 0 (+) 1 1 1 2 of 4",
        "2 ──▶ 3 part 1 (+) 2 1 1 1 of 4",
        "3 ──▶ 0 part 2 (+) 1 2 1 1 of 4",
    ]


def test_the_bytes_are_those_of_a_message_of_one_mebibyte() -> None:
    assert "The busiest worker sends 1.50 MiB of a 1 MiB message" in printed("allreduce", "--algorithm", "ring")


def test_exact_algorithms_show_the_brackets_of_the_lanes() -> None:
    assert "((0+1)+(2+3))+(4+5)" in printed("allreduce", "--algorithm", "direct", "-n", "4", "--lanes", "6")


def test_hosts_say_how_many_workers_there_are() -> None:
    assert told("allreduce", "--algorithm", "hierarchical", "--hosts", "2,3")["workers"] == 5


def test_json_has_every_move() -> None:
    story = told("broadcast", "--algorithm", "direct", "-n", "3", "--source", "1")
    assert [(send["source"], send["target"]) for send in story["rounds"][0]["sends"]] == [(1, 0), (1, 2)]


def test_json_says_what_everyone_holds_in_the_end() -> None:
    assert told("allreduce", "-n", "3", "--lanes", "5")["rounds"][-1]["held"] == [[5, 5, 5]] * 3


@pytest.mark.parametrize("workers", ["1", "64"])
def test_one_worker_and_many_are_explained(workers: str) -> None:
    assert told("allreduce", "--algorithm", "circulant", "-n", workers)["workers"] == int(workers)


def test_many_parts_are_summed_up() -> None:
    assert "20 of 20 parts complete" in printed("all-gather", "-n", "20")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["allreduce", "--algorithm", "star"], "there is no 'star' for all_reduce: choose one of direct, oneshot,"),
        (["allreduce", "--algorithm", "ring", "--lanes", "8"], "--lanes has no meaning for ring: it is for direct,"),
        (["allreduce", "--hosts", "2,2"], "--hosts has no meaning for direct: it is for hierarchical"),
        (["all-gather", "--lanes", "8"], "--lanes has no meaning for direct"),
        (["broadcast", "--source", "4"], "source must be one of the workers 0 to 3, not 4"),
        (["allreduce", "--algorithm", "hierarchical", "--hosts", "2,2", "-n", "5"], "--hosts names 4 workers, but"),
        (["allreduce", "--algorithm", "hierarchical", "--hosts", "64,1"], "--workers must be 1 to 64, not 65"),
        (["allreduce", "--svg", "picture.png"], "--svg must be a file that ends in .svg, not picture.png"),
        (["allreduce", "--svg", "nowhere/ring.svg"], "there is no folder nowhere"),
    ],
)
def test_what_cannot_be_explained_is_refused_in_a_sentence(words: list[str], sentence: str) -> None:
    refused = explain(*words).exception
    assert isinstance(refused, BadArgument)
    assert sentence in str(refused)


@pytest.mark.parametrize("words", [["-n", "0"], ["-n", "65"], ["--hosts", "2,"], ["--hosts", "0,2"], ["--chunks", "0"]])
def test_numbers_that_make_no_sense_are_refused(words: list[str]) -> None:
    assert explain("allreduce", *words).exit_code == 2


def test_help_comes_without_torch() -> None:
    code = "import sys; from lockstep.cli.explain import command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_neighbouring_parts_are_written_as_a_span() -> None:
    assert spans((0, 1, 2, 5, 7, 8)) == "0–2, 5, 7–8"


def test_words_in_a_picture_may_contain_signs_of_the_language_it_is_written_in() -> None:
    shapes = [
        svg.text(0, 0, "a < b & c", class_='"x"'),
        svg.arrow_head((0, 0), (10, 10), "black"),
        svg.polyline([(0, 1)]),
    ]
    drawn = ElementTree.fromstring(svg.document(20, 20, shapes, title="<&>"))
    words = drawn.find(f"{SVG}text")
    assert words is not None
    assert (words.text, words.get("class"), drawn.findtext(f"{SVG}title")) == ("a < b & c", '"x"', "<&>")


def test_the_tip_of_an_arrow_is_where_it_points() -> None:
    head = ElementTree.fromstring(svg.arrow_head((0, 0), (10.5, 0), "black"))
    assert str(head.get("points")).split()[0] == "10.5,0"
