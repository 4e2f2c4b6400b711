"""A Wasserstein GAN whose critic is clamped by hand, with one copy of the optimizer state on a host.

    python examples/23_wgan.py
    lockstep run -n 3 examples/23_wgan.py
    lockstep run -n 3 --strategy replicated examples/23_wgan.py

The script writes to parameters itself, after each update of the critic, and keeps an average of the
generator. Under a sharded strategy all workers see the same memory: what each of them writes counts
once. Look at the digest: it is the same under both strategies, on any number of workers.
"""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.strategies import Sharded

NOISE = 4


def ring(num_points: int) -> TensorDataset:
    angle = 2 * torch.pi * torch.rand(num_points)
    points = torch.stack([angle.cos(), angle.sin()], dim=1)
    return TensorDataset(points + 0.05 * torch.randn_like(points))


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))


def main() -> None:
    run = lockstep.start(lanes=6, strategy=Sharded("optimizer"))
    loader = run.shard(DataLoader(ring(960), batch_size=96, shuffle=True))
    critic, generator = network(2, 1), network(NOISE, 2)
    of_critic = torch.optim.RMSprop(critic.parameters(), lr=2e-3)
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    average = AveragedModel(generator, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    run.replicate(critic, of_critic)
    run.replicate(generator, of_generator, average=average)

    for epoch in run.epochs(4):
        for batch in loader:
            for (real,) in run.lanes(batch):
                fake = generator(torch.randn(len(real), NOISE, device=real.device)).detach()
                run.backward(critic(fake).mean() - critic(real).mean())
            of_critic.step()
            of_critic.zero_grad()
            with torch.no_grad():
                for parameter in critic.parameters():
                    parameter.clamp_(-0.1, 0.1)

            for (real,) in run.lanes(batch):
                run.backward(-critic(generator(torch.randn(len(real), NOISE, device=real.device))).mean())
            of_generator.step()
            of_generator.zero_grad()
            critic.zero_grad()
            average.update_parameters(generator)
        run.print(f"epoch {epoch}  critic {-run.loss:.6f}")

    largest = max(float(parameter.detach().abs().max()) for parameter in critic.parameters())
    run.print(f"largest weight of the critic {largest:.6f}")
    run.print(f"digest {run.digest()}")


if __name__ == "__main__":
    main()
