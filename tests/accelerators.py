"""Accelerators that this machine need not have."""

import torch


def visible_accelerators(monkeypatch, count, kind="cuda"):
    """Pretend that PyTorch sees accelerators. Returns the list of those that are made current."""
    accelerator, used = torch.device(kind), []
    monkeypatch.setattr(
        torch.accelerator,
        "current_accelerator",
        lambda check_available=False: accelerator if count or not check_available else None,
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "set_device_index", used.append)
    return used
