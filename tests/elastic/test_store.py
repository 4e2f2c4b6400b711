"""The store at which workers meet: what is said on its connections, and real connections, with strangers among them."""

import gc
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import DistNetworkError, DistStoreError, PrefixStore

from lockstep.elastic.store import LocalStore, NotOfThisRun, RemoteStore, Secret, StoreServer, server
from lockstep.elastic.store.session import Intrusion, Session
from lockstep.elastic.store.values import KeyValues

SECRET = Secret(b"of this run")
LIMIT_S = 20.0


# -- sessions: no socket ----------------------------------------------------------------------------------------------


def carry(source: Session, target: Session, cut: int = 1 << 20) -> list[list[bytes]]:
    """What `target` receives of what `source` has to send, in pieces of at most `cut` bytes."""
    data, messages = bytes(source.outgoing), []
    source.outgoing.clear()
    for at in range(0, len(data), cut):
        messages += target.receive(data[at : at + cut])
    return messages


def greeted(secret: Secret = SECRET, theirs: Secret = SECRET, cut: int = 1 << 20) -> tuple[Session, Session]:
    serves, asks = Session(secret, serves=True), Session(theirs, serves=False)
    for source, target in ((serves, asks), (asks, serves), (serves, asks)):
        carry(source, target, cut)
    return serves, asks


@given(st.integers(1, 40), st.lists(st.lists(st.binary(max_size=50), min_size=1), max_size=4))
def test_messages_arrive_whole_and_in_order_however_they_are_cut(cut: int, messages: list[list[bytes]]) -> None:
    serves, asks = greeted(cut=cut)
    assert serves.is_open
    assert asks.is_open
    for message in messages:
        asks.send(*message)
        serves.send(*message)
    assert carry(asks, serves, cut) == messages
    assert carry(serves, asks, cut) == messages


@pytest.mark.parametrize("theirs", [Secret(), Secret(b"of another run")])
def test_without_the_secret_nothing_is_said(theirs: Secret) -> None:
    serves, asks = Session(SECRET, serves=True), Session(theirs, serves=False)
    carry(serves, asks)
    with pytest.raises(Intrusion):
        carry(asks, serves)
    assert not serves.outgoing
    assert not serves.is_open


def test_a_server_without_the_secret_is_found_out_too() -> None:
    serves, asks = Session(Secret(b"of another run"), serves=True), Session(SECRET, serves=False)
    carry(serves, asks)
    serves._secret = Secret(b"")  # it lets everybody in
    serves.outgoing += b"\0" * 16
    with pytest.raises(Intrusion):
        carry(serves, asks)
    assert not asks.is_open


@given(st.data())
def test_a_message_that_was_changed_repeated_or_left_out_is_found(data: st.DataObject) -> None:
    serves, asks = greeted()
    frames = []
    for number in range(3):
        asks.send(b"set", b"key", str(number).encode())
        frames.append(bytes(asks.outgoing))
        asks.outgoing.clear()
    what = data.draw(st.sampled_from(["changed", "repeated", "left out"]))
    if what == "changed":
        at = data.draw(st.integers(4, len(frames[1]) - 1))
        frames[1] = frames[1][:at] + bytes([frames[1][at] ^ 1]) + frames[1][at + 1 :]
    elif what == "repeated":
        frames[1] = frames[0]
    else:
        del frames[1]
    assert serves.receive(frames[0])
    with pytest.raises(Intrusion):
        for frame in frames[1:]:
            serves.receive(frame)


def test_a_message_of_another_connection_and_ones_own_sent_back_are_found() -> None:
    (serves, asks), (other, _) = greeted(), greeted()
    asks.send(b"set", b"key", b"value")
    frame = bytes(asks.outgoing)
    for target in (other, asks):
        with pytest.raises(Intrusion):
            target.receive(frame)
    assert serves.receive(frame)


@given(st.binary(max_size=400))
def test_noise_never_opens_a_session(noise: bytes) -> None:
    for session in (Session(SECRET, serves=True), Session(SECRET, serves=False)):
        with suppress(Intrusion):
            assert session.receive(noise) == []
        assert not session.is_open


def test_a_secret_is_not_shown() -> None:
    assert "run" not in repr(SECRET)


# -- real connections -------------------------------------------------------------------------------------------------


class Kept:
    """A store of this process behind a port."""

    def __init__(self) -> None:
        self.values = KeyValues()
        self.server = StoreServer(socket.create_server(("127.0.0.1", 0)), self.values, SECRET)
        self.local = LocalStore(self.values)
        self.address = f"127.0.0.1:{self.server.port}"

    def client(self, secret: Secret = SECRET, timeout_s: float = LIMIT_S) -> RemoteStore:
        return RemoteStore(self.address, secret, LIMIT_S, timeout_s)

    def close(self) -> None:
        self.server.close()
        self.local.close()


@pytest.fixture
def kept() -> Iterator[Kept]:
    with closing(Kept()) as kept:
        yield kept


def test_both_sides_see_one_store(kept: Kept) -> None:
    with closing(kept.client()) as client:
        client.set("a", "1")
        kept.local.set("b", b"\x00\xff")
        assert (kept.local.get("a"), client.get("b")) == (b"1", b"\x00\xff")
        assert (client.add("n", 2), kept.local.add("n", 3), client.add("n", 0)) == (2, 5, 5)
        assert client.check(["a", "b"])
        assert not client.check(["a", "missing"])
        assert client.compare_set("first", "", "mine") == kept.local.compare_set("first", "", "yours") == b"mine"
        assert client.compare_set("first", "mine", "next") == b"next"
        assert client.compare_set("nothing", "expected", "there") == b"expected"
        assert client.starting_with("fir") == {"first": b"next"}
        assert (client.delete_key("a"), client.delete_key("a"), kept.local.check(["a"])) == (True, False, False)


@pytest.mark.parametrize("written_by", ["its keeper", "another client"])
def test_a_wait_ends_when_the_last_key_is_written(kept: Kept, written_by: str) -> None:
    with closing(kept.client()) as client, closing(kept.client()) as other:
        writer = kept.local if written_by == "its keeper" else other
        writer.set("one", "")
        timer = threading.Timer(0.1, writer.set, ("two", "2"))
        timer.start()
        client.wait(["one", "two"])
        assert client.get("two") == b"2"
        timer.join()


def test_a_wait_that_is_too_long_names_the_key_and_leaves_the_connection_usable(kept: Kept) -> None:
    with closing(kept.client()) as client:
        for store in (client, kept.local):
            with pytest.raises(DistStoreError, match="missing"):
                store.wait(["missing"], timedelta(seconds=0.05))
        client.set("missing", "here")
        assert client.get("missing") == b"here"


def test_an_answer_that_comes_after_its_time_is_not_taken_for_the_next_one(kept: Kept) -> None:
    with closing(kept.client(timeout_s=0.2)) as client:
        with kept.values._changed, pytest.raises(DistStoreError, match="does not answer"):
            client.add("n", 1)  # the server can answer nobody
        kept.local.set("word", "right")
        client.set_timeout(timedelta(seconds=LIMIT_S))
        assert client.get("word") == b"right"
        assert client.add("n", 1) == 2


def test_values_larger_than_any_buffer_go_both_ways(kept: Kept) -> None:
    large = os.urandom(8 << 20)
    with closing(kept.client()) as client:
        client.set("large", large)
        assert client.get("large") == large


def test_whoever_does_not_know_the_secret_is_refused_by_name(kept: Kept) -> None:
    with pytest.raises(NotOfThisRun, match="secret"):
        kept.client(Secret(b"of another run"))


def test_a_server_that_is_no_store_is_refused_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            taken, _ = listener.accept()
            taken.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n and more than a nonce")
            taken.close()

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(NotOfThisRun):
            RemoteStore(f"127.0.0.1:{listener.getsockname()[1]}", SECRET, LIMIT_S)
        thread.join()


def test_nobody_there_and_nobody_any_more_are_network_errors(kept: Kept) -> None:
    client = kept.client()
    kept.server.close()
    with pytest.raises(DistNetworkError):
        for _ in range(2):  # the first may still be sent
            client.set("a", "1")
    client.close()
    with pytest.raises(DistNetworkError, match="nobody is reached"):
        kept.client()


def test_strangers_are_sent_away_and_workers_answered(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "GREETING_S", 0.3)
    strangers = [socket.create_connection(("127.0.0.1", kept.server.port)) for _ in range(server.MOST_STRANGERS + 40)]
    noise = random.Random(0)
    with closing(kept.client()) as client:
        for number, stranger in enumerate(strangers):
            with suppress(OSError):
                if number % 2:
                    stranger.sendall(noise.randbytes(200))
            assert client.add("n", 1) == number + 1
        for stranger in strangers:
            stranger.settimeout(LIMIT_S)
            with suppress(ConnectionError):
                while stranger.recv(1000):
                    pass
            stranger.close()
        assert kept.values.starting_with("") == {"n": str(len(strangers)).encode()}


def test_parts_of_torch_keep_a_store_that_nobody_else_holds(kept: Kept) -> None:
    inside = PrefixStore("part", kept.client())
    gc.collect()
    inside.set("word", "spoken")
    assert kept.local.get("part/word") == b"spoken"


def test_a_process_that_is_forked_does_not_keep_the_port_or_a_connection_open(kept: Kept) -> None:
    client = kept.client()
    client.set("a", "1")
    child = os.fork()
    if child == 0:
        time.sleep(LIMIT_S)
        os._exit(0)
    try:
        kept.server.close()
        with pytest.raises(DistNetworkError):
            for _ in range(2):
                client.set("a", "2")
        with pytest.raises(DistNetworkError, match="nobody is reached"):
            kept.client()
    finally:
        client.close()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
