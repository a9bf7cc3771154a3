"""Several sequences in one row, none of which sees another: attention is worked out for each by itself.

    tokens           a b c | d e | f g h i        one row [1, T]
    position_ids     0 1 2 | 0 1 | 0 1 2 3        begin anew with each sequence
    attention_mask   3       2     4              the lengths, [1, 1, 1, n]

A model of transformers takes a mask of four dimensions for one that is ready, and hands it to the attention of each
block as it is. So the lengths go where a mask would, and an attention of ours, registered with transformers by name,
reads them. Its cost follows the square of each sequence's length, where a mask over the row would have it follow the
square of the row's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.models.huggingface.anatomy import Anatomy, DecoderError
from penstock.models.huggingface.layers import HIDDEN, model_layers
from penstock.models.huggingface.routers import Routers

__all__ = ["attend_each", "packed_inputs", "require_apart", "require_usual", "use_each_sequence"]

EACH_SEQUENCE = "penstock_each_sequence"
"""The name under which transformers knows the attention."""
LENGTHS = (9, 1, 6)
"""Of the sequences by which a small copy is judged: longer and shorter than its windows, and one token alone."""


def packed_inputs(tokens: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    """What a model made with `Decoder(packed=True)` takes for sequences that lie in one row.

    Args:
        tokens: [1, T], one sequence behind the other.
        lengths: [n] whole numbers, T in all.

    Returns:
        `input_ids`[1, T], `position_ids`[1, T] and the lengths as an `attention_mask`[1, 1, 1, n].

    Raises:
        DecoderError: the lengths do not add up to the row.

    Examples:
        >>> import torch
        >>> inputs = packed_inputs(torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([3, 2]))
        >>> inputs["position_ids"].tolist(), inputs["attention_mask"].tolist()
        ([[0, 1, 2, 0, 1]], [[[[3, 2]]]])
    """
    if tokens.shape != (1, total := int(lengths.sum())):
        raise DecoderError(
            f"sequences of {total} tokens in all were given with tokens{list(tokens.shape)}; they lie in one row, "
            f"[1, {total}]"
        )
    places = torch.cat([torch.arange(length, device=tokens.device) for length in lengths.tolist()])
    return {"input_ids": tokens, "position_ids": places[None], "attention_mask": lengths.reshape(1, 1, 1, -1)}


def attend_each(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Causal attention within each sequence of a row; without lengths, within each row.

    Args:
        module: the attention that asks.
        query: [B, H, T, D]. key, value: [B, H', T, D].
        attention_mask: lengths, [1, 1, 1, n], or None.
        kwargs: what torch's attention takes as transformers calls it, and `sliding_window`.

    Raises:
        DecoderError: a mask that is no lengths, or numbers that are added to the scores.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if kwargs.get("position_bias") is not None:
        raise DecoderError("its attention adds numbers by pairs of places, which is not known of packed sequences")
    spans = [query.shape[2]] if attention_mask is None else _spans(attention_mask, query)
    window = kwargs.get("sliding_window")
    rows = zip(query.split(spans, 2), key.split(spans, 2), value.split(spans, 2), strict=True)
    parts = [sdpa_attention_forward(module, *row, _band(row[0], window), **kwargs)[0] for row in rows]  # B, L, H, D
    return torch.cat(parts, 1), None


def _spans(mask: Tensor, query: Tensor) -> list[int]:
    spans: list[int] = mask.flatten().tolist() if mask.dtype == torch.int64 and mask.shape[:3] == (1, 1, 1) else []
    if query.shape[0] != 1 or sum(spans) != query.shape[2]:
        raise DecoderError(
            f"an attention_mask{list(mask.shape)} of {mask.dtype} came to rows of {query.shape[2]} tokens; give what "
            "packed_inputs(tokens, lengths) makes"
        )
    return spans


def _without_padding(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> None:
    """No mask, as lengths say what sees what. Raises DecoderError where a sample is padded, which they do not say."""
    if attention_mask is None or attention_mask.all():
        return
    length = attention_mask.shape[-1]
    padded = length - attention_mask.sum(-1)
    sample = int(padded.argmax())
    raise DecoderError(
        f"sample {sample} of {length} tokens has {int(padded[sample])} that are padding, and a model "
        "that keeps sequences in one row apart takes none; give rows made by packed_inputs(tokens, lengths), or make "
        "the Decoder without packed=True"
    )


def _band(query: Tensor, window: int | None) -> Tensor | None:
    """Which places see which, where a window is shorter than the sequence."""
    length = query.shape[2]
    if window is None or length <= window:
        return None
    seen = torch.ones(length, length, dtype=torch.bool, device=query.device)
    return seen.tril().triu(1 - window)[None, None]


def require_usual(model: Any) -> None:
    """Raises DecoderError for a model on which `use_each_sequence` was called already: it takes no padded samples."""
    if model.config._attn_implementation == EACH_SEQUENCE:
        raise DecoderError(
            "the model keeps sequences in one row apart, as an earlier Decoder(packed=True) left it; go on with that "
            'Decoder, or call model.set_attn_implementation("sdpa") first'
        )


def use_each_sequence(model: Any) -> None:
    """Has a model, and what is built by its config, work out attention by `attend_each`.

    Raises DecoderError for a model that does not call torch's attention, as what it does instead would be lost.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    usual = model.config._attn_implementation
    if usual != "sdpa":
        raise DecoderError(
            f"{type(model).__name__} ({model.config.model_type}) works out attention by {usual!r}, and sequences in "
            "one row are kept apart only where torch's own attention does"
        )
    AttentionInterface.register(EACH_SEQUENCE, attend_each)
    AttentionMaskInterface.register(EACH_SEQUENCE, _without_padding)
    model.set_attn_implementation(EACH_SEQUENCE)


def require_apart(small: Any, anatomy: Anatomy, routers: Routers | None) -> None:
    """Tries a small model on sequences in one row, cut into layers, and on each alone, as a whole and as it came.

    Every logit must be the same but for rounding, and no gradient may lead from one sequence to another. Afterwards
    `use_each_sequence` holds for the model.

    Raises:
        DecoderError: the model can't be tried, or a sequence has other logits among others than alone.
    """
    name = f"{type(small).__name__} ({small.config.model_type})"
    small = small.eval()
    count = small.config.get_text_config(decoder=True).vocab_size
    tokens = torch.randint(1, count - 1, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    try:
        alone, rounding = _alone(small, tokens)
        use_each_sequence(small)
        layers = model_layers(small, anatomy, routers)
        value: Any = packed_inputs(tokens, torch.tensor(LENGTHS))
        value = layers[0](value)
        embedded = value[HIDDEN] = value[HIDDEN].detach().requires_grad_()
        for layer in layers[1:]:
            value = layer(value)
    except DecoderError:
        raise
    except Exception as error:  # whatever a model's code raises where a mask is none
        raise DecoderError(
            f"a small copy of {name} does not take several sequences in one row ({type(error).__name__}: {error})"
        ) from error
    together = (value["logits"] if isinstance(value, dict) else value).split(LENGTHS, 1)
    for number, (wanted, found) in enumerate(zip(alone, together, strict=True)):
        off = float((wanted - found).detach().abs().max())
        if not off <= rounding * float(wanted.abs().max()):
            raise DecoderError(
                f"{name} does not keep sequences in one row apart: in a small copy the logits of sequence {number} "
                f"differ by up to {off:.3g} from those that it has alone"
            )
        # Rounding hides no leak here: what does not reach a logit has a gradient of 0.
        (reached,) = torch.autograd.grad((found * wanted).sum(), embedded, retain_graph=True)
        others = [each for place, each in enumerate(reached.split(LENGTHS, 1)) if place != number]
        if any(each.any() for each in others):
            raise DecoderError(
                f"{name} does not keep sequences in one row apart: in a small copy the logits of sequence {number} "
                "have a gradient by the tokens of others"
            )


@torch.no_grad()
def _alone(small: Any, tokens: Tensor) -> tuple[list[Tensor], float]:
    """The logits of each sequence, and how far rounding may take them, as a share of the largest.

    In float64, where the model's code runs in it: the matrix products of some mixtures do not.
    """
    parts = tokens.split(LENGTHS, 1)
    try:
        small.double()
        return [small(input_ids=each, use_cache=False).logits for each in parts], 1e-9
    except RuntimeError:
        small.float()
        return [small(input_ids=each, use_cache=False).logits for each in parts], 2e-5
