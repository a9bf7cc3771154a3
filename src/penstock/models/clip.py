"""A CLIP: a tower for each modality, each a flat list of layers, and the contrast of what they say.

    text   [B, T]            embedding  block ... block  summary -> [B, E]
    audio  [B, T, features]  embedding  block ... block  summary -> [B, E]   } contrast -> logits[P, B, B]
    video  [B, T, features]  embedding  block ... block  summary -> [B, E]

A tower looks at tokens, or at vectors: frames of sound, patches of a picture or of a film. For each pair of towers
the logits say how well each sample of the one goes with each of the other (Radford et al. 2021, arXiv 2103.00020, for
two towers; here every pair has a matrix). Any cut of a tower is a pipeline stage; weights are seeded as in the GPT,
by the tower's name and the layer's number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, takewhile
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.models.block import TransformerBlock, dropout_layer
from penstock.models.listed import ListedLayers, require_sizes
from penstock.program import Branch, Program
from penstock.runtime import Stage, partition
from penstock.schedule import StageGraph

__all__ = [
    "CLIP",
    "CLIPConfig",
    "CLIPStages",
    "Contrast",
    "ContrastiveLoss",
    "TowerConfig",
    "clip_presets",
    "clip_program",
    "retrieval_accuracy",
    "tower_costs",
    "tower_layers",
    "tower_stage",
]


@dataclass(frozen=True, slots=True)
class TowerConfig:
    """Sizes of one tower. Its input is tokens or vectors, so either `vocab_size` or `num_features` is given.

    Attributes:
        context: most tokens or vectors per sample.
        depth: number of blocks.
        width: numbers per token between blocks.
        num_heads: attention heads per block; they divide the width.
        vocab_size: number of tokens.
        num_features: numbers per vector.
        dropout: share of numbers that dropout sets to zero while training.

    Raises:
        ValueError: a size below 1, heads that do not divide the width, both or none of `vocab_size` and
            `num_features`.

    Examples:
        >>> import penstock as ps
        >>> tower = ps.models.TowerConfig(context=16, depth=2, width=32, num_heads=2, vocab_size=64)
        >>> tower.num_features is None
        True
    """

    context: int
    depth: int
    width: int
    num_heads: int
    vocab_size: int | None = None
    num_features: int | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        looked_at = {"vocab_size": self.vocab_size, "num_features": self.num_features}
        given = {name: size for name, size in looked_at.items() if size is not None}
        if len(given) != 1:
            raise ValueError(f"a tower with {' and '.join(given) or 'neither'}; give vocab_size or num_features, one")
        sizes = {**given, "context": self.context, "depth": self.depth}
        require_sizes("a tower", sizes, self.width, self.num_heads, self.dropout)

    @property
    def num_layers(self) -> int:
        """The blocks, the embedding and the summary."""
        return self.depth + 2


@dataclass(frozen=True)
class CLIPConfig:
    """Sizes of a CLIP with any number of towers.

    Attributes:
        towers: the sizes of each tower, by name.
        shared_width: numbers in the vector that each tower makes of a sample.

    Raises:
        ValueError: fewer than two towers.

    Examples:
        >>> import penstock as ps
        >>> config = ps.models.clip_presets["nano"]
        >>> sorted(config.towers), config.shared_width > 0
        (['audio', 'text', 'video'], True)
    """

    towers: Mapping[str, TowerConfig]
    shared_width: int = 512

    def __post_init__(self) -> None:
        if len(self.towers) < 2 or self.shared_width < 1:
            raise ValueError(
                f"a CLIP of {len(self.towers)} towers and shared width {self.shared_width}; it needs two towers, and "
                "a width of at least 1"
            )
        object.__setattr__(self, "towers", MappingProxyType(dict(self.towers)))

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The pairs of towers, in the order of the logits."""
        return list(combinations(self.towers, 2))

    @property
    def num_parameters(self) -> int:
        """Of all towers, and the scale of the contrast."""
        return sum(self.tower_parameters(name) for name in self.towers) + 1

    def tower_parameters(self, name: str) -> int:
        """The parameters of one tower."""
        return _listed(self, name).num_parameters

    def tower(self, name: str) -> TowerConfig:
        """One tower. `ValueError` where there is none of that name."""
        if name not in self.towers:
            raise ValueError(f"no tower {name!r}; there are {', '.join(self.towers)}")
        return self.towers[name]


_AUDIO = TowerConfig(context=264, depth=240, width=1024, num_heads=16, num_features=256)
_TEXT = TowerConfig(context=77, depth=240, width=768, num_heads=16, vocab_size=49408)
_VIDEO = TowerConfig(context=264, depth=440, width=1024, num_heads=16, num_features=1176)

clip_presets: dict[str, CLIPConfig] = {
    "nano": CLIPConfig(
        {
            "audio": TowerConfig(context=8, depth=2, width=32, num_heads=2, num_features=6),
            "text": TowerConfig(context=6, depth=2, width=32, num_heads=2, vocab_size=32),
            "video": TowerConfig(context=12, depth=2, width=32, num_heads=2, num_features=10),
        },
        shared_width=32,
    ),
    "flexpipe-audio-text": CLIPConfig({"audio": _AUDIO, "text": _TEXT}),
    "flexpipe-audio-video": CLIPConfig({"audio": _AUDIO, "video": _VIDEO}),
    "flexpipe-audio-text-video": CLIPConfig({"audio": _AUDIO, "text": _TEXT, "video": _VIDEO}),
}
"""Named sizes. FlexPipe's table 4 has the towers (3B, 1.7B and 5.5B parameters, which these sizes give) and models of
4.7B, 8.2B and 9.7B, without saying of which towers. Audio and text are 4.8B with the embeddings that we assume (16 x
16 patches of a spectrogram, CLIP's 49,408 words, 2 x 14 x 14 patches of a film in three colours); audio and video are
8.6B and all three 10.3B: no combination of the towers adds up to 8.2B or 9.7B."""


class TowerEmbedding(nn.Module):
    """Tokens[B, T] or vectors[B, T, features] to [B, T, D], each with its place."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.config = config
        if config.vocab_size is not None:
            self.token = nn.Embedding(config.vocab_size, config.width)
        else:
            self.patch = nn.Linear(config.num_features or 0, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.dropout = dropout_layer(config.dropout)

    def forward(self, given: Tensor) -> Tensor:
        length, context = given.shape[1], self.config.context
        if length > context:
            raise ValueError(f"samples of length {length} given to a tower of context {context}; crop them")
        embedded = self.token(given) if self.config.vocab_size is not None else self.patch(given)
        place = torch.arange(length, device=given.device)  # T
        out: Tensor = self.dropout(embedded + self.position(place))  # B, T, D
        return out


class TowerSummary(nn.Module):
    """[B, T, D] to what the tower says, [B, E] of length 1: the mean over the sample, behind a norm."""

    def __init__(self, width: int, shared_width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, shared_width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.normalize(self.project(self.norm(x).mean(1)), dim=-1)


class Contrast(nn.Module):
    """Compares the towers' vectors, {tower: [B, E]}: logits[P, B, B] for each pair of towers, with a learnt scale.

    Args:
        config: names the towers, and so the pairs.

    Examples:
        >>> import penstock as ps
        >>> contrast = ps.models.Contrast(ps.models.clip_presets["nano"])
        >>> import torch
        >>> vectors = {name: torch.randn(4, 8) for name in ps.models.clip_presets["nano"].towers}
        >>> contrast(vectors).shape
        torch.Size([3, 4, 4])
    """

    def __init__(self, config: CLIPConfig) -> None:
        super().__init__()
        self.pairs = config.pairs
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, said: Mapping[str, Tensor]) -> Tensor:
        scale = self.log_scale.exp().clamp(max=100.0)
        return torch.stack([scale * said[left] @ said[right].T for left, right in self.pairs])


class ContrastiveLoss:
    """Cross-entropy, in nats, of finding a sample's partner in the other tower; a mean over both ways and all pairs.

    Samples are told apart from those of their own microbatch only: a batch cut into more of them is an easier task.

    Examples:
        >>> import penstock as ps
        >>> import torch
        >>> logits = torch.eye(4).expand(3, 4, 4) * 100
        >>> round(ps.models.ContrastiveLoss()(logits).item(), 3)
        0.0
    """

    by_microbatch = True

    def __call__(self, logits: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits[P, B, B] and each sample's partner int64[B] (its own number where None) to a scalar."""
        num_pairs, size, _ = logits.shape
        if targets is None:
            targets = torch.arange(size, device=logits.device)
        wanted = targets.expand(num_pairs, size).flatten()
        there = functional.cross_entropy(logits.float().flatten(0, 1), wanted)
        back = torch.empty_like(targets)
        back[targets] = torch.arange(size, device=targets.device)
        wanted = back.expand(num_pairs, size).flatten()
        return (there + functional.cross_entropy(logits.float().mT.flatten(0, 1), wanted)) / 2

    def __repr__(self) -> str:
        return "ContrastiveLoss()"


class CLIP(nn.Module):
    """The whole model in one module: {tower: its input} to logits[P, B, B].

    Args:
        config: its sizes.
        seed: initial weights are drawn from it, the same as those of the cut model.

    Examples:
        >>> import penstock as ps
        >>> import torch
        >>> from penstock.data import PairedSamples, TokenForm, VectorForm
        >>> forms = {"audio": VectorForm(8, 6), "text": TokenForm(6, 32), "video": VectorForm(12, 10)}
        >>> samples = PairedSamples(forms)
        >>> batch = {name: torch.from_numpy(value) for name, value in samples.samples(range(4)).items()}
        >>> ps.models.CLIP(ps.models.clip_presets["nano"])(batch).shape  # three pairs of towers
        torch.Size([3, 4, 4])
    """

    def __init__(self, config: CLIPConfig, seed: int = 0) -> None:
        super().__init__()
        layers = {name: nn.Sequential(*tower_layers(config, name, seed=seed)) for name in config.towers}
        self.towers = nn.ModuleDict(layers)
        self.contrast = Contrast(config)

    def forward(self, given: Mapping[str, Tensor]) -> Tensor:
        if missing := [name for name in self.towers if name not in given]:
            raise ValueError(
                f"nothing given for tower {missing[0]!r}; there is input for {', '.join(given) or 'none'}"
            )
        out: Tensor = self.contrast({name: tower(given[name]) for name, tower in self.towers.items()})
        return out


def retrieval_accuracy(logits: Tensor) -> Tensor:
    """For each pair of towers, the share of samples [P] whose partner comes first; by chance it is 1/B.

    Args:
        logits: [P, B, B], of P pairs of towers and B samples.

    Examples:
        >>> import penstock as ps
        >>> import torch
        >>> ps.models.retrieval_accuracy(torch.eye(4).expand(3, 4, 4))
        tensor([1., 1., 1.])
    """
    return (logits.argmax(-1) == torch.arange(logits.shape[-1], device=logits.device)).float().mean(-1)


def tower_layers(
    config: CLIPConfig, name: str, indices: Iterable[int] | None = None, seed: int = 0
) -> list[nn.Module]:
    """The layers of a tower at `indices`, in that order, on the CPU in float32.

    Nothing is drawn from torch's global generators.

    Args:
        config: the sizes of the model.
        name: the tower.
        indices: numbers of layers, from 0; all where not given.
        seed: initial weights are drawn from it, layer by layer.

    Raises:
        ValueError: an unknown tower or an index out of range.

    Examples:
        >>> import penstock as ps
        >>> config = ps.models.clip_presets["nano"]
        >>> len(ps.models.tower_layers(config, "text", [0, 1]))
        2
    """
    return _listed(config, name).layers(indices, seed)


def _listed(config: CLIPConfig, name: str) -> ListedLayers:
    tower = config.tower(name)

    def make(index: int) -> nn.Module:
        if index == 0:
            return TowerEmbedding(tower)
        if index == tower.num_layers - 1:
            return TowerSummary(tower.width, config.shared_width)
        return TransformerBlock(tower.width, tower.num_heads, tower.dropout, causal=False)

    return ListedLayers("a tower", tower.depth, tower.width, make, prefix=f"{name}/")


def tower_stage(config: CLIPConfig, name: str, indices: Iterable[int], seed: int = 0) -> Stage:
    """The stage that holds a tower's layers at `indices`, under their names in `CLIP` ("towers.text.3").

    Args:
        config: the sizes of the model.
        name: the tower.
        indices: numbers of layers, from 0.
        seed: initial weights are drawn from it, layer by layer.

    Examples:
        >>> import penstock as ps
        >>> stage = ps.models.tower_stage(ps.models.clip_presets["nano"], "text", [0])
        >>> next(name for name, _ in stage.named_parameters())
        'towers.text.0.token.weight'
    """
    wanted = list(indices)
    layers = tower_layers(config, name, wanted, seed)
    # A layer's number in the whole model seeds its dropout: towers of one shape must not draw the same.
    before = sum(config.towers[other].num_layers for other in takewhile(lambda other: other != name, config.towers))
    named = {f"towers.{name}.{i}": layer for i, layer in zip(wanted, layers, strict=True)}
    return Stage(named, [before + i for i in wanted])


def tower_costs(config: CLIPConfig, name: str) -> list[float]:
    """Forward FLOPs per sample of each layer of a tower, from sizes alone.

    Args:
        config: the sizes of the model.
        name: the tower.

    Examples:
        >>> import penstock as ps
        >>> config = ps.models.clip_presets["nano"]
        >>> name = sorted(config.towers)[0]
        >>> len(ps.models.tower_costs(config, name)) == len(ps.models.tower_layers(config, name))
        True
    """
    tower = config.tower(name)
    length, width = tower.context, tower.width
    block = length * (2 * 12 * width**2 + 4 * length * width)
    first = 2.0 * length * width * (1 + (tower.num_features or 0))
    return [first, *[float(block)] * tower.depth, 2.0 * width * (length + config.shared_width)]


CONTRAST = "contrast"
"""The branch of the stage that compares what the towers say."""


@dataclass(frozen=True)
class CLIPStages:
    """The cut of a CLIP into stages, the towers' blocks spread by their FLOPs.

        cut = CLIPStages(config, {"audio": 2, "text": 4, "video": 1})
        pipe = ps.Pipeline(cut.sources(), program.build(), loss_fn=ContrastiveLoss(), optimizer=torch.optim.AdamW)
        pipe.step(cut.inputs({"audio": ..., "text": ..., "video": ...}))

    Parameters have the names that they have in `CLIP`, and the same values for the same seed.

    Attributes:
        config: the sizes of the model.
        num_stages: number of stages of each tower, by name.

    Raises:
        ValueError: towers other than the config's, or a number that no cut of a tower's layers has.

    Examples:
        >>> import penstock as ps
        >>> config = ps.models.clip_presets["nano"]
        >>> cut = ps.models.CLIPStages(config, {name: 1 for name in config.towers})
        >>> len(cut.sources())
        4
    """

    config: CLIPConfig
    num_stages: Mapping[str, int]

    def __post_init__(self) -> None:
        _require_towers(self.config, self.num_stages, "a number of stages")
        for name in self.config.towers:
            num, most = self.num_stages[name], self.config.tower(name).num_layers
            if not 1 <= num <= most:
                raise ValueError(f"tower {name!r} in {num} stages; it has {most} layers, so give 1 to {most}")
        ordered = {name: self.num_stages[name] for name in self.config.towers}
        object.__setattr__(self, "num_stages", MappingProxyType(ordered))

    @classmethod
    def of(cls, config: CLIPConfig, program: Program) -> CLIPStages:
        """The cut that a program of `clip_program` runs."""
        return cls(config, {name: num for name, (_, num) in program.branches.items() if name != CONTRAST})

    @property
    def stages(self) -> dict[str, range]:
        """The numbers of each tower's stages."""
        found: dict[str, range] = {}
        first = 0
        for name, num in self.num_stages.items():
            found[name] = range(first, first + num)
            first += num
        return found

    @property
    def contrast(self) -> int:
        """The number of the stage that all towers feed, the last."""
        return sum(self.num_stages.values())

    def graph(self, num_microbatches: Mapping[str, int] | None = None) -> StageGraph:
        """The stages as a graph. `num_microbatches` are those of each tower and of "contrast" where they differ."""
        edges = [(stage, stage + 1) for part in self.stages.values() for stage in part[:-1]]
        edges += [(part[-1], self.contrast) for part in self.stages.values()]
        if num_microbatches is None:
            return StageGraph(self.contrast + 1, tuple(edges))
        _require_towers(self.config, num_microbatches, "a number of microbatches", CONTRAST)
        _require_matching(num_microbatches)
        counts = [num_microbatches[name] for name, part in self.stages.items() for _ in part]
        return StageGraph(self.contrast + 1, tuple(edges), (*counts, num_microbatches[CONTRAST]))

    def sources(self, seed: int = 0) -> list[Callable[[], nn.Module]]:
        """For each stage the function that makes it, which a rank calls for its own stages alone."""
        made: list[Callable[[], nn.Module]] = []
        for name, num in self.num_stages.items():
            parts = partition(tower_costs(self.config, name), num)
            made += [partial(tower_stage, self.config, name, part, seed) for part in parts]
        return [*made, partial(contrast_stage, self.config)]

    def inputs(self, batch: Mapping[str, Tensor]) -> dict[int, Any]:
        """A batch by tower, as `ps.Pipeline.step` takes it: by the stage that it goes into."""
        _require_towers(self.config, batch, "input")
        return {part[0]: batch[name] for name, part in self.stages.items()}


def contrast_stage(config: CLIPConfig) -> Stage:
    """The stage that compares what the towers said, given as a tuple in the order of the config's towers."""

    def call(layer: nn.Module, said: tuple[Tensor, ...]) -> Any:
        return layer(dict(zip(config.towers, said, strict=True)))

    number = sum(tower.num_layers for tower in config.towers.values())
    return Stage({CONTRAST: Contrast(config)}, [number], call)


def clip_program(config: CLIPConfig, towers: Mapping[str, Branch], contrast: Branch, **options: Any) -> Program:
    """One program of all the towers' branches and the contrast's, which has one stage.

    A tower holds all the forwards of one microbatch of the contrast before any backward: a cap must leave room for
        them at each of its stages.

    Args:
        config: names the towers.
        towers: each tower's branch; what it feeds is filled in.
        contrast: the branch of the stage that compares the towers.
        options: for `ps.Program.of_branches`.

    Raises:
        ValueError: branches of other towers than the config's, more stages than a tower has layers, a contrast of
            several stages, or of microbatches that do not match a tower's.
        ScheduleError: branches that contradict each other.

    Examples:
        >>> import penstock as ps
        >>> config = ps.models.clip_presets["nano"]
        >>> towers = {name: ps.Branch(ps.placements.one_to_one(1), 4) for name in config.towers}
        >>> program = ps.models.clip_program(config, towers, ps.Branch(ps.placements.one_to_one(1), 4))
        >>> program.build().num_ranks
        4
    """
    _require_towers(config, towers, "a branch")
    CLIPStages(config, {name: branch.placement.num_stages for name, branch in towers.items()})
    if contrast.placement.num_stages != 1:
        raise ValueError(f"a contrast of {contrast.placement.num_stages} stages; it is one stage, so place one")
    _require_matching({name: branch.num_microbatches for name, branch in {**towers, CONTRAST: contrast}.items()})
    feeding = {name: replace(towers[name], feeds=(CONTRAST,)) for name in config.towers}
    return Program.of_branches({**feeding, CONTRAST: contrast}, **{"name": "clip", **options})


def _require_towers(config: CLIPConfig, given: Iterable[str], what: str, *more: str) -> None:
    """Raises ValueError where something is not given for just the towers of a config."""
    wanted, got = [*config.towers, *more], list(given)
    if CONTRAST in config.towers:
        raise ValueError(
            f"a tower called {CONTRAST!r}, which is what the stage is called that all towers feed; rename it"
        )
    if set(got) != set(wanted):
        raise ValueError(f"{what} given for {', '.join(got) or 'nothing'}; give one for each of {', '.join(wanted)}")


def _require_matching(counts: Mapping[str, int]) -> None:
    """Raises ValueError where the contrast's microbatches and a tower's do not hold whole ones of each other."""
    for name, count in counts.items():
        if max(count, counts[CONTRAST]) % min(count, counts[CONTRAST]):
            raise ValueError(
                f"tower {name!r} works on {count} microbatches and the contrast on {counts[CONTRAST]}; one must be a "
                "multiple of the other, so that whole microbatches are compared"
            )
