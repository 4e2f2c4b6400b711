"""The server of the page: whom it answers, with what, and what it refuses."""

import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from lockstep.errors import BadEnvironment
from lockstep.observe.page.report import report_text
from lockstep.observe.page.server import POLICY, PageServer

EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = tmp_path / EVIL
    run.mkdir()
    (run / "history.jsonl").write_text(
        '{"at": 1, "step": 3, "loss": 0.5, "samples": 1, "seconds": 1, "lanes": {"0": 1}}\n'
    )
    (run / "worker-0.log").write_text("hello\n")
    (tmp_path / "secret.log").write_text("secret")
    return run


@pytest.fixture
def server(folder: Path) -> Iterator[PageServer]:
    with PageServer([folder]) as server:
        yield server


def ask(server: PageServer, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes, dict[str, str]]:
    """`path` comes behind the token, unless it begins with a slash."""
    address = urlsplit(server.address)
    assert address.hostname is not None
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=30)
    try:
        connection.request(method, path if path.startswith("/") else f"{address.path}{path}", headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.getheaders())
    finally:
        connection.close()


def test_the_page_its_parts_and_its_data_are_served(server: PageServer) -> None:
    for path, kind in (("", "text/html"), ("page.js", "text/javascript"), ("page.css", "text/css")):
        status, body, headers = ask(server, path)
        assert (status, headers["Content-Type"].partition(";")[0]) == (200, kind)
        assert body
    (run,) = json.loads(ask(server, "runs.json")[1])["runs"]
    assert (run["name"], run["now"]["step"]) == (EVIL, 3)
    assert ask(server, "log/0/0")[1] == b"hello\n"


def test_every_answer_forbids_the_browser_to_load_anything_from_elsewhere(server: PageServer) -> None:
    for path in ("", "runs.json", "log/0/0", "nothing", "/"):
        headers = ask(server, path)[2]
        assert headers["Content-Security-Policy"] == POLICY
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["X-Content-Type-Options"] == "nosniff"
    assert "http" not in POLICY
    assert b"://" not in ask(server, "")[1]


@pytest.mark.parametrize("path", ["/", "/wrong/", "/wrong/runs.json", "/page.js", "//", "/%00/"])
def test_without_the_token_every_path_is_forbidden(server: PageServer, path: str) -> None:
    status, body, _ = ask(server, path)
    assert status == 403
    assert b"token" in body


def test_a_part_of_the_token_is_not_the_token(server: PageServer) -> None:
    token = urlsplit(server.address).path.strip("/")
    for path in (f"/{token[:-1]}/", f"/{token}x/", f"/{token.lower()}/", f"/{token}"):
        assert ask(server, path)[0] == 403


def test_a_request_under_another_name_is_forbidden(server: PageServer) -> None:
    assert ask(server, "runs.json", Host="evil.example:80")[0] == 403
    assert ask(server, "runs.json", Host=f"localhost:{urlsplit(server.address).port}")[0] == 200


@pytest.mark.parametrize(
    "path",
    ["../secret.log", "log/0/../../secret.log", "log/0/..%2f..%2fsecret.log", "log/0/-1", "log/1/0", "log/0/9",
     "assets/page.js", "timeline/0.json", "timeline/7.json", "worker-0.log", "log/0/0/"],
)  # fmt: skip
def test_what_is_not_in_the_table_is_not_found(server: PageServer, path: str) -> None:
    status, body, _ = ask(server, path)
    assert (status, body) == (200, b"") if path == "log/0/9" else status == 404
    assert b"secret" not in body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_the_page_can_only_be_read(server: PageServer, method: str) -> None:
    assert ask(server, "runs.json", method)[0] == 501


def test_data_that_has_not_changed_is_not_sent_again(server: PageServer, folder: Path) -> None:
    etag = ask(server, "runs.json")[2]["ETag"]
    status, body, _ = ask(server, "runs.json", **{"If-None-Match": etag})
    assert (status, body) == (304, b"")
    with (folder / "history.jsonl").open("a") as file:
        file.write('{"at": 2, "step": 4, "loss": 0.4}\n')
    assert ask(server, "runs.json", **{"If-None-Match": etag})[0] == 200


def test_only_loopback_is_listened_on(server: PageServer) -> None:
    assert urlsplit(server.address).hostname == "127.0.0.1"
    assert server._server.socket.getsockname()[0] == "127.0.0.1"


def test_a_port_that_is_taken_is_named(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(BadEnvironment, match="give another --port"):
            PageServer([folder], taken.getsockname()[1])


def test_a_report_holds_no_address_and_no_markup_of_the_run() -> None:
    data: dict[str, Any] = {"runs": [{"name": "</script><script>alert(1)</script>"}], "logs": {}, "made_at": "now"}
    text = report_text(data)
    assert "alert(1)</script>" not in text
    assert "://" not in text.replace("http://www.w3.org/2000/svg", "").replace("chrome://tracing", "")
    found = text.partition('id="embedded">')[2].partition("</script>")[0]
    assert json.loads(found) == data
