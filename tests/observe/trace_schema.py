"""Checks a trace against Chrome's JSON format, as Perfetto reads it: what it would drop or draw wrongly is an error."""

from collections import defaultdict
from typing import Any

NEEDED = {
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "i": {"name", "cat", "pid", "tid", "ts", "s", "args"},
    "s": {"name", "cat", "pid", "tid", "ts", "id", "bp"},
    "f": {"name", "cat", "pid", "tid", "ts", "id", "bp"},
}


def check_trace(trace: dict[str, Any]) -> None:
    events = trace["traceEvents"]
    for event in events:
        assert set(event) == NEEDED[event["ph"]] | {"ph"}, event
        assert isinstance(event["pid"], int), event
        assert event["pid"] > 0, event
        assert isinstance(event["tid"], int), event
        assert event["ph"] == "M" or event["ts"] >= 0, event
        assert event.get("dur", 0) >= 0, event
    _check_names(events)
    _check_nesting(events)
    _check_arrows(events)


def of_kind(trace: dict[str, Any], category: str, ph: str = "X") -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == ph and event["cat"] == category]


def overlap_us(one: dict[str, Any], other: dict[str, Any]) -> float:
    ends = one["ts"] + one["dur"], other["ts"] + other["dur"]
    return float(min(ends) - max(one["ts"], other["ts"]))


def _check_names(events: list[dict[str, Any]]) -> None:
    """Every thread that is used has a name, and belongs to one process."""
    named = {event["tid"] for event in events if event["ph"] == "M" and event["name"] == "thread_name"}
    pids = defaultdict(set)
    for event in events:
        if event["ph"] != "M":
            assert event["tid"] in named, event
        pids[event["tid"]].add(event["pid"])
    assert all(len(of_thread) == 1 for of_thread in pids.values())


def _check_nesting(events: list[dict[str, Any]]) -> None:
    """Slices of a thread are disjoint, or one stands inside of the other."""
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["tid"]].append((event["ts"], -event["dur"], event["name"]))
    for slices in threads.values():
        open_until: list[float] = []
        for begin, minus_dur, name in sorted(slices):
            while open_until and open_until[-1] <= begin + 1e-3:
                open_until.pop()
            end = begin - minus_dur
            assert not open_until or end <= open_until[-1] + 1e-3, (name, begin, end, open_until)
            open_until.append(end)


def _check_arrows(events: list[dict[str, Any]]) -> None:
    """Each has one begin and one end, both in slices, and does not point back in time."""
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert set(begins) == set(ends)
    assert len(begins) == sum(event["ph"] == "s" for event in events)
    for id, begin in begins.items():
        assert ends[id]["ts"] >= begin["ts"] - 1e-3
        for event in (begin, ends[id]):
            inside = [
                one for one in events
                if one["ph"] == "X" and one["tid"] == event["tid"]
                and one["ts"] - 1e-3 <= event["ts"] <= one["ts"] + one["dur"] + 1e-3
            ]  # fmt: skip
            assert inside, event
