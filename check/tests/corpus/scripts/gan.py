"""Two networks, two optimizers, DistributedDataParallel around both."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

nz = 8
dist.init_process_group("nccl")
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
torch.manual_seed(dist.get_rank())
real_data = torch.randn(160, 6, generator=torch.Generator().manual_seed(5)) * 0.5 + 1
sampler = DistributedSampler(TensorDataset(real_data))
loader = DataLoader(TensorDataset(real_data), batch_size=16, sampler=sampler)
netG = nn.Sequential(nn.Linear(nz, 24), nn.ReLU(), nn.Linear(24, 6)).cuda()
netD = nn.Sequential(nn.Linear(6, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1)).cuda()
netG = DistributedDataParallel(netG, device_ids=[local_rank])
netD = DistributedDataParallel(netD, device_ids=[local_rank])
criterion = nn.BCEWithLogitsLoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
start_epoch = 0
if os.path.exists("gan.pt"):
    ckpt = torch.load("gan.pt", map_location=f"cuda:{local_rank}")
    netG.load_state_dict(ckpt["netG"])
    netD.load_state_dict(ckpt["netD"])
    optimizerG.load_state_dict(ckpt["optimizerG"])
    optimizerD.load_state_dict(ckpt["optimizerD"])
    start_epoch = ckpt["epoch"]

for epoch in range(start_epoch, 5):
    sampler.set_epoch(epoch)
    for (real,) in loader:
        real = real.cuda()
        ones, zeros = torch.ones(len(real), 1).cuda(), torch.zeros(len(real), 1).cuda()
        netD.zero_grad()
        errD_real = criterion(netD(real), ones)
        errD_real.backward()
        noise = torch.randn(len(real), nz, device="cuda")
        fake = netG(noise)
        errD_fake = criterion(netD(fake.detach()), zeros)
        errD_fake.backward()
        optimizerD.step()
        netG.zero_grad()
        errG = criterion(netD(fake), ones)
        errG.backward()
        optimizerG.step()
    if dist.get_rank() == 0:
        print(f"[{epoch}/5] Loss_D {(errD_real + errD_fake).item():.3f} Loss_G {errG.item():.3f}")
        state = {
            "netG": netG.state_dict(),
            "netD": netD.state_dict(),
            "optimizerG": optimizerG.state_dict(),
            "optimizerD": optimizerD.state_dict(),
            "epoch": epoch + 1,
        }
        torch.save(state, "gan.pt.tmp")
        os.replace("gan.pt.tmp", "gan.pt")
dist.destroy_process_group()
