"""`penstock bench`: what our parts cost beside their peers, measured in alternation in one run.

penstock bench split --out split.json          penstock bench runtime --schedule zb-v --gpt tiny
"""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.app import app
from penstock.cli.failure import Misuse
from penstock.cli.options import Json, result_option
from penstock.cli.output import print_json
from penstock.formats.files import write_whole

bench = typer.Typer(
    help="Measure Penstock, in part beside torch's own code.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")

Raw = Annotated[str | None, result_option("Where the result goes: every single number, as JSON.")]


@bench.callback()
def root() -> None:
    """Measure Penstock, in part beside torch's own code."""


@bench.command(short_help="Compare the cost of a split backward with torch's.")
def split(
    context: typer.Context,
    width: Annotated[
        list[int] | None, typer.Option("--width", help="Width of the blocks; may be repeated. [8, 128, 512]")
    ] = None,
    depth: Annotated[
        list[int] | None,
        typer.Option("--depth", help="Number of blocks, in the stage; may be repeated. [1, 4, 16]"),
    ] = None,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="How many times each is timed, in turn with the others.")
    ] = 15,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Samples per step, which is here one backward.")] = 2,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens per sample.")] = 64,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Compile the stage with torch.compile, in both variants.")
    ] = False,
    out: Raw = None,
    json: Json = False,
) -> None:
    """Time a split backward, I and W, beside the plain one, in Penstock and in torch.distributed.pipelining."""
    import torch

    from penstock.bench import split as measured
    from penstock.bench.record import machine

    torch.set_num_threads(1)
    rows = measured.run(width or (8, 128, 512), depth or (1, 4, 16), repeats, batch, tokens, compiled)
    _give(context, {"machine": machine(), "rows": rows}, measured.table(rows), out, json)


@bench.command(short_help="Compare steps with those of torch.distributed.pipelining.")
def runtime(
    context: typer.Context,
    gpt: Annotated[
        list[str] | None, typer.Option("--gpt", help="Which GPT is run: tiny or small; may be repeated. [both]")
    ] = None,
    schedule: Annotated[
        list[str] | None,
        typer.Option(
            "--schedule", help="Library schedule by name: 1f1b, interleaved-1f1b or zb-v; may be repeated. [all]"
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            min=1,
            help="How many steps to run, of each side, before it is the other's turn. [10 of tiny, 2 of small]",
        ),
    ] = None,
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, help="Number of rounds, in each of which it is every side's turn.")
    ] = 12,
    dispatch: Annotated[
        str,
        typer.Option("--dispatch", help="How ranks choose their ops: frozen, hinted or dynamic. Those of Penstock."),
    ] = "frozen",
    transport: Annotated[
        list[str] | None,
        typer.Option(
            "--transport", help="What carries messages: host (shared memory) or gloo; may be repeated. [both]"
        ),
    ] = None,
    memory: Annotated[
        bool, typer.Option("--memory/--no-memory", help="Also measure peak memory, in a launch for each side.")
    ] = True,
    out: Raw = None,
    json: Json = False,
) -> None:
    """Run the same GPT over four processes in Penstock's runtime and in torch's, in alternation."""
    from penstock.bench import runtime as measured

    sizes, schedules = gpt or list(measured.SIZES), schedule or list(measured.SCHEDULES)
    transports = transport or list(measured.TRANSPORTS)
    for name, chosen, known in (
        ("--gpt", sizes, measured.SIZES),
        ("--schedule", schedules, measured.SCHEDULES),
        ("--transport", transports, measured.TRANSPORTS),
    ):
        if wrong := [value for value in chosen if value not in known]:
            raise Misuse(f"{name} {wrong[0]}: choose among {', '.join(known)}")
    result = measured.run(sizes, schedules, steps, rounds, dispatch, transports, memory)
    _give(context, result, measured.table(result["rows"]), out, json)


@bench.command(short_help="Compare the tuner's predicted steps with measured ones.")
def tune(
    context: typer.Context,
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, help="Number of rounds, quiet ones, that each setting is to have.")
    ] = 5,
    steps: Annotated[int, typer.Option("--steps", min=1, help="How many steps to run, timed, in a round.")] = 20,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.01, help="For how many seconds layers are measured, in a round.")
    ] = 1.0,
    patience: Annotated[
        float, typer.Option("--patience", min=0, help="Most seconds to wait for a quiet moment before each round.")
    ] = 60.0,
    setting: Annotated[
        list[int] | None,
        typer.Option("--setting", help="Run only the setting of this number, counted from 1; may be repeated. [all]"),
    ] = None,
    go_on: Annotated[
        bool,
        typer.Option(
            "--continue", help="Continue after the rounds that --out has from this command, which was ended."
        ),
    ] = False,
    out: Raw = None,
    json: Json = False,
) -> None:
    """Measure the layers of a small GPT, predict six ways to train it, run them, and compare."""
    from penstock.bench import tune as measured

    if wrong := [number for number in setting or () if not 1 <= number <= len(measured.SETTINGS)]:
        raise Misuse(f"--setting {wrong[0]}: there are 1 to {len(measured.SETTINGS)}")
    settings = [measured.SETTINGS[number - 1] for number in setting or range(1, len(measured.SETTINGS) + 1)]
    before = _before(context, out) if go_on else None
    result = measured.run(
        rounds, steps, seconds, settings, patience, before, lambda result: _keep(context, result, out)
    )  # fmt: skip
    _give(context, result, measured.table(result["rows"]), out, json)


@bench.command(short_help="Measure the planner's speed and the gaps that it proves.")
def plan(
    context: typer.Context,
    instances: Annotated[int, typer.Option("--instances", min=1, help="How many random problems of each kind.")] = 20,
    only: Annotated[
        str | None,
        typer.Option(
            "--only",
            help="One part alone: speed, free (no memory cap), tight (a tight cap) or families. [all]",
        ),
    ] = None,
    family: Annotated[
        list[str] | None,
        typer.Option(
            "--family", help="For the families: one placement, such as V or circular; may be repeated. [all]"
        ),
    ] = None,
    size: Annotated[
        list[str] | None,
        typer.Option(
            "--size", metavar="RANKSxN", help="For the tight cap: one size, such as 8x32; may be repeated. [all]"
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Seed of random numbers: the problems. [drawn, and printed]")
    ] = None,
    out: Raw = None,
    json: Json = False,
) -> None:
    """Time how fast orders are made and timed, and plan random problems with and without a tight memory cap."""
    import secrets

    from penstock.bench import plan as measured
    from penstock.bench.record import machine

    if only not in (None, "speed", "free", "tight", "families"):
        raise Misuse(f"--only {only}: choose among speed, free, tight, families")
    if wrong := next((name for name in family or () if name not in measured.PLACEMENTS), None):
        raise Misuse(f"--family {wrong}: choose among {', '.join(measured.PLACEMENTS)}")
    known = {f"{ranks}x{num}": (ranks, num, seconds) for ranks, num, seconds in measured.TIGHT_SIZES}
    if wrong := next((name for name in size or () if name not in known), None):
        raise Misuse(f"--size {wrong}: choose among {', '.join(known)}")
    seed = secrets.randbelow(2**31) if seed is None else seed
    result: dict[str, Any] = {"machine": machine(), "seed": seed}
    tables = [f"seed {seed}"]
    if only in (None, "speed"):
        result["speeds"] = measured.speeds(seed)
        tables.append(measured.speed_table(result["speeds"]))
    families: list[dict[str, Any]] = []
    if only in (None, "free"):
        families += measured.free(instances, seed)
    if only in (None, "tight"):
        families += measured.tight(instances, seed, [known[name] for name in size or known])
    if families:
        result["families"] = families
        tables.append(measured.gap_table(families))
    if only in (None, "families"):
        result["placements"] = list(measured.families(instances, seed, family or tuple(measured.PLACEMENTS)))
        tables.append(measured.family_table(result["placements"]))
    _give(context, result, "\n\n".join(tables), out, json)


@bench.command(short_help="Measure the search of all programs.")
def space(
    context: typer.Context,
    ranks: Annotated[
        list[int] | None, typer.Option("--ranks", min=2, help="Number of ranks; may be repeated. [2, 4, ..., 128]")
    ] = None,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="How many times each is timed, after one to warm up.")
    ] = 3,
    out: Raw = None,
    json: Json = False,
) -> None:
    """Time the search over placements, rules and traversals, and compare what it finds with known schedules."""
    from penstock.bench import space as measured
    from penstock.bench.record import machine

    sizes = tuple(ranks or measured.SIZES)
    searches = measured.searches(sizes, repeats)
    library = measured.against_library(tuple(p for p in measured.COMPARED if p in sizes))
    shared = measured.shared_ends(repeats)
    result = {"machine": machine(), "searches": searches, "library": library, "shared_ends": shared}
    tables = [measured.search_table(searches), measured.library_table(library), measured.shared_table(shared)]
    _give(context, result, "\n\n".join(tables), out, json)


def _give(context: typer.Context, result: dict[str, Any], table: str, out: str | None, as_json: bool) -> None:
    """Prints the table or the numbers, and writes the numbers with the command that made them."""
    _keep(context, result, out)
    if as_json:
        print_json(result)
    else:
        print(table)
        if out is not None:
            print(f"wrote {out}")


def _keep(context: typer.Context, result: dict[str, Any], out: str | None) -> None:
    """Writes the numbers to `--out`, where it is given, with the record of what made them."""
    from penstock.bench.record import record

    if out is not None:
        written = {**record(), "command": _command(context, out), **result}
        write_whole(Path(out), json_module.dumps(written, indent=1) + "\n")


def _command(context: typer.Context, out: str | None) -> str:
    """What was asked for, wherever the numbers go and in however many calls."""
    return " ".join(["penstock", *(word for word in context.obj.arguments if word not in _NOT_ASKED and word != out)])


_NOT_ASKED = ("--out", "--json", "--continue")


def _before(context: typer.Context, out: str | None) -> dict[str, Any] | None:
    """What this command has written to `--out` before; None where nothing is there yet."""
    from penstock.bench.record import machine

    if out is None:
        raise Misuse("--continue goes on with the numbers in a file; give it with --out")
    if not Path(out).exists():
        return None
    try:
        found: dict[str, Any] = json_module.loads(Path(out).read_text())
        then = {"command": found["command"], "machine": found["machine"]}
    except (ValueError, KeyError, TypeError):
        raise Misuse(f"--continue: {out} is no file of penstock bench; give another --out") from None
    for what, now in (("command", _command(context, out)), ("machine", machine())):
        if then[what] != now:
            raise Misuse(
                f"--continue: {out} is of another {what}, {then[what]}, and this is {now}; give another --out, or "
                "leave out --continue to begin anew"
            )
    return found
