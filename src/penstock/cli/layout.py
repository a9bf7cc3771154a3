"""`penstock layout`: what a layout string of Megatron's gives, and a better balanced one.

penstock layout "Et*4|(t*4|)*14tmL" --ranks 4
penstock layout "Et*15|t*15|t*16|t*15L" --ranks 4 --microbatches 32 --times t=1,L=1.4
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from penstock.cli.app import app
from penstock.cli.failure import Misuse
from penstock.cli.options import Json
from penstock.cli.output import plural, print_json, table
from penstock.formats.megatron_layout import MegatronLayout
from penstock.tune.layout import MOST_TRIALS, LayerTimes, SimulatedLayout, better_layout, judge_layout


@app.command(short_help="Judge a Megatron layout string and find a better one.")
def layout(
    text: Annotated[
        str,
        typer.Argument(metavar="LAYOUT", help="The layout, as Megatron's --pipeline-model-parallel-layout takes it."),
    ],
    ranks: Annotated[
        int,
        typer.Option("--ranks", min=1, help="Number of ranks, of the pipeline. Stage s lies on rank s mod RANKS."),
    ],
    microbatches: Annotated[
        int | None, typer.Option("--microbatches", min=1, help="Number of microbatches, per step. [four per rank]")
    ] = None,
    times: Annotated[
        str | None,
        typer.Option(
            "--times",
            metavar="t=MS,...",
            help="ms of a forward of each kind of layer (E, t, m, L). With these times the step is simulated.",
        ),
    ] = None,
    backward: Annotated[
        float | None, typer.Option("--backward", min=0.0, help="A backward's time, divided by that of a forward. [2]")
    ] = None,
    json: Json = False,
) -> None:
    """Show which layers each rank has; with layer times, the simulated step and a layout that makes it shorter."""
    given = MegatronLayout.parse(text)
    given.check_ranks(ranks)
    if times is None:
        for name, value in (("--microbatches", microbatches), ("--backward", backward)):
            if value is not None:
                raise Misuse(f"{name} is for a simulated step; give --times too, like --times t=1,L=1.4")
        _show(given, ranks, None, None, json)
        return
    layers = LayerTimes(_times(times), 2.0 if backward is None else backward)
    count = 4 * ranks if microbatches is None else microbatches
    judged = judge_layout(given, ranks, count, layers)
    if not json:
        print(f"looking for a better one among at most {MOST_TRIALS:,} layouts ...", file=sys.stderr, flush=True)
    _show(given, ranks, judged, better_layout(given, ranks, count, layers), json)


def _times(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in text.split(","):
        letter, _, value = part.partition("=")
        try:
            found[letter.strip()] = float(value)
        except ValueError:
            raise Misuse(f"--times {text}: {part!r} is not LETTER=MS; give it like t=1,E=0.2,L=1.4") from None
    return found


def _show(
    given: MegatronLayout, ranks: int, judged: SimulatedLayout | None, better: SimulatedLayout | None, as_json: bool
) -> None:
    if as_json:
        found: dict[str, Any] = {"layout": str(given), "stages": given.stages, "num_ranks": ranks}
        if judged is not None and better is not None:
            found |= {"judged": _as_json(judged), "better": _as_json(better)}
        print_json(found)
        return
    chunks = len(given.stages) // ranks
    print(f"{given}\n{plural(len(given.stages), 'stage')} over {plural(ranks, 'rank')}\n")
    shown = given if better is None else better.layout
    for number, each in enumerate((given,) if shown == given else (given, shown)):
        facts = (judged, better)[number] if judged is not None else None
        if number:
            print(f"\nbetter    {each}\n")
        head = ["", *(f"chunk {chunk}" for chunk in range(chunks)), *(["busy", "activations"] if facts else [])]
        rows = []
        for rank in range(ranks):
            row = [f"rank {rank}", *(each.stages[chunk * ranks + rank] or "-" for chunk in range(chunks))]
            rows.append([*row, *([f"{facts.busy[rank]:.6g}", f"{facts.peak[rank]:.6g}"] if facts else [])])
        print(table(head, rows))
        if facts is not None:
            print(f"\nstep      {facts.makespan:.6g}, bubble ratio {facts.bubble:.1%} (simulated)")
    if judged is not None and better is not None:
        gain = judged.makespan / better.makespan
        print(
            f"gain      {gain:.3f} times as fast, with no rank fuller than {max(judged.peak):.6g}"
            if gain > 1
            else f"better    nothing found: none of the layouts tried, {MOST_TRIALS:,} at most, has a shorter step"
        )


def _as_json(judged: SimulatedLayout) -> dict[str, Any]:
    return {
        "layout": str(judged.layout),
        "makespan": judged.makespan,
        "bubble_ratio": judged.bubble,
        "busy": judged.busy,
        "peak_activations": judged.peak,
    }
