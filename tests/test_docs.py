"""What is written for people holds: links lead somewhere, code is code, and the README's example trains."""

import ast
import builtins
import inspect
import re
import symtable
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.optim import exclude_biases_and_norms, scale_lr
from lockstep.wire.choice import bucket_bytes
from lockstep.wire.link import Link

ROOT = Path(__file__).parent.parent
TOP = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "examples/README.md")
PAGES = [*TOP, *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("**/*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WIRE = re.compile(r" (\d+) workers · .*\n  wire: .* · ([\d.]+) GB/s, (\d+) µs a round · buckets of (\d+) MiB")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def links(page: str) -> list[str]:
    """The targets of a page's relative links, without the place inside the target."""
    found = (link.partition("#")[0] for link in LINK.findall(FENCE.sub("", read(page))))
    return [link for link in found if link and "://" not in link and not link.startswith("mailto:")]


def places(page: str) -> list[tuple[str, str]]:
    """The places inside of pages to which a page links: each with its page."""
    found = [link.partition("#") for link in LINK.findall(FENCE.sub("", read(page))) if "://" not in link]
    folder = (ROOT / page).parent
    return [(str((folder / target) if target else ROOT / page), place) for target, _, place in found if place]


def headings(page: str) -> set[str]:
    """The headings of a page, as links write them."""
    found = re.findall(r"^#+ (.*)$", FENCE.sub("", Path(page).read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in found}


def python_blocks(page: str) -> list[str]:
    return [code for language, code in FENCE.findall(read(page)) if language == "python"]


def missing_names(code: str) -> set[str]:
    """What a block uses and neither makes nor imports."""
    names = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)]
    table = symtable.symtable(code, "block", "exec")
    made = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    made |= {child.get_name() for child in table.get_children()} | set(dir(builtins))
    inside = {symbol.get_name() for child in tables_below(table) for symbol in child.get_symbols() if symbol.is_local()}
    return {node.id for node in names} - made - inside


def tables_below(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    for child in table.get_children():
        yield child
        yield from tables_below(child)


WITH_CODE = [page for page in PAGES if python_blocks(page)]
WHOLE = [(page, code) for page in WITH_CODE for code in python_blocks(page) if not missing_names(code)]
OF_OPTIM = ("docs/optimizers.md", "docs/scaling.md", "docs/noise.md")


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


@pytest.mark.parametrize("page", PAGES)
def test_every_link_into_a_page_leads_to_a_heading(page: str) -> None:
    assert [(target, place) for target, place in places(page) if place not in headings(target)] == []


def test_links_are_found_at_all() -> None:
    assert "docs/api.md" in links("README.md")
    assert "seams" in [place for _, place in places("docs/api.md")]


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
    for number, code in enumerate(python_blocks(page)):
        compile(code, f"{page}, block {number}", "exec")


def test_what_a_block_lacks_to_be_a_whole_program_is_found() -> None:
    assert missing_names(python_blocks("README.md")[0]) == {"optimizer"}  # it makes a `model` and a `loader` of yours
    assert {"docs/algorithms.md", "docs/observe.md"} <= {page for page, _ in WHOLE}


@pytest.mark.parametrize(("page", "code"), WHOLE, ids=[page for page, _ in WHOLE])
def test_every_block_that_is_a_whole_program_runs(page: str, code: str) -> None:
    exec(compile(code, page, "exec"), {"__name__": "block"})


@pytest.mark.parametrize("page", OF_OPTIM)
def test_every_block_about_optimizers_runs_with_a_model_and_its_loader(page: str) -> None:
    for number, code in enumerate(python_blocks(page)):
        exec(compile(code, f"{page}, block {number}", "exec"), names_for_a_block(is_scaled="scale_lr(" not in code))


def names_for_a_block(is_scaled: bool) -> dict[str, object]:
    """What the blocks take for granted: a small model, an optimizer, scaled or not, and the squares of a step."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).pow(2).sum().backward()
    optimizer.step()
    if is_scaled:
        scale_lr(optimizer, batch=128, base_batch=64)
    parameter = next(model.parameters())
    return {
        "torch": torch, "model": model, "optimizer": optimizer, "parameter": parameter, "gradient": parameter.grad,
        "loader": range(100), "epochs": 90, "scheduler": LambdaLR(optimizer, float) if is_scaled else None,
        "exclude_biases_and_norms": exclude_biases_and_norms,
        "step": 0, "batch": 8, "lane_squares": {0: 2.0, 1: 3.0}, "weights": {0: 4.0, 1: 4.0}, "whole_square": 1.5,
    }  # fmt: skip


@pytest.mark.parametrize("option", inspect.signature(lockstep.start).parameters)
def test_every_option_of_start_is_in_the_api(option: str) -> None:
    assert f"| `{option}` |" in read("docs/api.md")


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


def test_the_extra_with_which_workers_share_gpu_memory_is_named_where_people_install_and_where_they_use_gpus() -> None:
    extras = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]
    assert [requirement.split(">")[0] for requirement in extras["cuda"]] == ["cuda-bindings"]
    assert re.search(r"pip install \"\.\[\w+,cuda\]\"", read("README.md"))
    assert 'pip install "torch-lockstep[cuda]"' in read("docs/gpu.md")


@pytest.mark.parametrize("page", PAGES)
def test_no_line_of_prose_is_longer_than_a_line_of_code(page: str) -> None:
    lines = [line for line in FENCE.sub("", read(page)).splitlines() if not line.startswith(("|", "    ", "#", "<"))]
    assert [line for line in lines if len(line) > 120 and " " in line[:120].strip()] == []
