"""A profile without the device: computed from a GPT's sizes and a device's floating-point speed.

Bytes are those that `models/gpt.py` keeps when it runs (a test compares them). Times are operations divided by
speed. The matrix products of a forward count once in F, once in I and once in W; attention's products of scores
count twice in I.
"""

from __future__ import annotations

import math
from dataclasses import replace

from penstock.cost.costs import MERGE_WORK
from penstock.models import GPTConfig
from penstock.tune.errors import TuneError
from penstock.tune.profile import BYTES, MessageCosts, Profile

STATES = {"SGD": 0, "Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Adagrad": 1, "RMSprop": 1}
"""Numbers that an optimizer of torch.optim keeps for each weight with its default options; 2 is assumed for
others.
"""

FLOAT, HALF, INDEX = 4, 2, 8  # bytes


def estimate(
    config: GPTConfig,
    name: str,
    microbatch_size: int,
    tflops: float,
    optimizer: str = "AdamW",
    half: bool = False,
    recompute: bool = False,
) -> Profile:
    """The profile of a GPT on devices that sustain `tflops` * 1e12 operations per second.

    Args:
        half: autocast to bfloat16, with float32 weights.
        recompute: blocks keep only their input.

    Raises:
        TuneError: a speed that is not above 0.
    """
    if not (math.isfinite(tflops) and tflops > 0):
        raise TuneError(f"devices of {tflops} TFLOP/s do nothing; give a speed above 0")
    width, vocab, context = config.width, config.vocab_size, config.context
    tokens = microbatch_size * context
    per_ms = tflops * 1e9

    products = 2.0 * 12 * width**2 * tokens / per_ms
    scores = 2.0 * context * width * tokens / per_ms
    output = 2.0 * width * vocab * tokens / per_ms
    lookup = 2.0 * width * tokens / per_ms
    again = products + scores if recompute else 0.0
    depth = config.depth
    f = [lookup, *[products + scores] * depth, output]
    i = [lookup, *[products + 2 * scores + again] * depth, output]
    w = [0.0, *[products] * depth, output]

    kept_of_block = tokens * (16 * width * HALF + 13 * width if half else 16 * width * FLOAT)
    kept_of_block += tokens * FLOAT * (4 + config.num_heads)
    number = HALF if half else FLOAT
    hidden = float(tokens * width * FLOAT)
    kept_of_head = tokens * (2 * width * FLOAT + vocab * FLOAT + 2 * FLOAT + INDEX) + 12
    activation = [tokens * INDEX + context * INDEX, *[hidden if recompute else kept_of_block] * depth, kept_of_head]

    def held_by(*linears: tuple[int, int]) -> float:
        """For W, by linears given by their inputs and outputs: of those whose weight gradients are worth a delay."""
        return float(tokens * number * sum(a + b for a, b in linears if tokens * a * b >= MERGE_WORK))

    block = held_by((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
    held = [hidden + tokens * INDEX, *[block] * depth, held_by((width, vocab))]

    biases = config.bias
    block_weights = 12 * width**2 + 2 * width + ((9 + 2) * width if biases else 0)
    weights = [
        (vocab + context) * width,
        *[block_weights] * depth,
        vocab * width + width + (width if biases else 0),
    ]
    weight = [float(FLOAT * count) for count in weights]
    states = STATES.get(optimizer, 2)
    return Profile(
        model=name,
        layers=["embedding", *[f"block {number}" for number in range(depth)], "head"],
        microbatch_size=microbatch_size,
        num_parallel=1,
        f=f,
        b=[x + y for x, y in zip(i, w)],
        f_split=f,
        i=i,
        w=w,
        activation=[float(value) for value in activation],
        held=[float(value) for value in held],
        output=[*[hidden] * (depth + 1), 0.0],
        weight=weight,
        state=[states * value for value in weight],
        update=[0.0] * config.num_layers,
        recompute=recompute,
        transient=float(kept_of_block) if recompute else 0.0,
        tied=float(FLOAT * vocab * width) if config.tied else 0.0,
        source="estimated",
    )


def estimate_ends(
    config: GPTConfig,
    name: str,
    microbatch_size: int,
    tflops: float,
    num_ranks: int,
    transfer: MessageCosts,
    optimizer: str = "AdamW",
    half: bool = False,
) -> Profile:
    """The profile of a GPT's embedding and head on one of several ranks that share them: of its part of the
    vocabulary, with the sums over the ranks that each op takes.

    Args:
        transfer: of the devices' links.
        others: as for `estimate`.
    """
    own = replace(config, vocab_size=-(-config.vocab_size // num_ranks))
    part = estimate(own, name, microbatch_size, tflops, optimizer, half)

    def summed(size: float) -> float:
        return transfer.at("reduce", size) * 2 * (num_ranks - 1) / num_ranks  # in a ring, as replicas sum

    hidden = part.output[0]
    # Of each token the loss needs the largest logit, then the sum over all words and the logit of the right one. It
    # keeps logits and their powers, where on one rank it keeps one of the two.
    number = hidden / config.width
    of_loss = summed(number) + summed(2 * number)
    f = [part.f[0] + summed(hidden), part.f[-1] + of_loss]
    i = [part.i[0], part.i[-1] + summed(hidden)]
    w = [part.w[0], part.w[-1]]
    rows = {row: [getattr(part, row)[0], getattr(part, row)[-1]] for row in (*BYTES, "tensors", "update")}
    rows["activation"][1] += number * own.vocab_size
    b = [x + y for x, y in zip(i, w, strict=True)]
    layers = [part.layers[0], part.layers[-1]]
    return replace(part, layers=layers, f=f, f_split=f, b=b, i=i, w=w, num_sharing=num_ranks, **rows)  # type: ignore[arg-type]
