"""The options of `penstock train`, read into an order. Imports torch only when it runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.train.folder import RunFolder, free_folder
from penstock.train.handover import Order
from penstock.train.settings import Settings, SettingsError, read_settings

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
    sample: Annotated[int | None, _option("Tokens of text to write at the end.", "sample")] = None,
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
    """The order for the options given; a resumed run's own settings stand behind them. Raises SettingsError."""
    given = dict(given)
    if "warmup" in given:
        given["warmup"] = _counts(given["warmup"])
    if "optimizer_options" in given:
        given["optimizer_options"] = _object(given["optimizer_options"])
    if resume is None:
        settings = Settings.from_mapping(given, "options")
        name = f"{settings.preset}-{Path(settings.schedule).stem}-{settings.ranks}"
        folder = RunFolder(Path(out)) if out is not None else free_folder(Path("runs"), name)
        if folder.checkpoints.exists():
            raise SettingsError(
                f"{folder.path} holds a run; go on with --resume {folder.path}, or give another --out"
            )
        return Order(settings, str(folder.path), False, export, as_json)
    if out is not None and Path(out) != Path(resume):
        raise SettingsError(f"--resume {resume} goes on in its own folder; leave out --out {out}")
    saved = read_settings(RunFolder(Path(resume)).settings)
    settings = Settings.from_mapping({**saved, **given}, resume)
    return Order(settings, resume, True, export, as_json)


def _counts(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise SettingsError(f"--warmup {text}: whole numbers are needed, like 7,5,3,1") from None


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
        return carry_out.join_and_run(order)
    return carry_out.start_ranks(order, port)


def run_command(argv: list[str]) -> int:
    """The same options for a rank under torchrun."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(train)
    code = app(argv, prog_name="penstock.train", standalone_mode=False)
    return code if isinstance(code, int) else 0
