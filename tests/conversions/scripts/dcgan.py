"""A GAN: the discriminator's update with real and with made images, then the generator's, and pictures now and then."""

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import lockstep

num_epochs, batch_size, nz = 2, 16, 8
real_label, fake_label = 1.0, 0.0
torch.manual_seed(999)
run = lockstep.start(lanes=4)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

pictures = torch.tanh(torch.randn(50, 3, 8, 8, generator=torch.Generator().manual_seed(0)))
dataloader = run.shard(DataLoader(TensorDataset(pictures), batch_size=batch_size, shuffle=True))


def weights_init(m):
    if isinstance(m, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif isinstance(m, nn.BatchNorm2d):
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


netG = nn.Sequential(
    nn.ConvTranspose2d(nz, 16, 4, 1, 0, bias=False), nn.BatchNorm2d(16), nn.ReLU(True),
    nn.ConvTranspose2d(16, 3, 4, 2, 1, bias=False), nn.Tanh(),
).to(device)  # fmt: skip
netD = nn.Sequential(
    nn.Conv2d(3, 16, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(16, 1, 4, 1, 0, bias=False), nn.Sigmoid(), nn.Flatten(0),
).to(device)  # fmt: skip
netG.apply(weights_init)
netD.apply(weights_init)
criterion = nn.BCELoss()
fixed_noise = torch.randn(4, nz, 1, 1, device=device)
optimizerD = optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))

run.replicate(netD, optimizerD)
run.replicate(netG, optimizerG)


def save_pictures():
    if run.step % 4 == 2:  # every second batch; each has two updates
        torch.save(netG(fixed_noise).detach(), "made.pt")


for epoch in run.epochs(num_epochs):
    for i, data in run.steps(enumerate(dataloader), [optimizerD, optimizerG, save_pictures]):
        netD.zero_grad()
        real = data[0].to(device)
        label = torch.full((real.size(0),), real_label, device=device)
        output = netD(real)
        errD_real = criterion(output, label)
        errD_real.backward()
        D_x = output.mean().item()

        noise = torch.randn(real.size(0), nz, 1, 1, device=device)
        fake = netG(noise)
        label.fill_(fake_label)
        output = netD(fake.detach())
        errD_fake = criterion(output, label)
        errD_fake.backward()
        D_G_z1 = output.mean().item()
        errD = errD_real + errD_fake
        optimizerD.step()

        netG.zero_grad()
        label.fill_(real_label)
        output = netD(fake)
        errG = criterion(output, label)
        errG.backward()
        D_G_z2 = output.mean().item()
        optimizerG.step()

        run.print(
            f"[{epoch}][{i}] D {errD.item():.4f} G {errG.item():.4f} D(x) {D_x:.4f} D(G(z)) {D_G_z1:.4f} {D_G_z2:.4f}"
        )
    torch.save(netG.state_dict(), "netG.pt")
