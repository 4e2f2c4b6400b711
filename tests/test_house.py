"""The habits of the house: names, notes, files and rooms are what the pages and the comments call them."""

import ast
import importlib
import re
import subprocess
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields as fields_of
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

import lockstep
from lockstep.cli.run import command as run_command
from lockstep.events import Event

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lockstep"
SOURCES = [path for folder in ("lockstep", "tests", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
TOP = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md")
PAGES = [*TOP, *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]

INSIDE = {"guard", "sources", "trail"}
"""Fields of a Run that other rooms use; scripts do not."""

DOUBLED: dict[str, set[str]] = {}
"""Class names that may exist twice, with their files: a protocol, and what implements it under the same name."""

VERBS_THAT_ARE_NOUNS = {"halving.py", "ring.py", "lightning"}

NO_FILES = {
    "utils.py",  # there is none
    "model/", "model2/",  # what names in `run.state()` begin with
    "step-00000412/",  # a checkpoint
}  # fmt: skip
NO_MODULES = {"lockstep.noise"}  # a logger

FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"`([\w./-]+\.(?:py|md|toml)|[\w./-]+/)`")
MODULE = re.compile(r"`(lockstep(?:\.\w+)+)[`(]")
NOTE = re.compile(r"^[ \t]*(?:# )?Note \[([^\]]+)\][ \t]*$", re.MULTILINE)
CITED = re.compile(r"Note \[([^\]]+)\](?: in `?([\w/]+\.py))?")


A_FILE_FOR_EACH = {"cli", "integrations", "settings/environments", "programs/explain/schedules"}
"""Rooms with a file for each command, trainer, launcher or schedule: a list of them would say nothing."""


def test_nothing_that_a_run_has_written_is_committed() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "tests", "examples", "benchmarks"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("this is no clone")
    paths = [Path(line) for line in listed.stdout.splitlines()]
    scripts = [path for path in paths if path.is_relative_to("tests/corpus/shapes")]
    assert scripts
    assert {path.suffix for path in scripts} == {".py"}
    assert {path.suffix for path in paths} <= {".py", ".md", ".txt", ".json", ".yaml"}


@cache
def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def section(page: str, title: str) -> str:
    """What stands below a heading, up to the next of its level."""
    return read(page).split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def first_cells(table: str) -> Iterator[str]:
    """The first column of a table's rows."""
    return (row.split("|")[1] for row in table.splitlines() if row.startswith("| `"))


def names_in(table: str) -> list[str]:
    """The names that a table explains: those in its first column, without their arguments."""
    return [name for cell in first_cells(table) for name in re.findall(r"`(\w+)", cell)]


# -- public names -----------------------------------------------------------------------------------------------------


def test_the_public_names_are_those_that_the_api_counts_up() -> None:
    sentence = re.search(r"The public names are(.*?)\. Everything else may change", read("docs/api.md"), re.DOTALL)
    assert sentence is not None
    assert sorted(re.findall(r"`lockstep\.(\w+)`", sentence[1])) == sorted(lockstep.__all__)


@pytest.mark.parametrize(("module", "title"), [("optim", "Large batches"), ("strategies", "Strategies")])
def test_the_public_names_of_a_module_are_those_of_its_table_in_the_api(module: str, title: str) -> None:
    public = importlib.import_module(f"lockstep.{module}").__all__
    assert sorted(names_in(section("docs/api.md", title))) == sorted(public)


def test_the_public_names_of_the_run_are_those_of_the_api() -> None:
    fields = re.findall(r"^        self\.([a-z]\w*)\b[^=\n]* = ", read("lockstep/run/run.py"), re.MULTILINE)
    public = {name for name in dir(lockstep.Run) if not name.startswith("_")} | set(fields) - INSIDE
    assert set(re.findall(r"\brun\.([a-z]\w*)", read("docs/api.md"))) - {"md"} == public  # run.md is a page
    assert set(fields) >= INSIDE


# -- tables of options and events -------------------------------------------------------------------------------------


def test_every_option_of_run_is_in_the_table_of_launching() -> None:
    table = " ".join(first_cells(section("docs/launching.md", "`lockstep run`")))
    options = chain.from_iterable((*option.opts, *option.secondary_opts) for option in run_command.params)
    assert set(re.findall(r"`(-[\w-]+)`", table)) == {option for option in options if option.startswith("-")}


def test_every_variable_that_is_read_is_in_a_table_of_launching() -> None:
    """Each `LOCKSTEP_...` in the room that reads the environment."""
    settings = "".join(path.read_text(encoding="utf-8") for path in (PACKAGE / "settings").rglob("*.py"))
    tables = " ".join(first_cells(section("docs/launching.md", "Variables that lockstep itself reads")))
    assert set(re.findall(r"`(LOCKSTEP_\w+)`", tables)) == set(re.findall(r'"(LOCKSTEP_\w+)"', settings))


def test_every_kind_of_event_is_in_the_table_of_observe_with_its_fields() -> None:
    rows = [row.split("|")[1:3] for row in section("docs/observe.md", "Events").splitlines() if row.startswith("| `")]
    shown = {name: re.findall(r"`(\w+)`", fields) for kinds, fields in rows for name in re.findall(r"`(\w+)`", kinds)}
    stamp = {field.name for field in fields_of(Event)}
    emitted = {
        kind.__name__: [field.name for field in fields_of(kind) if field.name not in stamp]
        for kind in Event.__subclasses__()
        if kind.__module__ == Event.__module__
    }
    assert {name: shown.get(name) for name in emitted} == emitted


# -- notes ------------------------------------------------------------------------------------------------------------


@cache
def notes() -> dict[str, list[str]]:
    """The files in which each note is written."""
    found = defaultdict(list)
    for path in SOURCES:
        for name in NOTE.findall(path.read_text(encoding="utf-8")):
            found[name].append(str(path.relative_to(ROOT)))
    return found


def citations(text: str) -> list[tuple[str, str]]:
    """The notes that a text cites, each with the file that it names or ""; also where a line ends in between."""
    return CITED.findall(re.sub(r"\s*\n\s*(?:# )?", " ", NOTE.sub("", text)))


def test_every_note_has_a_name_of_its_own() -> None:
    assert {name: files for name, files in notes().items() if len(files) > 1} == {}


def test_every_note_that_is_cited_is_written_and_in_the_file_that_is_named() -> None:
    cited = [
        (str(path.relative_to(ROOT)), *citation)
        for path in [*SOURCES, *(ROOT / page for page in PAGES)]
        if path != Path(__file__)
        for citation in citations(path.read_text(encoding="utf-8"))
    ]
    assert len(cited) > 100
    wrong = [(by, name, file) for by, name, file in cited if not any(is_in(file, at) for at in notes().get(name, ()))]
    assert wrong == []


def is_in(named: str, path: str) -> bool:
    """Whether a file is meant by this name, which may be the end of its path; "" may be any."""
    return not named or f"/{path}".endswith(f"/{named}")


# -- classes and files ------------------------------------------------------------------------------------------------


def test_no_class_name_exists_twice() -> None:
    classes = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                classes[node.name].add(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    doubled = {name: places for name, places in classes.items() if len(places) > 1}
    assert {name: {place.partition(":")[0] for place in places} for name, places in doubled.items()} == DOUBLED


def test_files_and_folders_are_named_by_nouns() -> None:
    files = list(PACKAGE.rglob("*.py"))
    named = {path.name for path in {*files, *(file.parent for file in files)} if path.stem.endswith("ing")}
    assert named == VERBS_THAT_ARE_NOUNS


@cache
def paths() -> frozenset[str]:
    """All that a page may name; a folder ends in a slash."""
    folders = ("lockstep", "tests", "examples", "benchmarks", "docs")
    below = chain.from_iterable((ROOT / folder).rglob("*") for folder in folders)
    found = [*ROOT.iterdir(), *(path for path in below if "__pycache__" not in path.parts)]
    return frozenset(f"/{path.relative_to(ROOT)}" + "/" * path.is_dir() for path in found)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_only_files_and_folders_that_exist(page: str) -> None:
    named = set(FILE.findall(FENCE.sub("", read(page)))) - NO_FILES
    assert {name for name in named if not any(path.endswith(f"/{name}") for path in paths())} == set()


def test_pages_name_files_at_all() -> None:
    assert {"reducer.py", "shared/"} <= set(FILE.findall(FENCE.sub("", read("docs/wire.md"))))


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_only_modules_and_their_names_that_exist(page: str) -> None:
    named = set(MODULE.findall(FENCE.sub("", read(page)))) - NO_MODULES
    assert {name for name in named if not exists(name)} == set()


def exists(name: str) -> bool:
    """Whether it can be imported, or is an attribute of what can be."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        parent, _, attribute = name.rpartition(".")
        return bool(parent) and exists(parent) and hasattr(importlib.import_module(parent), attribute)
    return True


# -- rooms ------------------------------------------------------------------------------------------------------------


def floors() -> list[set[str]]:
    """The rooms as import-linter's layers have them, from the top."""
    contracts = tomllib.loads(read("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if "containers" not in contract)
    return [{room.strip().removeprefix("lockstep.") for room in floor.split("|")} for floor in layers]


def rooms_of_contributing() -> list[str]:
    """The rooms in the order of the table, a file without its ending."""
    cells = " ".join(first_cells(section("CONTRIBUTING.md", "The house")))
    return [name.rstrip("/").removesuffix(".py") for name in re.findall(r"`([\w./]+)`", cells)]


def test_the_layers_are_the_rooms_that_exist() -> None:
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert set(chain.from_iterable(floors())) == rooms - {"__init__", "__main__"}


@pytest.mark.parametrize("init", sorted(PACKAGE.glob("*/**/__init__.py")), ids=lambda init: str(init.parent.name))
def test_the_docstring_of_a_room_names_its_files_and_folders(init: Path) -> None:
    room = init.parent
    if str(room.relative_to(PACKAGE)) in A_FILE_FOR_EACH:
        return
    files = {path.stem for path in room.glob("*.py")} - {"__init__"}
    folders = {path.parent.name for path in room.glob("*/__init__.py")}
    said = set(re.findall(r"`(\w+)/?`", ast.get_docstring(ast.parse(init.read_text())) or ""))
    assert files | folders <= said


def test_the_table_of_rooms_has_each_of_them_once_in_the_order_of_the_layers() -> None:
    height = {room: number for number, floor in enumerate(floors()) for room in floor}
    named = rooms_of_contributing()
    assert sorted(named) == sorted(height)
    assert [height[room] for room in named] == sorted(height.values())


def test_the_suites_that_contributing_names_run_on_every_variant_of_a_seam() -> None:
    suites = {path.name for path in (ROOT / "tests").rglob("test_*_conformance.py")}
    assert suites == {Path(name).name for name in re.findall(r"`(\S+_conformance\.py)`", read("CONTRIBUTING.md"))}
