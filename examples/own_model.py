"""Trains a small network over four pipeline ranks, and compares its weights with those of a plain loop.

    python examples/own_model.py
    torchrun --standalone --nproc-per-node 4 examples/own_model.py

The first line runs all ranks in this process, the second one rank per process. The program is the same.
"""

from __future__ import annotations

import copy
import os

import torch
import torch.distributed as dist
from torch import nn

import penstock as ps

STEPS, MICROBATCHES = 20, 8


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same batch on every rank: it follows from the step."""
    draws = torch.Generator().manual_seed(step)
    x = torch.randn(32, 16, generator=draws)
    return x, x[:, :4].prod(1, keepdim=True)


def main() -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    num_ranks = dist.get_world_size() if dist.is_initialized() else 4
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 64), *(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(6)), nn.Linear(64, 1)
    )
    plain = copy.deepcopy(model)

    schedule = ps.build("zb-h1", num_ranks, MICROBATCHES)
    with ps.Pipeline(model, schedule, loss_fn=nn.MSELoss(), optimizer=torch.optim.AdamW) as pipe:
        for step in range(STEPS):
            loss = pipe.step(*batch_of(step)).loss
        print(f"loss {loss:.6f} after {STEPS} steps over {num_ranks} ranks")

        if not dist.is_initialized():  # where this process has all stages
            optimizer = torch.optim.AdamW(plain.parameters())
            for step in range(STEPS):
                optimizer.zero_grad()
                for x, y in zip(*(each.chunk(MICROBATCHES) for each in batch_of(step))):
                    (nn.functional.mse_loss(plain(x), y) / MICROBATCHES).backward()
                optimizer.step()
            same = all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters()))
            print("weights equal to the plain loop's, to the last bit:", same)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
