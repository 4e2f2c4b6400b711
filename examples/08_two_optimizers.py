"""Two models and two optimizers: a small GAN that learns points on a circle.

    python examples/08_two_optimizers.py
    lockstep run -n 2 examples/08_two_optimizers.py

Each model is replicated with its own optimizer, and each update is a `run.lanes` loop over the same
batch. Noise drawn inside a lane belongs to the lane, not to the worker. Look at how far generated
points are away from the circle, less and less, and at the digest, the same on any number of
workers.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep


def circle(num_points: int) -> TensorDataset:
    """Points on a circle with radius 2, a little blurred."""
    angle = 6.28 * torch.rand(num_points)
    return TensorDataset(2 * torch.stack([angle.cos(), angle.sin()], dim=1) + 0.05 * torch.randn(num_points, 2))


def network(num_inputs: int, num_outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(num_inputs, 64),
        nn.LeakyReLU(0.2),
        nn.Linear(64, 64),
        nn.LeakyReLU(0.2),
        nn.Linear(64, num_outputs),
    )


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.5, 0.99))


def judged(scores: torch.Tensor, real: bool) -> torch.Tensor:
    """How far the scores are from saying that all points are real, or that none is."""
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(real)))


def main() -> None:
    run = lockstep.start(lanes=2)
    loader = run.shard(DataLoader(circle(1000), batch_size=100, shuffle=True))
    generator, critic = network(4, 2), network(2, 1)
    generator_optimizer, critic_optimizer = adam(generator), adam(critic)
    run.replicate(generator, generator_optimizer)
    run.replicate(critic, critic_optimizer)

    for epoch in run.epochs(30):
        for batch in loader:
            for (points,) in run.lanes(batch):
                fake = generator(torch.randn(len(points), 4, device=run.device)).detach()
                run.backward(judged(critic(points), real=True) + judged(critic(fake), real=False))
            critic_loss = run.loss
            critic_optimizer.step()

            for (points,) in run.lanes(batch):
                fake = generator(torch.randn(len(points), 4, device=run.device))
                run.backward(judged(critic(fake), real=True))
            generator_optimizer.step()
            for optimizer in (generator_optimizer, critic_optimizer):
                optimizer.zero_grad()
        if epoch % 5 == 4:
            away = (generator(torch.randn(500, 4, device=run.device)).norm(dim=1) - 2).abs().mean()
            run.print(f"epoch {epoch}  critic {critic_loss:.4f}  generator {run.loss:.4f}  away {away:.3f}")

    run.print(f"digest {run.digest()}")


if __name__ == "__main__":
    main()
