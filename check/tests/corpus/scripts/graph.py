"""Graph style: one graph, no DataLoader, one process, dropout, evaluation after each step."""

import argparse
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=200)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--weight_decay", type=float, default=5e-4)
parser.add_argument("--dropout", type=float, default=0.5)
args = parser.parse_args()
torch.manual_seed(42)


class GraphConvolution(nn.Module):
    def __init__(self, features, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features, outputs))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, inputs, adjacency):
        return torch.sparse.mm(adjacency, inputs @ self.weight)


class GCN(nn.Module):
    def __init__(self, features, hidden, classes):
        super().__init__()
        self.first = GraphConvolution(features, hidden)
        self.second = GraphConvolution(hidden, classes)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, inputs, adjacency):
        hidden = self.dropout(F.relu(self.first(inputs, adjacency)))
        return F.log_softmax(self.second(hidden, adjacency), dim=1)


features = torch.randn(60, 12)
labels = (features[:, :4].sum(1) > 0).long()
edges = torch.randint(60, (2, 240))
adjacency = torch.sparse_coo_tensor(edges, torch.full((240,), 0.25), (60, 60)).coalesce()
idx_train, idx_val, idx_test = torch.arange(30), torch.arange(30, 45), torch.arange(45, 60)
model = GCN(12, 8, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)


def accuracy(output, rows):
    return (output[rows].argmax(1) == labels[rows]).double().mean()


def train(epoch):
    start = time.time()
    model.train()
    optimizer.zero_grad()
    output = model(features, adjacency)
    loss = F.nll_loss(output[idx_train], labels[idx_train])
    loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        output = model(features, adjacency)
    print(
        f"Epoch: {epoch + 1:04d}",
        f"loss_train: {loss.item():.4f}",
        f"acc_val: {accuracy(output, idx_val).item():.4f}",
        f"time: {time.time() - start:.4f}s",
    )


def test():
    model.eval()
    with torch.no_grad():
        output = model(features, adjacency)
    print(f"Test set results: accuracy= {accuracy(output, idx_test).item():.4f}")


for epoch in range(args.epochs):
    train(epoch)
test()
