"""`penstock convert`: a schedule from one format to another, by the files' endings.

penstock convert mine.txt mine.json                  penstock convert mine.json mine.csv
penstock convert mine.json mine.csv --dialect torch:compute_comms
penstock convert theirs.csv theirs.json --declare-order
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.app import app
from penstock.cli.failure import Misuse
from penstock.cli.options import Json
from penstock.cli.output import print_json
from penstock.formats import load, save
from penstock.formats.files import DIALECTS
from penstock.library import SCHEDULES


@app.command(short_help="Convert a schedule file to another format.")
def convert(
    source: Annotated[str, typer.Argument(metavar="IN", help="Schedule to read: .json, .txt or .csv (torch's).")],
    target: Annotated[str, typer.Argument(metavar="OUT", help="Schedule to write: .json, .txt or .csv (torch's).")],
    dialect: Annotated[
        str | None,
        typer.Option(
            "--dialect",
            metavar="|".join(DIALECTS),
            help="Messages in the .csv: those of the schedule (torch, the default), none, or all.",
        ),
    ] = None,
    declare_order: Annotated[
        bool,
        typer.Option(
            "--declare-order",
            help="Declare the order of microbatches that the rows show, where it is not the ascending one.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Convert a schedule between native JSON, the text grid and torch's CSV.

    JSON and text keep what the schedule says as it is, valid or not. A CSV is for torch to run, so only what is
    proved is written, and what torch's pipelining lacks is named.
    """
    if source in SCHEDULES:
        raise Misuse(
            f"{source} is a library schedule and no file; write it with penstock show {source} --ranks R "
            f"--microbatches M --out {target}"
        )
    written = Path(target).suffix == ".csv"
    if dialect is not None and not written and Path(source).suffix != ".csv":
        raise Misuse(f"--dialect {dialect} is for .csv files; neither {source} nor {target} is one, so leave it out")
    plan = load(source, dialect if Path(source).suffix == ".csv" else None, declare_order)
    save(plan, target, dialect if written else None)
    limit = plan.max_in_flight if written else None
    orders = written and bool(plan.microbatch_orders)
    if json:
        left_out = ["max_in_flight"] * (limit is not None) + ["microbatch_orders"] * orders
        print_json(
            {"source": source, "target": target, "name": plan.name, "num_ops": plan.num_ops, "left_out": left_out}
        )
    else:
        print(f"wrote {target}")
        if limit is not None:
            print(f"left out: at most {limit:g} activations in flight, which has no place in torch's CSV")
        if orders:
            print("left out: that microbatches run in the order of the rows; read the CSV with --declare-order")
