"""`penstock split`: how a model of one's own is cut into stages, before anything runs.

penstock split net.py:Net --stages 4 --data net.py:make_data
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.app import app
from penstock.cli.failure import Misuse
from penstock.cli.options import Json
from penstock.cli.output import print_json
from penstock.train.options import options_of
from penstock.train.own_file import is_own
from penstock.train.settings import Settings

if TYPE_CHECKING:
    from penstock.runtime import Split

DEFAULTS = Settings()


@app.command(short_help="Show how your own model is cut into stages.")
def split(
    model: Annotated[str, typer.Argument(metavar="FILE.py:NAME", help="A class, function or module in a file.")],
    stages: Annotated[
        int | None,
        typer.Option("--stages", min=1, help="Number of stages, of about equal cost. [every layer is a stage]"),
    ] = None,
    model_options: Annotated[
        str | None, typer.Option("--model-options", metavar="JSON", help="Arguments of your own model, as JSON.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            help="What the model learns from: text (a file, folder, .jsonl or .bin/.idx), or your own, "
            "data.py:make_data. Its first microbatch gives operations and messages.",
        ),
    ] = None,
    microbatches: Annotated[
        int, typer.Option("--microbatches", min=1, help="Number of microbatches, per step.")
    ] = DEFAULTS.microbatches,
    json: Json = False,
) -> None:
    """Show which layers each stage has, their parameters and costs, and what stages pass on."""
    if not is_own(model):
        raise Misuse(f"{model}: penstock split is for a model of your own; give FILE.py:NAME")
    given = options_of(Settings)["model_options"].read(model_options or "{}")
    found = _found(model, given, data, microbatches, stages)
    sizes = [len(paths) for paths in found.layers]
    words = ["penstock", "train", "--model", model]
    words += ["--model-options", model_options] if model_options else []
    words += ["--data", data or ""]
    words += ["--ranks", str(len(found)), "--microbatches", str(microbatches), "--cut", ",".join(map(str, sizes))]
    if json:
        sent: Sequence[int | None] = found.sent or [None] * len(found)
        rows = zip(found.layers, found.num_parameters, found.shares, sent, strict=True)
        print_json(
            {
                "stages": [
                    {"layers": paths, "parameters": held, "cost": share, "bytes": passed}
                    for paths, held, share, passed in rows
                ],
                "costs": found.costs,
                "costs_are": "parameters" if found.sent is None else "operations",
                "kept_whole": found.kept_whole,
                "train": shlex.join(words) if data else None,
            }
        )
        return
    print(found)
    if data:
        print(f"\n{shlex.join(words)}")


def _found(model: str, given: dict[str, Any], data: str | None, microbatches: int, stages: int | None) -> Split:
    """The cut of a model of the user's own, tried on its data where these are given."""
    from penstock.library import build
    from penstock.runtime import PartitionError
    from penstock.runtime import split as cut
    from penstock.train.tasks.own import OwnTask, built
    from penstock.train.tasks.own_data import own_batch

    if data is None:
        try:
            return cut(built(model, given, DEFAULTS.seed), stages)
        except PartitionError as error:
            if "Give an example" not in str(error):
                raise
            raise PartitionError(
                f"{error}. Here that is --data FILE.py:NAME, whose first microbatch is the example"
            ) from None
    path = os.path.abspath(data) if is_own(data) or os.path.exists(data) else data
    size = (own_batch(path, DEFAULTS.seed, 1) if is_own(data) else None) or DEFAULTS.batch
    settings = Settings(
        model=os.path.abspath(model), model_options=given, data=path, batch=size, microbatches=microbatches, ranks=1
    )
    tried = OwnTask(settings, build("gpipe", 1, microbatches)).tried()
    return cut(tried.model, stages, example=tried.inputs)
