"""Table 3: throughput of all methods, GPT- and BERT-style models, 4 and 8 ranks, two batches each.

    python -m experiments.amdp.table3               simulated, two minutes
    python -m experiments.amdp.table3 --measured    and on emulated devices, seven minutes
    python -m experiments.amdp.table3 --show        what was found last

One number of the device is fitted: the share of its peak that matrix products reach, so that DAPPLE comes out as in
the paper (`penstock.cost.presets`, A800). All else is counted or the maker's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from experiments.amdp.command import command
from experiments.amdp.methods import METHODS, Trial, trial_of
from experiments.amdp.setups import MODELS, Setup
from experiments.amdp.synchronous import best_synchronous
from experiments.common.results import Row, find, table

NAMES = {
    "1f1b": "DAPPLE",
    "interleaved-1f1b": "Inter-1F1B",
    "chimera": "Chimera",
    "zb-v": "ZB-V",
    "pipedream": "PipeDream",
    "xpipe": "XPipe",
    "pipedream-2bw": "2BW",
    "amdp": "AMDP",
}
PAPER: Mapping[tuple[str, int, int], tuple[float, ...]] = {
    ("GPT", 4, 16): (25.2, 35.4, 25.3, 26.3, 34.5, 38.5, 38.6, 39.1),
    ("GPT", 4, 64): (36.3, 39.8, 30.1, 30.9, 34.5, 40.7, 41.0, 42.1),
    ("GPT", 8, 32): (44.0, 57.0, 46.3, 45.2, 61.0, 66.0, 70.3, 75.5),
    ("GPT", 8, 128): (61.9, 67.5, 56.0, 54.4, 61.0, 69.7, 71.6, 83.7),
    ("BERT", 4, 16): (26.0, 34.7, 29.3, 28.9, 37.2, 37.8, 41.0, 41.6),
    ("BERT", 4, 64): (37.1, 41.0, 34.5, 33.8, 37.2, 41.7, 42.9, 43.6),
    ("BERT", 8, 32): (45.2, 37.5, 52.8, 40.4, 65.0, 73.6, 74.3, 78.5),
    ("BERT", 8, 128): (64.8, 58.8, 63.8, 54.1, 65.0, 75.6, 75.8, 86.1),
}
"""ktokens/s, in the order of `NAMES`."""

BEST = "best synchronous"
"""Ours: without mismatch and without a barrier between windows; see `synchronous`."""

TARGETS = {"pipedream-2bw": 1.15, "1f1b": 1.3}
"""How many times as fast as these AMDP is to be, at the least, on 8 ranks with a batch of 128."""

HEADS = (0.0, 0.5, 1.0, 1.5, 2.0)
COMPARED = ("1f1b", "interleaved-1f1b", "chimera", "zb-v", "pipedream-2bw", "amdp")
"""In the tables of other cuts and heads."""


def trials() -> Iterator[tuple[Row, Trial]]:
    """The paper's table, and the best without mismatch."""
    for key in PAPER:
        setup = Setup(*key)
        for method in METHODS:
            yield keys_of(setup, method), trial_of(method, setup)
        yield keys_of(setup, BEST), best_synchronous(setup)


def other_setups(model: str) -> Mapping[str, Setup]:
    """Heads of other weights, stages cut so that they make up for it, and slow links."""
    heads = {f"head {head:g} times as heavy": Setup(model, 8, 128, head=head) for head in HEADS}
    return {
        **heads,
        "stages cut for balance": Setup(model, 8, 128, "balanced"),
        "links of 25 GB/s": Setup(model, 8, 128, link_gb=25.0),
        "links of 25 GB/s, b = 32": Setup(model, 8, 32, link_gb=25.0),
    }


def other_trials() -> Iterator[tuple[Row, Trial]]:
    for model in MODELS:
        for setup in other_setups(model).values():
            if setup != Setup(model, 8, 128):  # which is in the paper's table
                for method in COMPARED:
                    yield keys_of(setup, method), trial_of(method, setup)


def keys_of(setup: Setup, method: str) -> Row:
    return {
        "model": setup.model,
        "ranks": setup.num_ranks,
        "batch": setup.batch,
        "split": setup.split,
        "head": setup.head,
        "link_gb": setup.link_gb,
        "method": method,
    }


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """The paper's table with ours beside it, and ratios."""
    kinds = ("simulated", "measured") if any(row["measured"] is not None for row in rows) else ("simulated",)
    found = {
        (key, kind): {method: _value(rows, kind, method, Setup(*key)) for method in (*NAMES, BEST)}
        for key in PAPER
        for kind in kinds
    }
    found |= {(key, "paper"): dict(zip(NAMES, values, strict=True)) for key, values in PAPER.items()}
    rivals = [method for method in (*NAMES, BEST) if method != "amdp"]
    yield "throughput (ktokens/s)"
    yield from table(
        ["", "d", "b", "", *NAMES.values(), BEST],
        [
            [*_setup(key, kind), *(_number(found[key, kind].get(method), ".1f") for method in (*NAMES, BEST))]
            for key in PAPER
            for kind in ("paper", *kinds)
        ],
    )
    yield ""
    yield "AMDP as a multiple of"
    yield from table(
        ["", "d", "b", "", *(NAMES.get(method, method) for method in rivals)],
        [
            [*_setup(key, kind), *(_number(_over(found[key, kind], method), ".2f") for method in rivals)]
            for key in PAPER
            for kind in ("paper", *kinds)
        ],
    )
    yield ""
    yield from _chosen(rows)
    yield ""
    yield from _targets(rows, kinds)
    yield from _clock(rows)
    yield ""
    yield from _others(rows)


def _over(found: Mapping[str, float], method: str) -> float | None:
    return found["amdp"] / found[method] if method in found else None


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def _chosen(rows: Sequence[Row]) -> Iterator[str]:
    names = [_row(rows, BEST, Setup(*key))["schedule"] for key in PAPER]
    yield f"{BEST}, no barrier between windows, row by row: {', '.join(names)}"


def _setup(key: tuple[str, int, int], kind: str) -> list[str]:
    model, ranks, batch = key
    return [model, str(ranks), str(batch), kind] if kind == "paper" else ["", "", "", kind]


def _row(rows: Sequence[Row], method: str, setup: Setup) -> Row:
    return find(rows, **keys_of(setup, method))


def _value(rows: Sequence[Row], kind: str, method: str, setup: Setup) -> float:
    value = _row(rows, method, setup)[kind]
    return float("nan") if value is None else float(value)


def _targets(rows: Sequence[Row], kinds: Sequence[str]) -> Iterator[str]:
    for model in MODELS:
        for kind in kinds:
            found = {method: _value(rows, kind, method, Setup(model, 8, 128)) for method in ("amdp", *TARGETS)}
            parts = [
                f"{found['amdp'] / found[method]:.2f} times {NAMES[method]} (at least {least:g})"
                for method, least in TARGETS.items()
            ]
            yield f"{model}, d = 8, b = 128, {kind}: AMDP is {' and '.join(parts)}"


def _clock(rows: Sequence[Row]) -> Iterator[str]:
    """How far what was measured is from what was simulated, over all cells of the table."""
    off = sorted(abs(row["measured"] / row["simulated"] - 1) for row in rows if row["measured"] is not None)
    if off:
        yield (
            f"measured of {len(off)} cells: {median(off):.1%} off the simulated in the median, nine of ten within "
            f"{off[9 * len(off) // 10]:.1%}, all within {off[-1]:.1%}"
        )


def _others(rows: Sequence[Row]) -> Iterator[str]:
    yield "d = 8, b = 128, simulated: what the head's weight decides"
    body = []
    for model in MODELS:
        for name, setup in other_setups(model).items():
            found = {method: _value(rows, "simulated", method, setup) for method in COMPARED}
            ratios = [found["amdp"] / found[method] for method in TARGETS]
            body.append([model, name, *(f"{each:.1f}" for each in found.values()), *(f"{r:.2f}" for r in ratios)])
    names = [NAMES[method] for method in COMPARED]
    yield from table(["", "", *names, *(f"AMDP/{NAMES[method]}" for method in TARGETS)], body)


if __name__ == "__main__":
    command("table3", __doc__, trials, lines, other_trials)
