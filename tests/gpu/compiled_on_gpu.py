"""A script that trains a small language model which is compiled in one of several ways, and prints its digest."""

import argparse
import json
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from lanes_on_gpu import CONTEXT, WIDTH, WORDS, Block, as_a_host_of_its_own
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep import Run

WAYS = (
    "no",
    "before",
    "after",
    "in-place",
    "regional",
    "lane",
    "reduce-overhead",
    "max-autotune",
    "breaks",
    "checkpointed",
    "optimizer",
    "dynamic",
)


class Gpt(nn.Module):
    """With a graph break or checkpoints in it, if asked."""

    def __init__(self, *, breaks: bool, checkpoints: bool) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.breaks, self.checkpoints = breaks, checkpoints

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x) + self.places.weight
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
            if self.breaks:
                torch._dynamo.graph_break()
        return self.head(self.norm(x))


def compiled(model: Gpt, way: str) -> Callable[[Tensor], Tensor]:
    """The model as it is called; the ways that need the run compile later."""
    match way:
        case "before" | "breaks" | "checkpointed":
            return torch.compile(model)
        case "reduce-overhead" | "max-autotune":
            return torch.compile(model, mode=way)
        case "dynamic":
            return torch.compile(model, dynamic=True)
        case "in-place":
            model.compile()
        case "regional":
            for block in model.blocks:
                block.compile()
    return model


def compile_with_cudnn() -> None:
    """Trains the model's lane once as another program would: torch keeps its graphs, with cuDNN's attention in them."""
    torch.manual_seed(0)
    net, batch = torch.compile(Gpt(breaks=False, checkpoints=False).cuda()), torch.zeros(4, CONTEXT, dtype=torch.long)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), torch.autocast("cuda", torch.bfloat16):
        F.cross_entropy(net(batch.cuda()).flatten(0, -2), batch.cuda().flatten()).backward()
    torch._dynamo.reset()


def main(args: argparse.Namespace) -> None:
    if args.after_cudnn:
        compile_with_cudnn()
    if args.wire == "nccl":
        as_a_host_of_its_own()
    run = lockstep.start(lanes=8, wire=args.wire)
    torch.manual_seed(0)
    model = Gpt(breaks=args.way == "breaks", checkpoints=args.way == "checkpointed")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=args.capture)
    net = compiled(model, args.way)
    run.replicate(net if args.way == "before" else model, optimizer)
    if args.way == "after":
        net = torch.compile(model)
    losses = train(run, net, optimizer, args)
    run.print(json.dumps({"digest": run.digest(), "losses": losses, "workers": run.size, "graphs": args.graphs()}))


def train(run: Run, net: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, args) -> list[float | None]:
    kind = run.device.type

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
            return F.cross_entropy(net(x).flatten(0, -2), y.flatten())

    forward = torch.compile(loss_of) if args.way == "lane" else loss_of
    update = torch.compile(optimizer.step) if args.way == "optimizer" else optimizer.step

    def lane(x: Tensor, y: Tensor) -> Tensor:
        if args.way == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        loss = forward(x, y)
        run.backward(loss)
        return loss

    compute = run.captured(lane, optimizer) if args.capture else lane
    args.graphs = lambda: getattr(compute, "num_graphs", 0)
    losses = []
    for step in range(args.steps):
        torch.manual_seed(step)
        number = 21 if step % 5 == 4 else 32  # uneven lanes now and then
        for x, y in run.lanes((torch.randint(WORDS, (number, CONTEXT)), torch.randint(WORDS, (number, CONTEXT)))):
            compute(x, y)
        losses.append(run.loss)
        update()
        optimizer.zero_grad()
    return losses


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--wire")
    parser.add_argument("--capture", action="store_true")
    parser.add_argument("--after-cudnn", action="store_true")
    main(parser.parse_args())
