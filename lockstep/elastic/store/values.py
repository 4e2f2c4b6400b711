"""What a store keeps: bytes by key, for the threads of one process."""

import threading
import time
from collections.abc import Callable, Sequence


def _nothing() -> None:
    """Nobody wants to know."""


class KeyValues:
    """Keys and values. Every method is one atomic operation; `on_change` is called after each that writes."""

    def __init__(self) -> None:
        self.on_change: Callable[[], None] = _nothing
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._write(key, value)
        self.on_change()

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            if amount or key not in self._values:
                self._write(key, str(total).encode())
        if amount:
            self.on_change()
        return total

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """What stands there afterwards: `desired` if it was `expected`, or nothing and nothing was expected."""
        with self._changed:
            found = self._values.get(key)
            if found is None and expected:
                return expected
            if found is not None and found != expected:
                return found
            self._write(key, desired)
        self.on_change()
        return desired

    def delete(self, key: str) -> bool:
        with self._changed:
            return self._values.pop(key, None) is not None

    def found(self, keys: Sequence[str]) -> list[bytes] | None:
        """The values of `keys`; None unless all are there."""
        with self._changed:
            return self._found(keys)

    def await_all(self, keys: Sequence[str], limit_s: float) -> list[bytes] | None:
        """The values as soon as all are there; None if they are not within `limit_s`."""
        until_s = time.monotonic() + limit_s
        with self._changed:
            while (values := self._found(keys)) is None:
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    return None
                self._changed.wait(left_s)
            return values

    def starting_with(self, prefix: str) -> dict[str, bytes]:
        with self._changed:
            return {key: value for key, value in self._values.items() if key.startswith(prefix)}

    def _found(self, keys: Sequence[str]) -> list[bytes] | None:
        values = [self._values[key] for key in keys if key in self._values]
        return values if len(values) == len(keys) else None

    def _write(self, key: str, value: bytes) -> None:
        self._values[key] = value
        self._changed.notify_all()
