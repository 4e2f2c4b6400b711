"""Standard output and error that may be full or closed."""

import io
import os
import sys
from contextlib import suppress
from typing import TextIO

import click

from lockstep.errors import BadEnvironment


class CannotWrite(BadEnvironment):
    """Standard output cannot be written."""


class Output(io.TextIOWrapper):
    """Standard output that raises CannotWrite with the reason. A closed pipe is left to click."""

    @classmethod
    def over(cls, stream: TextIO) -> "Output":
        return cls(stream.buffer, stream.encoding, stream.errors, line_buffering=stream.isatty(), write_through=True)

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise _explained(error) from error

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise _explained(error) from error


def complain(text: str) -> None:
    """Writes a line to standard error, if it can be written."""
    with suppress(OSError):
        click.echo(text, err=True)


def discard_output() -> None:
    """Drops unwritten standard output: Python would fail on it again when it exits."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _explained(error: OSError) -> Exception:
    if isinstance(error, BrokenPipeError):
        return error
    return CannotWrite(f"the output cannot be written: {error.strerror}")
