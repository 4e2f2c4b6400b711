"""The reference models, in plain torch, each with data to learn from and a loss: what is measured and shown.

None of them draws random numbers in its forward pass, so any two ways of training one must agree to rounding.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
"""Inputs and targets of one global batch; dimension 0 counts samples."""


@dataclass(frozen=True)
class Workload:
    """A model and what it is trained on.

    `make_model()` draws the initial weights from torch's global generator, `make_batch(generator)` a whole
    global batch from the one it is given. `per_share_statistics`: the model has BatchNorm, so that
    its result depends on how the batch is cut. `rounds_coarsely`: its loss computes in bfloat16.
    """

    name: str
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[torch.Generator], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    batch_size: int
    per_share_statistics: bool = False
    rounds_coarsely: bool = False


def classification_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy over the samples of the batch."""
    inputs, classes = batch
    return F.cross_entropy(model(inputs), classes)


def token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy over the tokens of the batch."""
    tokens, next_tokens = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), next_tokens.flatten())


def normal_batches(batch_size: int, *shape: int, num_classes: int = 10) -> Callable[[torch.Generator], Batch]:
    """What makes batches of normal inputs of this shape, each of some class."""

    def make_batch(generator: torch.Generator) -> Batch:
        inputs = torch.randn(batch_size, *shape, generator=generator)
        return inputs, torch.randint(0, num_classes, (batch_size,), generator=generator)

    return make_batch


# -- mlp ----------------------------------------------------------------------------------------------------


def make_mlp(width: int = 1024, num_hidden: int = 6, num_classes: int = 10) -> nn.Sequential:
    """Equal square layers; 6.3 M parameters by default."""
    hidden: list[nn.Module] = []
    for _ in range(num_hidden):
        hidden += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(width, num_classes))


def mlp(batch_size: int = 64, width: int = 1024) -> Workload:
    return Workload("mlp", lambda: make_mlp(width), normal_batches(batch_size, width), classification_loss, batch_size)


# -- wide ---------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """One table for all categorical fields, then an MLP over the joined rows; 8.5 M parameters."""

    def __init__(
        self, num_categories: int = 50_000, width: int = 128, num_fields: int = 8, num_classes: int = 2
    ) -> None:
        super().__init__()
        joined = width * num_fields
        self.table = nn.Embedding(num_categories, width)
        self.deep = nn.Sequential(
            nn.Linear(joined, joined),
            nn.ReLU(),
            nn.Linear(joined, joined),
            nn.ReLU(),
            nn.Linear(joined, num_classes),
        )

    def forward(self, fields: Tensor) -> Tensor:
        logits: Tensor = self.deep(self.table(fields).flatten(1))
        return logits


def wide(batch_size: int = 256) -> Workload:
    def make_batch(generator: torch.Generator) -> Batch:
        fields = torch.randint(0, 50_000, (batch_size, 8), generator=generator)
        return fields, torch.randint(0, 2, (batch_size,), generator=generator)

    return Workload("wide", Wide, make_batch, classification_loss, batch_size)


# -- gpt ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GptShape:
    """The sizes of a GPT; 10.9 M parameters by default. `bias`: linear layers have one, as in GPT-2."""

    num_tokens: int = 512
    context: int = 128
    width: int = 384
    num_blocks: int = 6
    num_heads: int = 6
    bias: bool = False


class GptBlock(nn.Module):
    """Attention to earlier tokens, then an MLP for each token, each normed before and added after."""

    def __init__(self, width: int, num_heads: int, bias: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.mix = nn.Linear(width, width, bias=bias)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.down = nn.Linear(4 * width, width, bias=bias)

    def forward(self, stream: Tensor) -> Tensor:
        stream = stream + self.attend(self.attention_norm(stream))
        changed: Tensor = stream + self.down(F.gelu(self.up(self.mlp_norm(stream))))
        return changed

    def attend(self, stream: Tensor) -> Tensor:
        batch, length, width = stream.shape
        heads = self.qkv(stream).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: Tensor = self.mix(attended.transpose(1, 2).reshape(batch, length, width))
        return mixed


class Gpt(nn.Module):
    """A decoder-only transformer with learned positions; one table reads tokens and scores the next one."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.num_tokens, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        blocks = (GptBlock(shape.width, shape.num_heads, shape.bias) for _ in range(shape.num_blocks))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(shape.width)
        self.apply(_draw_small)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores for the token after each of `tokens`: [batch, length] to [batch, length, num_tokens]."""
        stream = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return F.linear(self.norm(self.blocks(stream)), self.tokens.weight)


def _draw_small(module: nn.Module) -> None:
    """GPT-2's initial weights: with torch's default for tables, tied scores would start far too large."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def gpt(shape: GptShape | None = None, batch_size: int = 8) -> Workload:
    sizes = shape or GptShape()

    def make_batch(generator: torch.Generator) -> Batch:
        text = torch.randint(0, sizes.num_tokens, (batch_size, sizes.context + 1), generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    return Workload("gpt", lambda: Gpt(sizes), make_batch, token_loss, batch_size)


def gpt50m(batch_size: int = 8) -> Workload:
    """A GPT whose parameters, gradients and optimizer state take more than Python and torch: 49.5 M parameters."""
    shape = GptShape(num_tokens=8192, context=16, width=640, num_blocks=9, num_heads=8)
    return replace(gpt(shape, batch_size), name="gpt50m")


# -- cnn ----------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """Two convolutions with BatchNorm, added to their input, which is projected where the shape changes."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_convolution(channels_in, channels, 3, stride),
            nn.ReLU(),
            *_convolution(channels, channels, 3, 1),
        )
        same = channels_in == channels and stride == 1
        self.skip = nn.Identity() if same else nn.Sequential(*_convolution(channels_in, channels, 1, stride))

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.body(images) + self.skip(images))


def _convolution(channels_in: int, channels: int, size: int, stride: int) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    convolution = nn.Conv2d(channels_in, channels, size, stride, padding=size // 2, bias=False)
    return convolution, nn.BatchNorm2d(channels)


def make_cnn(num_classes: int = 10) -> nn.Sequential:
    """A ResNet with 8 layers for 32×32 images; 0.3 M parameters."""
    return nn.Sequential(
        *_convolution(3, 32, 3, 1),
        nn.ReLU(),
        Residual(32, 32, 1),
        Residual(32, 64, 2),
        Residual(64, 128, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, num_classes),
    )


def cnn(batch_size: int = 64) -> Workload:
    make_batch = normal_batches(batch_size, 3, 32, 32)
    return Workload("cnn", make_cnn, make_batch, classification_loss, batch_size, per_share_statistics=True)


# -- the registry -------------------------------------------------------------------------------------------

WORKLOADS: dict[str, Callable[[], Workload]] = {"mlp": mlp, "wide": wide, "gpt": gpt, "cnn": cnn}
"""How to make each reference workload; without arguments at its reference size."""


def reference_workload(name: str) -> Workload:
    return WORKLOADS[name]()


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
