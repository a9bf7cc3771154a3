"""A captioner: an image tower before a decoder, in one flat list of layers, for images of any size.

    patches of all images [1, P, features]
      0  patch embedding         patches, each with its row and column in its image
      1  .. image_depth blocks   a patch sees its own image
         join                    a sample is its images, then its words:  [i i i i w w w] [i i w w w w w]
         .. depth blocks         a vector sees those before it in its own sample
         head                    logits[1, P + T, V]

The images of a microbatch lie in one row, one after the other, and so do the samples, so that nothing is padded: what
an image costs follows from its own number of patches. A sample may have several images, or none. Weights are seeded
as in the GPT, by the number of the layer; blocks and head of the decoder are the GPT's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from penstock.models.block import TransformerBlock, dropout_layer
from penstock.models.gpt import GPTBlock, GPTConfig, Head, Packed
from penstock.models.listed import ListedLayers
from penstock.models.seeded import require_sizes
from penstock.runtime import Stage

__all__ = [
    "CaptionerConfig",
    "Join",
    "captioner_layers",
    "captioner_presets",
    "captioner_stage",
]


@dataclass(frozen=True, slots=True)
class CaptionerConfig:
    """Sizes of a captioner.

    Attributes:
        num_features: numbers of a patch.
        side: most rows, and most columns, of patches in an image.
        image_depth, image_width, image_heads: of the image tower.
        vocab_size: words.
        context: most words of a sample; its images come on top.
        depth, width, num_heads: of the decoder.
        dropout: share of the values that both towers leave out in training.

    Raises:
        ValueError: a size below 1, or heads that do not divide their width.

    Examples:
        >>> import penstock as ps
        >>> config = ps.models.captioner_presets["nano"]
        >>> config.depth > 0, config.image_depth > 0
        (True, True)
    """

    num_features: int
    side: int
    image_depth: int
    image_width: int
    image_heads: int
    vocab_size: int
    context: int
    depth: int
    width: int
    num_heads: int
    dropout: float = 0.0

    def __post_init__(self) -> None:
        image = {"num_features": self.num_features, "side": self.side, "image_depth": self.image_depth}
        require_sizes("the image tower of a captioner", image, self.image_width, self.image_heads, self.dropout)
        words = {"vocab_size": self.vocab_size, "context": self.context, "depth": self.depth}
        require_sizes("the decoder of a captioner", words, self.width, self.num_heads, self.dropout)

    @property
    def decoder(self) -> GPTConfig:
        """The sizes of the decoder as those of a GPT."""
        return GPTConfig(self.vocab_size, self.context, self.depth, self.width, self.num_heads, self.dropout)

    @property
    def num_image_layers(self) -> int:
        """The layers of the image tower: the patch embedding and its blocks."""
        return self.image_depth + 1

    @property
    def num_layers(self) -> int:
        """Both towers' blocks, the patch embedding, the join and the head."""
        return self.image_depth + self.depth + 3


captioner_presets: dict[str, CaptionerConfig] = {
    "nano": CaptionerConfig(
        num_features=12, side=16, image_depth=2, image_width=32, image_heads=2, vocab_size=48, context=64, depth=3,
        width=48, num_heads=4,
    ),
    "tiny": CaptionerConfig(
        num_features=48, side=32, image_depth=4, image_width=96, image_heads=3, vocab_size=96, context=256, depth=8,
        width=128, num_heads=4,
    ),
}  # fmt: skip
"""Named sizes; `dataclasses.replace` gives one another depth or width."""


class PatchEmbedding(nn.Module):
    """Patches of images that lie in one row to vectors, each with the row and the column it has in its image."""

    def __init__(self, config: CaptionerConfig) -> None:
        super().__init__()
        self.patch = nn.Linear(config.num_features, config.image_width)
        self.row = nn.Embedding(config.side, config.image_width)
        self.column = nn.Embedding(config.side, config.image_width)
        self.dropout = dropout_layer(config.dropout)

    def forward(self, given: Packed) -> Packed:
        """{patches[1, P, features], sizes[I, 2], ...} to {images[1, P, D], image_lengths[I], ...}.

        Raises:
            ValueError: images that have other than P patches in all, or are larger than `side`.
        """
        patches, sizes = given["patches"], given["sizes"]
        shapes: list[tuple[int, int]] = [(rows, columns) for rows, columns in sizes.tolist()]
        total, side = sum(rows * columns for rows, columns in shapes), self.row.num_embeddings
        if patches.shape[:2] != (1, total):
            raise ValueError(
                f"images of {total} patches in all were given with patches{list(patches.shape)}; they lie in one "
                f"row, [1, {total}, features]"
            )
        if (largest := max((max(shape) for shape in shapes), default=0)) > side:
            raise ValueError(f"an image of {largest} patches along one side; there are at most {side}: crop it")
        place = [torch.cartesian_prod(torch.arange(rows), torch.arange(columns)) for rows, columns in shapes]
        where = torch.cat([torch.empty(0, 2, dtype=torch.int64), *place]).to(patches.device)  # P, 2
        embedded = self.patch(patches) + self.row(where[:, 0]) + self.column(where[:, 1])
        rest = {name: value for name, value in given.items() if name not in ("patches", "sizes")}
        return {"images": self.dropout(embedded), "image_lengths": sizes.prod(1), **rest}


class ImageBlock(TransformerBlock):
    """A block in which every patch sees those of its own image."""

    def forward(self, value: Packed) -> Packed:  # type: ignore[override]
        return {**value, "images": super().forward(value["images"], lengths=value["image_lengths"])}


class Join(nn.Module):
    """Images, as the decoder reads them, before the words of their sample: what a GPT's blocks take as packed."""

    def __init__(self, config: CaptionerConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.image_width)
        self.project = nn.Linear(config.image_width, config.width)
        self.token = nn.Embedding(config.vocab_size, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.dropout = dropout_layer(config.dropout)

    def forward(self, given: Packed) -> Packed:
        """{images[1, P, D], image_lengths[I], images_of[S], tokens[1, T], num_words[S]} to {hidden, lengths[S]}.

        Raises:
            ValueError: counts that do not go together, or more words than positions.
        """
        patches, words = given["image_lengths"].tolist(), given["num_words"].tolist()
        counts, tokens = given["images_of"].tolist(), given["tokens"]
        if len(counts) != len(words) or sum(counts) != len(patches) or tokens.shape != (1, sum(words)):
            raise ValueError(
                f"{len(patches)} images and tokens{list(tokens.shape)} were given for {len(words)} samples with "
                f"{sum(counts)} images and {sum(words)} words; counts are of the samples, and words lie in one row"
            )
        if (most := max(words)) > (context := self.position.num_embeddings):
            raise ValueError(f"{most} words given to a captioner of context {context}; crop the text")
        starts = [sum(counts[:k]) for k in range(len(counts))]
        seen = [sum(patches[start : start + count]) for start, count in zip(starts, counts, strict=True)]
        place = torch.cat([torch.arange(count, device=tokens.device) for count in words])  # T
        said = self.token(tokens) + self.position(place)  # 1, T, D
        shown = self.project(self.norm(given["images"]))  # 1, P, D
        rows = zip(shown.split(seen, 1), said.split(words, 1), strict=True)
        hidden = torch.cat([part for row in rows for part in row], 1)
        lengths = [own + count for own, count in zip(seen, words, strict=True)]
        return {"hidden": self.dropout(hidden), "lengths": torch.tensor(lengths)}


def captioner_layers(config: CaptionerConfig, indices: Iterable[int] | None = None, seed: int = 0) -> list[nn.Module]:
    """Layers of a captioner in the order asked for, on the CPU in float32.

    Draws nothing from torch's global generators.

    Args:
        config: sizes of both towers.
        indices: which layers; all where not given.
        seed: of the first weights.

    Raises:
        ValueError: an index out of range.

    Examples:
        >>> import penstock as ps
        >>> config = ps.models.captioner_presets["nano"]
        >>> len(ps.models.captioner_layers(config))
        8
    """
    wanted = list(range(config.num_layers) if indices is None else indices)
    towers = _Towers(config)
    return [towers.layer(index, seed) for index in wanted]


def captioner_stage(
    config: CaptionerConfig,
    indices: Iterable[int],
    seed: int = 0,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
) -> Stage:
    """The stage that holds some layers, under their names in the whole model ("layers.3").

    Args:
        config: sizes of both towers.
        indices: its layers, ascending.
        seed: of the first weights.
        wrap: puts something around each block, like activation checkpointing.

    Examples:
        >>> import penstock as ps
        >>> stage = ps.models.captioner_stage(ps.models.captioner_presets["nano"], range(3))
        >>> next(name for name, _ in stage.named_parameters())
        'layers.0.patch.weight'
    """
    wanted = list(indices)
    layers = captioner_layers(config, wanted, seed)
    if wrap is not None:
        layers = [wrap(layer) if isinstance(layer, TransformerBlock) else layer for layer in layers]
    return Stage({f"layers.{i}": layer for i, layer in zip(wanted, layers, strict=True)}, wanted)


class _Towers:
    """Both towers as lists of layers of their own, which their depths and widths seed."""

    def __init__(self, config: CaptionerConfig) -> None:
        self._config = config
        num, decoder = config.num_image_layers, config.decoder

        def image(index: int) -> nn.Module:
            block = ImageBlock(config.image_width, config.image_heads, config.dropout, causal=False)
            return PatchEmbedding(config) if index == 0 else block

        def words(index: int) -> nn.Module:
            if index == 0:
                return Join(config)
            if index == config.depth + 1:
                return Head(decoder)
            return GPTBlock(config.width, config.num_heads, config.dropout, decoder.bias)

        self._image = ListedLayers("an image tower", config.image_depth, config.image_width, image, prefix="image/")
        self._words = ListedLayers("a decoder", config.depth, config.width, words, prefix="words/")
        self._num = num

    def layer(self, index: int, seed: int) -> nn.Module:
        if not 0 <= index < self._config.num_layers:
            raise ValueError(
                f"layer {index} asked of a captioner of {self._config.num_layers} layers, counted from 0"
            )
        within = index - self._num
        tower, place = (self._image, index) if within < 0 else (self._words, within)
        (found,) = tower.layers([place], seed)
        return found
