"""What the tuner says: a table for people, one object for programs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.tune.profile import Profile, Transfer
from penstock.tune.search import Candidate, Ranked, in_bytes
from penstock.tune.session import Outcome
from penstock.tune.verify import Measured


def as_json(outcome: Outcome) -> dict[str, Any]:
    """The outcome as plain data."""
    found = outcome.found
    return {
        "model": outcome.model,
        "num_ranks": outcome.space.num_devices,
        "batch": outcome.space.batch,
        "num_tried": found.num_tried,
        "num_too_large": found.num_too_large,
        "num_measured": outcome.num_measured,
        "num_reused": outcome.num_reused,
        "interrupted": outcome.interrupted,
        "best": [_ranked_json(outcome, ranked) for ranked in found.best],
        "best_running": [_ranked_json(outcome, ranked) for ranked in found.best_running],
        "notices": outcome.notices,
    }


def _ranked_json(outcome: Outcome, ranked: Ranked) -> dict[str, Any]:
    candidate, prediction = ranked.candidate, ranked.prediction
    measured = outcome.measured.get(candidate)
    return {
        "schedule": candidate.plan.name,
        "options": dict(candidate.plan.options),
        "program": candidate.plan.program,
        "pp": candidate.shape.pp,
        "dp": candidate.shape.dp,
        "microbatch_size": candidate.shape.microbatch_size,
        "num_microbatches": candidate.shape.num_microbatches,
        "recompute": candidate.recompute,
        "cut": [len(layers) for layers in candidate.cut],
        "runs": candidate.runs,
        "step_ms": prediction.step,
        "makespan_ms": prediction.makespan,
        "update_ms": prediction.update,
        "reduce_ms": prediction.reduce,
        "bubble_ratio": prediction.bubble_ratio,
        "samples_per_second": ranked.samples_per_second,
        "tokens_per_second": _tokens(outcome, ranked),
        "memory_bytes": [memory.total for memory in prediction.memory],
        "measured": None if measured is None else _measured_json(ranked, measured),
    }


def _measured_json(ranked: Ranked, measured: Measured) -> dict[str, Any]:
    return {
        "step_ms": measured.step,
        "makespan_ms": measured.makespan,
        "predicted_over_measured": ranked.prediction.step / measured.step,
        "num_undisturbed": measured.undisturbed,
        "other_programs_cores": measured.others,
        "steps_ms": list(measured.steps),
    }


def show(outcome: Outcome, num_shown: int) -> None:
    """Prints the best, and the best that run here where those are others."""
    found = outcome.found
    _print_table(outcome, f"{outcome.model}: the fastest by prediction", found.best[:num_shown])
    shown = {ranked.candidate for ranked in found.best[:num_shown]}
    running = [ranked for ranked in found.best_running[:num_shown] if ranked.candidate not in shown]
    if running:
        print()
        _print_table(outcome, "more of those that penstock train runs", running)
    print()
    print(_summary(outcome))
    if any(not ranked.candidate.runs for ranked in found.best[:num_shown]):
        print("*  predicted only: penstock train runs one pipeline, without copies of it (dp 1)")
    for notice in outcome.notices:
        print(f"note  {notice}")


def train_command(outcome: Outcome, schedule_file: str | None = None) -> str | None:
    """The line that trains with the best that runs; None where there is no such line.

    There is none where nothing that runs was found, the model is just a file of costs, or the best is a program
    that no file holds yet.
    """
    if not outcome.found.best_running or outcome.config is None:
        return None
    candidate = outcome.found.best_running[0].candidate
    if candidate.plan.program and schedule_file is None:
        return None
    words = ["penstock", "train", "--preset", outcome.model, "--batch", str(outcome.space.batch)]
    if schedule_file is not None:
        words += ["--schedule", schedule_file]
    else:
        shape = candidate.shape
        words += ["--schedule", candidate.plan.name, "--ranks", str(shape.pp)]
        words += ["--microbatches", str(shape.num_microbatches)]
        for name, value in candidate.plan.options:
            option = {"num_stages": "--stages"}.get(name, f"--{name}")
            words += [option, ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    words += ["--cut", ",".join(str(len(layers)) for layers in candidate.cut)]
    return shlex.join([*words, *(["--recompute"] if candidate.recompute else [])])


def _print_table(outcome: Outcome, title: str, rows: Sequence[Ranked]) -> None:
    verified = any(ranked.candidate in outcome.measured for ranked in rows)
    speed = "samples/s" if outcome.config is None else "tokens/s"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("schedule")
    heads = ["pp", "dp", "microbatches", "layers", "step ms", speed, "bubbles", "a rank"]
    for head in [*heads, *(["measured ms", "off"] if verified else [])]:
        table.add_column(head, justify="right")
    for ranked in rows:
        table.add_row(*_cells(outcome, ranked, verified))
    Console(width=None if Console().is_terminal else 140, highlight=False, markup=False).print(table)


def _cells(outcome: Outcome, ranked: Ranked, verified: bool) -> list[str]:
    candidate, prediction = ranked.candidate, ranked.prediction
    shape = candidate.shape
    name = candidate.name + (" +recompute" if candidate.recompute else "")
    tokens = _tokens(outcome, ranked)
    cells = [
        name if candidate.runs else f"{name}*",
        str(shape.pp),
        str(shape.dp),
        f"{shape.num_microbatches} of {shape.microbatch_size}",
        _cut(candidate),
        f"{prediction.step:.1f}",
        f"{ranked.samples_per_second:.4g}" if tokens is None else f"{tokens:,.0f}",
        f"{prediction.bubble_ratio:.1%}",
        in_bytes(prediction.peak_bytes),
    ]
    if verified:
        measured = outcome.measured.get(candidate)
        cells += ["", ""] if measured is None else [
            f"{measured.step:.1f}", f"{prediction.step / measured.step - 1:+.1%}",
        ]  # fmt: skip
    return cells


def _cut(candidate: Candidate) -> str:
    counts = [len(layers) for layers in candidate.cut]
    return " ".join(map(str, counts)) if len(counts) <= 8 else f"{min(counts)} to {max(counts)} in {len(counts)}"


def _tokens(outcome: Outcome, ranked: Ranked) -> float | None:
    return None if outcome.config is None else ranked.samples_per_second * outcome.config.context


def _summary(outcome: Outcome) -> str:
    found = outcome.found
    said = [f"{found.num_tried} candidates"]
    if found.num_too_large:
        said.append(f"{found.num_too_large} of them above the memory limit")
    if outcome.num_measured or outcome.num_reused:
        measured = f"{outcome.num_measured} profiles measured" if outcome.num_measured else "nothing measured"
        said.append(f"{measured}, {outcome.num_reused} taken from the database")
    return "; ".join(said) + ("; interrupted: the best so far" if outcome.interrupted else "")


def show_profile(profiles: Sequence[Profile], transfers: dict[int, Transfer]) -> None:
    """Prints what was measured, layer by layer, and what messages cost."""
    console = Console(width=None if Console().is_terminal else 140, highlight=False, markup=False)
    for profile in profiles:
        side = f", {profile.num_parallel} ranks at a time" if profile.num_parallel > 1 else ""
        table = Table(
            title=f"{profile.model}: microbatches of {profile.microbatch_size}{side}"
            f"{', recompute' if profile.recompute else ''}",
            title_justify="left",
            box=None,
            pad_edge=False,
        )
        table.add_column("layer")
        for head in ("F ms", "B ms", "I ms", "W ms", "update ms", "kept by F", "by I", "weights", "state", "message"):
            table.add_column(head, justify="right")
        for number, layer in enumerate(profile.layers):
            times = (profile.f, profile.b, profile.i, profile.w, profile.update)
            sizes = (profile.activation, profile.held, profile.weight, profile.state, profile.output)
            table.add_row(layer, *(f"{row[number]:.3f}" for row in times), *(in_bytes(row[number]) for row in sizes))
        over = profile.op_overhead
        table.add_row("each op", *(f"{over.get(kind, 0.0):.3f}" for kind in ("f", "b", "i", "w")))
        console.print(table)
        print()
    for num_ranks, transfer in transfers.items():
        if num_ranks == 1:
            print(f"one rank     {transfer.step_alone:.2f} ms a step besides its ops")
            continue
        print(f"{num_ranks} ranks      {transfer.step:.2f} ms a step besides their ops")
        print(f"messages     {transfer.latency:.2f} ms and {transfer.bandwidth / 1e6:.3g} GB/s")
        for size, delay in zip(transfer.sizes, transfer.delay):
            reduce = transfer.at("reduce", size)
            print(f"  {in_bytes(size):>8}  {delay:.2f} ms from op to op, {reduce:.2f} ms to sum over two ranks")
