"""A GPT as a flat list of layers, so that any cut of the list is a pipeline stage.

Layer 0 embeds, layers 1 to `depth` are blocks, the last layer is the final norm with the head. The weights of a
layer follow from the seed and the layer's index and from nothing else: a rank builds only its own layers, and any
partition over any number of ranks holds the same numbers, bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["GPTConfig", "build_layers", "presets", "tied_parameters"]


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Sizes of a GPT; `tied` makes the embedding and the head one weight, `bias` is for linears and norms.

    `ValueError` if a size is below 1 or the heads do not divide the width.
    """

    vocab_size: int
    context: int
    depth: int
    width: int
    num_heads: int
    dropout: float = 0.0
    tied: bool = False
    bias: bool = True

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context", "depth", "width", "num_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"GPT with {name} {getattr(self, name)}; it must be at least 1")
        if self.width % self.num_heads:
            raise ValueError(
                f"GPT of width {self.width} with {self.num_heads} heads; "
                "the width must be a multiple of the number of heads"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"GPT with dropout {self.dropout}; it must be at least 0 and below 1")

    @property
    def num_layers(self) -> int:
        """The blocks, the embedding and the head."""
        return self.depth + 2


presets: dict[str, GPTConfig] = {
    "nano": GPTConfig(vocab_size=256, context=64, depth=4, width=64, num_heads=4),
    "tiny": GPTConfig(vocab_size=256, context=128, depth=8, width=96, num_heads=3),
    "small": GPTConfig(vocab_size=256, context=256, depth=8, width=384, num_heads=6),
    "gpt2-124m": GPTConfig(vocab_size=50257, context=1024, depth=12, width=768, num_heads=12, tied=True),
    "gpt2-355m": GPTConfig(vocab_size=50257, context=1024, depth=24, width=1024, num_heads=16, tied=True),
    "gpt2-774m": GPTConfig(vocab_size=50257, context=1024, depth=36, width=1280, num_heads=20, tied=True),
    "gpt2-1.5b": GPTConfig(vocab_size=50257, context=1024, depth=48, width=1600, num_heads=25, tied=True),
}
"""Named sizes; `dataclasses.replace` gives one another vocabulary, depth or context."""


class Embedding(nn.Module):
    """Tokens[B, T] to [B, T, D]: the token's row plus the position's."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.dropout = _dropout(config)

    def forward(self, tokens: Tensor) -> Tensor:
        num_tokens, context = tokens.shape[-1], self.position.num_embeddings
        if num_tokens > context:
            raise ValueError(f"{num_tokens} tokens given to a GPT of context {context}; crop the input")
        place = torch.arange(num_tokens, device=tokens.device)  # T
        out: Tensor = self.dropout(self.token(tokens) + self.position(place))  # B, T, D
        return out


class Attention(nn.Module):
    """Causal self-attention, [B, T, D] to [B, T, D]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=config.bias)
        self.out = nn.Linear(config.width, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, num_tokens, width = x.shape
        qkv = self.qkv(x).view(batch, num_tokens, 3, self.num_heads, -1)  # B, T, 3, H, D/H
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each B, H, T, D/H
        dropout = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, num_tokens, width))  # B, T, D
        return out


class MLP(nn.Module):
    """Two linears around a GELU, four times the width between them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width, bias=config.bias)
        self.down = nn.Linear(4 * config.width, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.gelu(self.up(x), approximate="tanh"))  # B, T, 4D between
        return out


class Block(nn.Module):
    """Attention and MLP, each behind its norm and around it a residual; [B, T, D] to [B, T, D]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.mlp = MLP(config)
        self.dropout = _dropout(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        out: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return out


class Head(nn.Module):
    """The final norm and the output matrix, [B, T, D] to logits[B, T, V]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width, bias=config.bias)
        self.output = nn.Linear(config.width, config.vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.output(self.norm(x))
        return out


def build_layers(config: GPTConfig, indices: Iterable[int] | None = None, seed: int = 0) -> list[nn.Module]:
    """The layers at `indices` (all, unless told otherwise) in that order, on the CPU in float32.

    Draws nothing from torch's global generators. With `config.tied`, embedding and head share one Parameter if
    both are asked for; a head alone gets the embedding's initial weight. `ValueError` for an index out of range.
    """
    wanted = list(range(config.num_layers) if indices is None else indices)
    for index in wanted:
        if not 0 <= index < config.num_layers:
            raise ValueError(f"layer {index} asked of a GPT of {config.num_layers} layers, counted from 0")
    layers = [_build_layer(config, index, seed) for index in wanted]
    embedding = next((layer for layer in layers if isinstance(layer, Embedding)), None)
    if config.tied and embedding is not None:
        for layer in layers:
            if isinstance(layer, Head):
                layer.output.weight = embedding.token.weight
    return layers


def tied_parameters(config: GPTConfig) -> list[list[str]]:
    """Groups of plain parameter names that are one parameter, wherever their layers lie."""
    if not config.tied:
        return []
    return [["layers.0.token.weight", f"layers.{config.num_layers - 1}.output.weight"]]


def _build_layer(config: GPTConfig, index: int, seed: int) -> nn.Module:
    # Built without storage first: torch's own initialisation would draw from the global generator.
    with torch.device("meta"):
        layer: nn.Module
        if index == 0:
            layer = Embedding(config)
        elif index == config.num_layers - 1:
            layer = Head(config)
        else:
            layer = Block(config)
    layer.to_empty(device="cpu")
    generator = _generator(seed, index)
    std = 0.5 * config.width**-0.5
    # What a block adds to the residual stream shrinks with the number of such additions.
    residual = std * (2 * config.depth) ** -0.5
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
            else:
                scale = residual if name in ("attention.out.weight", "mlp.down.weight") else std
                parameter.normal_(0.0, scale, generator=generator)
        if config.tied and isinstance(layer, Head):
            # The embedding draws its tokens first, so its generator's first numbers are its token weight.
            layer.output.weight.normal_(0.0, std, generator=_generator(seed, 0))
    return layer


def _generator(seed: int, index: int) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def _dropout(config: GPTConfig) -> nn.Module:
    return nn.Dropout(config.dropout) if config.dropout else nn.Identity()
