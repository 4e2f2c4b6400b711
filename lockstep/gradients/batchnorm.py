"""Batch norm over the whole global batch: the lanes of a step exchange their statistics, forward and backward.

# Note [Lane weights in batch norm's backward]
# With x_v, dy_v of lane v, u_v = x_v - mean, M elements per channel over all lanes, and L = sum_v w_v·loss_v / w,
# w = sum_v w_v, the gradient of L with respect to lane u's input is
#     w_u/w · γ·s · (dy_u - 1/(w_u·M) · [ sum_v w_v·Σdy_v + u_u·s² · sum_v w_v·Σ(dy_v·u_v) ]),   s = 1/sqrt(var + eps).
# dy_v here is the gradient of lane v's own loss, and the factor w_u/w is applied later, to the lane's parameters (see
# Note [One place for the weight]), so the backward below returns the rest.

# Note [A loss in the middle of a lane]
# An exception in a forward or backward pass would end the user's loop. So when a worker is lost there, the layer goes
# on with what this worker has, and remembers it: the step is found spoilt when its lanes end, and is computed again.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.errors import BadArgument, Disagreement, Misuse, WorkerLost, naming_lost_worker
from lockstep.events import Events, Wait
from lockstep.gradients.plan import StepPlan
from lockstep.wire.transport import STATISTICS, InProcess, Transport


@dataclass
class Statistics:
    """Exchanges per-channel sums between the workers whose lanes are computed at the same time."""

    num_channels: int
    events: Events
    transport: Transport = field(default_factory=InProcess)
    carriers: tuple[int, ...] = ()
    weight: float = 1.0
    step: int = 0
    failure: WorkerLost | None = None
    """Who was lost in the step under way. See Note [A loss in the middle of a lane]."""

    def begin(self, plan: StepPlan, transport: Transport) -> None:
        """Starts a step over `transport`; refuses one whose lanes are not all computed at the same time."""
        assignment = plan.assignment
        self.transport, self.step, self.failure = transport, plan.step, None
        if any(len(lanes) > 1 for lanes in assignment.lanes_of):
            raise Misuse(
                f"synchronised batch norm needs all lanes of a step at the same time, but {assignment.num_lanes} lanes "
                f"on {assignment.num_workers} workers are computed one after the other. "
                f"Start with lanes={assignment.num_workers}, or keep ordinary batch norm."
            )
        carrier = assignment.carriers()
        self.carriers = tuple(carrier[lane] for lane in plan.present)

    def gather(self, layer: int, values: torch.Tensor) -> torch.Tensor:
        """Collective among the carriers. One row per lane, in lane order. All messages have one size."""
        own = self.transport.world.rank
        if own not in self.carriers or self.failure is not None:
            # Outside of training lanes, or in a step that is spoilt: this worker's data are all there is.
            return values.unsqueeze(0)
        message = torch.full((2 * self.num_channels + 2,), float(layer), dtype=torch.float64, device="cpu")
        message[1 : 1 + values.numel()] = values
        rows = {peer: torch.empty_like(message) for peer in self.carriers if peer != own}
        try:
            with naming_lost_worker(self.step, f"batch norm layer {layer}"):
                pending = [self.transport.receive(row, peer, STATISTICS) for peer, row in rows.items()]
                pending += [self.transport.send(message, peer, STATISTICS) for peer in rows]
                with self.events.waiting(Wait.STATISTICS):
                    for transfer in pending:
                        transfer.wait()
        except WorkerLost as lost:
            self.failure = lost
            return values.unsqueeze(0)
        rows[own] = message
        self._check_layer(rows, own)
        return torch.stack([rows[peer][1 : 1 + values.numel()] for peer in self.carriers])

    def _check_layer(self, rows: dict[int, torch.Tensor], own: int) -> None:
        for peer, row in rows.items():
            if row[0] != rows[own][0]:
                mine, theirs = f"layer {int(rows[own][0])}", f"layer {int(row[0])}"
                raise Disagreement("the batch norm layer under way", own, mine, peer, theirs)


class SyncBatchNorm(_BatchNorm):
    """Batch norm whose statistics in training are those of the whole global batch.

    Made by `sync_batchnorm`; `run.replicate` connects it. Not connected, it is ordinary batch norm.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.statistics: Statistics | None = None
        self.layer = 0

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise BadArgument(f"batch norm needs at least 2 dimensions, got {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        over_batch = self.training or self.running_mean is None
        if self.statistics is None or not over_batch:
            return super().forward(input)
        self._check_input_dim(input)
        output: torch.Tensor
        output, mean, var, count = _Normalise.apply(
            input, self.weight, self.bias, self.eps, self.statistics, self.layer
        )
        if self.training and self.track_running_stats:
            self._track(mean, var * count / (count - 1))
        return output

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, unbiased_var: torch.Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased_var.to(self.running_var.dtype), momentum)


def sync_batchnorm(model: torch.nn.Module) -> torch.nn.Module:
    """Replaces every BatchNorm layer of `model` by one with statistics over the whole global batch; returns the model.

    Parameters, buffers, hooks on other modules and names stay. Call it before making the optimizer or after: the
    parameters are the same objects. The run must have one lane per worker; a step that does not says so.
    """
    if isinstance(model, _BatchNorm) and not isinstance(model, SyncBatchNorm):
        return _converted(model)
    for name, child in list(model.named_children()):
        if (new := sync_batchnorm(child)) is not child:
            setattr(model, name, new)
    return model


def norms_by_lane(modules: Iterable[torch.nn.Module]) -> list[_BatchNorm]:
    """The BatchNorm layers of the models whose statistics in training are those of a lane, in whatever mode."""
    layers = (layer for module in modules for layer in module.modules())
    return [layer for layer in layers if isinstance(layer, _BatchNorm) and not isinstance(layer, SyncBatchNorm)]


def lane_norm_note(modules: Iterable[torch.nn.Module], shares: Collection[int], num_lanes: int) -> str:
    """What to know of batch norm in a step whose lanes hold so many samples each; empty if there is nothing."""
    if num_lanes == 1 or not any(layer.training for layer in norms_by_lane(modules)):
        return ""
    few = f", which {len(shares)} of {num_lanes} lanes share" if len(shares) < num_lanes else ""
    return (
        f"BatchNorm sees the {max(shares)} samples of a lane, not the {sum(shares)} of the batch{few}; what to do if "
        'those are few is in docs/lanes.md, "BatchNorm by lane"'
    )


def connect(modules: Iterable[torch.nn.Module], events: Events) -> Statistics | None:
    """Gives every SyncBatchNorm in `modules` one common exchange; None if there is none."""
    layers = [m for module in modules for m in module.modules() if isinstance(m, SyncBatchNorm)]
    if not layers:
        return None
    statistics = Statistics(max(layer.num_features for layer in layers), events)
    for number, layer in enumerate(layers):
        layer.statistics, layer.layer = statistics, number
    return statistics


def _converted(layer: _BatchNorm) -> SyncBatchNorm:
    new = SyncBatchNorm(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
    new.training = layer.training
    for name in ("weight", "bias"):
        new.register_parameter(name, getattr(layer, name))
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        new.register_buffer(name, getattr(layer, name))
    return new


class _Normalise(torch.autograd.Function):
    """y = (x - mean)/sqrt(var + eps)·γ + β with mean and var over all lanes."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        statistics: Statistics,
        layer: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
        mean, var, count = _global_moments(x, statistics, layer)
        ctx.statistics, ctx.layer, ctx.count = statistics, layer, count
        stats_dtype = x.dtype if weight is None else weight.dtype
        mean_here, var_here = mean.to(x.device, stats_dtype), var.to(x.device, stats_dtype)
        ctx.save_for_backward(x, weight, mean_here, (var + eps).rsqrt().to(x.device, stats_dtype))
        output = F.batch_norm(x, mean_here, var_here, weight, bias, training=False, eps=eps)
        ctx.mark_non_differentiable(mean_here, var_here)
        return output, mean_here, var_here, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, weight, mean, scale = ctx.saved_tensors
        dims, shape = _channel_dims(x)
        centred = _wide(x) - mean.view(shape)
        sum_dy = _wide(dy).sum(dims)
        sum_dy_centred = (_wide(dy) * centred).sum(dims)
        total_dy, total_dy_centred = _weighted_totals(ctx.statistics, ctx.layer, sum_dy, sum_dy_centred)
        factor = scale if weight is None else scale * weight
        inner = total_dy.view(shape) + centred * (scale * scale * total_dy_centred).view(shape)
        dx = factor.view(shape) * (_wide(dy) - inner / ctx.count)
        grad_weight = None if weight is None else (sum_dy_centred * scale).to(weight.dtype)
        grad_bias = None if weight is None else sum_dy.to(weight.dtype)
        return dx.to(x.dtype), grad_weight, grad_bias, None, None, None


def _global_moments(x: torch.Tensor, statistics: Statistics, layer: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Mean, biased variance and number of elements per channel over all lanes, in float64, in lane order."""
    dims, shape = _channel_dims(x)
    wide = _wide(x)
    mean = wide.mean(dims)
    squares = (wide - mean.view(shape)).square().sum(dims)
    count = x.numel() // x.shape[1]
    mine = torch.cat(
        [torch.tensor([count], dtype=torch.float64, device="cpu"), mean.double().cpu(), squares.double().cpu()]
    )
    rows = statistics.gather(layer, mine)
    counts, (means, squares) = rows[:, :1], rows[:, 1:].view(len(rows), 2, -1).unbind(1)
    total = float(counts.sum())
    if total <= 1:
        raise BadArgument("batch norm in training needs more than one value per channel in the global batch")
    mean = (counts * means).sum(0) / total
    var = (squares + counts * (means - mean).square()).sum(0) / total
    return mean, var, total


def _weighted_totals(
    statistics: Statistics, layer: int, sum_dy: torch.Tensor, sum_dy_centred: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums over all lanes, each counted by its weight relative to this one's."""
    if statistics.weight == 0:
        raise Misuse("synchronised batch norm cannot give a lane the weight 0: leave its samples out of the batch")
    own = torch.tensor([statistics.weight], dtype=torch.float64, device="cpu")
    mine = torch.cat([own, sum_dy.double().cpu(), sum_dy_centred.double().cpu()])
    rows = statistics.gather(layer, mine)
    relative = rows[:, :1] / statistics.weight
    totals = (relative * rows[:, 1:]).sum(0).to(sum_dy.device, sum_dy.dtype)
    first, second = totals.view(2, -1)
    return first, second


def _channel_dims(x: torch.Tensor) -> tuple[list[int], list[int]]:
    """All dimensions but the channels', and the shape that spreads a channel's number over them."""
    dims = [dim for dim in range(x.dim()) if dim != 1]
    return dims, [-1 if dim == 1 else 1 for dim in range(x.dim())]


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
