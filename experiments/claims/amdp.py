"""AMDP: what it claims beside what was found here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from statistics import fmean

from experiments.amdp import (
    convergence,
    defaults,
    delay,
    figure7,
    figure8,
    own_rates,
    pays,
    table1,
    table3,
    table4,
    table5,
    tentative,
)
from experiments.amdp.command import simulated_row
from experiments.amdp.methods import trial_of
from experiments.amdp.setups import Setup
from experiments.claims.claim import Claim, Value, as_saved, facts_of, read_paper, rows_of
from experiments.common.results import Row, find

SIZES = {"GPT": (8, 128), "BERT": (8, 128)}
AMDP_S_LOSS = {"GPT": 0.007, "BERT": 0.0}
"""Over the synchronous one's, by section 4.2: 2.90 over 2.88, and 2.36 "matching DAPPLE"."""
RIVALS = ("pipedream-2bw", "1f1b")


def times_as_fast(model: str, rival: str) -> Value:
    """AMDP's throughput over another's, 8 ranks and batches of 128."""

    def value(rows: Sequence[Row], how: str) -> float | None:
        setup = Setup(model, *SIZES[model])
        one, other = (find(rows, **table3.keys_of(setup, method))[how] for method in ("amdp", rival))
        return None if one is None or other is None else one / other

    return value


def without_zero(model: str, batch: int) -> Value:
    """Throughput without ZeRO over that with it."""

    def value(rows: Sequence[Row], how: str) -> float | None:
        off, on = (find(rows, model=model, batch=batch, zero=zero)[how] for zero in (False, True))
        return None if off is None or on is None else off / on

    return value


@cache
def again(model: str) -> list[Row]:
    setup = Setup(model, *SIZES[model])
    return as_saved(
        simulated_row(table3.keys_of(setup, method), trial_of(method, setup)) for method in (*RIVALS, "amdp")
    )


@cache
def again_zero() -> list[Row]:
    return as_saved(simulated_row(keys, trial) for keys, trial in table4.trials())


@cache
def again_formulas() -> list[Row]:
    return as_saved(table1.rows([(8, 32)]))


def of_method(method: str, column: str) -> Value:
    return lambda rows, how: float(find(rows, method=method, d=8, n=32)[column]) if how == "simulated" else None


def over_synchronous(method: str) -> Value:
    """The final loss over the synchronous one's, by training and not by simulation."""

    def value(rows: Sequence[Row], how: str) -> float | None:
        if how == "simulated":
            return None
        by = {row["method"]: row["final"] for row in rows}
        return by[method] / by["synchronous"] - 1 if method in by and by[method] is not None else None

    return value


def sooner(method: str) -> Value:
    """The time in which the fastest synchronous schedule reaches AMDP's last loss, over that of a method, by training
    and simulated ranks.
    """

    def value(rows: Sequence[Row], how: str) -> float | None:
        if how == "simulated":
            return None
        by = {row["method"]: row for row in rows}
        target = max(by[name]["final"] for name in (figure7.SYNC, figure7.AMDP))
        slow, fast = (
            (figure7.reached(by[name], target) or float("nan")) * by[name]["batch_seconds"]
            for name in (figure7.SYNC, method)
        )
        return slow / fast

    return value


def beside_vnag(model: str, method: str) -> Value:
    """A method's throughput over vNAG's, by simulation."""

    def value(rows: Sequence[Row], how: str) -> float | None:
        if how != "simulated":
            return None
        times = facts_of("amdp/table5")["throughput"]
        one, other = (find(times, model=model, method=each)["ktokens"] for each in (method, "vNAG"))
        return float(one / other)

    return value


def loss_of_small(model: str, method: str) -> Value:
    """The last loss of a small model over that of the synchronous pipeline, by training."""

    def value(rows: Sequence[Row], how: str) -> float | None:
        if how == "simulated":
            return None
        mine, like = (find(rows, model=model, method=each)["final"] for each in (method, table5.SYNC))
        return float(mine / like - 1)

    return value


def figure_7_times(method: str) -> str:
    """How many times as fast as the best of the paper's synchronous schedules a method reaches AMDP's last loss."""
    return f"{sooner(method)(rows_of('amdp/figure7'), 'trained'):.2f}"


def memory_without_zero(model: str, num_ranks: int) -> Value:
    """By how much the average memory grows without ZeRO, by simulation."""
    return lambda rows, how: figure8.rise(rows, model, num_ranks, "amdp") if how == "simulated" else None


def by_protocol(model: str, method: str) -> Value:
    """The final loss over the synchronous one's with the same optimizer, a mean over seeds, by training."""

    def value(rows: Sequence[Row], how: str) -> float | None:
        of_row = [row for row in rows if (row["part"], row["model"], row["name"]) == ("table 1", model, method)]
        return None if how == "simulated" or not of_row else convergence.over_synchronous(rows, model, of_row)

    return value


def at_own_rate(name: str, best: bool = False) -> Value:
    """The last loss over that of 1f1b, each at its own rate, a mean over seeds, by training.

    Args:
        best: whether 1f1b has the best optimizer, instead of the same.
    """

    def value(rows: Sequence[Row], how: str) -> float | None:
        if how == "simulated":
            return None
        like = own_rates.best_synchronous(rows) if best else own_rates.SYSTEMS[name].like
        return fmean(own_rates.over(rows, name, like))

    return value


CLAIMS = (
    *(
        Claim(
            "Table 1",
            f"bubble of {name}, d = 8, n = 32",
            paper,
            "amdp/table1",
            of_method(method, "bubble"),
            again=again_formulas,
            digits=4,
            show="{:.1%}",
        )
        for method, name, paper in (
            ("1f1b", "DAPPLE", 0.179),
            ("interleaved-1f1b", "Inter-1F1B", 0.099),
            ("amdp", "AMDP", 0.0),
        )
    ),
    Claim(
        "Table 1",
        "updates between F and B, AMDP",
        1,
        "amdp/table1",
        of_method("amdp", "mismatch"),
        again=again_formulas,
        digits=0,
        show="{:.0f}",
    ),
    *(
        Claim(
            "Table 3",
            f"AMDP over {table3.NAMES[rival]}, {model}, d = 8, b = 128",
            paper,
            "amdp/table3",
            times_as_fast(model, rival),
            "amdp/table3",
            partial(again, model),
        )
        for model, rival, paper in (
            ("GPT", "pipedream-2bw", 1.17),
            ("GPT", "1f1b", 1.35),
            ("BERT", "pipedream-2bw", 1.14),
            ("BERT", "1f1b", 1.33),
        )
    ),
    *(
        Claim(
            "Table 4",
            f"without ZeRO over with it, {model}, b = 128",
            table4.PAPER[model][0] / table4.PAPER[model][1],
            "amdp/table4",
            without_zero(model, 128),
            "amdp/table4",
            again_zero,
            digits=3,
            show="{:.3f}",
        )
        for model in ("GPT", "BERT")
    ),
    *(
        Claim(
            "Figure 7",
            f"final loss over the synchronous one, {method}",
            paper,
            "amdp/figure7",
            over_synchronous(method),
            trained="amdp/figure7",
            digits=4,
            show="{:+.2%}",
        )
        for method, paper in (
            ("amdp", 0.007),
            ("amdp, mismatch 0", None),
            (figure7.LATE, None),
            ("pipedream-2bw", None),
            ("xpipe", None),
            ("pipedream", None),
        )
    ),
    *(
        Claim(
            "Figure 7",
            f"time to AMDP's last loss, the best of the paper's synchronous schedules over {method}",
            paper,
            "amdp/figure7",
            sooner(method),
            trained="amdp/figure7",
        )
        for method, paper in (("amdp", 1.23), (figure7.LATE, None), (figure7.WITHOUT, None))
    ),
    *(
        Claim(
            "Table 5",
            f"throughput over vNAG's, {method}, {model}",
            None
            if (model, method) not in table5.PAPER
            else table5.PAPER[model, method][0] / table5.PAPER[model, "vNAG"][0],
            "amdp/table5",
            beside_vnag(model, method),
        )
        for model in table5.MODELS
        for method in ("AMDP", table5.LATE)
    ),
    *(
        Claim(
            "Table 5",
            f"last loss over Sync. PP's, {method}, {model}",
            table5.PAPER[model, method][1] / table5.PAPER[model, table5.SYNC][1] - 1
            if (model, method) in table5.PAPER
            else None,
            "amdp/table5",
            loss_of_small(model, method),
            trained="amdp/table5",
            digits=3,
            show="{:+.1%}",
        )
        for model, method in (
            *((model, method) for model in table5.MODELS for method in ("AMDP", "vNAG")),
            ("Model-1", table5.LATE),
        )
    ),
    *(
        Claim(
            "Figure 8",
            f"growth of the average memory without ZeRO, {model}, d = {num_ranks}",
            paper,
            "amdp/figure6",
            memory_without_zero(model, num_ranks),
            digits=3,
            show="{:.1%}",
        )
        for (model, num_ranks), paper in figure8.PAPER.items()
    ),
    *(
        Claim(
            "Figure 7 by protocol",
            f"final loss over the synchronous one, {method}, {model}, three seeds",
            AMDP_S_LOSS[model] if method == "amdp" else None,
            "amdp/convergence",
            by_protocol(model, method),
            trained="amdp/convergence",
            digits=4,
            show="{:+.2%}",
        )
        for model in ("GPT", "BERT")
        for method in ("amdp", "amdp, predicting", "amdp, Muon", "pipedream-2bw", "xpipe", "pipedream", "vnag")
    ),
    *(
        Claim(
            "Own rates",
            f"last loss over 1f1b's with {optimizer}, each at its own rate, {name}, three seeds",
            None,
            "amdp/own_rates",
            at_own_rate(name, best),
            trained="amdp/own_rates",
            digits=4,
            show="{:+.2%}",
        )
        for optimizer, best in (("the same optimizer", False), ("the best optimizer", True))
        for name in own_rates.SYSTEMS
        if "amdp" in name and not (best and "Muon" in name)  # the best is Muon, and with it both are the same
    ),
)


def table_1(method: str) -> str:
    """A method's bubble, d = 8, n = 32."""
    return f"{of_method(method, 'bubble')(rows_of('amdp/table1'), 'simulated'):.1%}"


def _claimed(what: str) -> Claim:
    (claim,) = [each for each in CLAIMS if each.what == what]
    return claim


def over_rival(model: str, rival: str, of_paper: bool) -> str:
    """AMDP's throughput over another's, simulated or by the paper, as the table of claims shows it."""
    claim = _claimed(f"AMDP over {rival}, {model}, d = 8, b = 128")
    value = claim.paper if of_paper else claim.committed("simulated")
    assert value is not None
    return claim.show.format(value)


def lost_without_zero(model: str, of_paper: bool) -> str:
    """The share of throughput that is lost without ZeRO, simulated or by the paper."""
    claim = _claimed(f"without ZeRO over with it, {model}, b = 128")
    value = claim.paper if of_paper else claim.committed("simulated")
    assert value is not None
    return f"{1 - value:.1%}"


def protocol_over(method: str) -> str:
    """GPT's last loss by protocol over the synchronous one, a mean over seeds."""
    value = by_protocol("GPT", method)(rows_of("amdp/convergence"), "trained")
    assert value is not None
    return f"{value:.2%}"


def _learning(rows: Sequence[Row]) -> Iterable[str]:
    return table5.lines(rows, facts_of("amdp/table5")["throughput"])


def _by_protocol(rows: Sequence[Row]) -> Iterable[str]:
    return convergence.lines(rows, facts_of("amdp/convergence").get("times", ()))


def figure_7(method: str) -> Row:
    return find(rows_of("amdp/figure7"), method=method)


def by_rate(method: str, peak: float) -> float:
    """A loss of `rates.py`."""
    loss: float = find(rows_of("amdp/rates"), method=method, peak=peak)["final"]
    return loss


def over_at(peak: float) -> str:
    """What a delay of one update costs at a rate."""
    return f"{by_rate('amdp', peak) / by_rate('synchronous', peak) - 1:.2%}"


def seconds_to_loss(model: str, name: str) -> str:
    times = facts_of("amdp/convergence")["times"]
    return f"{find(times, model=model, name=name)['seconds']:.0f}"


def mean_loss(model: str, method: str) -> float:
    mine = {"part": "table 1", "model": model, "name": method}
    return fmean(row["final"] for row in rows_of("amdp/convergence") if mine.items() <= row.items())


def late_over(name: str, digits: int = 0) -> str:
    (way,) = [each for each in delay.WAYS if each.name == name]
    over = delay.over_synchronous(rows_of("amdp/delay"), way)
    assert over is not None
    return f"{over:.{digits}%}"


def over_no_mismatch(method: str, bound: bool = False) -> str:
    """What a method of `tentative.py` loses to mismatch 0 over the judged seeds, AdamW at d = 8 and n = 32: the mean
    and its standard error, or the bound that 95% lie below.
    """
    gap = tentative.gap_of(rows_of("amdp/tentative"), tentative.Case(method))
    assert gap is not None, "the protocol has judged it"
    return f"{gap.bound:.2%}" if bound else f"{gap.mean:+.2%} ± {gap.error:.2%}"


def by_default(name: str, steps: int) -> str:
    return above(fmean(defaults.over(rows_of("amdp/defaults"), name, steps)))


def above(share: float, digits: int = 2) -> str:
    """A share in words: "3.62% above", or "0.05% below"."""
    return f"{abs(share):.{digits}%} {'below' if share < 0 else 'above'}"


def own_rate_over(name: str, best: bool = False) -> str:
    """A share of `own_rates.py`."""
    found = at_own_rate(name, best)(rows_of("amdp/own_rates"), "trained")
    assert found is not None
    return above(found)


def own_rate_seeds(name: str) -> str:
    """The shares of `own_rates.py` by seed, over 1f1b with the same optimizer."""
    each = own_rates.over(rows_of("amdp/own_rates"), name, own_rates.SYSTEMS[name].like)
    return f"{min(each):+.2%} to {max(each):+.2%}"


def own_rate_of(name: str) -> str:
    return f"{own_rates.own_rate(rows_of('amdp/own_rates'), name):g}"


def muon_below_adamw() -> str:
    """How far 1f1b with Muon ends below 1f1b with AdamW, each at its own rate."""
    return f"{-fmean(own_rates.over(rows_of('amdp/own_rates'), own_rates.SYNC_MUON, own_rates.SYNC)):.0%}"


def mismatch_alone(optimizer: str) -> str:
    """By how much AMDP with a mismatch of one ends over AMDP without, each at its own rate, with updates as ops."""
    with_one, without = (f"amdp, mismatch {most}{optimizer}" for most in (1, 0))
    return f"{fmean(own_rates.over(rows_of('amdp/own_rates'), with_one, without)):.2%}"


def held_out_over(which: str) -> str:
    """What a mismatch of one costs Muon on the seed that chooses rates, both at one rate."""
    rows, name = rows_of("amdp/own_rates"), "amdp, mismatch 1, Muon"
    rate = own_rates.GRID[1] if which == "the default rate" else own_rates.own_rate(rows, name)
    return above(
        own_rates.by_rate(rows, name)[rate] / own_rates.by_rate(rows, own_rates.SYNC_MUON)[rate] - 1, digits=1
    )


FASTEST = "synchronous, the fastest of the paper's four"
NEAREST = "Rotated, late, predicted, slower by stage"
BEST_RATE = 0.004
"""AdamW's without delays, by `tuning.py`; twice that of Figure 7."""


def distance_over_bound() -> str:
    """The squared distance of Theorem 1's runs over its bound (18), where it is largest."""
    found = [row for row in rows_of("amdp/theorem1") if row["part"] == "cosine"]
    return f"{max(row['distance'] / row['bound'] for row in found):.0f}"


def pays_over(rival: str) -> str:
    """AMDP's throughput by rule `tentative` over another's: 8 ranks, windows of 32, the preset's head, fast links."""
    row = find(rows_of("amdp/pays"), d=8, n=32, head=pays.OWN_HEAD, link=pays.LINKS[0])
    return f"{row['tentative'] / row[rival]:.3f}"


def cells_that_pay(link: float | None = None) -> str:
    """Cells of the table in which AMDP by rule `tentative` is faster than draining and than synchronous orders.

    Args:
        link: counts only cells with links of so many GB/s.
    """
    rows = [row for row in rows_of("amdp/pays") if link in (None, row["link"])]
    won = sum(row["tentative"] > max(row["drained"], row["synchronous"]) for row in rows)
    return f"{won} of the {len(rows)} cells"


def cells_of_2bw() -> str:
    """Cells of the table in which PipeDream-2BW is faster than AMDP by rule `tentative`."""
    rows = rows_of("amdp/pays")
    return f"{sum(row['2bw'] > row['tentative'] for row in rows)} of the {len(rows)} cells"


def most_it_pays() -> str:
    """The largest gain of AMDP by rule `tentative` over the best synchronous order."""
    return f"{max(row['tentative'] / row['synchronous'] for row in rows_of('amdp/pays')) - 1:.0%}"


def most_with_long_windows() -> str:
    """The largest gain over draining and over synchronous orders, with four times as many microbatches as ranks."""
    rows = [row for row in rows_of("amdp/pays") if row["n"] == 4 * row["d"]]
    return f"{max(row['tentative'] / max(row['drained'], row['synchronous']) for row in rows) - 1:.1%}"


def small_model_over(method: str) -> str:
    """How far a method of Table 5 ends above the synchronous loss, for the small Model-1."""
    over = loss_of_small("Model-1", method)(rows_of("amdp/table5"), "trained")
    assert over is not None
    return f"{over:.1%}"


def slower_by_tentative() -> str:
    """The share of AMDP's throughput that rule `tentative` costs at Table 5's two models, by simulation."""
    times = facts_of("amdp/table5")["throughput"]
    shares = [
        1
        - find(times, model=model, method=table5.LATE)["ktokens"] / find(times, model=model, method="AMDP")["ktokens"]
        for model in table5.MODELS
    ]
    return f"{min(shares):.1%} to {max(shares):.1%}"


NUMBERS: Mapping[str, Callable[[], str]] = {
    "Table 1, AMDP's bubble": partial(table_1, "amdp"),
    "Theorem 1, distance over (18)": distance_over_bound,
    **{
        f"Table 3, {model} over {rival}{' in the paper' * of_paper}": partial(over_rival, model, rival, of_paper)
        for model, rival in (("GPT", "2BW"), ("GPT", "DAPPLE"), ("BERT", "2BW"))
        for of_paper in (False, True)
    },
    **{
        f"Table 4, {model} without ZeRO{' in the paper' * of_paper}": partial(lost_without_zero, model, of_paper)
        for model in ("GPT", "BERT")
        for of_paper in (False, True)
    },
    "GPT, AMDP over synchronous": partial(protocol_over, "amdp"),
    "GPT, AMDP predicting over synchronous": partial(protocol_over, "amdp, predicting"),
    "Figure 7, AMDP over synchronous": lambda: (
        f"{figure_7('amdp')['final'] / figure_7('synchronous')['final'] - 1:.2%}"
    ),
    "Figure 7, tentative over synchronous": lambda: above(
        figure_7(figure7.LATE)["final"] / figure_7(figure7.SYNC)["final"] - 1
    ),
    **{
        f"Figure 7, {name} to the loss": partial(figure_7_times, method)
        for name, method in (("none", figure7.AMDP), ("tentative", figure7.LATE), ("mismatch 0", figure7.WITHOUT))
    },
    "Rates, over synchronous at the rate of Figure 7": lambda: over_at(figure_7("amdp")["peak"]),
    "Rates, over synchronous at the best rate": lambda: over_at(BEST_RATE),
    **{
        f"{model}, seconds of {name}": partial(seconds_to_loss, model, name)
        for model, names in (("GPT", ("vnag, each", "amdp")), ("BERT", ("amdp", FASTEST, "xpipe", "vnag, each")))
        for name in names
    },
    "GPT, vnag, each below AMDP": lambda: f"{1 - mean_loss('GPT', 'vnag, each') / mean_loss('GPT', 'amdp'):.1%}",
    "Full staleness, the nearest": partial(late_over, NEAREST),
    "Full staleness, its rates with nothing late": partial(
        late_over, "Rotated, nothing late, slower by stage", digits=1
    ),
    "Full staleness, all late by 1": partial(late_over, "Rotated, all late by 1, predicted, slower", digits=1),
    **{
        f"Full staleness, all late by {versions}": partial(
            late_over, f"Rotated, all late by {versions}, predicted, slower"
        )
        for versions in (3, 7)
    },
    **{
        f"Full staleness, {name}": partial(late_over, way, digits=1)
        for name, way in {
            "Rotated, error feedback": "Rotated, late, error feedback, slower by stage",
            "Rotated, predicted": NEAREST,
            "Rotated, compensated": "Rotated, late, predicted, slower by stage, compensated",
            "Muon, error feedback": "Muon, late, error feedback, slower by stage, momentum 0.8",
            "Muon, predicted": "Muon, late, predicted, slower by stage, momentum 0.8",
            "AdamW, late": "AdamW, late",
            "AdamW, compensated": "AdamW, late, compensated",
            "AdamW, compensated 32 times as strongly": "AdamW, late, compensated 32 times as strongly",
            "AdamW, corrected": "AdamW, late, corrected",
        }.items()
    },
    "Pays, d = 8, n = 32 over 2BW": partial(pays_over, "2bw"),
    "Pays, d = 8, n = 32 over drained": partial(pays_over, "drained"),
    "Pays, d = 8, n = 32 over synchronous": partial(pays_over, "synchronous"),
    "Pays, cells": cells_that_pay,
    "Pays, cells, fast links": partial(cells_that_pay, pays.LINKS[0]),
    "Pays, cells, slow links": partial(cells_that_pay, pays.LINKS[1]),
    "Pays, cells, 2BW": cells_of_2bw,
    "Pays, most over synchronous": most_it_pays,
    "Pays, most at n = 4d": most_with_long_windows,
    "Table 5, tentative over synchronous": partial(small_model_over, table5.LATE),
    "Table 5, none over synchronous": partial(small_model_over, "AMDP"),
    "Table 5, tentative slower": slower_by_tentative,
    **{
        f"Tentative weights, {method}{', bound' * bound}": partial(over_no_mismatch, method, bound)
        for method, bound in (("none", False), ("xpipe", False), ("tentative", False), ("tentative", True))
    },
    "Defaults, mismatch 1": partial(by_default, "amdp, mismatch 1", 400),
    "Defaults, mismatch 1, Muon": partial(by_default, "amdp, mismatch 1, Muon", 200),
    "Own rates, default": partial(own_rate_over, own_rates.DEFAULT),
    "Own rates, default, seeds": partial(own_rate_seeds, own_rates.DEFAULT),
    "Own rates, default, over the best": partial(own_rate_over, own_rates.DEFAULT, best=True),
    **{
        f"Own rates, {name}": partial(own_rate_over, f"amdp, {name}")
        for name in ("mismatch 0", "mismatch 0, Muon", "mismatch 1", "mismatch 1, Muon")
    },
    **{
        f"Own rates, {name}, seeds": partial(own_rate_seeds, f"amdp, {name}")
        for name in ("mismatch 0", "mismatch 0, Muon")
    },
    **{
        f"Own rates, mismatch 1 over 0{optimizer}": partial(mismatch_alone, optimizer) for optimizer in ("", ", Muon")
    },
    "Own rates, the rate of mismatch 1": partial(own_rate_of, "amdp, mismatch 1"),
    "Own rates, AdamW's rate": partial(own_rate_of, own_rates.SYNC),
    "Own rates, Muon's rate": partial(own_rate_of, own_rates.SYNC_MUON),
    "Own rates, Muon below AdamW": muon_below_adamw,
    **{
        f"Own rates, held out, mismatch 1, Muon, at {which}": partial(held_out_over, which)
        for which in ("the default rate", "its own")
    },
}
"""What stands for the names in braces in `amdp.toml`."""

PAPER = read_paper(
    "amdp",
    CLAIMS,
    {"Table 5": _learning, "Figure 9": table5.curve_lines, "Figure 7 by protocol": _by_protocol},
    NUMBERS,
)
