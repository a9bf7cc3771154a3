"""`penstock tune`: the fastest way to train a model on the ranks there are, by measurement and simulation.

penstock tune --preset tiny --batch 16                       measures here, and remembers
penstock tune --preset tiny --ranks 2 --profile-only --out tiny-costs.json      measures alone
penstock tune --model clip --ranks 6                         lays the towers of a CLIP over the ranks
penstock tune --costs gpt2-7b:device=a100 --ranks 16         for devices that are not here
"""

from __future__ import annotations

import hashlib
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.app import app
from penstock.cli.costs import CostsSource, MemoryLimit
from penstock.cli.failure import Misuse
from penstock.cli.options import Json, bytes_of, result_option, taken
from penstock.cli.output import print_json, show_progress
from penstock.formats.files import write_whole
from penstock.train.options import with_options
from penstock.tune.settings import TuneSettings

if TYPE_CHECKING:
    from penstock.tune.search import SearchFound, TuneCandidate


OF_SEARCH = {
    **{name: "--" + name.replace("_", "-") for name in ("costs", "memory_limit", "pp", "dp", "shared_ends", "top")},
    **{"schedules": "--schedule", "programs": "--no-programs", "verify": "--verify"},
}
"""Settings that --profile-only does not read, with their options."""


@app.command(short_help="Find the fastest way to train a model.")
@with_options(TuneSettings)
def tune(
    costs: CostsSource = None,
    memory_limit: MemoryLimit = None,
    out: Annotated[
        str | None,
        result_option(
            "Where the result goes: the schedule of the choice, .json or .txt. One without a name goes to "
            "runs/ without it. With --profile-only the measurements, .json, for --costs.",
            "a schedule is written as .json or .txt, measurements as .json",
            ".json",
            ".txt",
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A TOML file of settings: depth = 8. Options beside it win.")
    ] = None,
    json: Json = False,
    **given: Any,
) -> None:
    """Measure a model's layers and messages, simulate every way to train it, and rank them by throughput.

    Measured are F, B, I, W, the update and the memory of every layer. What was measured before is used again.
    """
    limit = bytes_of("--memory-limit", memory_limit)
    settings = replace(taken(TuneSettings, given), config=config, costs=costs, memory_limit=limit)
    if settings.profile_only:
        _profile(settings, out, json)
        return
    from penstock.tune import report, session

    outcome = session.tune(settings, _teller(json), None if json else _show_progress)
    choice = outcome.choice
    if out is None and choice is not None and choice.candidate.plan.needs_file and outcome.trained is not None:
        out = _place_of(choice.candidate)
    if out is not None and choice is not None:
        from penstock.formats import save

        save(choice.candidate.plan.schedule, out)
    command = report.train_command(outcome, settings.config, out)
    if json:
        print_json({**report.as_json(outcome), "out": out, "train": command})
    else:
        report.show(outcome, settings.top)
        if out is not None:
            print(f"wrote {out}")
        if command is not None:
            print(command)
    if outcome.interrupted:
        raise typer.Exit(128 + signal.SIGINT)


def _profile(settings: TuneSettings, out: str | None, json: bool) -> None:
    """Measures layers and messages, and shows or writes them."""
    import msgspec

    from penstock.formats.profile import profile_to_json
    from penstock.tune import report
    from penstock.tune.session import measure

    default = TuneSettings()
    if extra := next((name for name in OF_SEARCH if getattr(settings, name) != getattr(default, name)), None):
        raise Misuse(f"--profile-only measures the layers here, and no more; leave out {OF_SEARCH[extra]}")
    meter = measure(settings, _teller(json))
    profiles = list(meter.profiles.values())
    if out is not None:
        write_whole(Path(out), profile_to_json(profiles, meter.transfers))
    if json:
        print_json(
            {
                "profiles": msgspec.to_builtins(profiles),
                "transfers": {str(count): msgspec.to_builtins(each) for count, each in meter.transfers.items()},
                "num_measured": meter.num_measured,
                "num_reused": meter.num_reused,
                "out": out,
                "notices": meter.notices,
            }
        )
        return
    report.show_profile(profiles, meter.transfers)
    print(f"\n{meter.num_measured} measured, {meter.num_reused} measured before")
    for notice in meter.notices:
        print(f"note  {notice}")
    if out is not None:
        print(f"wrote {out}")


def _place_of(candidate: TuneCandidate) -> str:
    """Where a schedule without a name goes if no --out was given, so that the printed command can name it."""
    folder = Path("runs")
    folder.mkdir(exist_ok=True)
    digest = hashlib.sha256(str(candidate.plan.schedule).encode()).hexdigest()[:8]
    return str(folder / f"program-{candidate.shape.pp}x{candidate.shape.num_microbatches}-{digest}.json")


def _teller(json: bool) -> Callable[[str], None] | None:
    """What writes a line on the work to stderr, as that is now; None where only JSON is wanted."""
    return None if json else partial(print, file=sys.stderr, flush=True)


def _show_progress(found: SearchFound) -> None:
    """Shows on a terminal how far the search is."""
    best = f", best {found.best[0].prediction.step:.1f} ms a step" if found.best else ""
    show_progress(f"simulating: {found.num_tried} candidates{best}")
