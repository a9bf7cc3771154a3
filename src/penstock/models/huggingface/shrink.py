"""A small copy of a config: the same architecture with fewer heads, experts, words and blocks, and without dropout.

Every kind of block that the model has is in the copy: blocks are alike where their modules have the same classes and
the same settings other than numbers ("sliding_attention", has a bias). Sizes of a head stay, as rotary embeddings
depend on them; what is as wide as all heads together shrinks with their number.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from torch import nn

from penstock.models.huggingface.anatomy import Anatomy, DecoderError, blocks_of

__all__ = ["shrunken"]

DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers")
ENCODER_DEPTHS = ("num_layers", "encoder_layers", "num_hidden_layers")
DECODER_DEPTHS = ("num_decoder_layers", "decoder_layers")
HEADS = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
)
GROUPS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
WIDTHS = ("n_embd", "d_model", "n_inner", "d_inner", "d_ff", "ffn_dim", "word_embed_proj_dim")
WIDE = ("hidden_size", "intermediate_size", "embedding_size")
"""Ends of names of widths."""
INNER = ("intermediate_size", "ffn_hidden_size", "n_inner", "d_ff", "ffn_dim")
"""Ends of names of widths on which nothing depends in a model with heads."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
MOST: Mapping[str, int] = {
    **dict.fromkeys(EXPERTS, 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "topk_group"), 2),
    "n_group": 4,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("sliding_window", "attention_window_size", "attention_chunk_size"), 4),
}
"""Of these no more than so many."""
LEAST_BLOCKS = 3
NUM_WORDS = 64
NARROW = 64
"""Width of a model without heads, and most that is used between two layers of an MLP."""
ALIGNED = 4
"""What widths are multiples of, as some matrix products ask for 16 bytes."""
MOST_WEIGHTS = 60_000_000
"""Of a copy."""


def shrunken(model: Any, anatomy: Anatomy) -> Any:
    """A small copy of a model's config; the model's weights may lie on the meta device.

    Raises:
        DecoderError: the copy is still large.
    """
    num_blocks = _enough(blocks_of(model, anatomy.blocks))
    small = copy.deepcopy(model.config)
    text = small.get_text_config(decoder=True)
    read = getattr(text, "hidden_size", None)
    for each in _configs(small):
        was = getattr(each, "num_hidden_layers", None)
        _shrink(each)
        if each is small and anatomy.encoder is not None:
            _cut_both(small, _enough(blocks_of(model, anatomy.encoder.blocks)), num_blocks)
        elif was is not None:
            _cut(each, int(was), num_blocks if each is text else min(int(was), _least_inside(model.config)))
    for each in _configs(small):  # pictures that are projected to what the decoder reads still are
        if read is not None and getattr(each, "projection_dim", None) == read:
            each.projection_dim = text.hidden_size
    _shrink_images(small, getattr(small, "vision_config", small))
    return small


def require_small(model: nn.Module, kind: str) -> None:
    """Raises DecoderError for a copy with too many weights."""
    count = sum(each.numel() for each in model.parameters())
    if count > MOST_WEIGHTS:
        raise DecoderError(
            f"no small copy can be made of the config of a {kind}: it still has {count:,} weights, and "
            f"{MOST_WEIGHTS:,} are the most for a comparison with the whole model; compare it by hand, then give "
            "compare=False"
        )


def _configs(config: Any) -> list[Any]:
    """A config and those in it."""
    inner = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return [config, *(below for each in inner if each is not None for below in _configs(each))]


def _shrink(config: Any) -> None:
    scale = _scale(config)
    for name, value in list(vars(config).items()):
        if isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
        elif not isinstance(value, int) or isinstance(value, bool):
            continue
        elif name in MOST:
            setattr(config, name, min(value, MOST[name]))
        elif name in (*HEADS, *GROUPS, *WIDTHS) or name.endswith((*WIDE, *INNER, "_num_heads")):
            less = _less(value, scale, 1 if "head" in name else ALIGNED)
            setattr(config, name, min(less, NARROW) if name.endswith(INNER) and _heads(config) else less)
        elif name in ("vocab_size", "decoder_vocab_size"):
            setattr(config, name, min(value, NUM_WORDS))
    _renumber(config)


def _less(value: int, scale: Fraction, unit: int) -> int:
    return min(value, unit * math.ceil(value * scale / unit))


def _scale(config: Any) -> Fraction:
    """By what the number of heads shrinks, and every width with it."""
    heads = _heads(config)
    if heads is None:
        width = getattr(config, "hidden_size", NARROW)
        return Fraction(1, max(1, width // NARROW)) if isinstance(width, int) else Fraction(1)
    groups = next((getattr(config, name) for name in GROUPS if isinstance(vars(config).get(name), int)), heads)
    few = min(groups, 2) * min(heads // groups if heads % groups == 0 else heads, 2)
    return min(Fraction(few, heads), Fraction(1))


def _heads(config: Any) -> int | None:
    return next((getattr(config, name) for name in HEADS if isinstance(vars(config).get(name), int)), None)


def _renumber(config: Any) -> None:
    """Special tokens whose numbers the vocabulary has no more become its last words."""
    count = getattr(config, "vocab_size", None) or getattr(config.get_text_config(decoder=True), "vocab_size", None)
    if not isinstance(count, int):
        return
    fresh = iter(range(min(count, NUM_WORDS) - 1, 0, -1))
    for name, value in list(vars(config).items()):
        if name.endswith(("_token_id", "_token_index")):
            if isinstance(value, int) and value >= min(count, NUM_WORDS):
                setattr(config, name, next(fresh))
            elif isinstance(value, list):
                setattr(config, name, [min(each, count - 1) for each in value])


def _cut(config: Any, was: int, now: int) -> None:
    """Fewer blocks, and as many entries in whatever has one for each."""
    for name, value in list(vars(config).items()):
        if name in DEPTHS and value == was:
            setattr(config, name, now)
        elif isinstance(value, list | tuple) and len(value) == was:
            setattr(config, name, value[:now])


def _cut_both(config: Any, encoder: int, decoder: int) -> None:
    """Fewer blocks in an encoder and in a decoder, which have depths of their own."""
    for names, now in ((ENCODER_DEPTHS, encoder), (DECODER_DEPTHS, decoder)):
        for name in names:
            if isinstance(vars(config).get(name), int):
                setattr(config, name, now)


def _enough(blocks: Iterable[nn.Module]) -> int:
    """How many blocks it takes to have one of every kind."""
    kinds: set[tuple[Any, ...]] = set()
    last = count = 0
    for number, block in enumerate(blocks, 1):
        count = number
        kind = tuple((name, type(each), _settings(each)) for name, each in block.named_modules())
        if kind not in kinds:
            kinds.add(kind)
            last = number
    return min(count, max(last, LEAST_BLOCKS))


def _least_inside(config: Any) -> int:
    """Blocks of a tower for images: so many that it has those whose hidden states are taken."""
    taken = getattr(config, "vision_feature_layer", None)
    numbers = [taken] if isinstance(taken, int) else list(taken or ())
    return max(LEAST_BLOCKS, *map(abs, numbers), 0)


def _settings(module: nn.Module) -> tuple[Any, ...]:
    """What distinguishes a module from one of the same class, sizes and numbers aside."""
    plain = {name: value for name, value in vars(module).items() if isinstance(value, str | bool | None)}
    return (*sorted(plain.items(), key=lambda each: each[0]), *sorted(module._parameters))


def _shrink_images(config: Any, images: Any) -> None:
    """Pictures of two by two patches."""
    size, patch = getattr(images, "image_size", None), getattr(images, "patch_size", None)
    if isinstance(size, int) and isinstance(patch, int) and size > 2 * patch:
        images.image_size = 2 * patch
        if isinstance(getattr(config, "image_seq_length", None), int):
            config.image_seq_length = 4
