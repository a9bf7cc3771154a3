"""FlexPipe: what it claims beside what was found here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

from experiments.claims.claim import Claim, Lines, Value, as_saved, read_paper, rows_of
from experiments.common.results import Row
from experiments.flexpipe import figure2, figure12, figure13, figure14, figure16, guessed_towers, sweep
from experiments.flexpipe.setups import GPT_5B, GPT_16B, Model

KIND = {"simulated": "samples", "measured": "measured"}
FIGURES: dict[str, tuple[Model, Any, int]] = {
    "figure12": (GPT_5B, figure12, 1000),
    "figure13": (GPT_16B, figure13, 512),
}
"""The model of each, its module, and the vocabulary of its headline."""


def over(vocabulary: int, method: str, rival: str) -> Value:
    """How many times as fast."""
    return lambda rows, how: sweep.speedup(rows, vocabulary, method, rival, KIND[how])


def clip_over(clip: str, method: str) -> Value:
    return lambda rows, how: figure16.speedup(rows, clip, method, KIND[how])


@cache
def again(figure: str) -> list[Row]:
    """The headline's rows, their runs made anew out of what was chosen, and simulated."""
    model, _, vocabulary = FIGURES[figure]
    return as_saved(
        row | sweep.facts(sweep.chosen(model, row))
        for row in rows_of(f"flexpipe/{figure}")
        if row["vocabulary"] == vocabulary and row["samples"] is not None and row["method"] in COMPARED
    )


@cache
def again_clip() -> list[Row]:
    return as_saved(
        row | figure16.facts(figure16.chosen(row))
        for row in rows_of("flexpipe/figure16")
        if row["method"] in figure16.CLIP_METHODS
    )


COMPARED = ("Megatron-LM", "T-1F1B", "Tessel", "FlexPipe", "ours")
RIVALS = {
    "figure12": (
        ("FlexPipe", "Megatron-LM", 1.91),
        ("FlexPipe", "T-1F1B", None),
        ("FlexPipe", "Tessel", None),
        ("ours", "Megatron-LM", None),
    ),
    "figure13": (
        ("FlexPipe", "Megatron-LM", 2.28),
        ("FlexPipe", "T-1F1B", None),
        ("FlexPipe", "Tessel", None),
        ("ours", "Megatron-LM", None),
    ),
}
CLAIMS = (
    *(
        Claim(
            "Figure 2",
            f"heaviest over lightest stage, {what}",
            figure2.PAPER[what],
            "flexpipe/figure2",
            partial(lambda what, rows, how: rows[-1][what] if how == "simulated" else None, what),
            again=lambda: as_saved(figure2.rows_of()),
        )
        for what in ("time", "memory")
    ),
    *(
        Claim(
            figure.replace("figure", "Figure "),
            f"{method} over {rival}, GPT {FIGURES[figure][0].name}, {FIGURES[figure][2]}K words",
            paper,
            f"flexpipe/{figure}",
            over(FIGURES[figure][2], method, rival),
            f"flexpipe/{figure}",
            partial(again, figure),
        )
        for figure, each in RIVALS.items()
        for method, rival, paper in each
    ),
    *(
        Claim(
            "Figure 16",
            f"{method} over DistMM-Pipe, CLIP {clip}",
            paper if method == "FlexPipe" else None,
            "flexpipe/figure16",
            clip_over(clip, method),
            "flexpipe/figure16",
            again_clip,
        )
        for method in ("FlexPipe", "ours")
        for clip, paper in figure16.PAPER.items()
    ),
)


def _sweep(figure: str) -> Lines:
    model, module, _ = FIGURES[figure]
    return lambda rows: sweep.lines(rows, model, module.PAPER)


def _waiting(_: Sequence[Row]) -> Iterator[str]:
    return figure14.lines(list(figure14.chosen(figure14.RESULTS)))


def within(ratios: Iterable[float]) -> str:
    """The least whole percentage that all are within of 1."""
    return f"{math.ceil(100 * max(abs(ratio - 1) for ratio in ratios))}%"


def by_the_clock(figure: str) -> str:
    """How far throughputs by the clock are from simulated ones, in all rows that have both."""
    rows = [row for row in rows_of(f"flexpipe/{figure}") if row["measured"] is not None]
    return within(row["measured"] / row["samples"] for row in rows)


def guessed_gains(guess: str) -> str:
    """How far FlexPipe's gains are from the paper's under a guess."""
    rows = [row for row in rows_of("flexpipe/guessed_towers") if row["guess"] == guess]
    return within(guessed_towers.gain(row) / figure16.PAPER[row["clip"]] for row in rows)


NUMBERS: Mapping[str, Callable[[], str]] = {
    "Figure 13, by the clock within": partial(by_the_clock, "figure13"),
    "Figure 16, by the clock within": partial(by_the_clock, "figure16"),
    "twice the sequence within": partial(guessed_gains, "video of twice the sequence"),
}
"""What stands for the names in braces in `flexpipe.toml`."""

PAPER = read_paper(
    "flexpipe",
    CLAIMS,
    {"Figure 12": _sweep("figure12"), "Figure 13": _sweep("figure13"), "Figure 14": _waiting},
    NUMBERS,
)
