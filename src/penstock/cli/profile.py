"""`penstock profile`: what a model's layers and messages cost on this machine.

penstock profile --preset tiny --microbatch-size 2 --ranks 2 --out tiny-costs.json
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import tune as options
from penstock.cli.app import app
from penstock.cli.options import Json, counts, result_option
from penstock.cli.output import print_json
from penstock.formats.files import write_whole


@app.command(short_help="Measure a model's layers and messages here.")
def profile(
    model: options.Model = None,
    model_options: options.ModelOptions = None,
    data: options.Data = None,
    batch: options.Batch = None,
    preset: options.Preset = "tiny",
    depth: options.Depth = None,
    width: options.Width = None,
    heads: options.Heads = None,
    context: options.Context = None,
    dropout: options.Dropout = None,
    tied: options.Tied = None,
    tokenizer: options.Tokenizer = None,
    precision: options.Precision = "float32",
    optimizer: options.Optimizer = "AdamW",
    optimizer_options: options.OptimizerOptions = None,
    clip: options.Clip = 1.0,
    device: options.Device = "cpu",
    threads: options.Threads = 1,
    ranks: Annotated[
        int,
        typer.Option("--ranks", min=1, help="Number of ranks, which work side by side while layers are measured."),
    ] = 1,
    microbatch_size: Annotated[
        str,
        typer.Option(
            "--microbatch-size", metavar="N,N,...", help="Samples per microbatch: one size, or several as 1,2,4."
        ),
    ] = "1",
    recompute: Annotated[
        bool,
        typer.Option(
            "--recompute", help="Let forwards run again, so that blocks keep only their input, and measure that."
        ),
    ] = False,
    database: options.DatabaseFile = None,
    seconds: options.Seconds = 1.0,
    fresh: options.Fresh = False,
    out: Annotated[
        str | None, result_option("Where the result goes: what was measured, as JSON for penstock tune --costs.")
    ] = None,
    json: Json = False,
) -> None:
    """Measure F, B, I, W, the update and the memory of every layer, and messages. What the database has is reused."""
    from penstock.train.settings import Settings
    from penstock.tune import costs_file, report
    from penstock.tune.session import MeasuredSource, measure

    settings = Settings(
        **options.measured_model(model, model_options, data, batch),
        preset=preset, depth=depth, width=width, heads=heads, context=context, dropout=dropout, tied=tied,
        tokenizer=options.usual_tokenizer(model, tokenizer, data), microbatches=1, ranks=1, precision=precision,
        optimizer=optimizer, optimizer_options=options.json_object("--optimizer-options", optimizer_options),
        clip=clip, device=device, threads=threads,
    )  # fmt: skip
    sizes = counts("--microbatch-size", microbatch_size)
    source = MeasuredSource(options.database_path(database), seconds, fresh)
    meter = measure(settings, source, ranks, sizes, recompute, None if json else options.say_line)
    profiles = list(meter.profiles.values())
    if out is not None:
        write_whole(Path(out), costs_file.to_json(profiles, meter.transfers))
    if json:
        print_json(
            {
                "profiles": [each.to_json() for each in profiles],
                "transfers": {str(count): each.to_json() for count, each in meter.transfers.items()},
                "num_measured": meter.num_measured,
                "num_reused": meter.num_reused,
                "out": out,
                "notices": meter.notices,
            }
        )
        return
    report.show_profile(profiles, meter.transfers)
    print(f"\n{meter.num_measured} measured, {meter.num_reused} taken from the database")
    for notice in meter.notices:
        print(f"note  {notice}")
    if out is not None:
        print(f"wrote {out}")
