"""`penstock analyze`: what slowed a recorded run, what each cause costs, and what would help.

penstock analyze trace.parquet            penstock analyze profiles/ --framework torchtitan --out page.html --json
penstock analyze profiles/ --try zb --link 2:3=120ms --channels gloo
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import costs as costs_options
from penstock.cli.app import app
from penstock.cli.failure import Misuse
from penstock.cli.options import Json, page_option, taken
from penstock.cli.output import print_json
from penstock.cli.source import is_file
from penstock.formats import load
from penstock.formats.files import require_place, write_whole
from penstock.schedule import Schedule
from penstock.train.options import counts, setting, with_options

if TYPE_CHECKING:
    from penstock.analyze import RunAnalysis, WhatIf
    from penstock.formats.traces.run_trace import RunTrace


TRACE, CHANGES = "The trace", "What is tried"
"""Groups of settings."""


@dataclass(frozen=True)
class TraceSettings:
    """How a trace is read, and what is said of its layers."""

    framework: str | None = setting(
        None, "Whose names ops have: torch, torchtitan, ranges, stacks, megatron, deepspeed, penstock.", TRACE
    )
    pattern: tuple[str, ...] | None = setting(
        None,
        "How op names read, with groups op, stage, microbatch, rank, ...",
        TRACE,
        metavar="[OP=]REGEX",
        is_repeated=True,
    )
    column: tuple[str, ...] | None = setting(
        None, "A table's own name of a column: microbatch=mb.", TRACE, metavar="OURS=THEIRS", is_repeated=True
    )
    unit: str | None = setting(None, "Unit of the times in a table: s, ms, us or ns. [ms; of the study s]", TRACE)
    ranks: int | None = setting(None, "Number of ranks, of one pipeline, where names do not say the stage.", TRACE)
    microbatches: int | None = setting(None, "Number of microbatches, where profiles do not say it.", TRACE)
    only_steps: str | None = setting(None, "Analyse only these steps, such as 12,20-23.", TRACE, metavar="LIST")
    drop_incomplete: bool = setting(False, "Leave out steps in which ops are missing.", TRACE)
    layers: str | None = setting(
        None, "Layers of each stage, as 8,8,8,6, to suggest a better cut.", TRACE, metavar="LIST"
    )

    @property
    def num_layers(self) -> list[int]:
        """Layers of each stage; none where they are not given."""
        return [] if self.layers is None else _whole_numbers(self.layers, "--layers")

    def read(self, traces: list[str]) -> RunTrace:
        """Reads the trace in these files. Raises Misuse, TraceError."""
        from penstock.formats.traces import read_trace  # here, as only this verb needs it

        for name in ("ranks", "microbatches"):
            if (count := getattr(self, name)) is not None and count < 1:
                raise Misuse(f"--{name} {count}: give at least 1")
        return read_trace(
            traces,
            patterns=self.pattern or (),
            preset=self.framework,
            columns=_columns(self.column or ()),
            unit=self.unit,
            num_ranks=self.ranks,
            num_microbatches=self.microbatches,
            steps=None if self.only_steps is None else _whole_numbers(self.only_steps, "--only-steps"),
        )


@dataclass(frozen=True)
class TriedSettings:
    """What is tried in place of what ran."""

    tries: tuple[str, ...] | None = setting(
        None,
        "Predict a step of this schedule; may be repeated.",
        CHANGES,
        flags=("--try",),
        metavar="NAME|FILE",
        is_repeated=True,
    )
    link: tuple[str, ...] | None = setting(
        None, costs_options.LINK, CHANGES, metavar="A:B=CONDITION", is_repeated=True
    )
    channels: str | None = setting(
        None, "What carries messages: buffered, gloo, nccl, nccl-pair or nccl-edge.", CHANGES
    )
    cut: str | None = setting(None, "How many layers each stage has, to predict.", CHANGES, metavar="LIST")

    @property
    def is_asked(self) -> bool:
        return any((self.tries, self.link, self.channels, self.cut))

    def predictions(self, found: RunAnalysis, num_layers: list[int]) -> list[WhatIf]:
        """The steps of the schedules to try, or of the one that ran; none where nothing is asked."""
        from penstock.analyze import predict

        schedules: list[Schedule | str | None] = [load(each) if is_file(each) else each for each in self.tries or ()]
        return [
            predict(
                found,
                each,
                layers=num_layers,
                links=costs_options.read_links([*self.link], None) if self.link else None,
                channels=self.channels or "buffered",
                cut=counts("--cut", self.cut) if self.cut else (),
            )
            for each in (schedules or [None] if self.is_asked else ())
        ]


@app.command(short_help="Find out what slowed a recorded run, and what would help.")
@with_options(TraceSettings, TriedSettings)
def analyze(
    traces: Annotated[
        list[str],
        typer.Argument(metavar="TRACE...", help="What was recorded: a file, a folder, or the profiles of all ranks."),
    ],
    out: Annotated[
        str | None,
        page_option("Where the result goes: the page, .html. [TRACE.analysis.html in this folder]", "the analysis"),
    ] = None,
    json: Json = False,
    **options: Any,
) -> None:
    """Replay a run of torch, Megatron, TorchTitan, DeepSpeed or Penstock, and say what slowed it, on a page too.

    With --try, --link, --channels or --cut: say how long a step would take then, and no more.
    """
    # Imported here, as only this verb needs them.
    from penstock.analyze import analyze_trace
    from penstock.analyze.page import headline, more, prediction_table, to_page

    settings, changes = taken(TraceSettings, options), taken(TriedSettings, options)
    trace, num_layers = settings.read(traces), settings.num_layers
    target = None if (json or changes.is_asked) and out is None else Path(out or f"{trace.name}.analysis.html")
    if target is not None:
        require_place(target)
    found = analyze_trace(trace, layers=num_layers, drop_incomplete=settings.drop_incomplete)
    tried = changes.predictions(found, num_layers)
    if target is not None:
        write_whole(target, to_page(found))
    if json:
        whole = {**found.to_json(), "headline": headline(found), "tried": [each.to_json() for each in tried]}
        print_json({**whole, "out": None if target is None else str(target)})
        return
    print(prediction_table(found, tried) if tried else " ".join([headline(found), *more(found)]))
    for note in found.notes:
        print(f"note: {note}")
    if target is not None:
        print(f"wrote {target}")


MOST = 1_000_000
"""Numbers of a range."""


def _columns(given: list[str] | tuple[str, ...]) -> dict[str, str]:
    found = {}
    for each in given:
        ours, equals, theirs = each.partition("=")
        if not (ours and equals and theirs):
            raise Misuse(f"--column {each}: write OURS=THEIRS, like --column microbatch=mb")
        found[ours] = theirs
    return found


def _whole_numbers(text: str, option: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise Misuse(f"{option} {text}: give whole numbers, like 12,20-23")
        numbers = range(int(first), int(last or first) + 1)
        if not 0 < len(numbers) <= MOST:
            raise Misuse(f"{option} {part}: give ranges that rise, of at most {MOST:,} numbers")
        found += numbers
    return found
