"""`penstock layout`: what a layout string of Megatron's gives, and a better balanced one.

penstock layout "Et*4|(t*4|)*14tmL" --ranks 4
penstock layout "Et*15|t*15|t*16|t*15L" --ranks 4 --microbatches 32 --times t=1,L=1.4
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from penstock.cli.app import app
from penstock.cli.failure import Misuse
from penstock.cli.options import Json
from penstock.cli.output import plural, print_json, table
from penstock.formats.megatron_layout import LETTERS, MegatronLayout
from penstock.tune.layout import MOST_TRIALS, LayerTimes, SimulatedLayout, better_layout, judge_layout

ASSUMED = {"E": 0.0, "t": 1.0, "m": 1.0, "L": 1.0}
"""The times of layers where none are given: a head takes about as long as a block, an embedding next to nothing."""


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
            help="ms of a forward of each kind of layer (E, t, m, L), and how many times as long its backward is "
            "(backward). [1 for t, m and L, 0 for E; backward=2]",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show which layers each rank has, the simulated step, and a layout that makes it shorter."""
    given = MegatronLayout.parse(text)
    given.check_ranks(ranks)
    typed = dict(ASSUMED) if times is None else _times(times)
    backward = typed.pop("backward", 2.0)
    layers = LayerTimes(typed, backward)
    count = 4 * ranks if microbatches is None else microbatches
    judged = judge_layout(given, ranks, count, layers)
    assumed = _assumed(given, typed, times)
    if not json:
        if assumed is not None:
            print(f"assumed   {assumed}\n", flush=True)
        print(f"looking for a better one among at most {MOST_TRIALS:,} layouts ...", file=sys.stderr, flush=True)
    _show(given, ranks, judged, better_layout(given, ranks, count, layers), assumed, json)


def _assumed(given: MegatronLayout, typed: Mapping[str, float], times: str | None) -> str | None:
    """The times that were not typed for layers of the layout, and the option that gives them; None if all were."""
    there = [letter for letter in LETTERS if any(letter in stage for stage in given.stages)]
    lacking = [letter for letter in there if times is None or letter not in typed]
    if not lacking:
        return None
    said = ", ".join(f"{letter} = {typed.get(letter, 0.0):g}" for letter in lacking)
    shown = ",".join(f"{letter}=MS" for letter in there)
    return f"{said} ms for a forward of each such layer; give --times {shown}, measured where you train"


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
    given: MegatronLayout,
    ranks: int,
    judged: SimulatedLayout,
    better: SimulatedLayout,
    assumed: str | None,
    as_json: bool,
) -> None:
    if as_json:
        found: dict[str, Any] = {"layout": str(given), "stages": given.stages, "num_ranks": ranks, "assumed": assumed}
        print_json(found | {"judged": _as_json(judged), "better": _as_json(better)})
        return
    chunks = len(given.stages) // ranks
    print(f"{given}\n{plural(len(given.stages), 'stage')} over {plural(ranks, 'rank')}\n")
    for number, facts in enumerate((judged,) if better.layout == given else (judged, better)):
        if number:
            print(f"\nbetter    {facts.layout}\n")
        rows = [
            [
                f"rank {rank}",
                *(facts.layout.stages[chunk * ranks + rank] or "-" for chunk in range(chunks)),
                f"{facts.step.busy[rank]:.6g}",
                f"{facts.step.peak_activations[rank]:.6g}",
            ]
            for rank in range(ranks)
        ]
        print(table(["", *(f"chunk {chunk}" for chunk in range(chunks)), "busy", "activations"], rows))
        print(f"\nstep      {facts.step.makespan:.6g}, bubble ratio {facts.step.bubble_ratio:.1%} (simulated)")
    gain = judged.step.makespan / better.step.makespan
    print(
        f"gain      {gain:.3f} times as fast, with no rank fuller than {max(judged.step.peak_activations):.6g}"
        if gain > 1
        else f"better    nothing found: none of the layouts tried, {MOST_TRIALS:,} at most, has a shorter step"
    )


def _as_json(judged: SimulatedLayout) -> dict[str, Any]:
    shown = ("makespan", "bubble_ratio", "busy", "peak_activations")
    return {"layout": str(judged.layout), **{name: getattr(judged.step, name) for name in shown}}
