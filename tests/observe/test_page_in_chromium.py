"""The page in a real browser, while a run is killed, grows and ends; and the report of it.

The pictures in docs/pictures are made here: `LOCKSTEP_PICTURES=1 pytest tests/observe/test_page_in_chromium.py`.
"""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, Browser, chromium
from click.testing import CliRunner
from launches import launch

from lockstep.cli.main import lockstep
from lockstep.observe.page.server import PageServer

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (apt-get install chromium)")

PICTURES = Path(__file__).parents[2] / "docs/pictures"

# It trains until the test has seen enough. The noise is measured often, so that there is some.
TRAINING = """
import os
import torch
import torch.nn.functional as F
import lockstep

run = lockstep.start(lanes=6, noise_every=2)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.05)
run.replicate(model, optimizer)
truth = torch.randn(16, 4)
while run.step < 200000:
    x = torch.randn(48, 16)
    for x, y in run.lanes((x, (x @ truth).argmax(1))):
        run.backward(F.cross_entropy(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
    if run.step % 50 == 0 and run.total(int(run.is_first and os.path.exists("enough"))):
        break
run.print("digest", run.digest())
"""


@dataclass
class Seen:
    """What the test has seen: the page while the run went on, and the run's folder afterwards."""

    live: dict[str, Any]
    folder: Path
    requested: list[str]
    errors: list[str]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def seen(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """A run on two workers with `--page`: worker 1 is killed and replaced, then a third one joins."""
    folder = tmp_path_factory.mktemp("page")
    with launch(folder, TRAINING, "-n", "2", "--page", "--timeline", LOCKSTEP_FAULT="kill 1 at 60") as run:
        line = run.lines[run.wait_for(r"page: http")]
        browser.size(1200, 900)
        browser.open(re.findall(r"http://\S+", line)[0])
        live = {
            "fresh": browser.wait_for("document.getElementById('freshness').textContent"),
            "lost": browser.wait_for("document.querySelector('[data-chart=loss] .sign.k-lost title')?.textContent"),
            "joined": browser.wait_for("document.querySelector('[data-chart=loss] .sign.k-joined title')?.textContent"),
        }
        assert CliRunner().invoke(lockstep, ["scale", str(run.run_dir), "3"]).exit_code == 0
        browser.wait_for("document.querySelectorAll('[data-chart=lanes] .area').length === 3")
        browser.wait_for("document.querySelectorAll('[data-chart=parts] .area').length === 4")
        live["workers"] = browser.wait_for("document.querySelectorAll('#workers tbody tr').length === 3")
        live["log"] = browser.wait_for("document.getElementById('log').textContent")
        if os.environ.get("LOCKSTEP_PICTURES"):
            browser.picture(PICTURES / "page.png")
        (folder / "enough").touch()
        assert run.finish() == 0, run.shown()
    return Seen(live, run.run_dir, browser.requested, browser.errors)


@pytest.fixture
def page(browser: Browser, seen: Seen) -> Iterator[Browser]:
    """The page of the run that is over."""
    with PageServer([seen.folder]) as server:
        browser.size(1200, 900)
        browser.open(server.address)
        browser.wait_for("document.querySelectorAll('[data-chart=loss] .line').length === 1")
        yield browser


def test_a_kill_and_a_join_are_marks_on_the_curve_while_the_run_goes_on(seen: Seen) -> None:
    assert seen.live["fresh"] == "live"
    assert seen.live["lost"] == "worker 1 lost"
    assert seen.live["joined"] == "worker 1 has joined"
    assert "lockstep 0." in seen.live["log"]


def test_the_page_asks_for_nothing_from_elsewhere_and_complains_of_nothing(seen: Seen) -> None:
    assert len(seen.requested) > 4
    assert all(address.startswith("http://127.0.0.1:") for address in seen.requested)
    assert seen.errors == []


def test_afterwards_the_page_shows_the_same_run(page: Browser) -> None:
    page.wait_for("document.getElementById('freshness').textContent === 'the run is over'")
    assert page.value("document.querySelector('#runs tbody td:nth-child(3)').textContent") == "finished"
    assert "SIGKILL" in page.value("document.getElementById('happenings').textContent")
    assert page.value("document.querySelectorAll('[data-chart=noise] .band').length") == 1
    assert page.value("document.querySelectorAll('[data-chart=memory] .line').length") == 3
    trace = page.value("fetch(document.querySelector('#timeline a').href).then((answer) => answer.json())")
    assert len(trace["traceEvents"]) > 100


def test_a_chart_is_read_by_the_keyboard(page: Browser) -> None:
    page.value("document.querySelector('[data-chart=loss]').focus()")
    page.press("Home")
    first = page.value("document.activeElement.parentElement.querySelector('output').textContent")
    page.press("End")
    page.press("ArrowLeft")
    last = page.value("document.activeElement.parentElement.querySelector('output').textContent")
    assert re.match(r"step 0: \d", first)
    assert re.match(r"step [\d.]+k?: \d", last)
    assert last != first
    page.value("document.querySelector('[data-chart=parts]').parentElement.querySelector('.legend button').focus()")
    page.press(" ")
    assert page.value("document.activeElement.getAttribute('aria-pressed')") == "false"
    assert page.value("document.querySelectorAll('[data-chart=parts] .area').length") == 3


def test_everything_that_can_be_used_is_reached_by_the_tab_key(page: Browser) -> None:
    page.value("document.querySelector('.skip').focus()")
    reached = set()
    for _ in range(60):
        page.press("Tab")
        reached.add(page.value("(document.activeElement.dataset?.chart || document.activeElement.id)"))
    assert {"loss", "rate", "parts", "lanes", "memory", "noise", "log-scale", "log-slot", "log"} <= reached


def test_the_page_fits_a_phone(page: Browser) -> None:
    page.size(390, 844, is_phone=True)
    page.wait_for("document.querySelector('[data-chart=loss]').clientWidth < 380")
    assert page.value("document.documentElement.scrollWidth") <= 390
    if os.environ.get("LOCKSTEP_PICTURES"):
        page.size(390, 844)
        page.picture(PICTURES / "page-phone.png")


def test_several_runs_lie_over_each_other(browser: Browser, seen: Seen, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    lines = [
        {"at": 100.0 + step, "step": step * 50_000, "loss": 1.5, "samples": 9, "seconds": 1.0} for step in range(9)
    ]
    (other / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with PageServer([seen.folder, other]) as server:
        browser.size(1200, 900)
        browser.open(server.address)
        browser.wait_for("document.querySelectorAll('[data-chart=loss] .line').length === 2")
        assert browser.value("document.querySelectorAll('#runs tbody tr').length") == 2
        browser.value("document.querySelector('[data-chart=loss]').focus()")
        browser.press("End")  # the other run is longer
        result = browser.value("document.activeElement.parentElement.querySelector('output').textContent")
        assert result == "step 400k: run: –, other: 1.5"
        browser.value("document.querySelector('input[value=t]').click()")
        browser.wait_for("document.querySelector('[data-chart=loss]').getAttribute('aria-label').includes(' s')")


def test_a_mark_stands_inside_of_its_chart_although_the_curve_ends_before_it(browser: Browser, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"at": 100.0 + step, "step": step, "loss": 1.5, "samples": 9, "seconds": 1.0} for step in range(9)
    ]
    lines.append({"at": 120.0, "step": 20, "kind": "GenerationFormed", "joined": [1]})
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with PageServer([tmp_path]) as server:
        browser.size(1200, 900)
        browser.open(server.address)
        browser.wait_for("document.querySelector('[data-chart=loss] .mark')")
        end, width = browser.value(
            "[Number(document.querySelector('[data-chart=loss] .mark').getAttribute('x1')), "
            "document.querySelector('[data-chart=loss]').viewBox.baseVal.width]"
        )
    assert end < width


def test_the_report_needs_no_server_and_holds_no_markup_of_the_run(seen: Seen, tmp_path: Path) -> None:
    evil = tmp_path / "<img src=x onerror=document.title=1>"
    seen.folder.rename(evil)
    try:
        out = tmp_path / "report.html"
        assert CliRunner().invoke(lockstep, ["report", str(evil), "--out", str(out)]).exit_code == 0
    finally:
        evil.rename(seen.folder)
    with chromium() as browser:  # of its own: a file is another site, and gets another process
        browser.open(f"file://{out}")
        browser.wait_for("document.querySelectorAll('[data-chart=loss] .line').length === 1")
        assert browser.value("document.querySelector('main img')") is None
        assert browser.value("document.querySelector('#runs tbody td').textContent").strip() == evil.name
        assert browser.value("document.querySelectorAll('[data-chart=loss] .sign').length") >= 3
        assert "lockstep 0." in browser.value("document.getElementById('log').textContent")
        assert all(address.startswith(("file:", "data:")) for address in browser.requested)
        assert browser.errors == []
