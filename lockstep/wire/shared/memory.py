"""The shared memory of one host's workers: own segments, those mapped from others, and tensors in them."""

import json
import os
import threading
import time
from collections.abc import Iterable, Sequence
from itertools import count

import torch

from lockstep.errors import BadEnvironment
from lockstep.wire.shared import semaphores
from lockstep.wire.shared.neighbours import MAX_FILES, Neighbours
from lockstep.wire.shared.segments import SharedSegment, mapped

MAX_NEWS = 2000
"""How many released segments a message names; the next message has the rest."""


class HostMemory:
    """Segments, by the rank that made them and a number. Any thread. Its owner calls `close`.

    `reveal` sends the file of a segment to the peers when it is first needed. A peer reads its mail when `view` gets a
    number that it does not know. The same messages name released segments.
    """

    def __init__(self, neighbours: Neighbours) -> None:
        self.neighbours = neighbours
        self.num_forgotten = 0
        self._lock = threading.RLock()
        self._numbers = count()
        self._own: dict[int, SharedSegment] = {}
        self._released: list[int] = []
        self._theirs: dict[tuple[int, int], torch.Tensor] = {}
        self._files: dict[int, list[int]] = {}
        """Files of `send_file` that have arrived, by the peer that sent them."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """New shared memory, as bytes. Peers see it after `reveal`."""
        segment = SharedSegment(next(self._numbers), num_bytes, self.neighbours.sockets)
        with self._lock:
            self._own[segment.bytes.data_ptr()] = segment
        return segment.bytes

    def release(self, tensor: torch.Tensor) -> None:
        """The memory under a tensor will not be revealed again; tensors that view it stay valid."""
        with self._lock:
            segment = self._own.pop(tensor.data_ptr(), None)
            if segment is not None:
                if segment.is_known:
                    self._released.append(segment.number)
                segment.close()
                self.num_forgotten += 1

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """The number of this worker's segment at whose start the tensor begins, if there is one."""
        segment = self._own.get(tensor.data_ptr())
        return None if segment is None else segment.number

    def reveal(self, tensors: Iterable[torch.Tensor]) -> list[int]:
        """The numbers of the segments that hold these tensors, which peers can `view` from now on."""
        with self._lock:
            segments = [self._own[tensor.data_ptr()] for tensor in tensors]
            new = {segment.number: segment for segment in segments if not segment.is_known}
            if new:
                self._send(list(new.values()))
            return [segment.number for segment in segments]

    def view(self, peer: int, number: int) -> torch.Tensor:
        """The bytes of a peer's segment, which that peer has revealed."""
        with self._lock:
            if peer == self.neighbours.rank:
                return next(segment.bytes for segment in self._own.values() if segment.number == number)
            while (peer, number) not in self._theirs:
                self._read_mail(peer)
            return self._theirs[peer, number]

    def next_of(self, peer: int) -> torch.Tensor:
        """The bytes of the next segment that a peer reveals, for both sides to use from the start."""
        with self._lock:
            known = set(self._theirs)
            self._read_mail(peer)
            (new,) = set(self._theirs) - known
            return self._theirs[new]

    def send_file(self, file: int) -> None:
        """Every peer receives the open file by `next_file`; the caller keeps its own."""
        with self._lock:
            for peer in self.neighbours.sockets:
                self._hand_over(peer, _message([], [], num_files=1), [file])

    def next_file(self, peer: int) -> int:
        """The next file that a peer has sent; the caller closes it."""
        with self._lock:
            while not self._files.get(peer):
                self._read_mail(peer)
            return self._files[peer].pop(0)

    def close(self) -> None:
        with self._lock:
            for segment in self._own.values():
                segment.close()
            for file in (file for files in self._files.values() for file in files):
                os.close(file)
            self._own.clear()
            self._theirs.clear()
            self._files.clear()

    def _send(self, segments: list[SharedSegment]) -> None:
        for start in range(0, len(segments), MAX_FILES):
            batch = segments[start : start + MAX_FILES]
            released, self._released = self._released[:MAX_NEWS], self._released[MAX_NEWS:]
            message = _message(batch, released, num_files=0)
            for peer in self.neighbours.sockets:
                self._hand_over(peer, message, [segment.file for segment in batch])
            for segment in batch:
                segment.close()

    def _hand_over(self, peer: int, message: bytes, files: list[int]) -> None:
        """The kernel limits how many of a user's files are in transit: when there are too many, reads the mail."""
        deadline = time.monotonic() + self.neighbours.timeout_s
        while not self.neighbours.try_send(peer, message, files):
            if time.monotonic() > deadline:
                raise BadEnvironment(
                    "too many files are in transit between the workers of this host: raise the limit with ulimit -n"
                )
            self.read_mail()
            self.neighbours.wait_for_mail(semaphores.LOOK_S)

    def read_mail(self) -> None:
        """Reads all messages of peers, so that their files are not in transit any more."""
        with self._lock:
            for peer in self.neighbours.with_mail():
                self._read_mail(peer)

    def _read_mail(self, peer: int) -> None:
        text, files = self.neighbours.receive(peer)
        message = json.loads(text)
        for number in message["released"]:
            self._theirs.pop((peer, number), None)
            self.num_forgotten += 1
        segments = message["new"]
        if len(files) != len(segments) + message["files"]:
            raise BadEnvironment(
                f"files of worker {peer} did not arrive: this process has too many open. Raise the limit with ulimit -n"
            )
        for (number, num_bytes), file in zip(segments, files, strict=False):  # behind them come those of `send_file`
            self._theirs[peer, number] = mapped(file, num_bytes)
            os.close(file)
        self._files.setdefault(peer, []).extend(files[len(segments) :])


def _message(new: Sequence[SharedSegment], released: Sequence[int], num_files: int) -> bytes:
    """What is sent with the files of new segments, and with `num_files` others behind them."""
    numbers = [[segment.number, segment.num_bytes] for segment in new]
    return json.dumps({"new": numbers, "released": list(released), "files": num_files}).encode()


class Staging:
    """Typed tensors in the shared memory of this worker, and copies there of tensors from elsewhere."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._kept: dict[tuple[torch.dtype, int], torch.Tensor] = {}

    def allocate(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat tensor that needs no copy. Any thread."""
        if device.type != "cpu" or num_elements == 0:
            return torch.empty(num_elements, dtype=dtype, device=device)
        return self._memory.allocate(num_elements * dtype.itemsize).view(dtype)

    def release(self, tensor: torch.Tensor) -> None:
        self._memory.release(tensor)

    def shared(self, tensor: torch.Tensor, slot: int, *, filled: bool) -> torch.Tensor:
        """The tensor itself if peers can see it, else its place in shared memory, `filled` with a copy or not."""
        if self._memory.number_of(tensor) is not None:
            return tensor
        kept = self._kept.get((tensor.dtype, slot))
        if kept is None or kept.numel() < tensor.numel():
            if kept is not None:
                self.release(kept)
            kept = self._kept[tensor.dtype, slot] = self.allocate(tensor.numel(), tensor.dtype, tensor.device)
        staged = kept[: tensor.numel()]
        return staged.copy_(tensor) if filled else staged

    def roots_and_place(
        self, roots: Sequence[torch.Tensor], total: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The roots where peers can see them, and the place there for their sum, which may be the first root's."""
        shared = [self.shared(root, slot, filled=True) for slot, root in enumerate(roots)]
        in_place = bool(roots) and roots[0] is total
        return shared, shared[0] if in_place else self.shared(total, len(roots), filled=False)
