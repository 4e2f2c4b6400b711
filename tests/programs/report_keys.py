"""The keys of the JSON that each benchmark prints: what programs that read a report rely on."""

import json
from pathlib import Path
from typing import Any

RECORDED: dict[str, list[str]] = json.loads(Path(__file__).with_name("bench_keys.json").read_text(encoding="utf-8"))
"""By benchmark. `rows[].ms` is the key `ms` of every entry of the list `rows`."""


def keys(value: Any, path: str = "") -> set[str]:
    """The paths to everything in a report that is no object and no list; those of a list's entries are one."""
    if isinstance(value, dict) and value:
        return {found for key, inner in value.items() for found in keys(inner, f"{path}.{key}".lstrip("."))}
    if isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        return {found for inner in value for found in keys(inner, f"{path}[]")}
    return {path}
