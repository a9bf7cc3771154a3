"""`penstock compare`: schedules side by side, throughput, memory and loss.

penstock compare 1f1b amdp pipedream-2bw --ranks 4 --microbatches 8 --batch 16 --steps 64
penstock compare --steps 0 --costs gpt2-14b --ranks 8 --microbatches 32
penstock compare zb-h1 zb-v plan.json --steps 0 --costs gpt2-7b --link 1:2=20 --memory-limit 35GiB
"""

from __future__ import annotations

import math
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import costs as costs_options
from penstock.cli import tune as options
from penstock.cli.app import app
from penstock.cli.failure import Misuse
from penstock.cli.options import Json, ScheduleOption, bytes_of, links_of
from penstock.cli.output import print_json
from penstock.cost.presets import PRESETS
from penstock.library.options import read_options
from penstock.train.compare.contenders import STEPS, USUAL, contenders
from penstock.train.settings import Settings

if TYPE_CHECKING:
    from penstock.schedule import Schedule
    from penstock.train.compare.result import Comparison
    from penstock.train.compare.run import CostSource

DEFAULTS = Settings()


@app.command(short_help="Compare schedules: throughput, memory, loss.")
def compare(
    schedules: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME|FILE]...", help=f"Library schedules, or files. [{' '.join(USUAL)}]"),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", help=f"Number of ranks, of the pipeline. [{DEFAULTS.ranks}, or those of a file]"),
    ] = None,
    microbatches: Annotated[
        int | None,
        typer.Option(
            "--microbatches",
            help=f"Number of microbatches, per step. [{DEFAULTS.microbatches}; with amdp 4 for each rank]",
        ),
    ] = None,
    option: ScheduleOption = None,
    batch: options.Batch = None,
    steps: Annotated[int, typer.Option("--steps", min=0, help="How many steps to run; 0 simulates only.")] = STEPS,
    window: Annotated[
        int | None, typer.Option("--window", help="Microbatches per update, of an asynchronous schedule.")
    ] = None,
    rule: Annotated[
        str | None, typer.Option("--rule", help="Which weights ops read, in an asynchronous schedule: such as xpipe.")
    ] = None,
    max_mismatch: Annotated[
        int | None,
        typer.Option(
            "--max-mismatch",
            help="Most updates between a microbatch's forward and its backward. [amdp: 0; with --rule 1]",
        ),
    ] = None,
    drain_every: Annotated[
        int | None,
        typer.Option(
            "--drain-every", help="Steps after which the pipeline drains, of an asynchronous schedule. [about 8]"
        ),
    ] = None,
    sharding: Annotated[
        str | None,
        typer.Option("--sharding", help="What the holders of a stage divide: none, copies, zero1, fsdp. [copies]"),
    ] = None,
    model: options.Model = None,
    model_options: options.ModelOptions = None,
    preset: Annotated[
        str, typer.Option("--preset", help="Preset that says the sizes of the model.")
    ] = DEFAULTS.preset,
    depth: options.Depth = None,
    width: options.Width = None,
    heads: options.Heads = None,
    context: options.Context = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            help=f"{options.LEARNT_FROM}. [Python's own library]",
        ),
    ] = None,
    lr: Annotated[float | None, typer.Option("--lr", help="Peak learning rate.")] = None,
    lr_warmup: Annotated[
        int | None, typer.Option("--lr-warmup", help="Steps in which the learning rate rises to its peak.")
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            "--optimizer", help="A class of torch.optim, the same for all. [the usual one of each schedule]"
        ),
    ] = None,
    optimizer_options: options.OptimizerOptions = None,
    clip: options.Clip = DEFAULTS.clip,
    seed: Annotated[
        int, typer.Option("--seed", help="Seed of random numbers: weights and data order.")
    ] = DEFAULTS.seed,
    threads: Annotated[
        int | None, typer.Option("--threads", help="Threads per rank. [its share of the cores]")
    ] = None,
    processes: Annotated[
        bool,
        typer.Option(
            "--processes", help="Run one process per rank. Without it all ranks run in this process, in turn."
        ),
    ] = False,
    costs: Annotated[
        str | None,
        typer.Option(
            "--costs",
            metavar="NAME|FILE",
            help=f"All costs, of a preset or a file: {', '.join(PRESETS)}, with options as in gpt2-7b:device=a100, "
            "or a file. [what the model's layers take here]",
        ),
    ] = None,
    link: costs_options.Link = None,
    default_delay: costs_options.DefaultDelay = 0.0,
    dispatch: Annotated[
        str,
        typer.Option(
            "--dispatch", help="How ranks choose their ops: frozen, hinted, dynamic or auto. Of what is simulated."
        ),
    ] = "frozen",
    memory_limit: costs_options.MemoryLimit = None,
    database: options.DatabaseFile = None,
    seconds: options.Seconds = 1.0,
    fresh: options.Fresh = False,
    out: Annotated[
        str | None,
        typer.Option(
            "--out", metavar="DIR", help="Where the result goes: the runs, and a page with charts, into a folder."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Train the same model on the same data by several schedules, and simulate each over the same costs."""
    if "RANK" in os.environ:
        raise Misuse("penstock compare starts its ranks itself; run it without torchrun")
    limit = bytes_of("--memory-limit", memory_limit)
    asked = contenders(
        schedules or (),
        {
            **options.own_model(model, model_options, data, batch, seed),
            "ranks": ranks, "microbatches": microbatches, "steps": steps or STEPS, "window": window,
            "rule": rule, "max_mismatch": max_mismatch, "drain_every": drain_every, "sharding": sharding,
            "preset": preset, "depth": depth, "width": width, "heads": heads, "context": context,
            "lr": lr, "lr_warmup": lr_warmup, "optimizer": optimizer,
            "clip": clip, "seed": seed, "threads": threads,
            "schedule_options": read_options(option or ()),
            "optimizer_options": options.json_object("--optimizer-options", optimizer_options) or None,
            "in_process": not processes, "sample": 0, "evaluate_every": 0, "save_every": 0,
        },
    )  # fmt: skip

    def source() -> CostSource:
        if costs is not None:
            return _given(costs)
        return _measured(asked[0], options.database_path(database), seconds, fresh, json)

    from penstock.train.compare.result import SimulatedRun
    from penstock.train.compare.run import compare as run

    found, files = run(
        asked,
        steps > 0,
        source,
        None if out is None else Path(out),
        _silent if json else _say,
        SimulatedRun(links_of(link or [], default_delay), dispatch),
        limit,
    )
    if json:
        print_json({**found.to_json(), "files": files})
    else:
        _show(found, files)
        if found.steps not in (0, steps):
            print(f"note  {steps} steps were asked for; {found.steps} are whole passes of all")
    if found.interrupted:
        raise typer.Exit(128 + signal.SIGINT)


def _given(costs: str) -> CostSource:
    """Costs by a preset's name or from a file."""
    from penstock.cost import CostError, Costs
    from penstock.formats.costs import are_of_a_model, read_costs
    from penstock.train.compare.run import CostSource

    stages: dict[int, str] = {}

    def costing(schedule: Schedule) -> Costs:
        stages.setdefault(schedule.num_stages, schedule.name)
        if len(stages) > 1 and not are_of_a_model(costs):
            (few, one), (many, other) = sorted(stages.items())
            raise CostError(
                f"{costs} has times per stage, and {one} has {few} stages where {other} has {many}: their models "
                "would be of unequal size. Give a preset or a profile, whose layers are cut for each "
                "schedule, or compare schedules with as many stages"
            )
        return read_costs(costs, schedule.num_stages)

    return CostSource(f"the costs of {costs}", None, costing)


def _measured(settings: Settings, database: Path, seconds: float, fresh: bool, quiet: bool) -> CostSource:
    """What the model's layers take here, one rank at a time."""
    from penstock.train.compare.run import CostSource
    from penstock.train.tasks.layers import stage_layers
    from penstock.tune.predict import costs_of
    from penstock.tune.session import MeasuredSource, measure

    size = math.ceil(settings.batch / settings.microbatches)
    meter = measure(
        settings, MeasuredSource(database, seconds, fresh), 1, [size], settings.recompute, None if quiet else _say
    )
    (profile,) = meter.profiles.values()
    model = meter.model
    return CostSource(
        f"what the layers of {model.name} take here (microbatches of {size})",
        model.num_tokens,
        lambda schedule: costs_of(schedule, stage_layers(model.costs, schedule), profile),
    )


def _show(found: Comparison, files: dict[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for place, name in enumerate(found.head()):
        table.add_column(name, justify="left" if place == 0 else "right")
    for row in found.rows:
        table.add_row(*found.cells(row))
    Console(width=None if Console().is_terminal else 140, highlight=False, markup=False).print(table)
    print()
    for line in found.words():
        print(line)
    for notice in found.notices:
        print(f"note  {notice}")
    for path in files.values():
        print(f"wrote {path}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _silent(line: str) -> None:
    """Says nothing: with --json stdout and stderr are for the object alone."""
