"""Processes that carry a mark in their environment, so that a test finds what its program left running."""

import psutil

MARK = "LOCKSTEP_TEST_MARK"


def survivors(mark: str) -> list[int]:
    return [process.pid for process in psutil.process_iter() if _carries(process, mark)]


def _carries(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
