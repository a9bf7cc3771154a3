"""The options of `penstock train`, read into an order. Imports torch only when it runs."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.formats import load
from penstock.train.folder import RunFolder, free_folder
from penstock.train.settings import Settings, SettingsError, is_schedule_file, read_settings

if TYPE_CHECKING:
    from penstock.train.handover import Order

DEFAULTS = Settings()


def _help(text: str, field: str | None = None) -> str:
    value = getattr(DEFAULTS, field) if field is not None else None
    return text if value is None else f"{text} [{value}]"


def _option(text: str, field: str | None = None, **rest: Any) -> Any:
    return typer.Option(help=_help(text, field), show_default=False, **rest)


def train(
    schedule: Annotated[str | None, _option("Library schedule or schedule file.", "schedule")] = None,
    ranks: Annotated[int | None, _option("Pipeline ranks, one process each.", "ranks")] = None,
    microbatches: Annotated[int | None, _option("Microbatches a step.", "microbatches")] = None,
    stages: Annotated[int | None, _option("Stages over the whole model (interleaved-1f1b).")] = None,
    warmup: Annotated[str | None, _option("Warm-up counts, one a rank (zb).", metavar="X0,X1,...")] = None,
    cut: Annotated[str | None, _option("Layers of each stage; else about equal cost.", metavar="N0,N1,...")] = None,
    dispatch: Annotated[str | None, _option("frozen or dynamic.", "dispatch")] = None,
    preset: Annotated[str | None, _option("Sizes of the model.", "preset")] = None,
    depth: Annotated[int | None, _option("Blocks, instead of the preset's.")] = None,
    width: Annotated[int | None, _option("Width, instead of the preset's.")] = None,
    heads: Annotated[int | None, _option("Heads, instead of the preset's.")] = None,
    context: Annotated[int | None, _option("Tokens a sample, instead of the preset's.")] = None,
    dropout: Annotated[float | None, _option("Dropout, instead of the preset's.")] = None,
    tied: Annotated[bool | None, _option("Embedding and head share one weight.")] = None,
    data: Annotated[str | None, _option("Text file, folder, .jsonl or .bin/.idx; else Python's own library.")] = None,
    tokenizer: Annotated[str | None, _option("A tokenizers JSON file; else bytes.")] = None,
    steps: Annotated[int | None, _option("Updates.", "steps")] = None,
    batch: Annotated[int | None, _option("Samples a step.", "batch")] = None,
    lr: Annotated[float | None, _option("Peak learning rate.", "lr")] = None,
    lr_decay: Annotated[str | None, _option("cosine or constant.", "lr_decay")] = None,
    lr_warmup: Annotated[int | None, _option("Steps up to the peak.", "lr_warmup")] = None,
    optimizer: Annotated[str | None, _option("A class of torch.optim.", "optimizer")] = None,
    optimizer_options: Annotated[str | None, _option("Its options besides lr, as JSON.", metavar="JSON")] = None,
    clip: Annotated[float | None, _option("Most the gradient's norm may be; 0 for none.", "clip")] = None,
    precision: Annotated[str | None, _option("float32, or bfloat16 with float32 weights.", "precision")] = None,
    recompute: Annotated[bool | None, _option("Activation checkpointing of every block.")] = None,
    seed: Annotated[int | None, _option("Of weights, data order and dropout.", "seed")] = None,
    evaluate_every: Annotated[int | None, _option("Steps; 0 for at the end only.", "evaluate_every")] = None,
    save_every: Annotated[int | None, _option("Steps; 0 for at the end only.", "save_every")] = None,
    keep: Annotated[int | None, _option("Checkpoints kept.", "keep")] = None,
    device: Annotated[str | None, _option("cpu or cuda.", "device")] = None,
    timeout: Annotated[float | None, _option("Seconds any wait may last.", "timeout")] = None,
    threads: Annotated[int | None, _option("Threads of each rank; else its share of the cores.")] = None,
    sample: Annotated[int | None, _option("Tokens of text to write at the end.", "sample")] = None,
    link: Annotated[
        list[str] | None,
        _option("Conditions to inject, repeatable: 0:1=latency:30ms+loss:1%.", metavar="A:B=CONDITION"),
    ] = None,
    in_process: Annotated[bool | None, _option("All ranks in one process, in turn.")] = None,
    out: Annotated[str | None, _option("Folder of the run; else a new one in runs/.")] = None,
    resume: Annotated[str | None, _option("Go on with the run in this folder.", metavar="RUN")] = None,
    export: Annotated[str | None, _option("Write the model here at the end (safetensors).", metavar="FILE")] = None,
    port: Annotated[int | None, _option("Port for the ranks to meet at; else a free one.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as one JSON object and nothing else.")
    ] = False,
) -> None:
    """Train a GPT over pipeline ranks on this machine, on real text."""
    given = {name: value for name, value in locals().items() if value is not None}
    for name in ("out", "resume", "export", "port", "as_json"):
        given.pop(name, None)
    order = order_of(given, out, resume, export, as_json)
    raise typer.Exit(_carry_out(order, port))


def order_of(given: dict[str, Any], out: str | None, resume: str | None, export: str | None, as_json: bool) -> Order:
    """The order for the options given; a resumed run's own settings stand behind them.

    Raises SettingsError, and ScheduleError for a schedule file that can't be read.
    """
    from penstock.train.handover import Order

    given = dict(given)
    for name in ("warmup", "cut"):
        if name in given:
            given[name] = _counts(name, given[name])
    if links := given.pop("link", None):
        given["link"] = shlex.join(links)
    if "optimizer_options" in given:
        given["optimizer_options"] = _object(given["optimizer_options"])
    for name in ("data", "tokenizer"):  # a run may be resumed from another folder
        if name in given:
            given[name] = os.path.abspath(given[name])
    if "schedule" in given:
        given |= _schedule_file(given)
    if "RANK" in os.environ and os.environ.get("WORLD_SIZE", "").isdigit():
        given.setdefault("ranks", int(os.environ["WORLD_SIZE"]))
    if resume is None:
        settings, folder = Settings.from_mapping(given), None
        name = f"{settings.preset}-{Path(settings.schedule).stem}-{settings.ranks}"
        folder = RunFolder(Path(out)) if out is not None else free_folder(Path("runs"), name)
        if folder.checkpoints.exists():
            raise SettingsError(
                f"{folder.path} holds a run; go on with --resume {folder.path}, or give another --out"
            )
    else:
        if out is not None and os.path.abspath(out) != os.path.abspath(resume):
            raise SettingsError(f"--resume {resume} goes on in its own folder; leave out --out {out}")
        folder = RunFolder(Path(resume))
        saved = Settings.from_mapping(read_settings(folder.settings), f"{folder.settings}: ")
        settings = Settings.from_mapping({**dataclasses.asdict(saved), **_cleared(given), **given})
    settings = dataclasses.replace(settings, threads=settings.num_threads)
    return Order(settings, str(folder.path), resume is not None, export, as_json)


def _schedule_file(given: dict[str, Any]) -> dict[str, Any]:
    """A schedule file says itself for how many ranks and microbatches it is; nothing for a name."""
    if not is_schedule_file(given["schedule"]):
        return {}
    path = os.path.abspath(given["schedule"])
    schedule = load(path)
    counts = {"ranks": schedule.num_ranks, "microbatches": schedule.num_microbatches}
    return {"schedule": path} | {name: count for name, count in counts.items() if name not in given}


def _cleared(given: dict[str, Any]) -> dict[str, Any]:
    """What another schedule makes void of a resumed run's settings: options that only the old one takes."""
    return {"stages": None, "warmup": None, "cut": None} if "schedule" in given or "ranks" in given else {}


def _counts(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise SettingsError(f"--{name} {text}: whole numbers are needed, like 7,5,3,1") from None


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise SettingsError(f"--optimizer-options {text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise SettingsError(f"--optimizer-options {text!r}: give a JSON object, like '{{\"momentum\": 0.9}}'")
    return value


def _carry_out(order: Order, port: int | None) -> int:
    # Light checks first: most mistakes are told before torch is loaded.
    order.settings.build_schedule()
    from penstock.train import carry_out

    if "RANK" in os.environ:
        return carry_out.run_joined(order)
    return carry_out.carry_out(order, port)


def run_command(argv: list[str]) -> int:
    """The same options for a rank under torchrun. What is wrong is told once on each host."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(train)
    try:
        code = app(argv, prog_name="penstock.train", standalone_mode=False)
    except Exception as error:
        known = type(error).__module__.startswith("penstock.")
        if isinstance(error, typer.BadParameter.__mro__[1]):
            message = f"{error.format_message()}\nsee python -m penstock.train --help"  # type: ignore[attr-defined]
        elif known and "penstock.runtime" not in type(error).__module__:
            message = str(error)
        else:
            raise
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"penstock: {message}", file=sys.stderr, flush=True)
        return 2
    return code if isinstance(code, int) else 0
