"""The models that are measured on a GPU, at the sizes at which people train them there.

All but the MLP compute in bfloat16 by autocast, inside their loss: so every way of training one computes the same.
"""

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.programs.models import Batch, GptShape, Workload, classification_loss, gpt, mlp, normal_batches
from lockstep.programs.packages import require

Loss = Callable[[nn.Module, Batch], Tensor]


def in_bfloat16(loss: Loss) -> Loss:
    """The same loss under autocast, on whatever device the batch is."""

    def autocast_loss(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast(batch[0].device.type, dtype=torch.bfloat16):
            return loss(model, batch)

    return autocast_loss


def gpt10m(
    batch_size: int = 16, context: int = 256, width: int = 384, num_blocks: int = 6, num_tokens: int = 256
) -> Workload:
    """A GPT for characters: 10.8 M parameters, so small that starting its kernels takes longer than they do."""
    return _gpt("gpt10m", GptShape(num_tokens, context, width, num_blocks, num_heads=6), batch_size)


def gpt124m(
    batch_size: int = 16, context: int = 1024, width: int = 768, num_blocks: int = 12, num_tokens: int = 50_304
) -> Workload:
    """GPT-2 small, its table of tokens rounded up to a multiple of 128: 124.5 M parameters."""
    return _gpt("gpt124m", GptShape(num_tokens, context, width, num_blocks, num_heads=12, bias=True), batch_size)


def _gpt(name: str, shape: GptShape, batch_size: int) -> Workload:
    plain = gpt(shape, batch_size)
    return replace(plain, name=name, loss=in_bfloat16(plain.loss), rounds_coarsely=True)


def resnet50(batch_size: int = 128, size: int = 224, num_classes: int = 1000) -> Workload:
    """torchvision's, with channels last in memory: 25.6 M parameters."""

    def make_model() -> nn.Module:
        # Branches that start at zero: at other weights rounding to bfloat16 is amplified until no two sides agree.
        made: nn.Module = torchvision_models("resnet50").resnet50(num_classes=num_classes, zero_init_residual=True)
        return made.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    def make_batch(generator: torch.Generator) -> Batch:
        images, classes = normal_batches(batch_size, 3, size, size, num_classes=num_classes)(generator)
        return images.contiguous(memory_format=torch.channels_last), classes

    loss = in_bfloat16(classification_loss)
    plain = Workload("resnet50", make_model, make_batch, loss, batch_size, per_share_statistics=True)
    return replace(plain, rounds_coarsely=True)


def vit(batch_size: int = 64, size: int = 224, num_classes: int = 1000) -> Workload:
    """torchvision's ViT-B/16: 86.6 M parameters."""

    def make_model() -> nn.Module:
        made: nn.Module = torchvision_models("vit").vit_b_16(image_size=size, num_classes=num_classes)
        return made

    make_batch = normal_batches(batch_size, 3, size, size, num_classes=num_classes)
    return Workload("vit", make_model, make_batch, in_bfloat16(classification_loss), batch_size, rounds_coarsely=True)


def torchvision_models(wanted_by: str) -> Any:
    """The module torchvision.models; a sentence that names torchvision if it is not there."""
    require("torchvision", wanted_by)
    return importlib.import_module("torchvision.models")


LARGE_WORKLOADS: dict[str, Callable[..., Workload]] = {
    "mlp": mlp,
    "gpt10m": gpt10m,
    "gpt124m": gpt124m,
    "resnet50": resnet50,
    "vit": vit,
}
"""How to make each workload of a GPU; without arguments at its reference size."""
