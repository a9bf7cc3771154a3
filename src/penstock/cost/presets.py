"""Costs by a model's name: those of PipeMorph's and AMDP's evaluations on the device they ran on, or another.

    costs_preset("gpt2-14b")                                    8 stages of 6 layers, as in the paper
    costs_preset("gpt2-14b", num_stages=4, microbatch_size=2)
    costs_preset("amdp-gpt", num_stages=4, split="balanced")
    parse_preset("gpt2-30b:tp=4,tflops=700", 8)                 as the command line takes it

PipeMorph's table 2 gives devices and parallelism; layers and widths are those of the scripts in its artifact.
Embedding and head count as a layer each when layers are dealt out, so the first and the last stage hold a block less.
AMDP's table 2 gives sizes and numbers of parameters; its layers are dealt out as Megatron does it.

`model_shapes` says what layers cost in operations and bytes. A device turns these into times.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any, Literal

from penstock.cost.conditions import Constant, LinkCondition
from penstock.cost.costs import Costs
from penstock.cost.cut import partition
from penstock.cost.errors import CostError
from penstock.cost.links import Links
from penstock.cost.model_shapes import BERTShape, GPTShape, LayerCosts
from penstock.unknown_names import did_you_mean

WEIGHT_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 2, 2, 12
"""Of a parameter under Adam in mixed precision: weight and gradient are 16-bit; the optimizer keeps a copy and two
moments in 32 (Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054, section 3.1)."""

STEP_BYTES = 30
"""Of a parameter that a step of Adam reads and writes: the gradient (2) is read and zeroed, copy and moments (12) are
read and written, the weight (2) is written. It does little arithmetic, so this is what takes its time."""

TAKE_OVER_BYTES = 6
"""Of a parameter that a copy reads and writes to take it over: it comes, is written and the gradient is zeroed."""

LayerSplit = Literal["layers", "even", "balanced"]

SPLITS: Mapping[LayerSplit, str] = {
    "layers": "embedding and head count as a layer each when layers are dealt out",
    "even": "blocks are dealt out; the embedding comes on top of the first, the head of the last stage's (Megatron)",
    "balanced": "the costliest stage costs least (`cost/cut.py`)",
}


@dataclass(frozen=True)
class Accelerator:
    """One device: a handful of plain numbers, to be changed by whoever has another.

    Attributes:
        tflops: peak of dense 16-bit matrix products, 1e12 operations a second.
        share_f, share_i, share_w: of that peak, what a forward, an input-gradient and a weight-gradient half reach.
        memory: bytes.
        group_gb: GB (1e9 bytes) a second that an all-reduce moves within a tensor-parallel group, by bus bandwidth.
        hbm_gb: GB a second that the device's own memory moves, reading and writing.
        link_gb: GB a second of a link to another device of the pipeline, each way.

    Raises:
        CostError: a number that is not above 0, a share above 1.
    """

    tflops: float
    share_f: float
    share_i: float
    share_w: float
    memory: float
    group_gb: float
    hbm_gb: float
    link_gb: float

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not (math.isfinite(value) and value > 0):
                raise CostError(f"a device with {each.name} {value:g}: give a number above 0")
            if each.name.startswith("share") and value > 1:
                raise CostError(f"a device with {each.name} {value:g}: it is a share of the peak, at most 1")

    def compute_ms(self, kind: str, flops: float) -> float:
        """Milliseconds of so many operations in an op of kind F, I or W."""
        share: float = getattr(self, f"share_{kind.lower()}")
        return flops / (self.tflops * share * 1e9)

    def all_reduce_ms(self, num_bytes: float, num_devices: int) -> float:
        """Milliseconds of an all-reduce: each device sends 2 (n - 1) / n of the bytes (a ring)."""
        return 2 * (num_devices - 1) / num_devices * num_bytes / (self.group_gb * 1e6)

    def move_ms(self, num_bytes: float) -> float:
        """Milliseconds of reading or writing so many bytes of the device's memory, where nothing else takes time."""
        return num_bytes / (self.hbm_gb * 1e6)


H800 = Accelerator(989, 0.45, 0.42, 0.65, memory=80e9, group_gb=165, hbm_gb=2700, link_gb=200)
"""The paper's device. The peak and the memory are the maker's. Shares and group_gb are such that stages take about
the whole milliseconds which the authors' profiler found (PipeMorph, artifact, experiments/single): F, I and W 9, 10
and 6 ms for 14B, and 11, 13 and 6 for 60B with 4 devices per stage."""

A100 = Accelerator(312, 0.6, 0.56, 0.7, memory=80e9, group_gb=230, hbm_gb=1600, link_gb=300)
"""A guess for comparison: the maker's peak and memory, shares that are usual for large matrices."""

A800 = Accelerator(312, 0.39, 0.39, 0.39, memory=80e9, group_gb=150, hbm_gb=1600, link_gb=200)
"""AMDP's device: an A100 whose NVLink has 400 GB/s, 200 each way. The share is the one number that fits the paper's
throughput of DAPPLE (1F1B) with the GPT-style model, in all four rows of its table 3 within 1.5%."""

A800_HEADS_OF_50 = replace(A800, share_f=0.265, share_i=0.265, share_w=0.265)
"""The same with the BERT-style model, within 1%. Its heads are 50 wide, no multiple of the 8 that matrix
units want."""

DEVICES = {"h800": H800, "a100": A100, "a800": A800}


@dataclass(frozen=True)
class CostPreset:
    """A model on its devices.

    Attributes:
        name: as it is asked for.
        shape: of the model, and what it is fed.
        num_stages: as the paper ran it.
        device: what it runs on.
        split: which layers make a stage, one of `SPLITS`.

    Raises:
        CostError: another split.
    """

    name: str
    shape: GPTShape
    num_stages: int
    device: Accelerator = H800
    split: LayerSplit = "layers"

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise CostError(f"no split {self.split!r} of layers; there are {', '.join(SPLITS)}")

    @property
    def num_microbatches(self) -> int:
        """Three a stage, as PipeMorph's runs have."""
        return 3 * self.num_stages

    def stages(self, num_stages: int | None = None) -> list[range]:
        """The layers of each stage, the embedding first and the head last; what does not divide goes to inner stages.

        Raises:
            CostError: fewer layers than stages.
        """
        count = self.num_stages if num_stages is None else num_stages
        even = self.split == "even"
        total = self.shape.num_blocks if even else self.shape.num_layers
        if not 1 <= count <= total:
            what = "blocks" if even else "layers"
            raise CostError(f"{self.name} in {count} stages: it has {total} {what}; give 1 to {total} stages")
        if self.split == "balanced":
            return partition([sum(self._layer_ms(layer)) for layer in self.shape.layers()], count)
        each, left = divmod(total, count)
        more = [*range(1, count - 1), 0, count - 1][:left]  # inner stages take what is left over
        sizes = [each + (stage in more) for stage in range(count)]
        if even:
            sizes[0] += 1
            sizes[-1] += 1
        return [range(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]

    def costs(self, num_stages: int | None = None) -> Costs:
        """Milliseconds, bytes of activations, of messages and of the model's state, one entry per stage.

        Raises:
            CostError: fewer layers than stages.
        """
        layers, device = self.shape.layers(), self.device
        parts = [[layers[index] for index in part] for part in self.stages(num_stages)]
        times = [[sum(ms) for ms in zip(*map(self._layer_ms, part), strict=True)] for part in parts]
        f, i, w = zip(*times, strict=True)
        parameters = [sum(layer.parameters for layer in part) for part in parts]
        kept = sum(layer.activation for layer in layers)
        held = sum(min(layer.held, layer.activation) for layer in layers)
        return Costs(
            f,
            i,
            w,
            activation=[sum(layer.activation for layer in part) for part in parts],
            freed_by_input=1 - held / kept,
            other={("U", stage): device.move_ms(STEP_BYTES * count) for stage, count in enumerate(parameters)},
            message_bytes=[self.shape.message_bytes] * (len(parts) - 1) + [0.0],
            update_bytes=[GRADIENT_BYTES * count for count in parameters],
            take_over=[device.move_ms(TAKE_OVER_BYTES * count) for count in parameters],
            weight_bytes=[WEIGHT_BYTES * count for count in parameters],
            gradient_bytes=[GRADIENT_BYTES * count for count in parameters],
            optimizer_bytes=[OPTIMIZER_BYTES * count for count in parameters],
        )

    def links(self) -> Links:
        """All links as fast as the device's."""
        return Links(default=LinkCondition(bandwidth=Constant(self.device.link_gb * 1e9)))

    def _layer_ms(self, layer: LayerCosts) -> tuple[float, float, float]:
        """Milliseconds of a layer's F, I and W."""
        device = self.device
        reduce = device.all_reduce_ms(self.shape.message_bytes, self.shape.tensor_parallel)
        return (
            device.compute_ms("F", layer.f) + layer.all_reduces_f * reduce,
            device.compute_ms("I", layer.i) + layer.all_reduces_i * reduce,
            device.compute_ms("W", layer.w),
        )

    def changed(self, device: Accelerator | str | None, split: Any, **changes: Any) -> CostPreset:
        """The preset on another device, cut another way, or with other sizes or numbers of it. None keeps."""
        given = {name: value for name, value in changes.items() if value is not None}
        chosen = self.device if device is None else DEVICES.get(device) if isinstance(device, str) else device
        if chosen is None:
            raise CostError(f"no device named {device!r}; there are {', '.join(DEVICES)}")
        numbers = {name: given.pop(name) for name in _DEVICE_NUMBERS if name in given}
        shape = replace(self.shape, **given)
        return replace(self, shape=shape, device=replace(chosen, **numbers), split=split or self.split)


_DEVICE_NUMBERS = ("tflops", "share_f", "share_i", "share_w", "group_gb", "hbm_gb", "link_gb")

_AMDP_GPT = GPTShape(48, 1600, num_heads=25, vocab_size=50304, num_positions=1024, microbatch_size=4)
"""1,557,686,400 parameters, as AMDP's table 2 has it: GPT-2's 50,257 words padded to a multiple of 128."""

_AMDP_BERT = BERTShape(32, 1600, num_heads=32, vocab_size=29056, num_positions=1024, microbatch_size=4)
"""1,036,998,658 parameters: the 28,996 words of cased BERT, padded. AMDP's table 2 has 1,036,179,458, which is the
same model with 512 positions. Its sequence of 1024 needs 1024 of them, 512 x 1600 numbers more."""

PRESETS: dict[str, CostPreset] = {
    preset.name: preset
    for preset in (
        CostPreset("gpt2-7b", GPTShape(22, 5120), 4),
        CostPreset("gpt2-14b", GPTShape(46, 5120), 8),
        CostPreset("gpt2-30b", GPTShape(38, 8192, tensor_parallel=2), 8),
        CostPreset("gpt2-60b", GPTShape(38, 11264, tensor_parallel=4), 8),
        CostPreset("gpt2-140b", GPTShape(78, 12288, tensor_parallel=8), 8),
        CostPreset("amdp-gpt", _AMDP_GPT, 8, device=A800, split="even"),
        CostPreset("amdp-bert", _AMDP_BERT, 8, device=A800_HEADS_OF_50, split="even"),
    )
}


def find_preset(name: str) -> CostPreset:
    """The preset of that name. Raises CostError that names those there are."""
    if name not in PRESETS:
        hint = did_you_mean(name, PRESETS)
        if ":" in name:  # which the command line takes
            hint = 'options of costs_preset are arguments of their own, such as device="a100";'
        raise CostError(f"no costs named {name!r}; {hint}{' ' * bool(hint)}there are {', '.join(PRESETS)}")
    return PRESETS[name]


def costs_preset(
    name: str,
    num_stages: int | None = None,
    *,
    microbatch_size: int | None = None,
    sequence: int | None = None,
    tensor_parallel: int | None = None,
    device: Accelerator | str | None = None,
    split: LayerSplit | None = None,
) -> Costs:
    """Costs of a GPT-2 or a BERT by name, from formulas over an assumed device: no measurement of yours.

    Args:
        name: one of `penstock.cost.presets.PRESETS`: gpt2-7b, 14b, 30b, 60b, 140b; amdp-gpt, amdp-bert.
        num_stages: the paper's where not given.
        microbatch_size: samples; 1 where not given, 4 of AMDP's.
        sequence: tokens per sample; 1024 where not given.
        tensor_parallel: devices that share each layer; the paper's where not given.
        device: an `Accelerator`, or the name of one: h800, a100, a800; the paper's where not given.
        split: which layers make a stage, one of `penstock.cost.presets.SPLITS`: "even" for AMDP's where not given,
            "layers" for the others.

    Raises:
        CostError: an unknown name, or sizes that do not go together.

    Examples:
        >>> import penstock as ps
        >>> costs = ps.cost.costs_preset("gpt2-7b", num_stages=4)
        >>> len(costs.f), costs.f[0] > 0
        (4, True)
    """
    changes = {"microbatch_size": microbatch_size, "sequence": sequence, "tensor_parallel": tensor_parallel}
    return find_preset(name).changed(device, split, **changes).costs(num_stages)


_PRESET_TEXT = re.compile(r"(?P<name>[a-z0-9.-]+)(?::(?P<options>[a-z_0-9=.,-]+))?", re.IGNORECASE)

_SIZES = {"tp": "tensor_parallel", "microbatch": "microbatch_size", "sequence": "sequence", "vocab": "vocab_size"}


def is_preset(text: str) -> bool:
    """Whether a text means a preset and not a file: one of the names, or a name with options behind it."""
    match = _PRESET_TEXT.fullmatch(text)
    return match is not None and match["name"] in PRESETS


def parse_preset(text: str) -> CostPreset:
    """Reads `gpt2-14b` or `gpt2-14b:tp=2,microbatch=2,sequence=2048,vocab=32000,device=a100,tflops=250`.

    Options are those four sizes, a device by name, any of its numbers (tflops, share_f, share_i, share_w, group_gb,
    hbm_gb, link_gb), and the split of layers, as `split=balanced`.

    Raises:
        CostError: names what is unknown or not a number.
    """
    match = _PRESET_TEXT.fullmatch(text)
    if match is None:
        raise CostError(f"costs {text!r}: write a name, or a name with options like gpt2-14b:tp=2,microbatch=2")
    preset = find_preset(match["name"])
    given: dict[str, Any] = {"device": None, "split": None}
    for part in match["options"].split(",") if match["options"] else ():
        key, _, value = part.partition("=")
        if key not in (known := (*_SIZES, "device", *_DEVICE_NUMBERS, "split")):
            raise CostError(f"costs {text!r}: no option {key!r}; there are {', '.join(known)}")
        name = _SIZES.get(key, key)
        if given.get(name) is not None:
            raise CostError(f"costs {text!r}: {key} is given twice")
        try:
            given[name] = int(value) if key in _SIZES else float(value) if key in _DEVICE_NUMBERS else value
        except ValueError:
            what = "a whole number" if key in _SIZES else "a number"
            raise CostError(f"costs {text!r}: {key} is {value!r}; give {what}") from None
    try:
        return preset.changed(**given)
    except CostError as error:
        raise CostError(f"costs {text!r}: {error}") from None
