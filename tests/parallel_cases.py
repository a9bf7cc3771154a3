"""Stages that tensor-parallel ranks share, each with what it is called with and what makes a number of its output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from penstock.models import (
    BERTConfig,
    BERTLoss,
    CrossEntropy,
    GPTConfig,
    bert_stage,
    clip_presets,
    gpt_stage,
    tower_stage,
)
from penstock.models.block import MLP
from penstock.models.listed import built, generator_of
from penstock.runtime.tensor_parallel import Sharding
from penstock.train.tasks.layers import recomputed

GPT = GPTConfig(vocab_size=27, context=8, depth=2, width=32, num_heads=4)
BERT = BERTConfig(vocab_size=27, context=8, depth=2, width=32, num_heads=4)


@dataclass(frozen=True)
class Case:
    """A stage that can be built again, what it is called with, and what makes a number of its output."""

    build: Callable[[], nn.Module]
    call: tuple[Any, ...]
    loss: Callable[..., Tensor]
    split: bool = False


def tokens(seed: int, *shape: int, below: int = 27) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


def masked(targets: Tensor) -> Tensor:
    targets[0, :3] = -100
    return targets


def gpt(**changes: Any) -> Case:
    config = replace(GPT, **changes)
    inputs, targets = tokens(1, 3, 8, below=config.vocab_size), masked(tokens(2, 3, 8, below=config.vocab_size))
    return Case(lambda: gpt_stage(config, range(4)), (inputs, targets), CrossEntropy())


def bert(**changes: Any) -> Case:
    config = replace(BERT, **changes)
    real = torch.arange(8).expand(3, 8) < torch.tensor([[8], [6], [5]])
    inputs = {"tokens": tokens(1, 3, 8), "segments": tokens(3, 3, 8, below=2), "real": real}
    targets = {"tokens": masked(tokens(2, 3, 8)), "next": torch.tensor([1, 0, 1])}
    return Case(lambda: bert_stage(config, range(4)), (inputs, targets), BERTLoss())


def tower(name: str) -> Case:
    config = clip_presets["nano"]
    size = config.towers[name]
    generator = torch.Generator().manual_seed(4)
    given = (
        tokens(1, 3, size.context, below=size.vocab_size)
        if size.vocab_size is not None
        else torch.randn(3, size.context, size.num_features or 0, generator=generator)
    )
    wanted = torch.randn(3, 32, generator=generator)
    return Case(lambda: tower_stage(config, name, range(4)), (given, wanted), functional.mse_loss)


def middle() -> Case:
    """A stage of blocks alone, whose input gets a gradient."""
    x = torch.randn(3, 8, 32, generator=torch.Generator().manual_seed(5)).requires_grad_()
    y = torch.randn(3, 8, 32, generator=torch.Generator().manual_seed(6))
    return Case(lambda: gpt_stage(GPT, [1, 2]), (x, y), functional.mse_loss)


def head() -> Case:
    """A stage of the head alone, as ranks that share it have it."""
    x = torch.randn(3, 8, 32, generator=torch.Generator().manual_seed(5)).requires_grad_()
    return Case(lambda: gpt_stage(GPT, [3]), (x, masked(tokens(2, 3, 8))), CrossEntropy())


def embedding() -> Case:
    y = torch.randn(3, 8, 32, generator=torch.Generator().manual_seed(6))
    return Case(lambda: gpt_stage(GPT, [0]), (tokens(1, 3, 8), y), functional.mse_loss)


def all_masked() -> Case:
    case = gpt()
    return replace(case, call=(case.call[0], torch.full((3, 8), -100)))


class TorchsOwn(nn.Module):
    """An MLP that is cut by torch's own styles, which make its activations DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = built(lambda: MLP(32), generator_of(0, "mlp"), 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def shard_over(self, sharding: Sharding) -> None:
        styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(self.inner, sharding.mesh, styles)
        sharding.takes(self.inner)


def torchs_own() -> Case:
    return replace(middle(), build=TorchsOwn, split=True)


CASES: dict[str, Callable[[], Case]] = {
    "torch's own": torchs_own,
    "gpt": gpt,
    "gpt tied": lambda: gpt(tied=True),
    "gpt without biases": lambda: gpt(bias=False),
    "gpt of five words": lambda: gpt(vocab_size=5),
    "gpt split": lambda: replace(gpt(), split=True),
    "gpt tied, split": lambda: replace(gpt(tied=True), split=True),
    "gpt recomputed": lambda: replace(gpt(), build=lambda: gpt_stage(GPT, range(4), wrap=recomputed)),
    "gpt recomputed, split": lambda: replace(
        gpt(), build=lambda: gpt_stage(GPT, range(4), wrap=recomputed), split=True
    ),
    "all masked": all_masked,
    "middle": middle,
    "middle split": lambda: replace(middle(), split=True),
    "head": head,
    "embedding": embedding,
    "bert": bert,
    "bert untied": lambda: bert(tied=False, next_sentence=False),
    "bert split": lambda: replace(bert(), split=True),
    "text tower": lambda: tower("text"),
    "audio tower": lambda: tower("audio"),
}


def decoder(config: Any) -> Case:
    from penstock.models.huggingface import Decoder, NextTokenLoss

    mask = torch.ones(3, 8, dtype=torch.long)
    mask[1, :3] = 0
    labels = tokens(1, 3, 8)
    given = {"input_ids": labels, "attention_mask": mask}

    def build() -> nn.Module:
        made = Decoder(config, compare=False)
        return made.stage(range(made.num_layers))

    return Case(build, (given, labels.masked_fill(mask == 0, -100)), NextTokenLoss())


KINDS = (
    "gpt2", "llama", "qwen2", "qwen3", "mistral", "gpt_neox", "opt", "phi", "bloom", "gemma", "gemma2"
)  # fmt: skip


def decoders() -> dict[str, Callable[[], Case]]:
    """By kind of model, small ones."""
    return {kind: lambda kind=kind: decoder(decoders_config(kind)) for kind in KINDS}  # type: ignore[misc]


def decoders_config(kind: str, **changes: Any) -> Any:
    """Of a small one."""
    from transformers import AutoConfig

    common = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 27}
    llama = {**common, "intermediate_size": 64, "max_position_embeddings": 16, "head_dim": 4}
    grouped = {**llama, "num_key_value_heads": 4}
    opt = {**common, "ffn_dim": 64, "max_position_embeddings": 16, "word_embed_proj_dim": 32}
    sizes: dict[str, dict[str, Any]] = {
        "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 27, "n_positions": 16},
        "llama": {**grouped, "tie_word_embeddings": True},
        "qwen2": grouped,
        "qwen3": grouped,
        "mistral": grouped,
        "gpt_neox": {**common, "intermediate_size": 64, "max_position_embeddings": 16},
        "opt": opt,
        "phi": {**common, "intermediate_size": 64, "max_position_embeddings": 16, "qk_layernorm": True},
        "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 27},
        "gemma": {**grouped, "pad_token_id": 0},
        "gemma2": {**grouped, "pad_token_id": 0},
    }
    # Nothing is to be drawn: dropout of a shard's heads differs from that of the whole.
    without = dict.fromkeys(
        ("attn_pdrop", "embd_pdrop", "resid_pdrop", "dropout", "attention_dropout", "hidden_dropout"), 0.0
    )
    return AutoConfig.for_model(kind, **{**without, **sizes[kind], **changes})
