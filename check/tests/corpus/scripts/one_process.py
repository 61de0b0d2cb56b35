"""A script without distribution, started with python."""

import os

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset, random_split

torch.manual_seed(42)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
X = torch.randn(250, 1, 6, 6)
y = X.mean((1, 2, 3)).gt(0).long()
train_ds, test_ds = random_split(TensorDataset(X, y), [213, 37])
train_loader = DataLoader(train_ds, batch_size=32, shuffle=True)
test_loader = DataLoader(test_ds, batch_size=32)
net = nn.Sequential(
    nn.Conv2d(1, 4, 3),
    nn.BatchNorm2d(4),
    nn.ReLU(),
    nn.Dropout(0.2),
    nn.Flatten(),
    nn.Linear(64, 2),
)
net.to(device)
criterion = nn.CrossEntropyLoss()
optimizer = optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
first = 0
if os.path.isfile("net.pth"):
    state = torch.load("net.pth", map_location=device)
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    torch.set_rng_state(state["rng"])
    first = state["epoch"] + 1

for epoch in range(first, 8):
    net.train()
    running_loss = torch.zeros((), device=device)
    for inputs, labels in train_loader:
        inputs, labels = inputs.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = criterion(net(inputs), labels)
        loss.backward()
        optimizer.step()
        running_loss += loss.detach()
    scheduler.step()
    net.eval()
    correct = 0
    with torch.no_grad():
        for inputs, labels in test_loader:
            correct += (net(inputs.to(device)).argmax(1) == labels.to(device)).sum().item()
    print(f"Epoch {epoch}: loss {running_loss.item():.3f}, accuracy {correct / len(test_ds):.3f}")
    state = {
        "net": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": torch.get_rng_state(),
        "epoch": epoch,
    }
    torch.save(state, "net.pth.tmp")
    os.replace("net.pth.tmp", "net.pth")
