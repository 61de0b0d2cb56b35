"""Sharpness style: an optimizer with two passes per step, augmentation, for one process."""

import argparse
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        norms = [
            p.grad.norm() for g in self.param_groups for p in g["params"] if p.grad is not None
        ]
        norm = torch.stack(norms).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old"] = p.data.clone()
                    p.add_(p.grad * group["rho"] / (norm + 1e-12))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()


class Digits(Dataset):
    def __init__(self, count, seed, train):
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.rand(count, 1, 10, 10, generator=generator)
        self.labels = (self.images[:, 0, 5, 5] * 3).long()
        self.train = train

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        image = self.images[i]
        if self.train:
            image = image.roll(random.randint(-1, 1), dims=2) + 0.05 * torch.randn(image.shape)
        return image, self.labels[i]


def build_model():
    convolution = [nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*convolution, nn.Flatten(), nn.Dropout(0.1), nn.Linear(150, 3))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", default=16, type=int)
    parser.add_argument("--epochs", default=20, type=int)
    parser.add_argument("--lr", default=0.05, type=float)
    args = parser.parse_args()
    random.seed(42)
    torch.manual_seed(42)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_loader = DataLoader(Digits(128, 0, True), args.batch_size, shuffle=True)
    test_loader = DataLoader(Digits(40, 1, False), args.batch_size)
    model = build_model().to(device)
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer.base_optimizer, args.epochs)
    for epoch in range(args.epochs):
        model.train()
        for images, labels in train_loader:
            images, labels = images.to(device), labels.to(device)
            F.cross_entropy(model(images), labels).backward()
            optimizer.first_step(zero_grad=True)
            F.cross_entropy(model(images), labels).backward()
            optimizer.second_step(zero_grad=True)
        scheduler.step()
        model.eval()
        correct = torch.zeros((), device=device)
        with torch.no_grad():
            for images, labels in test_loader:
                correct += (model(images.to(device)).argmax(1) == labels.to(device)).sum()
        print(f"Epoch {epoch}: {100 * correct.item() / 40:.1f} % correct")
