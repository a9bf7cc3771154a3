"""How a batch of a transformers model is cut: the rules for inputs that have usual names.

    position_ids    [3, B, T] of mRoPE    cut along dimension 1
                    [1, T] or [T]         whole, as they are those of every sample; a mask [1, 1, T, T] too
    cache_position  [T]                   whole
    pixel_values    [N, C, H, W]          each sample's pictures, counted by the image tokens among its input_ids
    cu_seq_lens_q   [n + 1]               offsets of sequences: each microbatch's own, counted from its first token

A packed row of several sequences, input_ids[1, T], is cut between sequences. Offsets say where these begin, or else
position_ids [1, T] that begin again at 0:

    input_ids  5 6 7 8 9 3    position_ids  0 1 0 1 2 0    ->    5 6   7 8 9   3
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor

from penstock.models.huggingface.pictures import IMAGES, PictureForm
from penstock.runtime import WHOLE, BatchRules

OFFSETS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "cu_seqlens_q", "cu_seqlens_k")
Rule = Callable[[Tensor, int], Sequence[Tensor | None]]
FOR_ALL_SAMPLES = ("position_ids", "attention_mask", "token_type_ids")
"""What may have one entry for all samples."""


class ModelStages(list[Any]):
    """The stages of a model, with the parameters that they share and the rules for its batches.

    Args:
        tied: groups of names of parameters that are one. `ps.Pipeline` adds them to `ParallelOptions.tied`.
        pictures: what pictures the model takes; None where it takes none, or pictures of no one size.
    """

    def __init__(self, stages: Sequence[Any], tied: Sequence[Sequence[str]], pictures: PictureForm | None) -> None:
        super().__init__(stages)
        self.tied, self._pictures = tied, pictures

    def batch_rules(self, inputs: Any) -> BatchRules:
        """The rules for a batch with these inputs."""
        return batch_rules(inputs, self._pictures)


def batch_rules(inputs: Any, pictures: PictureForm | None = None) -> BatchRules:
    """The rules for a batch with these inputs, by their usual names."""
    tokens = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
    if not isinstance(tokens, Tensor) or tokens.dim() != 2:
        return BatchRules()
    given = {name: value for name, value in inputs.items() if isinstance(value, Tensor) and value.dim()}
    num, length = tokens.shape
    offsets = next((given[name].tolist() for name in OFFSETS if name in given), None) or _offsets_of(given, length)
    if num == 1 and len(offsets) > 2:
        return _of_row(given, offsets)
    rules: dict[str, Any] = {}
    for name, value in given.items():
        if name in OFFSETS:
            rules[name] = _of_offsets([*range(0, num * length + 1, length)])
        elif name == "cache_position" or (name == "position_ids" and value.dim() == 1):
            rules[name] = WHOLE
        elif name == "position_ids" and value.dim() == 3:
            rules[name] = 1 if value.shape[1] == num else WHOLE
        elif name in FOR_ALL_SAMPLES and len(value) == 1 < num:
            rules[name] = WHOLE
        elif name == IMAGES and pictures is not None:
            counts = (tokens == pictures.token).sum(1) // pictures.num_tokens
            if counts.sum() == len(value):  # else no rule is right
                rules[name] = _of_pictures(counts)
    return BatchRules(inputs=rules)


def _offsets_of(given: Mapping[str, Tensor], length: int) -> list[int]:
    """Where the sequences of a row begin, and its end, by positions [1, T]. A row with a mask holds one."""
    positions, mask = given.get("position_ids"), given.get("attention_mask")
    if positions is None or positions.shape != (1, length) or (mask is not None and mask.dim() == 2):
        return []
    return [*(positions[0] == 0).nonzero().flatten().tolist(), length]


def _of_row(given: Mapping[str, Tensor], offsets: Sequence[int]) -> BatchRules:
    """The rules for a row of several sequences."""
    length, num_sequences = offsets[-1], len(offsets) - 1

    def along(dimension: int) -> Rule:
        def cut(value: Tensor, num: int) -> list[Tensor]:
            return [value.narrow(dimension, a, b - a) for a, b in _spans(offsets, num)]

        cut.num_samples = num_sequences  # type: ignore[attr-defined] # which are its samples
        return cut

    rules: dict[str, Any] = {}
    for name, value in given.items():
        if name in OFFSETS:
            rules[name] = _of_offsets(offsets)
        elif value.shape[-1] == length:  # positions may be [3, 1, T]
            rules[name] = along(value.dim() - 1)
        elif value.shape == (1, 1, 1, num_sequences):  # lengths, as packed_inputs has them
            rules[name] = 3
    return BatchRules(inputs=rules, targets=along(1))


def _spans(offsets: Sequence[int], num: int) -> list[tuple[int, int]]:
    """The tokens of each microbatch, where the samples begin at these; cut as `Tensor.tensor_split` does."""
    least, larger = divmod(len(offsets) - 1, num)
    ends = accumulate((least + (m < larger) for m in range(num)), initial=0)
    return [(offsets[a], offsets[b]) for a, b in pairwise(ends)]


def _of_offsets(samples: Sequence[int]) -> Rule:
    """The rule for offsets of sequences in samples that lie one behind the other."""

    def cut(value: Tensor, num: int) -> list[Tensor]:
        return [value[(value >= a) & (value <= b)] - a for a, b in _spans(samples, num)]

    return cut


def _of_pictures(counts: Tensor) -> Rule:
    """The rule for pictures, by the number of them that each sample has."""

    def cut(value: Tensor, num: int) -> list[Tensor | None]:
        sizes = [int(part.sum()) for part in counts.tensor_split(num)]
        return [part if len(part) else None for part in value.split(sizes)]

    return cut
