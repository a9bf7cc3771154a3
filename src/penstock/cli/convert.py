"""`penstock convert`: a schedule from one format to another, by the files' endings.

penstock convert mine.txt mine.json
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


@app.command(short_help="Convert a schedule file to another format.")
def convert(
    source: Annotated[str, typer.Argument(metavar="IN", help="Schedule to read: .json or .txt.")],
    target: Annotated[str, typer.Argument(metavar="OUT", help="Schedule to write: .json or .txt.")],
    json: Json = False,
) -> None:
    """Convert a schedule between native JSON and the text grid. What it says is kept as it is, valid or not."""
    for path in (source, target):
        if Path(path).suffix == ".csv":
            raise Misuse(f"{path}: torch's CSV schedules are not supported yet; use .json or .txt")
    plan = load(source)
    save(plan, target)
    if json:
        print_json({"source": source, "target": target, "name": plan.name, "num_ops": plan.num_ops})
    else:
        print(f"wrote {target}")
