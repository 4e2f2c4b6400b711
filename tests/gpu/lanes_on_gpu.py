"""A script that trains one of several models for some steps and prints its digest, captured or not, killed or not."""

import argparse
import gc
import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep
from lockstep import Run
from lockstep.strategies.sharded import offload
from lockstep.wire.cuda.nccl import NcclGroup

sys.path.append(str(Path(__file__).parents[1] / "recovery"))
from faults import Fault, Script

WIDTH, CONTEXT, WORDS = 64, 32, 97


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        heads = [part.unflatten(2, (4, -1)).transpose(1, 2) for part in self.attend(self.before(x)).chunk(3, 2)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(self.out(mixed))
        return x + self.drop(self.narrow(F.gelu(self.wide(self.after(x)))))


class Gpt(nn.Module):
    """Tied embeddings, dropout, and a layer that only some steps reach."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.words(x) + self.places.weight)))

    def data(self, number: int) -> tuple[Tensor, Tensor]:
        return torch.randint(WORDS, (number, CONTEXT)), torch.randint(WORDS, (number, CONTEXT))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.inner(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), Residual(32), nn.MaxPool2d(2), Residual(32)
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(self.layers(x).mean((2, 3)), 0.2, self.training))

    def data(self, number: int) -> tuple[Tensor, Tensor]:
        return torch.randn(number, 3, 16, 16), torch.randint(10, (number,))


class Half(Gpt):
    """Parameters in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)


MODELS = {"gpt": Gpt, "resnet": ResNet, "bf16": Gpt, "half": Half}


def as_a_host_of_its_own() -> None:
    """NCCL takes one GPU of one host for one worker: each worker is a host of its own to it."""
    os.environ["NCCL_HOSTID"] = f"test-{os.getpid()}"
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def started_as() -> int:
    """The number that this worker's launcher gave it: run.rank is another one after a loss."""
    return int(os.environ.get("LOCKSTEP_RANK") or os.environ["RANK"])


def die_once_while_connecting(mark: str) -> None:
    """The first worker in the run that comes here is killed when the others make a communicator with it."""

    def make(group: NcclGroup, *_: object) -> None:
        with open(Path(os.environ["LOCKSTEP_RUN_DIR"]) / mark, "x"):
            os.kill(os.getpid(), signal.SIGKILL)

    if not (Path(os.environ["LOCKSTEP_RUN_DIR"]) / mark).exists():
        NcclGroup._make = make


def script_faults(run: Run, args: argparse.Namespace) -> Script:
    """What is to happen to this worker; nothing happens to one that takes another's place, unless it is said so."""
    is_new = not run.guard.is_member
    if (is_new and args.kill_joining) or (started_as() == args.kill_reforming and not is_new):
        die_once_while_connecting("connecting")
    worker, step, point = args.fault.split(":")
    return Script([] if is_new else [Fault(int(worker), int(step), point)], started_as())


def count_those_that_leave() -> list[int]:
    """A 1 for each parameter that has left the GPU in a lane. Here they do so one by one, though they are small."""
    offload.GROUP_BYTES = 1
    found, leave = list[int](), offload.Offloadable.leave

    def counted(self: offload.Offloadable) -> None:
        leave(self)
        found.append(1)

    offload.Offloadable.leave = counted
    return found


def main(args: argparse.Namespace) -> None:
    if args.wire == "nccl":
        as_a_host_of_its_own()
    left = count_those_that_leave()
    run = lockstep.start(
        lanes=args.lanes,
        reduce_dtype=args.reduce_dtype,
        drift_every=10,
        noise_every=7,
        wire=args.wire,
        strategy=f"sharded:{args.sharded}" if args.sharded else "replicated",
    )
    faults = script_faults(run, args)
    model = MODELS[args.model]()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=torch.tensor(1e-3) if args.update else 1e-3, fused=True, capturable=args.update
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.01 * step))
    scaler = torch.amp.GradScaler("cuda") if args.scaler else None
    run.replicate(model, optimizer, scheduler=scheduler, **({} if scaler is None else {"scaler": scaler}))

    def lane(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=args.model == "bf16"):
            loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        run.backward(loss, scaler=scaler)
        if torch.cuda.is_current_stream_capturing():
            assert not gc.isenabled(), "garbage that holds GPU memory would break the recording"
        if args.waits:
            loss.item()
        if args.breaks and torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        return loss

    compute = run.captured(lane, optimizer if args.update else None) if args.captured else lane
    faults.watch(run)
    losses = train(run, model, optimizer, scheduler, scaler, compute, args, faults)
    result = {
        "digest": run.digest(),
        "losses": losses,
        "workers": run.size,
        "graphs": getattr(compute, "num_graphs", 0),
        "updates": any(update._graphs for update in run._captures._updates.values()),
        "noise": repr(run.noise),
        "memory": torch.cuda.memory_allocated(),
        "buckets": type(run._engine._buckets.buckets[0]).__name__,
        "state_on": sorted({v.device.type for s in optimizer.state.values() for v in s.values() if v.dim()}),
        "left": sum(left),
        "on_default_stream": torch.cuda.current_stream() == torch.cuda.default_stream(),
    }
    run.print(json.dumps(result))


def train(run: Run, model, optimizer, scheduler, scaler, compute, args, faults: Script) -> list[float | None]:
    losses = []
    for step in range(run.step, args.steps):
        torch.manual_seed(step)
        number = 21 if step % 5 == 4 else args.batch  # uneven lanes now and then
        batch = model.data(number)
        for x, y in run.lanes(batch):
            kept = compute(x, y)  # noqa: F841  as who logs a loss does, until the next lane has been recorded
            if args.kill == f"{started_as()}:{step}" and args.kill_in == "lanes":
                os.kill(os.getpid(), signal.SIGKILL)
        losses.append(run.loss)
        if scaler is not None:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        faults.reach("before update")
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        if args.kill == f"{started_as()}:{step}":
            os.kill(os.getpid(), signal.SIGKILL)
        if args.pause_s:
            time.sleep(args.pause_s)
    return losses


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--wire")
    parser.add_argument("--reduce-dtype")
    parser.add_argument("--kill", help="RANK:STEP", default="")
    parser.add_argument("--kill-in", choices=("lanes", "update"), default="update")
    parser.add_argument("--fault", help="RANK:STEP:POINT, a point of tests/recovery/faults.py", default="-1:0:")
    parser.add_argument("--kill-reforming", type=int, help="RANK: when it makes the second communicator", default=-1)
    parser.add_argument("--kill-joining", action="store_true", help="the first that joins, likewise")
    parser.add_argument("--pause-s", type=float, default=0.0)
    parser.add_argument("--memory-of-others", dest="wire", action="store_const", const="gpu")
    parser.add_argument("--sharded", nargs="?", const="optimizer", help="the level")
    for flag in ("captured", "update", "scaler", "waits", "breaks"):
        parser.add_argument(f"--{flag}", action="store_true")
    main(parser.parse_args())
