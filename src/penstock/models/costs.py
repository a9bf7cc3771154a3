"""What each layer costs: estimated from its weights or a shape, or measured; the input to `partition`."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from penstock.cost import CostsByLength, LengthLine
from penstock.models.chain import call_layer
from penstock.models.gpt import GPTConfig

__all__ = [
    "decoder_costs_by_length",
    "estimate_costs",
    "gpt_costs",
    "gpt_costs_by_length",
    "measure_costs",
]


def gpt_costs(config: GPTConfig) -> list[float]:
    """Forward FLOPs per token of each layer of a GPT, from its sizes alone: every rank can cut without building.

    A lookup multiplies nothing and counts its additions; the head counts its vocabulary.

    Args:
        config: the sizes.

    Examples:
        >>> import penstock as ps
        >>> config = ps.models.presets["nano"]
        >>> len(ps.models.gpt_costs(config)) == len(ps.models.build_layers(config))
        True
    """
    width = config.width
    block = 2 * 12 * width**2 + 2 * config.context * width  # causal: half of the T by T scores, twice
    return [2.0 * width, *[float(block)] * config.depth, 2.0 * width * config.vocab_size]


def gpt_costs_by_length(config: GPTConfig, parts: Sequence[Sequence[int]]) -> CostsByLength:
    """What the stages of a GPT cost by the lengths of sequences, from its sizes alone: ms at 10**9 FLOPs per ms.

    The backward to the inputs takes as many FLOPs as the forward, except that attention takes 2.5 times as many. The
        backward to the weights takes as many as the forward of the linear layers. A forward keeps 17 times each
        block's width for every token (Korthikanti et al. 2022, arXiv 2205.05198), and of the logits two numbers for
        each word; in float32.

    Args:
        config: the sizes.
        parts: the layers of each stage.

    Examples:
        >>> import penstock as ps
        >>> config = ps.models.presets["nano"]
        >>> costs = ps.models.gpt_costs_by_length(config, [range(3), range(3, 6)])
        >>> long, short = (costs.of([shape]).duration("F", 0, 0) for shape in ([512], [256, 256]))
        >>> long > short
        True
    """
    width = config.width
    layers = [2 * width, *[24 * width**2] * config.depth, 2 * width * config.vocab_size]
    return decoder_costs_by_length(layers, parts, width=width, attended=width, vocab_size=config.vocab_size)


def decoder_costs_by_length(
    layers: Sequence[float], parts: Sequence[Sequence[int]], *, width: int, attended: int, vocab_size: int
) -> CostsByLength:
    """What the stages of any decoder cost by the lengths of sequences; see `gpt_costs_by_length`.

    Args:
        layers: forward FLOPs per token of each layer's linears: of the embedding, the blocks and the head.
        parts: the layers of each stage.
        width: of the hidden states.
        attended: of a block's queries, all heads together.
        vocab_size: words that the head tells apart.

    Examples:
        >>> import penstock as ps
        >>> layers, parts = [0.0, 1e6, 1e6, 2e6], [range(2), range(2, 4)]
        >>> costs = ps.models.decoder_costs_by_length(layers, parts, width=64, attended=64, vocab_size=1000)
        >>> long, short = (costs.of([shape]).duration("F", 0, 0) for shape in ([512], [256, 256]))
        >>> long > short
        True
    """
    last = len(layers) - 1
    rows = []
    for part in parts:
        blocks = sum(0 < index < last for index in part)
        head = last in part
        linear = sum(layers[index] for index in part) * 1e-9
        kept = 4.0 * (blocks * 17 * width + head * 2 * vocab_size + (0 in part) * width)
        rows.append(_StageSizes(linear, blocks * 2 * attended * 1e-9, kept, 0.0 if head else 4.0 * width))
    return CostsByLength(
        f=[LengthLine(0.0, row.linear, row.square) for row in rows],
        i=[LengthLine(0.0, row.linear, 2.5 * row.square) for row in rows],
        w=[LengthLine(0.0, row.linear) for row in rows],
        activation=[LengthLine(per_token=row.kept) for row in rows],
        message_bytes=[LengthLine(per_token=row.sent) for row in rows],
    )


class _StageSizes(NamedTuple):
    """Of a stage's forward: ms for each token in its linears and for each squared length in attention, bytes that it
    keeps and that it sends on for each token.
    """

    linear: float
    square: float
    kept: float
    sent: float


def estimate_costs(layers: Sequence[nn.Module], sample: Any = None) -> list[float]:
    """Forward FLOPs of each layer. No layer costs less than 1.

    With a sample the layers run on torch's meta device, which computes shapes and no numbers. Matrix products and
        convolutions count their multiplications, everything else counts one FLOP for each number that it returns.
        Without a sample a layer counts, for one token, two FLOPs for each weight that is not looked up.

    Args:
        layers: in the order in which they run.
        sample: the input of the first layer; None to count one token.

    Examples:
        >>> import penstock as ps
        >>> import torch
        >>> layers = [torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)]
        >>> ps.models.estimate_costs(layers, torch.randn(4, 8))
        [1088.0, 64.0, 132.0]
    """
    if sample is None:
        return [_weight_flops(layer) for layer in layers]
    costs: list[float] = []
    value = _map_tensors(sample, lambda tensor: tensor.to("meta"))
    with torch.no_grad():
        for layer in layers:
            shadow = copy.deepcopy(layer).to("meta")
            counter = FlopCounterMode(display=False)
            with counter:
                value = call_layer(shadow, value)
            returned = sum(tensor.numel() for tensor in _tensors(value))
            costs.append(max(1.0, float(counter.get_total_flops() + returned)))
    return costs


def measure_costs(layers: Sequence[nn.Module], sample: Any, num_repeats: int = 3) -> list[float]:
    """Median milliseconds of one forward and backward of each layer, fed what the layer before it returned.

    Gradients, buffers and the random state are left as they were.

    Args:
        layers: in the order in which they run.
        sample: the input of the first layer.
        num_repeats: how often each layer runs.

    Examples:
        >>> import penstock as ps
        >>> import torch
        >>> layers = [torch.nn.Linear(8, 16), torch.nn.Linear(16, 1)]
        >>> times = ps.models.measure_costs(layers, torch.randn(4, 8))
        >>> len(times), min(times) > 0
        (2, True)
    """
    costs: list[float] = []
    value = sample
    state = torch.random.get_rng_state()
    try:
        for layer in layers:
            buffers = {name: buffer.clone() for name, buffer in layer.named_buffers()}
            # The first pass warms up caches and threads, and is not counted.
            timed = [_time_layer(layer, value) for _ in range(num_repeats + 1)]
            costs.append(median(ms for ms, _ in timed[1:]))
            value = timed[-1][1]
            with torch.no_grad():
                for name, buffer in layer.named_buffers():
                    buffer.copy_(buffers[name])
    finally:
        torch.random.set_rng_state(state)
    return costs


def _time_layer(layer: nn.Module, value: Any) -> tuple[float, Any]:
    value = _map_tensors(value, lambda tensor: tensor.detach().requires_grad_(tensor.is_floating_point()))
    leaves = [leaf for leaf in [*_tensors(value), *layer.parameters()] if leaf.requires_grad]
    device = next((tensor.device for tensor in [*leaves, *_tensors(value)]), torch.device("cpu"))
    with torch.enable_grad():
        # Cloned, so that a layer may work in place, which on a leaf is an error and on a view would reach it.
        given = _map_tensors(value, lambda tensor: tensor.clone())
        _wait(device)
        began = time.perf_counter()
        output = call_layer(layer, given)
    ends = [tensor for tensor in _tensors(output) if tensor.requires_grad]
    if ends and leaves:
        ones = [torch.ones_like(end) for end in ends]
        torch.autograd.grad(ends, leaves, ones, allow_unused=True)
    _wait(device)
    return (time.perf_counter() - began) * 1e3, output


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _weight_flops(layer: nn.Module) -> float:
    looked_up = {
        id(weight)
        for module in layer.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for weight in module.parameters(recurse=False)
    }
    flops = sum(2 * weight.numel() for weight in layer.parameters() if id(weight) not in looked_up)
    return max(1.0, float(flops))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _map_tensors(value: Any, change: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: _map_tensors(item, change) for name, item in value.items()}
    if isinstance(value, tuple | list):
        items = [_map_tensors(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
