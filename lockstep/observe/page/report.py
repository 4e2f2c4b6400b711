"""The page of runs as one file, which needs no server and loads nothing: to keep, or to send to somebody."""

import base64
import hashlib
import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lockstep.errors import BadEnvironment
from lockstep.observe.page.entries import read_entries
from lockstep.observe.page.log_tail import log_tail
from lockstep.observe.page.server import asset
from lockstep.observe.page.view import make_view

_LINK = '<link rel="stylesheet" href="page.css">'
_SCRIPT = '<script src="page.js"></script>'


def write_report(folders: Sequence[Path], out: Path) -> Path:
    """Writes the report of the runs in these folders to `out`; whole or not at all."""
    made_at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    views = [make_view(read_entries(folder)) for folder in folders]
    logs = {
        f"log/{number}/{slot}": log_tail(folder, slot)
        for number, folder in enumerate(folders)
        for slot in views[number]["log_slots"]
    }
    part = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        part.write_text(report_text({"runs": views, "logs": logs, "made_at": made_at}), encoding="utf-8")
        part.replace(out)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise BadEnvironment(f"the report cannot be written to {out}: {error.strerror}") from error
    return out


def report_text(embedded: dict[str, Any]) -> str:
    """The page with its style, its script and its data inside. Its policy allows these and nothing else."""
    style, script = asset("page.css"), asset("page.js")
    # Inside of a script element only `<` could end it: a run's name may hold "</script>".
    data = json.dumps(embedded, allow_nan=False).replace("<", "\\u003c")
    policy = f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'"
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>'
    body = f'<script type="application/json" id="embedded">{data}</script>\n<script>{script}</script>'
    page = asset("page.html")
    assert _LINK in page
    assert _SCRIPT in page
    return page.replace(_LINK, head).replace(_SCRIPT, body)


def _hash(text: str) -> str:
    """How a policy names an element's text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
