"""The options of `penstock train`, read into an order. Imports torch only when it runs."""

from __future__ import annotations

import gc
import os
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cost.presets import PRESETS
from penstock.rank_environment import RankEnvironment, start_rank_server
from penstock.schedule.updates import RULES
from penstock.train.emulated.settings import EmulatedSettings
from penstock.train.job import EmulatedJob, emulated_order_of, order_of, read_given
from penstock.train.settings import Settings
from penstock.train.tasks.open import schedule_of

if TYPE_CHECKING:
    from penstock.train.job import TrainJob

DEFAULTS, EMULATED = Settings(), EmulatedSettings()


GROUPS: dict[str, tuple[str, ...]] = {
    "Schedule": ("schedule", "ranks", "microbatches", "stages", "warmup", "option", "cut", "dispatch", "in_process"),
    "Mesh": ("pp", "dp", "tp", "sharding"),
    "Model": ("model", "model_options", "lora", "preset", "tower", "depth", "width", "heads", "context", "dropout",
              "tied"),
    "Data": (
        "data", "tokenizer", "batch", "packing", "microbatch_tokens", "length_costs", "sample",
    ),
    "Training": (
        "steps", "lr", "lr_decay", "lr_warmup", "optimizer", "optimizer_options", "clip", "precision", "recompute",
        "seed",
    ),
    "Asynchronous schedules": ("window", "rule", "max_mismatch", "drain_every"),
    "Links": ("link", "transport", "link_depth", "delegates", "interfaces"),
    "Adapting": ("adapt", "store", "host_memory"),
    "Machine": ("device", "threads", "timeout", "port"),
    "Emulated devices": ("costs", "stretch", "message_cap"),
    "The run": (
        "out", "resume", "fallback", "verify", "evaluate_every", "save_every", "keep", "export",
        "as_json", "help_all", "help",
    ),
}  # fmt: skip
"""The options of training as the help groups them, by the names of parameters."""

COMMON = {
    "schedule", "ranks", "microbatches", "dispatch", "dp", "tp", "sharding", "model", "lora", "preset", "data",
    "tokenizer", "batch", "steps", "lr", "precision", "recompute", "seed", "link", "adapt", "device", "out", "resume",
    "export", "as_json", "help_all", "help",
}  # fmt: skip
"""The options that most runs need, which `--help` shows; `--help-all` shows the others too."""

ALL = "penstock.train.help_all"
"""In the meta of a context: that its help is to show all options."""


def _print_all(context: typer.Context, wanted: bool) -> None:
    if wanted:
        context.meta[ALL] = True
        print(context.get_help())
        raise typer.Exit


def _help(text: str, field: str | None = None) -> str:
    value = getattr(DEFAULTS, field) if field is not None else None
    return text if value is None else f"{text} [{value}]"


def _option(text: str, field: str | None = None, **rest: Any) -> Any:
    return typer.Option(help=_help(text, field), show_default=False, **rest)


def train(
    call: typer.Context,
    schedule: Annotated[str | None, _option("Library schedule by name, or a schedule file.", "schedule")] = None,
    ranks: Annotated[int | None, _option("Number of ranks, of the pipeline; each is a process.", "ranks")] = None,
    pp: Annotated[int | None, _option("Number of ranks per pipeline, the same as --ranks.")] = None,
    dp: Annotated[
        int | None, _option("Number of replicas of the pipeline, each with its part of the batch.", "dp")
    ] = None,
    tp: Annotated[int | None, _option("Number of processes that share each layer.", "tp")] = None,
    sharding: Annotated[
        str | None, _option("What the holders of a stage divide: none, copies, zero1, fsdp.", "sharding")
    ] = None,
    microbatches: Annotated[
        int | None, _option("Number of microbatches, per step; with amdp 4 for each rank.", "microbatches")
    ] = None,
    stages: Annotated[int | None, _option("Number of stages, over the whole model (interleaved-1f1b).")] = None,
    warmup: Annotated[
        str | None,
        _option("Warm-up counts, one per rank: forwards before its first backward (zb).", metavar="X0,X1,..."),
    ] = None,
    option: Annotated[
        list[str] | None,
        _option(
            "Another option of a library schedule, as for ps.build, repeatable: overlap=true.", metavar="KEY=VALUE"
        ),
    ] = None,
    cut: Annotated[
        str | None, _option("How many layers each stage has. [stages of about equal cost]", metavar="N0,N1,...")
    ] = None,
    dispatch: Annotated[
        str | None, _option("How ranks choose their ops: frozen, hinted, dynamic or auto. [frozen; emulated: auto]")
    ] = None,
    model: Annotated[
        str | None,
        _option(
            "What is trained: gpt, bert, clip, a Hugging Face folder or config.json, or your own, nets.py:Net.",
            "model",
            metavar="NAME|PATH",
        ),
    ] = None,
    model_options: Annotated[str | None, _option("Arguments of your own model, as JSON.", metavar="JSON")] = None,
    lora: Annotated[
        str | None,
        _option(
            "Train adapters of a Hugging Face model: peft's LoraConfig as JSON, or a folder.",
            metavar="JSON|DIR",
        ),
    ] = None,
    preset: Annotated[str | None, _option("Preset that says the sizes of the model.", "preset")] = None,
    tower: Annotated[
        list[str] | None,
        _option(
            "Settings of one tower of a clip: text=ranks:2+microbatches:8+schedule:1f1b; may be repeated.",
            metavar="NAME=KEY:VALUE",
        ),
    ] = None,
    depth: Annotated[int | None, _option("Number of blocks. [the preset's]")] = None,
    width: Annotated[int | None, _option("Width of the blocks. [the preset's]")] = None,
    heads: Annotated[int | None, _option("Attention heads per block. [the preset's]")] = None,
    context: Annotated[int | None, _option("Tokens per sample. [the preset's]")] = None,
    dropout: Annotated[float | None, _option("Probability of dropout. [the preset's]")] = None,
    tied: Annotated[bool | None, _option("Let embedding and head share one weight, or not. [the preset's]")] = None,
    data: Annotated[
        str | None,
        _option(
            "What the model learns from: text (a file, folder, .jsonl or .bin/.idx), or your own, data.py:make_data. "
            "[Python's own library]"
        ),
    ] = None,
    tokenizer: Annotated[str | None, _option("A JSON file of the tokenizers library. [bytes as tokens]")] = None,
    steps: Annotated[int | None, _option("How many steps to run, each with its update.", "steps")] = None,
    batch: Annotated[int | None, _option("Samples per step.", "batch")] = None,
    packing: Annotated[
        str | None,
        _option(
            "windows of the text, or whole documents: arrival, planned, or a run's batches.jsonl.",
            "packing",
            metavar="HOW|FILE",
        ),
    ] = None,
    microbatch_tokens: Annotated[int | None, _option("Most tokens in a planned microbatch.")] = None,
    length_costs: Annotated[
        str | None,
        _option(
            "Costs to plan over: by the model's sizes, measured in the first steps, or a file.",
            "length_costs",
            metavar="HOW|FILE",
        ),
    ] = None,
    lr: Annotated[float | None, _option("Peak learning rate.", "lr")] = None,
    lr_decay: Annotated[str | None, _option("How the learning rate goes on: cosine or constant.", "lr_decay")] = None,
    lr_warmup: Annotated[
        int | None, _option("Steps in which the learning rate rises to its peak.", "lr_warmup")
    ] = None,
    optimizer: Annotated[
        str | None,
        _option("A class of torch.optim, or muon: Muon for hidden matrices, AdamW for the rest.", "optimizer"),
    ] = None,
    optimizer_options: Annotated[
        str | None, _option("Options of the optimizer other than lr, as JSON.", metavar="JSON")
    ] = None,
    clip: Annotated[float | None, _option("Largest norm of the gradient; 0 for no clipping.", "clip")] = None,
    precision: Annotated[
        str | None, _option("Type of numbers: float32, or bfloat16 or float16 with float32 weights.", "precision")
    ] = None,
    recompute: Annotated[
        bool | None, _option("Let forwards run again, so that blocks keep only their input until their backward.")
    ] = None,
    seed: Annotated[int | None, _option("Seed of random numbers: weights, data order and dropout.", "seed")] = None,
    evaluate_every: Annotated[
        int | None, _option("Steps between evaluations; 0 evaluates only at the end.", "evaluate_every")
    ] = None,
    save_every: Annotated[
        int | None, _option("Steps between checkpoints; 0 saves only at the end.", "save_every")
    ] = None,
    keep: Annotated[int | None, _option("How many checkpoints to keep.", "keep")] = None,
    device: Annotated[
        str | None,
        _option(
            "Device that ops run on: cpu (even where there are GPUs), cuda, or emulated, where ops take time only.",
            "device",
        ),
    ] = None,
    costs: Annotated[
        str | None,
        _option(
            f"All costs, of a preset or a file, emulated: {', '.join(PRESETS)}, or a file. [{EMULATED.costs}]",
            metavar="NAME|FILE",
        ),
    ] = None,
    stretch: Annotated[
        float | None, _option("Make ops and links slower by this factor, emulated, so that noise matters less. [1]")
    ] = None,
    message_cap: Annotated[
        str | None,
        _option("Emulated: most bytes of a message; larger ones are cut to this. [1MB]", metavar="BYTES"),
    ] = None,
    timeout: Annotated[float | None, _option("Most seconds that any wait may last.", "timeout")] = None,
    threads: Annotated[int | None, _option("Threads per rank. [its share of the cores]")] = None,
    sample: Annotated[int | None, _option("How many tokens of text the model writes at the end.", "sample")] = None,
    window: Annotated[int | None, _option("Microbatches per update, of an asynchronous schedule.")] = None,
    rule: Annotated[
        str | None,
        _option(f"Which weights ops read, in an asynchronous schedule: {', '.join(RULES)}.", metavar="NAME"),
    ] = None,
    max_mismatch: Annotated[
        int | None, _option("Most updates between a microbatch's forward and its backward. [amdp: 0; with --rule 1]")
    ] = None,
    drain_every: Annotated[
        int | None, _option("Steps after which the pipeline drains, of an asynchronous schedule. [about 8]")
    ] = None,
    link: Annotated[
        list[str] | None,
        _option(
            "What messages between A and B meet, made slow on purpose: 0:1=latency:30ms+loss:1%; may be repeated.",
            metavar="A:B=CONDITION",
        ),
    ] = None,
    transport: Annotated[
        str | None, _option("What carries messages: host, gloo, direct, delegate or nccl.", "transport")
    ] = None,
    link_depth: Annotated[int | None, _option("Most messages under way on a link with --link. [direct: 2]")] = None,
    delegates: Annotated[int | None, _option("TCP connections per direction of a delegated link. [2]")] = None,
    interfaces: Annotated[
        str | None,
        _option(
            "Network interfaces of this host that delegates use, the preferred one first.", metavar="NAME,NAME,..."
        ),
    ] = None,
    adapt: Annotated[bool | None, _option("Measure links, and change to another plan where that is faster.")] = None,
    store: Annotated[
        str | None, _option("Adapting: where ranks report. [the job's own store]", metavar="redis://HOST:PORT")
    ] = None,
    host_memory: Annotated[
        str | None, _option("Adapting: how many activations (4) or bytes (8GB) may wait in host memory.", metavar="N")
    ] = None,
    in_process: Annotated[
        bool | None, _option("Run all ranks in one process, in turn; emulated: as a thread each.")
    ] = None,
    out: Annotated[str | None, _option("Where the result goes: the folder of the run. [a new one in runs/]")] = None,
    resume: Annotated[
        str | None,
        _option("Continue the run in this folder; with the same --out, begin it there if need be.", metavar="RUN"),
    ] = None,
    fallback: Annotated[
        bool, typer.Option("--fallback", help="Resuming: take an older checkpoint where the newest is damaged.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check on the first batch that model and loss keep the contract.")
    ] = False,
    export: Annotated[
        str | None,
        _option("Where to write the model at the end; a Hugging Face model is written as a folder.", metavar="PATH"),
    ] = None,
    port: Annotated[int | None, _option("Port to use, at which ranks find each other. [a free one]")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else: the report.")
    ] = False,
    help_all: Annotated[
        bool, typer.Option("--help-all", is_eager=True, callback=_print_all, help="Show every option and exit.")
    ] = False,
) -> Any:
    """Train a GPT, BERT, CLIP, Hugging Face decoder or your own model over a mesh; or emulate a plan."""
    given = {name: value for name, value in locals().items() if value is not None}
    RankEnvironment.of(os.environ)  # what is wrong there is said before anything is made of it
    del given["call"]
    is_program = getattr(call.obj, "is_program", False)  # nothing is known of a launcher's
    for name in ("out", "resume", "fallback", "verify", "export", "port", "as_json", "help_all"):
        given.pop(name, None)
    given = read_given(given)
    if given.get("device") == "emulated":
        given |= {name: True for name, asked in (("fallback", fallback), ("verify", verify)) if asked}  # of training
        return _carry_out(emulated_order_of(given, out, resume, export, as_json), port, is_program)
    return _carry_out(order_of(given, out, resume, export, as_json, fallback, verify), port, is_program)


def _carry_out(order: TrainJob | EmulatedJob, port: int | None, is_program: bool) -> int:
    # Light checks first: most mistakes are told before torch is loaded.
    if isinstance(order, EmulatedJob):
        order.settings.check_plan()
    else:
        schedule_of(order.settings)
    forks = is_program and sys.platform == "linux"
    if forks and "RANK" not in os.environ and not order.settings.in_process:
        start_rank_server(["penstock.train.run_job"], {})  # it loads torch while this process does
    from penstock.train import run_job

    gc.freeze()  # torch and all else that is loaded stays: looking through it for garbage takes a second at the end
    return run_job.run_joined(order) if "RANK" in os.environ else run_job.run_job(order, port)


def _is_reported() -> bool:
    """Whether this process is one of several ranks, whose error is reported once for all of them."""
    from penstock.runtime.launch.rank import Reporter

    return isinstance(sys.excepthook, Reporter)


LET_SPEAK = 5.0
"""Seconds that the other ranks of a host leave the first one to report an error. torchrun ends all ranks when one
has ended, so a rank that ended sooner would end the first one before its message. If the first finds no error, the
others report.
"""


def run_command(argv: list[str]) -> int:
    """The same options for a rank under torchrun. Each host reports an error once."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(train)
    try:
        code = app(argv, prog_name="penstock.train", standalone_mode=False)
    except Exception as error:
        known = type(error).__module__.startswith("penstock.")
        if isinstance(error, typer.BadParameter.__mro__[1]):
            message = f"{error.format_message()}\nsee python -m penstock.train --help"  # type: ignore[attr-defined]
        elif known and not ("penstock.runtime" in type(error).__module__ and _is_reported()):
            message = str(error)
        else:
            raise
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(LET_SPEAK)
        print(f"penstock: {message}", file=sys.stderr, flush=True)
        return getattr(error, "exit_code", 2)
    return code if isinstance(code, int) else 0
