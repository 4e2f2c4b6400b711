"""What is written for people holds: links lead somewhere, code is code, and the README's example trains."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.wire.choice import bucket_bytes
from lockstep.wire.link import Link

ROOT = Path(__file__).parent.parent
TOP = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "examples/README.md")
PAGES = [*TOP, *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("**/*.md"))]
WITH_CODE = ("README.md", "CONTRIBUTING.md", "docs/api.md")

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WIRE = re.compile(r" (\d+) workers · .*\n  wire: .* · ([\d.]+) GB/s, (\d+) µs a round · buckets of (\d+) MiB")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def links(page: str) -> list[str]:
    """The targets of a page's relative links, without the place inside the target."""
    found = (link.partition("#")[0] for link in LINK.findall(FENCE.sub("", read(page))))
    return [link for link in found if link and "://" not in link and not link.startswith("mailto:")]


def python_blocks(page: str) -> list[str]:
    return [code for language, code in FENCE.findall(read(page)) if language == "python"]


def test_the_buckets_in_examples_of_start_lines_have_the_size_that_would_be_chosen() -> None:
    shown = [example for page in PAGES for example in WIRE.findall(read(page))]
    assert len(shown) >= 8
    for workers, gb_per_s, us, mib in shown:
        link = Link(float(us) * 1e-6, float(gb_per_s) * 1e9)
        assert bucket_bytes(link, int(workers)) == int(mib) * 2**20, (workers, gb_per_s, us, mib)


@pytest.mark.parametrize("page", PAGES)
def test_every_relative_link_leads_to_a_file(page: str) -> None:
    dead = [link for link in links(page) if not (ROOT / page).parent.joinpath(link).exists()]
    assert dead == []


def test_links_are_found_at_all() -> None:
    assert "docs/api.md" in links("README.md")


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, waiting = set[Path](), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page.suffix == ".md" and page.is_file() and page not in reached:
            reached.add(page)
            waiting += [(page.parent / link).resolve() for link in links(str(page.relative_to(ROOT)))]
    assert {ROOT / page for page in PAGES} - reached == set()


@pytest.mark.parametrize("page", WITH_CODE)
def test_every_python_block_compiles(page: str) -> None:
    blocks = python_blocks(page)
    assert blocks
    for number, code in enumerate(blocks):
        compile(code, f"{page}, block {number}", "exec")


@pytest.mark.parametrize("name", [name for name in dir(lockstep.Run) if not name.startswith("_")])
def test_every_public_name_of_the_run_is_in_the_api(name: str) -> None:
    assert f"run.{name}" in read("docs/api.md")


@pytest.mark.parametrize("option", inspect.signature(lockstep.start).parameters)
def test_every_option_of_start_is_in_the_api(option: str) -> None:
    assert f"| `{option}` |" in read("docs/api.md")


@pytest.mark.parametrize("name", lockstep.__all__)
def test_every_public_name_is_in_the_api(name: str) -> None:
    assert f"`lockstep.{name}`" in read("docs/api.md")


@pytest.fixture
def after_the_example() -> Iterator[dict[str, object]]:
    """The names that the README's example leaves, when it is given a small model and 30 samples that can be learned."""
    torch.manual_seed(0)
    x = torch.randn(30, 4)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=8, shuffle=True)
    names: dict[str, object] = {"model": model, "optimizer": optimizer, "loader": loader, "given": model, "data": x}
    try:
        exec(python_blocks("README.md")[0], names)
        yield names
    finally:
        if isinstance(run := names.get("run"), lockstep.Run):
            run.close()


def test_the_example_of_the_readme_trains(after_the_example: dict[str, object]) -> None:
    names = after_the_example
    model, run, x = names["model"], names["run"], names["data"]
    assert model is names["given"]
    assert isinstance(run, lockstep.Run)
    assert run.step == 10 * 4
    assert F.cross_entropy(model(x), x[:, :3].argmax(1)) < 0.5  # type: ignore[operator, index]
