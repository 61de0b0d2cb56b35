"""Policy gradients: each rank plays episodes of its own; no dataset, and a file for each rank."""

import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Categorical
from torch.utils.tensorboard import SummaryWriter


class Corridor:
    """Walk to the right end within 12 steps."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def reset(self):
        self.position, self.time = self.random.randint(-3, 0), 0
        return self.observation()

    def observation(self):
        return torch.tensor([self.position / 5, self.time / 12])

    def step(self, action):
        slip = self.random.random() < 0.1
        self.position += (1 if action else -1) * (-1 if slip else 1)
        self.time += 1
        done = self.position >= 4 or self.time == 12
        return self.observation(), float(self.position >= 4), done


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 32), nn.Tanh())
        self.policy = nn.Linear(32, 2)
        self.value = nn.Linear(32, 1)

    def forward(self, x):
        hidden = self.body(x)
        return self.policy(hidden), self.value(hidden).squeeze(-1)


@torch.no_grad()
def play(model, env, episodes):
    observations, actions, returns = [], [], []
    for _ in range(episodes):
        observation, done, rewards = env.reset(), False, []
        while not done:
            logits, _ = model(observation)
            action = Categorical(logits=logits).sample()
            observations.append(observation)
            actions.append(action)
            observation, reward, done = env.step(int(action))
            rewards.append(reward)
        total = 0.0
        discounted = []
        for reward in reversed(rewards):
            total = reward + 0.97 * total
            discounted.append(total)
        returns += reversed(discounted)
    return torch.stack(observations), torch.stack(actions), torch.tensor(returns)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = ActorCritic()
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=5e-3)
    env = Corridor(seed=100 + rank)
    torch.manual_seed(200 + rank)
    writer = SummaryWriter(f"curves/rank{rank}")
    update = 0
    if os.path.exists("policy.pt"):
        saved = torch.load("policy.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        update = saved["update"]
        torch.set_rng_state(torch.load(f"rng-{rank}-{update}.pt", weights_only=True))
    while update < 40:
        observations, actions, returns = play(model, env, episodes=6)
        logits, values = ddp(observations)
        distribution = Categorical(logits=logits)
        advantages = returns - values.detach()
        policy_loss = -(distribution.log_prob(actions) * advantages).mean()
        value_loss = nn.functional.mse_loss(values, returns)
        loss = policy_loss + 0.5 * value_loss - 0.01 * distribution.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        update += 1
        writer.add_scalar("return", returns.mean(), update)
        print(f"[rank {rank}] update {update} return {returns.mean().item():.3f}", flush=True)
        if update % 4 == 0:
            torch.save(torch.get_rng_state(), f"rng-{rank}-{update}.pt")
            dist.barrier()
            if rank == 0:
                saved = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "update": update,
                }
                torch.save(saved, "policy.tmp")
                os.replace("policy.tmp", "policy.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
