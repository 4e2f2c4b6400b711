"""A connection on which both sides have shown that they know the run's secret. Bytes in, messages out: no socket.

# Note [Nobody else takes part]
# Both sides of a new connection send a random number, and an HMAC of both numbers by the run's secret. Only after that
# is anything said. Every later message carries an HMAC by a key of this connection, over its direction and its number:
# it can be neither made, changed, repeated nor moved to another connection by somebody who does not know the secret.
# Nothing is encrypted. A run without a secret has an empty one: the same words, which protect nobody.
"""

import hmac
import secrets
import struct
from dataclasses import dataclass

HELLO = b"lockstep/1\n"
NONCE_BYTES = 16
MAC_BYTES = 16
MOST_BYTES = 1 << 28
"""The longest message. A longer one was not written by a worker."""

_LENGTH = struct.Struct(">I")
_COUNT = struct.Struct(">BQ")


class Intrusion(Exception):  # noqa: N818 - a verdict, not an accident
    """The other side is no worker of this run: it does not know the secret, or speaks another language."""


@dataclass(frozen=True)
class Secret:
    """What only the workers of a run know. It is never shown."""

    key: bytes = b""

    def __repr__(self) -> str:
        return "Secret(...)" if self.key else "Secret()"

    def proof(self, *words: bytes) -> bytes:
        return hmac.digest(self.key, b"".join(words), "sha256")


class Session:
    """One side of a connection. `outgoing` is what is to be sent; its owner takes it from there."""

    def __init__(self, secret: Secret, *, serves: bool) -> None:
        self.outgoing = bytearray()
        self.is_open = False
        """Whether the other side has shown that it knows the secret."""
        self._secret, self._serves = secret, serves
        self._incoming = bytearray()
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._key = b""
        self._num_sent = self._num_received = 0
        if serves:
            self.outgoing += HELLO + self._nonce

    @property
    def has_greeted(self) -> bool:
        """Whether this side has shown that it knows the secret."""
        return bool(self._key)

    def send(self, *parts: bytes) -> None:
        """Queues a message; only on a session that is open."""
        text = pack(parts)
        self.outgoing += _LENGTH.pack(len(text)) + self._mac(self._serves, self._num_sent, text) + text
        self._num_sent += 1

    def receive(self, data: bytes) -> list[list[bytes]]:
        """The messages that are complete with `data`. Raises Intrusion."""
        self._incoming += data
        if not self.is_open and not (self._greet_client() if self._serves else self._greet_server()):
            return []
        messages = []
        while (text := self._next()) is not None:
            messages.append(unpack(text))
        return messages

    # -- the greeting: see Note [Nobody else takes part] ------------------------------------------------------

    def _greet_client(self) -> bool:
        greeting = self._take(len(HELLO) + NONCE_BYTES + MAC_BYTES)
        if greeting is None:
            return False
        theirs, proof = greeting[len(HELLO) : -MAC_BYTES], greeting[-MAC_BYTES:]
        nonces = self._nonce + theirs
        self._check(greeting.startswith(HELLO) and self._is_proof(proof, b"client", nonces))
        self.outgoing += self._secret.proof(b"server", nonces)[:MAC_BYTES]
        self._open(nonces)
        return True

    def _greet_server(self) -> bool:
        if self._key:
            return self._await_proof()
        greeting = self._take(len(HELLO) + NONCE_BYTES)
        if greeting is None:
            return False
        self._check(greeting.startswith(HELLO))
        nonces = greeting[len(HELLO) :] + self._nonce
        self.outgoing += HELLO + self._nonce + self._secret.proof(b"client", nonces)[:MAC_BYTES]
        self._key = nonces
        return self._await_proof()

    def _await_proof(self) -> bool:
        proof = self._take(MAC_BYTES)
        if proof is None:
            return False
        self._check(self._is_proof(proof, b"server", self._key))
        self._open(self._key)
        return True

    def _open(self, nonces: bytes) -> None:
        self._key = self._secret.proof(b"messages", nonces)
        self.is_open = True

    def _is_proof(self, proof: bytes, side: bytes, nonces: bytes) -> bool:
        return hmac.compare_digest(proof, self._secret.proof(side, nonces)[:MAC_BYTES])

    # -- messages ---------------------------------------------------------------------------------------------

    def _next(self) -> bytes | None:
        if len(self._incoming) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._incoming)
        self._check(length <= MOST_BYTES)
        frame = self._take(_LENGTH.size + MAC_BYTES + length)
        if frame is None:
            return None
        mac, text = frame[_LENGTH.size : _LENGTH.size + MAC_BYTES], frame[_LENGTH.size + MAC_BYTES :]
        self._check(hmac.compare_digest(mac, self._mac(not self._serves, self._num_received, text)))
        self._num_received += 1
        return text

    def _mac(self, from_server: bool, number: int, text: bytes) -> bytes:
        return hmac.digest(self._key, _COUNT.pack(from_server, number) + text, "sha256")[:MAC_BYTES]

    def _take(self, size: int) -> bytes | None:
        if len(self._incoming) < size:
            self._check(self.is_open or HELLO.startswith(bytes(self._incoming[: len(HELLO)])) or bool(self._key))
            return None
        taken = bytes(self._incoming[:size])
        del self._incoming[:size]
        return taken

    def _check(self, is_of_this_run: bool) -> None:
        if not is_of_this_run:
            raise Intrusion


def pack(parts: tuple[bytes, ...] | list[bytes]) -> bytes:
    """The text that `unpack` reads back."""
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def unpack(text: bytes) -> list[bytes]:
    parts, at = [], 0
    while at < len(text):
        (length,) = _LENGTH.unpack_from(text, at)
        at += _LENGTH.size
        if at + length > len(text):
            raise Intrusion
        parts.append(text[at : at + length])
        at += length
    return parts
