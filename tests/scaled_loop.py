"""The plain loop with a gradient scaler of torch's, for models that compute in float16, and what it is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

ADAMW = partial(AdamW, lr=0.01)
NUM = 4


def scaled_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def scaled_batch(step: int) -> tuple[Tensor, Tensor]:
    """Every fourth batch overflows."""
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
    return x, x.roll(1, 0) * (1e6 if step % 4 == 3 else 1.0)


def new_scaler(**options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **{"init_scale": 2.0**12, "growth_interval": 2, **options})


class ScaledLoop:
    """A plain loop: one process, autocast to float16, a scaler, one optimizer.

    Args:
        clip_norm: to which gradients are clipped, or None.
    """

    def __init__(self, model: nn.Module, scaler: torch.amp.GradScaler, clip_norm: float | None = None) -> None:
        self.model, self.scaler, self.clip_norm = model, scaler, clip_norm
        self.optimizer = ADAMW(model.parameters())

    def backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Adds the gradients of a batch; returns its loss."""
        total: Any = 0
        for x, y in zip(inputs.chunk(NUM), targets.chunk(NUM), strict=True):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.MSELoss()(self.model(x), y) * (1 / NUM)
            self.scaler.scale(loss).backward()
            total = total + loss.detach()
        return total

    def update(self) -> Tensor | None:
        """Returns the norm where gradients are clipped."""
        norm = None
        if self.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return norm

    def step(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        loss = self.backward(inputs, targets)
        return loss, self.update()


def trained_by_loop(
    steps: Sequence[int], scaler: Callable[[], torch.amp.GradScaler] = new_scaler, clip_norm: float | None = None
) -> tuple[list[Tensor], dict[str, Tensor], float]:
    """The losses, the parameters afterwards, and the last scale."""
    loop = ScaledLoop(scaled_model(), scaler(), clip_norm)
    losses = [loop.step(*scaled_batch(step))[0] for step in steps]
    return losses, {name: p.detach() for name, p in loop.model.named_parameters()}, loop.scaler.get_scale()
