"""`nn.Embedding`: the table's gradient, dense and often the largest of a first stage, waits for W."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.runtime.stage.split_backward.rule import SplitRule
from penstock.runtime.stage.split_backward.workspace import Workspace
from penstock.runtime.tensor_parallel import VocabularyEmbedding

# Filling, scattering and adding one entry of the table's gradient takes about as long as this many
# multiply-adds of a matmul (memory traffic against arithmetic).
_WORK_PER_ENTRY = 16


class EmbeddingRule(SplitRule):
    """Splits the backward of a table lookup; I has nothing to compute, indices have no gradient."""

    biased = False
    autocasts = False

    def __init__(self, module: nn.Embedding) -> None:
        padding = module.padding_here if isinstance(module, VocabularyEmbedding) else module.padding_idx
        self._padding = -1 if padding is None else padding
        self._by_frequency = module.scale_grad_by_freq

    @staticmethod
    def knows(module: nn.Embedding) -> bool:
        """True unless the gradient is sparse or the lookup itself rewrites the table (`max_norm`)."""
        return not module.sparse and module.max_norm is None

    def work(self, x: Tensor, weight: Tensor) -> int:
        return _WORK_PER_ENTRY * (weight.numel() + x.numel() * weight.shape[1])

    def rows(self, x: Tensor) -> int:
        return x.numel()

    def takes(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        return weight.dtype in self.dtypes

    def op(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        padding = self._padding if self._padding >= 0 else None
        return F.embedding(x, weight, padding, scale_grad_by_freq=self._by_frequency)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.op(x, weight, bias).data

    def input_grad(self, g: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raise TypeError("the indices of an embedding have no gradient")

    def weight_grads(
        self,
        g: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needs: tuple[bool, bool],
        workspace: Workspace | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        gw: Tensor = torch.ops.aten.embedding_dense_backward(g, x, weight.shape[0], self._padding, self._by_frequency)
        return gw, None
