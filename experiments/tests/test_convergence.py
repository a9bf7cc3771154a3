"""The protocol of figure 7: which runs it asks for, with which optimizers and rates, in which order."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from experiments.amdp import convergence, figure7
from experiments.amdp.convergence import (
    DELAYED,
    FIRST,
    MODELS,
    PAPER,
    ROWS,
    SEEDS,
    Job,
    chart,
    lines,
    mean_curves,
    next_job,
    ready_jobs,
    row_of,
    run,
    times_to_loss,
)

pytestmark = pytest.mark.unit


def done(job: Job, final: float | None) -> dict[str, Any]:
    optimizer = job.name if job.part == "rates" else row_of(job.name).optimizer
    return {
        **job.key,
        "optimizer": optimizer,
        "final": final,
        "mismatch": 0,
        "updates": 1,
        "seconds": 1.0,
        "curve": [],
    }


def carried_out(loss: Any) -> list[dict[str, Any]]:
    """All runs of the protocol, each with a loss made up from its job."""
    rows: list[dict[str, Any]] = []
    while (job := next_job(rows)) is not None:
        assert len(rows) < 1000
        rows.append(done(job, loss(job)))
    return rows


def test_all_rows_are_there_with_the_optimizers_their_papers_name() -> None:
    assert [each.name for each in ROWS[:20]] == [each.name for each in figure7.METHODS if each.name != figure7.LATE]
    by = {each.name: each.optimizer for each in ROWS}
    assert (by["pipedream"], by["pipedream, windows"], by["pipedream-2bw"]) == ("SGD", "SGD", "Adam")
    assert (by["xpipe"], by["vnag, each"], by["spectrain"], by["amdp"]) == ("Adam", "NAdam", "SGD", "AdamW")
    assert (by["synchronous, NAdam"], by["synchronous, SGD"], by["synchronous"]) == ("NAdam", "SGD", "AdamW")
    assert len(ROWS) == 26
    # vNAG's momentum rises over a run as over the paper's 40,000 updates.
    assert row_of("vnag").optimizer_options["momentum_decay"] * 300 == pytest.approx(0.004 * 40_000)
    assert row_of("vnag, each").optimizer_options["momentum_decay"] * 9600 == pytest.approx(0.004 * 40_000)


def test_rates_come_from_a_seed_that_no_table_counts() -> None:
    """The grid goes on while its best lies at an edge, and every row then takes its optimizer's."""
    best = {"AdamW": 1.6e-2, "Adam": 4e-3, "NAdam": 5e-4, "Muon": 4e-3, "SGD": 0.2}
    rows = carried_out(lambda job: abs(job.peak - best[job.name]) if job.part == "rates" else 1.0 / job.peak)
    of_rates = [row for row in rows if row["part"] in ("rates", "own")]
    assert {row["seed"] for row in of_rates} == {convergence.HELD_OUT}
    tried = sorted(
        row["peak"] for row in rows if (row["part"], row["model"], row["name"]) == ("rates", "GPT", "AdamW")
    )
    assert tried == [2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2]
    table = {row["name"]: row["peak"] for row in rows if row["part"] == "table 1"}
    assert (table["amdp"], table["vnag"], table["pipedream"]) == (1.6e-2, 5e-4, 0.2)
    assert (table["spectrain, each"], table["pipedream, each"]) == (0.00625, 0.00625)
    assert table["synchronous, each"] == round(1.6e-2 / 32**0.5, 5)
    counts = Counter((row["model"], row["name"]) for row in rows if row["part"] == "table 1")
    assert set(counts.values()) == {len(SEEDS)}
    assert len(counts) == len(ROWS) * len(MODELS)
    assert len({tuple(row[key] for key in ("part", "model", "name", "seed", "peak")) for row in rows}) == len(rows)
    # No row is better at a lower rate here, so table 1 has them all.
    assert not [row for row in rows if row["part"] == "table 2"]


def test_what_is_better_at_its_own_rate_is_run_again() -> None:
    rows = carried_out(lambda job: abs(job.peak - FIRST[job.name]) if job.part == "rates" else abs(job.peak - 1e-3))
    own = {row["name"]: row["peak"] for row in rows if row["part"] == "table 2"}
    assert own["amdp"] == 1e-3
    assert set(own) <= set(DELAYED)
    assert "the protocol is done" in "\n".join(lines(rows))


def test_what_diverges_is_never_best() -> None:
    def loss(job: Job) -> float | None:
        diverges = job.part == "rates" and job.name != "SGD" and job.peak > 3e-3
        return None if diverges else 1.0 + abs(math.log(job.peak / 1e-3))

    rows = carried_out(loss)
    assert {row["peak"] for row in rows if row["part"] == "table 1" and row["name"] in ("amdp", "xpipe")} == {1e-3}
    diverged = [row | {"final": None} if row["name"] == "amdp" and row["seed"] == 1 else row for row in rows]
    assert "1 of 3 diverged" in "\n".join(lines(diverged))


def test_runs_that_end_in_another_order_are_the_same_runs() -> None:
    """So several processes may share them out."""

    def loss(job: Job) -> float:
        return 1.0 + abs(math.log(job.peak / (2 * FIRST[job.name] if job.part == "rates" else 1e-3)))

    draw, rows = random.Random(3), list[dict[str, Any]]()
    while jobs := list(ready_jobs(rows)):
        job = draw.choice(jobs)
        rows.append(done(job, loss(job)))
    one_by_one = carried_out(loss)
    assert sorted(map(repr, rows)) == sorted(map(repr, one_by_one))
    assert list(lines(rows)) == list(lines(one_by_one))


def curved(name: str, seed: int, *losses: float | None) -> dict[str, Any]:
    curve = [(50 * (number + 1), loss) for number, loss in enumerate(losses) if loss is not None]
    return done(Job("table 1", "GPT", name, seed, 1e-3), losses[-1]) | {"curve": curve}


def test_times_are_batches_to_the_worse_loss_times_what_a_batch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        *(curved("synchronous", seed, 3.0, 2.0 + seed / 10) for seed in SEEDS),
        *(curved("amdp", seed, 3.2, 2.2) for seed in SEEDS),
        *(curved("xpipe", seed, 3.2, 2.4) for seed in SEEDS),
        curved("vnag", 0, 2.9, 2.0),
        curved("vnag", 1, 2.9, None),
    ]
    best = SimpleNamespace(method="dualpipe", ktokens=lambda timing: timing)
    monkeypatch.setattr(convergence, "best_synchronous", lambda setup: best)
    monkeypatch.setattr(convergence, "simulate", lambda trial: PAPER.tokens)
    monkeypatch.setattr(convergence, "batch_seconds", lambda method, setup: 3.0 if method.name == "amdp" else 4.0)
    found = times_to_loss(rows)
    assert {row["target"] for row in found} == {2.2}
    at = {row["name"]: (row["batches"], row["seconds"]) for row in found}
    batches = 50 + 50 * (3.0 - 2.2) / (3.0 - 2.1)
    assert at == {
        "synchronous, the fastest of the paper's four": (pytest.approx(batches), pytest.approx(4 * batches)),
        "synchronous, dualpipe": (pytest.approx(batches), pytest.approx(PAPER.window / 1000 * batches)),
        "amdp": (pytest.approx(100.0), pytest.approx(300.0)),
    }, "xpipe never comes to that loss, and vnag diverged on a seed"
    assert "synchronous, dualpipe" in "\n".join(lines(rows, found))
    assert [row["method"] for row in mean_curves(rows, "GPT")] == ["synchronous", "amdp", "xpipe"]
    assert "xpipe" in str(chart(rows, "GPT"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vnag, each", pytest.param("amdp, predicting, Muon", marks=pytest.mark.nightly)])
def test_a_run(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Two batches of a BERT that is small."""
    small = {model: replace(config, width=16, num_heads=2) for model, config in MODELS.items()}
    monkeypatch.setattr(convergence, "MODELS", small)
    (row,) = run([Job("table 1", "BERT", name, 1, 1e-3)], num_batches=2)
    assert row["final"] > 1
    assert row["updates"] == (64 if "each" in name else 2)
    assert row["mismatch"] == (7 if "each" in name else 1)
