"""Where workers meet, with real stores."""

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from launches import start_lockstep
from torch.distributed import TCPStore

from lockstep.elastic import rendezvous
from lockstep.elastic.rendezvous import open_store
from lockstep.elastic.store import LocalStore, RemoteStore, StoreServer
from lockstep.errors import BadEnvironment
from lockstep.settings.environments.place import LaunchPlace
from lockstep.world import World


@pytest.fixture(autouse=True)
def _no_store_stays_open(monkeypatch):
    """A process that plays several workers, one test after another."""
    opened = {}
    monkeypatch.setattr(rendezvous, "_opened", opened)
    yield
    for place in opened.values():
        for part in (place.server, place.store):
            if isinstance(part, StoreServer | LocalStore | RemoteStore):
                part.close()


def listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def free_port() -> int:
    with listener() as taken:
        return int(taken.getsockname()[1])


def listening_addresses() -> set[str]:
    connections = psutil.Process().net_connections("tcp")
    return {connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN}


def place(rank: int, port: int, listen_fd: int | None = None) -> LaunchPlace:
    return LaunchPlace("lockstep run", World(rank, 2, rank, 2), "127.0.0.1", port, listen_fd)


def test_workers_meet_at_the_socket_that_worker_0_inherits():
    with listener() as inherited:
        port = inherited.getsockname()[1]
        host = open_store(place(0, port, inherited.detach()), 10)
    open_store(place(1, port), 10).set("word", "spoken")
    assert host.get("word") == b"spoken"


@pytest.mark.parametrize("inherits", [True, False])
def test_on_one_host_nothing_listens_outside_loopback(inherits):
    if inherits:
        inherited = listener()
        store = open_store(place(0, inherited.getsockname()[1], inherited.detach()), 10)
    else:
        store = open_store(place(0, free_port()), 10)
    assert listening_addresses() == {"127.0.0.1"}
    del store


def test_the_runs_of_a_script_share_a_store_and_no_key():
    at = place(0, free_port())
    first, second = (open_store(at, 10, run) for run in range(2))
    first.set("word", "spoken")
    assert not second.check(["word"])
    assert len(rendezvous._opened) == 1


def test_alone_there_is_a_store_and_no_socket_at_all():
    store = open_store(LaunchPlace("alone", World(0, 1), "127.0.0.1", 0), 10)
    store.set("word", "spoken")
    assert store.get("word") == b"spoken"
    assert listening_addresses() == set()


def test_under_an_agent_every_worker_is_a_client_of_its_store():
    agent = TCPStore("127.0.0.1", port := free_port(), is_master=True, wait_for_workers=False)
    places = [LaunchPlace("torchrun", World(rank, 2, rank, 2), "127.0.0.1", port, agent_store=True) for rank in (0, 1)]
    with ThreadPoolExecutor(2) as threads:
        zero, one = threads.map(lambda place: open_store(place, 30), places)
    zero.set("word", "spoken")
    assert one.get("word") == b"spoken"
    del agent


def test_a_port_in_use_is_a_bad_environment():
    with listener() as taken, pytest.raises(BadEnvironment, match="Set MASTER_PORT to a free port"):
        open_store(place(0, taken.getsockname()[1]), 10)


def test_a_worker_0_that_never_comes_is_a_bad_environment():
    with pytest.raises(BadEnvironment, match=r"worker 1 found worker 0 not at 127\.0\.0\.1"):
        open_store(place(1, free_port()), 0.2)


def run_on_two_workers(folder: Path, script: str, *options: str) -> tuple[int, str]:
    (folder / "train.py").write_text(script)
    launcher = start_lockstep("run", "-n", "2", *options, "train.py", cwd=folder)
    out, _ = launcher.communicate(timeout=60)
    return launcher.returncode, out


def test_workers_of_lockstep_run_meet(tmp_path):
    script = (
        "import contextlib\n"
        "import os\n"
        "from lockstep.settings.environment import find_place\n"
        "from lockstep.elastic.rendezvous import open_store\n"
        "place = find_place(os.environ)\n"
        "store = open_store(place, 60)\n"
        "store.set(f'from {place.world.rank}', 'here')\n"
        "print(store.get(f'from {1 - place.world.rank}'))\n"
        "if place.world.rank == 0:\n"
        "    store.wait(['read by 1'])  # it keeps the store\n"
        "else:\n"
        "    with contextlib.suppress(RuntimeError):  # worker 0 may end before it has answered\n"
        "        store.set('read by 1', '')\n"
    )
    assert run_on_two_workers(tmp_path, script, "--torch-distributed") == (0, "b'here'\n")


def test_a_script_under_lockstep_run_may_open_a_process_group_of_its_own_beside_the_run(tmp_path):
    script = (
        "import lockstep, torch\n"
        "import torch.distributed as dist\n"
        "run = lockstep.start(lanes=2)\n"
        "dist.init_process_group('lockstep')\n"
        "value = torch.tensor([dist.get_rank() + 1.0])\n"
        "dist.all_reduce(value)\n"
        "run.print(value.item())\n"
        "dist.destroy_process_group()\n"
    )
    code, printed = run_on_two_workers(tmp_path, script, "--torch-distributed")
    assert (code, printed.splitlines()[-1]) == (0, "3.0")


def test_who_does_not_find_worker_0_soon_says_so_and_looks_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "SOON_S", 0.1)
    notes: list[str] = []
    place = LaunchPlace("torchrun", World(1, 2, 0, 1), "localhost", free_port())
    with pytest.raises(BadEnvironment, match="MASTER_ADDR"):
        open_store(place, 0.4, note=notes.append)
    assert len(notes) == 1
    assert "localhost is this host itself" in notes[0]
