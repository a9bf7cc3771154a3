"""The tuner's result: a table for people, one object for programs."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.formats.profile import MessageCosts, Profile
from penstock.simulation.memory_footprint import in_bytes
from penstock.train.asynchronous import bound, proved_mismatch
from penstock.train.kinds import GPT, is_path
from penstock.train.settings import Settings
from penstock.tune.predict import Prediction
from penstock.tune.search import SETTINGS, RankedCandidate, TuneCandidate, settings_of
from penstock.tune.session import TuneOutcome
from penstock.tune.verify import MeasuredCandidate


def as_json(outcome: TuneOutcome) -> dict[str, Any]:
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
        "choice": None if outcome.choice is None else _choice_json(outcome, outcome.choice),
        "asynchronous": None if found.asynchronous is None else _ranked_json(outcome, found.asynchronous),
        "refused": dict(found.refused),
        "notices": outcome.notices,
    }


def _ranked_json(outcome: TuneOutcome, ranked: RankedCandidate) -> dict[str, Any]:
    candidate, prediction = ranked.candidate, ranked.prediction
    measured = outcome.measured.get(candidate)
    return {
        "schedule": candidate.plan.name,
        "options": dict(candidate.plan.options),
        "program": candidate.plan.program,
        "mismatch": proved_mismatch(candidate.plan.schedule),
        "towers": {name: dataclasses.asdict(each) for name, each in candidate.plan.towers},
        "pp": candidate.shape.pp,
        "dp": candidate.shape.dp,
        "microbatch_size": candidate.shape.microbatch_size,
        "num_microbatches": candidate.shape.num_microbatches,
        "recompute": candidate.recompute,
        "shared_ends": candidate.has_shared_ends,
        "cut": [len(layers) for layers in candidate.cut],
        "step_ms": prediction.step,
        "makespan_ms": prediction.makespan,
        "update_ms": prediction.update,
        "reduce_ms": prediction.reduce,
        "bubble_ratio": prediction.bubble_ratio,
        "samples_per_second": ranked.samples_per_second,
        "tokens_per_second": _tokens(outcome, ranked),
        "memory_bytes": [memory.total for memory in prediction.memory] if prediction.has_weights else None,
        "peak_activations": [memory.activations for memory in prediction.memory],
        "measured": None if measured is None else _measured_json(ranked, measured),
    }


def _choice_json(outcome: TuneOutcome, ranked: RankedCandidate) -> dict[str, Any]:
    settings = settings_of(ranked.candidate, outcome.settings)
    same = {name: getattr(settings, name) for name in ("sharding", "dispatch")}
    num_devices = ranked.candidate.num_ranks * outcome.tp
    return {**_ranked_json(outcome, ranked), "tp": outcome.tp, "num_devices": num_devices, **same}


def _measured_json(ranked: RankedCandidate, measured: MeasuredCandidate) -> dict[str, Any]:
    return {
        "step_ms": measured.step,
        "makespan_ms": measured.makespan,
        "predicted_over_measured": ranked.prediction.step / measured.step,
        "memory_bytes": list(measured.peak_bytes),
        "num_undisturbed": measured.undisturbed,
        "other_programs_cores": measured.others,
        "steps_ms": list(measured.steps),
    }


def show(outcome: TuneOutcome, num_shown: int) -> None:
    """Prints the best candidates, and which to train with."""
    found = outcome.found
    _print_table(outcome, f"{outcome.model}: the fastest by prediction", found.best[:num_shown])
    print()
    print(_summary(outcome))
    for notice in outcome.notices:
        print(f"note  {notice}")
    if found.asynchronous is not None:
        print(f"note  {_asynchronous_words(found.asynchronous, found.best[0])}")
    if outcome.choice is not None:
        print(f"\nchoice  {choice_words(outcome, outcome.choice)}")


def choice_words(outcome: TuneOutcome, ranked: RankedCandidate) -> str:
    """Which candidate to train with, all its settings, and how long its step takes."""
    candidate, shape = ranked.candidate, ranked.candidate.shape
    settings = settings_of(candidate, outcome.settings)
    each = "" if shape.dp == 1 else " in each replica"
    said = [
        f"{candidate.name}{' (a program of no name)' if candidate.plan.program else ''}",
        f"pp {shape.pp}",
        f"dp {shape.dp}",
        f"tp {outcome.tp}",
        *([f"{candidate.num_ranks * outcome.tp} devices"] if outcome.tp > 1 else []),
        f"{shape.microbatches}{each}",
        f"{' '.join(str(len(layers)) for layers in candidate.cut)} layers",
        *(["recompute"] if candidate.recompute else []),
        *([bound(proved_mismatch(candidate.plan.schedule))] if candidate.is_asynchronous else []),
        *([f"embedding and head shared by {shape.pp} ranks"] if candidate.has_shared_ends else []),
        f"sharding {settings.sharding}",
        f"dispatch {settings.dispatch}",
    ]
    measured = outcome.measured.get(candidate)
    took = f"{ranked.prediction.step:.1f} ms a step predicted"
    if measured is not None:
        took += f", {measured.step:.1f} ms measured: the fastest of {len(outcome.measured)} that were run"
        took += (
            f"; {in_bytes(ranked.prediction.peak_bytes)} per rank predicted, "
            f"{in_bytes(max(measured.peak_bytes, default=0.0))} measured"
        )
    return f"{', '.join(said)}; {took}"


def _asynchronous_words(ranked: RankedCandidate, best: RankedCandidate) -> str:
    """By how much an asynchronous candidate that was not asked for is faster than the best one, and what it costs."""
    candidate, faster = ranked.candidate, best.prediction.step / ranked.prediction.step - 1
    return (
        f"{candidate} would be {faster:.1%} faster by prediction, with {_memory(ranked.prediction)} per "
        f"rank and {bound(proved_mismatch(candidate.plan.schedule))}; --schedule {candidate.plan.name} chooses it"
    )


def train_command(outcome: TuneOutcome, config: Path | None = None, schedule_file: str | None = None) -> str | None:
    """The command that trains with the choice; None if the model is only a file of costs, which can't be trained.

    Args:
        config: the file of settings that was tuned, if one was given.
        schedule_file: the file with its schedule; needed for one that no name says.
    """
    if outcome.choice is None or outcome.trained is None:
        return None
    candidate = outcome.choice.candidate
    shape = candidate.shape
    settings = outcome.settings
    words = ["penstock", "train", *([] if config is None else ["--config", str(config)]), *_model_words(settings)]
    words += ["--batch", str(outcome.space.batch)]
    words += ["--schedule", schedule_file or candidate.plan.name, "--pp", str(shape.pp)]
    if shape.dp > 1:
        words += ["--dp", str(shape.dp)]
    if not candidate.plan.towers:  # a file of towers says how many each has
        words += ["--microbatches", str(shape.num_microbatches)]
    for name, value in candidate.plan.options if schedule_file is None else ():
        if name not in SETTINGS:
            words += ["--option", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
            continue
        words += [f"--{SETTINGS[name]}", str(value)]
    if not candidate.plan.towers:
        words += ["--cut", ",".join(str(len(layers)) for layers in candidate.cut)]
    words += ["--recompute"] if candidate.recompute else []
    words += [] if settings.device == "cpu" else ["--device", settings.device]
    return shlex.join([*words, "--threads", str(settings.threads)])


def _model_words(settings: Settings) -> list[str]:
    """The options of `penstock train` that say which model learns from which data."""
    words = [] if settings.model == GPT else ["--model", settings.model]
    words += [] if is_path(settings.model) else ["--preset", settings.preset]
    return [*words, *([] if settings.data is None else ["--data", settings.data])]


def _print_table(outcome: TuneOutcome, title: str, rows: Sequence[RankedCandidate]) -> None:
    verified = any(ranked.candidate in outcome.measured for ranked in rows)
    speed = "samples/s" if all(_tokens(outcome, ranked) is None for ranked in rows) else "tokens/s"
    table = _titled(title)
    table.add_column("schedule", no_wrap=True)
    layers = "layers" if not any(ranked.candidate.plan.towers for ranked in rows) else "ranks/stages/microbatches"
    memory = "memory per rank" if all(ranked.prediction.has_weights for ranked in rows) else "activations"
    heads = ["pp", "dp", "microbatches", layers, "step ms", speed, "bubbles", memory]
    for head in [*heads, *(["measured ms", "off", "measured memory"] if verified else [])]:
        table.add_column(head, justify="right", no_wrap=True)
    for ranked in rows:
        table.add_row(*_cells(outcome, ranked, verified))
    Console(width=None if Console().is_terminal else 140, highlight=False, markup=False).print(table)


def _cells(outcome: TuneOutcome, ranked: RankedCandidate, verified: bool) -> list[str]:
    candidate, prediction = ranked.candidate, ranked.prediction
    shape = candidate.shape
    tokens = _tokens(outcome, ranked)
    cells = [
        _short_name(candidate),
        str(shape.pp),
        str(shape.dp),
        f"{shape.num_microbatches} of {shape.microbatch_size}",
        _cut(candidate),
        f"{prediction.step:.1f}",
        f"{ranked.samples_per_second:.4g}" if tokens is None else f"{tokens:,.0f}",
        f"{prediction.bubble_ratio:.1%}",
        _memory(prediction).removesuffix(OF_ACTIVATIONS),
    ]
    if verified:
        measured = outcome.measured.get(candidate)
        cells += ["", "", ""] if measured is None else [
            f"{measured.step:.1f}",
            f"{prediction.step / measured.step - 1:+.1%}",
            in_bytes(max(measured.peak_bytes, default=0.0)),
        ]  # fmt: skip
    return cells


def _titled(title: str) -> Table:
    return Table(title=title, title_justify="left", box=None, pad_edge=False)


OF_ACTIVATIONS = " of activations"


def _memory(prediction: Prediction) -> str:
    """What the fullest rank holds: bytes, or where costs do not say what weights take, activations in their unit."""
    if prediction.has_weights:
        return in_bytes(prediction.peak_bytes)
    return f"{max(memory.activations for memory in prediction.memory):.6g}{OF_ACTIVATIONS}"


def _short_name(candidate: TuneCandidate) -> str:
    """The schedule in a few words, so that a row is one line. The line of the choice has the whole name."""
    plan = candidate.plan
    words = [plan.name]
    if plan.program:
        words = ["program on", plan.name.removeprefix("shared ends, ").partition(",")[0]]
    for name, value in plan.options:
        if name == "num_stages":
            words.append(f"{value} stages")
        elif name == "warmup" and isinstance(value, tuple):
            words.append(f"warm-up {value[0]}..{value[-1]}")
        elif name == "rule":
            words.append(f"mismatch {proved_mismatch(plan.schedule)}")
        elif name != "window":
            words.append(f"{name} {value}")
    return " ".join([*words, *(["+recompute"] if candidate.recompute else [])])


def _cut(candidate: TuneCandidate) -> str:
    if towers := candidate.plan.towers:
        return " ".join(f"{name} {len(each.ranks)}/{each.stages}/{each.microbatches}" for name, each in towers)
    counts = [len(layers) for layers in candidate.cut]
    return " ".join(map(str, counts)) if len(counts) <= 8 else f"{min(counts)} to {max(counts)} in {len(counts)}"


def _tokens(outcome: TuneOutcome, ranked: RankedCandidate) -> float | None:
    """A second; None if samples have no tokens, or it is not known how many."""
    tokens = None if outcome.trained is None else outcome.trained.num_tokens
    return None if tokens is None else ranked.samples_per_second * tokens


def _summary(outcome: TuneOutcome) -> str:
    found = outcome.found
    said = [f"{found.num_tried} candidate{'s' * (found.num_tried != 1)}"]
    if found.num_too_large:
        said.append(f"{found.num_too_large} of them above the memory limit")
    if found.refused:
        reason, _ = found.refused.most_common(1)[0]
        said.append(f"{found.refused.total()} of them penstock train would refuse, like: {reason}")
    if (count := outcome.num_measured) or outcome.num_reused:
        measured = f"{count} profile{'s' * (count != 1)} measured" if count else "nothing measured"
        said.append(f"{measured}, {outcome.num_reused} measured before")
    return "; ".join(said) + ("; interrupted: the best so far" if outcome.interrupted else "")


def show_profile(profiles: Sequence[Profile], transfers: dict[int, MessageCosts]) -> None:
    """Prints what was measured, layer by layer, and what messages cost."""
    console = Console(width=None if Console().is_terminal else 140, highlight=False, markup=False)
    for profile in profiles:
        side = f", {profile.num_parallel} ranks at a time" if profile.num_parallel > 1 else ""
        again = ", recompute" if profile.recompute else ""
        table = _titled(f"{profile.model}: microbatches of {profile.microbatch_size}{side}{again}")
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
