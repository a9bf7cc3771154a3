"""`nn.Conv1d`, `nn.Conv2d`, `nn.Conv3d`: autograd's convolution backward, asked for one half at a time."""

from __future__ import annotations

from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.runtime.stage.split_backward.rule import SplitRule
from penstock.runtime.stage.split_backward.workspace import Workspace

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d


class ConvRule(SplitRule):
    """Splits the backward of a convolution with any stride, padding mode, dilation and groups."""

    def __init__(self, module: Conv) -> None:
        self._stride = list(module.stride)
        self._dilation = list(module.dilation)
        self._groups = module.groups
        self._batched_dim = len(self._stride) + 2
        self._mode = module.padding_mode
        around = _padding(module)
        self._zeros = [0] * len(self._stride) if self._mode != "zeros" else around
        self.pads = self._mode != "zeros"
        self._around = [side for amount in reversed(around) for side in (amount, amount)]

    @staticmethod
    def knows(module: Conv) -> bool:
        """True unless the padding differs between two opposite sides (`padding="same"`, even kernel)."""
        if module.padding != "same":
            return True
        return all(d * (k - 1) % 2 == 0 for d, k in zip(module.dilation, module.kernel_size))

    def pad(self, x: Tensor) -> Tensor:
        return F.pad(x, self._around, mode=self._mode)

    def gives_view(self, x: Tensor, bias: Tensor | None) -> bool:
        return x.dim() != self._batched_dim

    def work(self, x: Tensor, weight: Tensor) -> int:
        return self.rows(x) * weight.numel()

    def rows(self, x: Tensor) -> int:
        return x.numel() // max(x.shape[-self._batched_dim + 1], 1) // prod(self._stride)

    def op(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.dim() == self._batched_dim:
            return self._convolve(x, weight, bias)
        return self._convolve(x.unsqueeze(0), weight, bias).squeeze(0)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = self.op(x, weight, bias)
        return y if x.dim() == self._batched_dim else y.data

    def input_grad(self, g: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        gx = self._backward(g, x, weight, bias, [True, False, False])[0]
        return gx if x.dim() == self._batched_dim else gx.squeeze(0)

    def weight_grads(
        self,
        g: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needs: tuple[bool, bool],
        workspace: Workspace | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        _, gw, gb = self._backward(g, x, weight, bias, [False, *needs])
        return (gw if needs[0] else None), (gb if needs[1] else None)

    def _convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.convolution(
            x,
            weight,
            bias,
            self._stride,
            self._zeros,
            self._dilation,
            False,
            [0] * len(self._stride),
            self._groups,
        )

    def _backward(
        self, g: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, wanted: list[bool]
    ) -> tuple[Tensor, Tensor, Tensor]:
        if x.dim() != self._batched_dim:
            g, x = g.unsqueeze(0), x.unsqueeze(0)
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
            g,
            x,
            weight,
            None if bias is None else list(bias.shape),
            self._stride,
            self._zeros,
            self._dilation,
            False,
            [0] * len(self._stride),
            self._groups,
            wanted,
        )
        return grads


def _padding(module: Conv) -> list[int]:
    if module.padding == "valid":
        return [0] * len(module.stride)
    if module.padding == "same":
        return [d * (k - 1) // 2 for d, k in zip(module.dilation, module.kernel_size)]
    return [int(amount) for amount in module.padding]
