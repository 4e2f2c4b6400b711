"""A folder takes the checkpoints of one training at a time; one that was killed keeps nobody out."""

import fcntl
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from launches import launch

from lockstep.state.checkpoints import in_use
from lockstep.state.checkpoints.in_use import FILE, FolderUse

SCRIPT = """
import os, select, torch, lockstep
from torch.utils.data import DataLoader, TensorDataset

run = lockstep.start(lanes=4, seed=1)
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
run.replicate(model, optimizer)
loader = run.shard(DataLoader(TensorDataset(torch.linspace(-1, 1, 32).view(16, 2)), batch_size=4, num_workers=1))
run.checkpoints(FOLDER, every_steps=1)
for epoch in run.epochs(6):
    for batch in loader:
        for (x,) in run.lanes(batch):
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.print("at step", run.step, flush=True)
        while run.step == 6 and not os.path.exists("go on"):
            select.select([], [], [], 0.05)
run.print("digest", run.digest())
"""


def use_of(folder: Path) -> FolderUse:
    return FolderUse(folder, print)


@contextmanager
def process(act: Callable[[], object]) -> Iterator[int]:
    """A forked process that has done something, and waits to be killed; inside of the block it lives."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        act()
        os.write(writer, b"x")
        signal.pause()
    os.close(writer)
    assert os.read(reader, 1) == b"x", "it has died"
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reader)


def test_a_folder_is_refused_while_another_process_uses_it_and_no_longer(tmp_path: Path) -> None:
    use = use_of(tmp_path / "kept")
    with process(use_of(tmp_path / "kept").claim) as pid:
        assert f"another training, which goes on (process {pid} of this host)" in use.claim()
    assert use.claim() == ""
    use.close()


def test_whoever_belongs_to_a_training_keeps_others_out_when_its_first_worker_is_gone(tmp_path: Path) -> None:
    use = use_of(tmp_path)
    with ExitStack() as first:
        first.enter_context(process(use_of(tmp_path).claim))
        with process(use_of(tmp_path).join) as other:
            first.close()
            assert f"process {other} " in use.claim()
    assert use.claim() == ""
    use.close()


def test_a_child_of_a_worker_keeps_nobody_out_and_a_copy_does(tmp_path: Path) -> None:
    use, another = use_of(tmp_path), use_of(tmp_path)
    assert use.claim() == ""
    with process(lambda: None), process(use.join) as copy:
        use.close()
        assert f"process {copy} " in another.claim()
    assert use.claim() == ""
    with process(lambda: None):
        use.close()
        with process(lambda: _claim_or_die(another)):
            pass


def _claim_or_die(use: FolderUse) -> None:
    if use.claim():
        os._exit(1)


def test_a_training_of_another_host_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    use = FolderUse(tmp_path, said.append)
    with process(use_of(tmp_path).claim):
        monkeypatch.setattr(in_use, "_host", lambda: "another")
        assert use.claim() == ""
    assert [text.startswith("another training, on host") for text in said] == [True]
    use.close()


def test_nobody_else_looks_while_a_training_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def look_too(_: str) -> None:
        descriptor = os.open(tmp_path, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)
        looked.append(tmp_path)

    looked: list[Path] = []
    with process(use_of(tmp_path).claim):
        monkeypatch.setattr(in_use, "_host", lambda: "another")
        use = FolderUse(tmp_path, look_too)
        assert use.claim() == ""
        use.close()
    assert looked == [tmp_path]


def test_a_file_that_tells_nothing_of_its_training_is_noted(tmp_path: Path) -> None:
    said: list[str] = []
    use = FolderUse(tmp_path, said.append)
    with process(use_of(tmp_path).claim):
        (tmp_path / FILE).write_text("")
        assert use.claim() == ""
    assert len(said) == 1
    use.close()


def test_whoever_joins_again_holds_one_descriptor(tmp_path: Path) -> None:
    use = use_of(tmp_path)
    before = os.listdir("/proc/self/fd")
    assert use.claim() == ""
    for _ in range(3):
        use.join()
    use.close()
    assert os.listdir("/proc/self/fd") == before


def test_where_nothing_can_be_written_nobody_is_kept_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    use = use_of(tmp_path / "file")
    assert use.claim() == ""
    use.join()
    use.close()


def test_a_second_launch_is_refused_and_one_after_a_kill_goes_on(tmp_path: Path) -> None:
    script, first, second = SCRIPT.replace("FOLDER", repr(str(tmp_path / "kept"))), tmp_path / "a", tmp_path / "b"
    with launch(first, script, "-n", "2") as run:
        run.wait_for("at step 6")
        with launch(second, script, "-n", "3") as other:
            assert other.finish() != 0
            assert "takes the checkpoints of another training, which goes on" in other.shown()
    (second / "go on").touch()
    with launch(second, script, "-n", "3") as other:
        assert other.finish() == 0, other.shown()
        assert "going on from step-" in other.shown()
    assert (tmp_path / "kept" / FILE).exists()
