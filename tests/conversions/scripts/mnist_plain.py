"""Digits by a small convolutional network: a train and a test function, a schedule by epochs, a line now and then."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.dropout = nn.Dropout(0.25)
        self.fc = nn.Linear(8 * 6 * 6, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        x = self.fc(torch.flatten(self.dropout(x), 1))
        return F.log_softmax(x, dim=1)


def digits(number, seed):
    """Stands for MNIST: a blurred template for each digit, under noise."""
    chance = torch.Generator().manual_seed(seed)
    templates = torch.randn(10, 1, 14, 14, generator=torch.Generator().manual_seed(0))
    label = torch.randint(0, 10, (number,), generator=chance)
    return TensorDataset(templates[label] + torch.randn(number, 1, 14, 14, generator=chance), label)


def train(args, model, device, loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            print(f"epoch {epoch} [{batch_idx}/{len(loader)}] loss {loss.item():.6f}")


def test(model, device, loader):
    model.eval()
    test_loss = correct = 0
    with torch.no_grad():
        for data, target in loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            correct += output.argmax(dim=1).eq(target).sum().item()
    print(f"test: loss {test_loss / len(loader.dataset):.4f}, right {correct}/{len(loader.dataset)}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--log-interval", type=int, default=2)
    parser.add_argument("--save-model", default="mnist.pt")
    args = parser.parse_args()
    torch.manual_seed(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    train_loader = DataLoader(digits(150, 1), batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(digits(60, 2), batch_size=50)
    model = Net().to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(args.epochs):
        train(args, model, device, train_loader, optimizer, epoch)
        test(model, device, test_loader)
        scheduler.step()
    torch.save(model.state_dict(), args.save_model)


if __name__ == "__main__":
    main()
