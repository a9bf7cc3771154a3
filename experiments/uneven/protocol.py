"""What is run, settled before the runs: cells, draws, seeds, aims.

F, I and W take 10 ms each for each rank's share of the model; links have no delay. A draw is one row of factors, one
for each microbatch, alike on all its ops; its seed is [number of the draw, 10 times sigma].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

import penstock as ps
from experiments.uneven.long_tails import long_tailed
from penstock.cost import CostsByLength, LengthLine

MS = 10.0
NUM_DRAWS = 100
SIGMAS = (0.3, 0.6, 1.0)
"""Standard deviation of the logarithm of a microbatch's factor."""


class Cell(NamedTuple):
    """A schedule as `ps.build` makes it, with four microbatches per rank, and how many times as fast it is to be.

    The aim is for the mean over the draws.
    """

    name: str
    num_ranks: int
    sigma: float
    aim: float


ORDER = tuple(
    Cell(name, num_ranks, sigma, aim)
    for name, num_ranks, aims in (
        ("1f1b", 8, (1.30, 1.50, 1.58)),
        ("interleaved-1f1b", 8, (1.11, 1.27, 1.35)),
        ("zb-h1", 8, (1.14, 1.35, 1.45)),
        ("zb", 8, (1.05, 1.25, 1.33)),
        ("zb-v", 8, (1.06, 1.19, 1.32)),
        ("1f1b", 16, (1.40, 1.70, 1.77)),
    )
    for sigma, aim in zip(SIGMAS, aims, strict=True)
)
"""Order and dispatch planned, over frozen in order of arrival; each rank's memory by count is the schedule's own."""

BYTES = (Cell("1f1b", 8, 0.6, 1.27), Cell("zb-h1", 8, 0.6, 1.18), Cell("zb-v", 8, 0.6, 1.12))
"""The same with activations as long as times, and no rank above the most that one holds in order of arrival."""

ERROR, NOISE, WORST = 0.05, 0.05, 1.02
"""How far off predicted factors are (deviation of the logarithm, seed [draw, 10 sigma, 99]), the predicted gain that
is then asked for, and the most that a draw of ORDER may take over frozen in order of arrival; their mean may take
1."""

CHANGED = (Cell("zb-v", 8, 0.6, 2.0), Cell("zb-v", 16, 0.6, 2.4))
"""RRFP's language setting with a change of schedule: planned by rules, over 1f1b frozen in order of arrival, at
1f1b's memory by count. Its 1.77 at one schedule is for 1f1b, 16 ranks and sigma 0.6 of ORDER."""


class Towers(NamedTuple):
    """A model with an encoder before its decoder, how it is run, and how many times as fast it is to be, if it is.

    Attributes:
        how: "order", "changed" or "spread".
    """

    how: str
    num_ranks: int
    sigma: float
    aim: float | None


TOWERS = tuple(
    Towers(how, num_ranks, sigma, aim)
    for how, aims in (("order", (None, None)), ("changed", (1.7, 2.0)), ("spread", (2.77, 2.77)))
    for num_ranks, aim in zip((8, 16), aims, strict=True)
    for sigma in (0.6, 1.0)
)
"""RRFP's multi-modal setting. Its abstract names only speedups and up to 128 GPUs, so what follows is assumed. The
encoder is the first quarter of the model's work. A microbatch is one sample, with a factor for its text and one for
its images, drawn alike and apart; the encoder's ops take the images' factor, and the decoder's, whose sequence has
both, the mean of the two. All are over 1f1b with an even cut, frozen in order of arrival.

order    1f1b in its best order, its own memory by count
changed  zb-v in its best order, in 1f1b's memory by count: the most that one of its ranks holds
spread   the encoder runs on all ranks at once, each with its part of the images, before and after a zb-v of the
         decoder in the same memory. What it holds beside that is kept, by count; the other encoders run again."""
ENCODER = 0.25
"""The encoder's share of the work."""


class LateTowers(NamedTuple):
    """The same model over late links.

    Attributes:
        latency: of each link, in ms; a rank's forward of a mean microbatch takes 10.
        memory: the planned run's, over 1f1b's own.
    """

    num_ranks: int
    sigma: float
    latency: float
    memory: int


LATE_TOWERS = tuple(
    LateTowers(num_ranks, sigma, latency, memory)
    for num_ranks in (8, 16)
    for sigma in (0.6, 1.0)
    for latency in (5.0, 10.0, 20.0)
    for memory in (1, 2)
)
"""RRFP's abstract names variability of communication too, and neither how late messages are nor what memory is
taken. So here all links are late alike, and the best of `LATE_SCHEDULES` in its best order by rules, in 1f1b's memory
by count or in twice that, is set beside 1f1b frozen in order of arrival over the same links. Draws 0 to 29; the aim
is 2.77."""
LATE_SCHEDULES, LATE_DRAWS, MULTI_MODAL = ("1f1b", "zb-h1", "zb", "zb-v"), 30, 2.77

CAPTIONED_STEPS, CAPTIONED_SAMPLES = 20, 4
CAPTIONED = (
    ("1f1b", 4, 16), ("1f1b", 8, 32), ("interleaved-1f1b", 8, 32), ("zb-h1", 8, 32), ("zb-v", 4, 16), ("zb-v", 8, 32),
)  # fmt: skip
"""Schedule, ranks, microbatches: a captioner of preset tiny with three quarters of its 28 blocks in the decoder, on
the samples of `CaptionedImages`, four to a microbatch; stages as `penstock train` cuts them, costs by its sizes.
Steps 0 to 19: a batch planned by lengths of both towers over the same batch as it arrives, frozen, in the same
memory. No aim."""
CAPTIONED_EMULATED = (("1f1b", 4, 16), ("zb-v", 4, 16), ("1f1b", 8, 32))
CAPTIONED_MS = 1500.0
"""Step 0 of these on emulated devices, slowed down until arrival takes so long by simulation."""

REPLICAS, RANKS, EACH = 32, 4, 8
"""Replicas, ranks of each, microbatches of each."""
BUSIEST, BUSIEST_IN_ANY = 1.005, 1.02
"""Most work of a replica over the mean: in the mean of the steps, and in any."""


class Tail(NamedTuple):
    """A schedule, the longest microbatch over the mean, and how many times as fast a step is to be, if it is."""

    name: str
    longest: float
    aim: float | None


ASSIGNED = (
    Tail("1f1b", 2.3, 1.40), Tail("zb-h1", 2.3, 1.35), Tail("zb", 2.3, 1.25), Tail("zb-v", 2.3, 1.25),
    Tail("1f1b", 4.0, None),
)  # fmt: skip
"""Steps of 256 microbatches with a tail as in production, seeds 0 to 99: assigned and ordered by rules, over frozen
and in order of arrival, the slowest replica's time. Of eight microbatches whose others are no shorter than 0.8 of the
mean the longest may be 2.3 of it, or its replica is busier than others whatever is done; with 4 it is."""

DOCUMENTS = (Tail("1f1b", 1.0, 1.5),)
DOCUMENT_DRAWS = 20
"""Whole documents: lengths log-normal as those of the default corpus are, 7,000 in the median and sigma 1.3, at most
a bin of 65,536; a decoder of width 4096, whose attention takes as long as its linear layers at 49,152 tokens. Bins by
next fit, each replica's eight in order of arrival and frozen, over the same documents planned: packed, assigned and
ordered, no rank above arrival's largest peak by tokens. Seeds [draw, 7]. A step has next fit's first 256 bins."""
BIN, MEDIAN, SPREAD, SHORTEST, EQUAL = 65536, 7000, 1.3, 64, 49152

EMULATED = (
    *((name, 8, sigma) for name in ("1f1b", "zb-h1", "zb", "zb-v") for sigma in (0.3, 0.6)),
    *((name, 4, 0.6) for name in ("1f1b", "zb-h1", "zb-v", "interleaved-1f1b")),
)
"""A dozen cells on emulated devices, draw 0: planned over arrival, measured beside simulated."""


def factors(sigma: float, num: int, draw: int) -> list[float]:
    found: list[float] = np.random.default_rng([draw, round(sigma * 10)]).lognormal(0, sigma, num).tolist()
    return found


def tower_factors(sigma: float, num: int, draw: int) -> tuple[list[float], list[float]]:
    """Of the encoder's ops and of the decoder's, by microbatch; the mean of the draws is 1."""
    source = np.random.default_rng([draw, round(sigma * 10), 4])
    images, text = source.lognormal(-(sigma**2) / 2, sigma, (2, num))
    return images.tolist(), ((images + text) / 2).tolist()


def predicted(real: Sequence[float], sigma: float, draw: int) -> list[float]:
    error = np.random.default_rng([draw, round(sigma * 10), 99]).lognormal(0, ERROR, len(real))
    found: list[float] = (np.array(real) * error).tolist()
    return found


def even_costs(schedule: ps.Schedule) -> ps.Costs:
    """As long for each rank's share of the model, and as much held of it."""
    share = schedule.num_ranks / schedule.num_stages
    times = [MS * share] * schedule.num_stages
    return ps.Costs(times, times, times, activation=[share] * schedule.num_stages)


def tower_costs(schedule: ps.Schedule, encoder: Sequence[float], decoder: Sequence[float]) -> ps.Costs:
    """Of a chain cut evenly, whose first quarter is the encoder."""
    first = round(schedule.num_stages * ENCODER)
    rows = [list(encoder)] * first + [list(decoder)] * (schedule.num_stages - first)
    return replace(even_costs(schedule), uneven=rows)


def spread(num_ranks: int, num_microbatches: int) -> ps.Schedule:
    """Stage 0, the encoder, on all ranks at once: first all its forwards, then zb-v, then all its backwards.

    The microbatches in the middle, where the longest run, are those whose encoder is kept.
    """
    decoder = ps.build("zb-v", num_ranks, num_microbatches)
    kept = num_ranks  # each holds ENCODER on every rank, and the decoder leaves ENCODER of 1f1b's `num_ranks` free
    first = (num_microbatches - kept) // 2
    forward = [ps.Op("F", 0, m) for m in range(num_microbatches)]
    backward = [
        op
        for m in range(num_microbatches)
        for op in ([] if first <= m < first + kept else [ps.Op("R", 0, m)]) + [ps.Op("B", 0, m)]
    ]
    rows = [[*forward, *(op._replace(stage=op.stage + 1) for op in row), *backward] for row in decoder.order]
    placement = ps.Placement(((0, *decoder.placement.pipelines[0]),), ((0, tuple(range(num_ranks))),))
    return ps.Schedule.of("spread", placement, rows, num_microbatches)


def spread_costs(schedule: ps.Schedule, encoder: Sequence[float], decoder: Sequence[float]) -> ps.Costs:
    share = (1 - ENCODER) * schedule.num_ranks / (schedule.num_stages - 1)
    times = [MS * ENCODER] + [MS * share] * (schedule.num_stages - 1)
    rows = [list(encoder)] + [list(decoder)] * (schedule.num_stages - 1)
    activation = [ENCODER] + [share] * (schedule.num_stages - 1)
    return ps.Costs(times, times, times, activation=activation, uneven=rows)


def assigned_work(longest: float, draw: int) -> list[float]:
    """Factors of the microbatches of a step, in order of arrival."""
    lengths = long_tailed(REPLICAS * EACH, 8192, draw, longest=longest)
    found: list[float] = (lengths / lengths.mean()).tolist()
    return found


def document_costs(schedule: ps.Schedule) -> CostsByLength:
    share = MS * schedule.num_ranks / schedule.num_stages
    line = LengthLine(0.0, share / BIN, share / BIN / EQUAL)
    activation = LengthLine(per_token=schedule.num_ranks / schedule.num_stages / BIN)
    rows = [line] * schedule.num_stages
    return CostsByLength(rows, rows, rows, activation=[activation] * schedule.num_stages)


def documents(draw: int) -> list[list[int]]:
    """The bins of a step by next fit, as they fill."""
    source = np.random.default_rng([draw, 7])
    bins: list[list[int]] = [[]]
    while len(bins) <= REPLICAS * EACH:
        length = int(np.clip(source.lognormal(np.log(MEDIAN), SPREAD), SHORTEST, BIN))
        if sum(bins[-1]) + length > BIN:
            bins.append([])
        bins[-1].append(length)
    return bins[: REPLICAS * EACH]


class Real(NamedTuple):
    """Real compute: a GPT between two processes on one machine, on documents of the default corpus that fit whole.

    Attributes:
        context: most tokens of a document; longer ones are left out. windows: of a context, tokens an update.
        blocks: of one update each way, in turn. padding, fixed: times the tokens a second of padding to the
            longest (the mean), and of windows of the context under plain causal attention (the median).
    """

    schedule: str = "1f1b"
    num_ranks: int = 2
    num_microbatches: int = 4
    depth: int = 4
    width: int = 96
    num_heads: int = 3
    context: int = 2048
    windows: int = 8
    blocks: int = 10
    padding: float = 1.15
    fixed: float = 1.0


REAL = Real()
