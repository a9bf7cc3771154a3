"""Costs by a model's name: the GPT-2s of PipeMorph's evaluation on the device they ran on, or another.

    costs_preset("gpt2-14b")                                    8 stages of 6 layers, as in the paper
    costs_preset("gpt2-14b", num_stages=4, microbatch_size=2)
    parse_preset("gpt2-30b:tp=4,tflops=700", 8)                 as the command line takes it

The paper's table 2 gives devices and parallelism; layers and widths are those of the scripts in its artifact.
Embedding and head count as a layer each when layers are dealt out, so the first and the last stage hold a block less.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from penstock.cost.costs import CostError, Costs
from penstock.cost.presets.accelerator import DEVICES, H800, Accelerator
from penstock.cost.presets.gpt import GPTShape

WEIGHT_BYTES = 16
"""A parameter under Adam in mixed precision: weight and gradient of 2 bytes, a copy and two moments of 4 (Rajbhandari
et al. 2020, ZeRO, arXiv 1910.02054, section 3.1)."""


@dataclass(frozen=True)
class CostPreset:
    """A model on its devices.

    Attributes:
        name: as it is asked for.
        shape: of the model, and what it is fed.
        num_stages, num_microbatches, data_parallel: as the paper ran it (three microbatches a stage).
        device: what it runs on.
    """

    name: str
    shape: GPTShape
    num_stages: int
    data_parallel: int = 1
    device: Accelerator = H800

    @property
    def num_microbatches(self) -> int:
        return 3 * self.num_stages

    def stages(self, num_stages: int | None = None) -> list[range]:
        """The layers of each stage, the embedding first and the head last; what does not divide goes to inner stages.

        Raises:
            CostError: fewer layers than stages.
        """
        count = self.num_stages if num_stages is None else num_stages
        total = self.shape.num_layers
        if not 1 <= count <= total:
            raise CostError(f"{self.name} in {count} stages: it has {total} layers; give 1 to {total} stages")
        each, more = divmod(total, count)
        inner = range(1, count - 1)
        extra = {*inner[:more]} if more <= len(inner) else {*inner, *[0, count - 1][: more - len(inner)]}
        found, start = [], 0
        for stage in range(count):
            end = start + each + (stage in extra)
            found.append(range(start, end))
            start = end
        return found

    def costs(self, num_stages: int | None = None) -> Costs:
        """Milliseconds, bytes of activations and of messages, one entry a stage.

        Raises:
            CostError: fewer layers than stages.
        """
        layers, device, group = self.shape.layers(), self.device, self.shape.tensor_parallel
        message = self.shape.message_bytes
        reduce = device.all_reduce_ms(message, group)
        parts = [[layers[index] for index in part] for part in self.stages(num_stages)]
        kept = sum(layer.activation for layer in layers)
        held = sum(min(layer.held, layer.activation) for layer in layers)
        return Costs(
            f=[sum(device.compute_ms("F", la.f) + la.all_reduces_f * reduce for la in part) for part in parts],
            i=[sum(device.compute_ms("I", la.i) + la.all_reduces_i * reduce for la in part) for part in parts],
            w=[sum(device.compute_ms("W", la.w) for la in part) for part in parts],
            activation=[sum(layer.activation for layer in part) for part in parts],
            freed_by_input=1 - held / kept,
            message_bytes=[message] * (len(parts) - 1) + [0.0],
        )

    def weight_bytes(self, num_stages: int | None = None) -> list[float]:
        """What weights, gradients and the optimizer's state take on each device of a stage."""
        layers = self.shape.layers()
        return [WEIGHT_BYTES * sum(layers[index].parameters for index in part) for part in self.stages(num_stages)]

    def max_in_flight(self, num_stages: int | None = None) -> list[int]:
        """Microbatches whose activations fit beside the weights, by stage; 0 where not even one does."""
        costs = self.costs(num_stages)
        return [
            max(0, int((self.device.memory - weights) // activation))
            for weights, activation in zip(self.weight_bytes(num_stages), costs.activation, strict=True)
        ]


def _paper(name: str, layers: int, width: int, parallel: tuple[int, int, int]) -> CostPreset:
    tensor, data, stages = parallel
    return CostPreset(name, GPTShape(layers, width, tensor_parallel=tensor), stages, data)


PRESETS: dict[str, CostPreset] = {
    preset.name: preset
    for preset in (
        _paper("gpt2-7b", 22, 5120, (1, 1, 4)),
        _paper("gpt2-14b", 46, 5120, (1, 1, 8)),
        _paper("gpt2-30b", 38, 8192, (2, 4, 8)),
        _paper("gpt2-60b", 38, 11264, (4, 2, 8)),
        _paper("gpt2-140b", 78, 12288, (8, 2, 8)),
    )
}


def find_preset(name: str) -> CostPreset:
    """The preset of that name. Raises CostError that names those there are."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=2, cutoff=0.6)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise CostError(f"no costs named {name!r}; {hint}there are {', '.join(PRESETS)}")
    return PRESETS[name]


def costs_preset(
    name: str,
    num_stages: int | None = None,
    *,
    microbatch_size: int | None = None,
    sequence: int | None = None,
    tensor_parallel: int | None = None,
    device: Accelerator | str = H800,
) -> Costs:
    """Costs of a GPT-2 by name, from formulas over an assumed device: no measurement of yours.

    Args:
        name: one of `penstock.cost.presets.PRESETS`: gpt2-7b, 14b, 30b, 60b, 140b.
        num_stages: the paper's where not given.
        microbatch_size: samples; 1 where not given. sequence: tokens a sample; 1024.
        tensor_parallel: devices that share each layer; the paper's where not given.
        device: an `Accelerator`, or the name of one: h800 (the paper's), a100.

    Raises:
        CostError: an unknown name, or sizes that do not go together.
    """
    preset = find_preset(name)
    changes = {"microbatch_size": microbatch_size, "sequence": sequence, "tensor_parallel": tensor_parallel}
    shape = replace(preset.shape, **{key: value for key, value in changes.items() if value is not None})
    return replace(preset, shape=shape, device=_device(device)).costs(num_stages)


def _device(device: Accelerator | str) -> Accelerator:
    if isinstance(device, Accelerator):
        return device
    if device not in DEVICES:
        raise CostError(f"no device named {device!r}; there are {', '.join(DEVICES)}")
    return DEVICES[device]


_PRESET_TEXT = re.compile(r"(?P<name>[a-z0-9.-]+)(?::(?P<options>[a-z_0-9=.,-]+))?", re.IGNORECASE)

_SHAPE = {"tp": "tensor_parallel", "microbatch": "microbatch_size", "sequence": "sequence", "vocab": "vocab_size"}
_DEVICE = ("tflops", "share_f", "share_i", "share_w", "group_gb")


def is_preset(text: str) -> bool:
    """Whether a text means a preset and not a file: one of the names, or a name with options behind it."""
    match = _PRESET_TEXT.fullmatch(text)
    return match is not None and match["name"] in PRESETS


def parse_preset(text: str) -> CostPreset:
    """Reads `gpt2-14b` or `gpt2-14b:tp=2,microbatch=2,sequence=2048,vocab=32000,device=a100,tflops=250`.

    Options are those four sizes, a device by name, and any of its numbers (tflops, share_f, share_i, share_w,
    group_gb).

    Raises:
        CostError: names what is unknown or not a number.
    """
    match = _PRESET_TEXT.fullmatch(text)
    if match is None:
        raise CostError(f"costs {text!r}: write a name, or a name with options like gpt2-14b:tp=2,microbatch=2")
    preset = find_preset(match["name"])
    given: dict[str, str] = {}
    for part in (match["options"] or "").split(",") if match["options"] else ():
        key, _, value = part.partition("=")
        if key not in (*_SHAPE, *_DEVICE, "device"):
            raise CostError(
                f"costs {text!r}: no option {key!r}; there are {', '.join((*_SHAPE, 'device', *_DEVICE))}"
            )
        if key in given:
            raise CostError(f"costs {text!r}: {key} is given twice")
        given[key] = value

    def number(key: str, kind: Callable[[str], Any], what: str) -> Any:
        try:
            return kind(given[key])
        except ValueError:
            raise CostError(f"costs {text!r}: {key} is {given[key]!r}; give {what}") from None

    try:
        shape = replace(
            preset.shape, **{_SHAPE[key]: number(key, int, "a whole number") for key in given if key in _SHAPE}
        )
        device = replace(
            _device(given.get("device", "h800")),
            **{key: number(key, float, "a number") for key in given if key in _DEVICE},
        )
    except CostError as error:
        raise error if str(error).startswith("costs ") else CostError(f"costs {text!r}: {error}") from None
    return replace(preset, shape=shape, device=device)
