"""What every transformer here is made of: attention, MLP, and a block of both behind their norms."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["MLP", "Attention", "TransformerBlock", "dropout_layer"]


class Attention(nn.Module):
    """Self-attention, [B, T, D] to [B, T, D]; `causal` lets no token see a later one."""

    def __init__(
        self, width: int, num_heads: int, dropout: float = 0.0, bias: bool = True, causal: bool = True
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_width = width // num_heads
        self.dropout = dropout
        self.causal = causal
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor, mask: Tensor | None = None, lengths: Tensor | None = None) -> Tensor:
        """`mask` is True where a token may be seen, bool, and goes with [B, H, T, T].

        `lengths` are those of sequences that lie in one row [1, T, D], one after the other: none sees another. There
        may be none of them.
        """
        # Head by head, so that consecutive rows of the weight are whole heads; a shard of it has some of the H.
        qkv = self.qkv(x).unflatten(-1, (-1, 3, self.head_width))  # B, T, H, 3, D/H
        query, key, value = qkv.permute(3, 0, 2, 1, 4).unbind(0)  # each B, H, T, D/H
        dropout = self.dropout if self.training else 0.0

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return functional.scaled_dot_product_attention(
                query, key, value, mask, dropout_p=dropout, is_causal=self.causal
            )

        if lengths is None:
            y = attend(query, key, value)
        else:
            # One at a time they take the sum of their squares; a mask over the row would take the square of the sum.
            spans = lengths.tolist()
            rows = zip(query.split(spans, 2), key.split(spans, 2), value.split(spans, 2), strict=True)
            y = torch.cat([attend(*row) for row in rows], 2) if spans else value
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))  # B, T, D
        return out


class MLP(nn.Module):
    """Two linears around a GELU, four times the width between them."""

    def __init__(self, width: int, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.down = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.gelu(self.up(x), approximate="tanh"))  # B, T, 4D between
        return out


class TransformerBlock(nn.Module):
    """Attention and MLP, each behind its norm and around it a residual; [B, T, D] to [B, T, D]."""

    def __init__(
        self, width: int, num_heads: int, dropout: float = 0.0, bias: bool = True, causal: bool = True
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=bias)
        self.attention = Attention(width, num_heads, dropout, bias, causal)
        self.mlp_norm = nn.LayerNorm(width, bias=bias)
        self.mlp = MLP(width, bias)
        self.dropout = dropout_layer(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None, lengths: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), mask, lengths))
        out: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return out


def dropout_layer(dropout: float) -> nn.Module:
    return nn.Dropout(dropout) if dropout else nn.Identity()
