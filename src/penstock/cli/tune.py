"""`penstock tune`: the fastest way to train a model on the ranks there are, by measurement and simulation.

penstock tune --preset tiny --batch 16                       measures here, and remembers
penstock tune --preset tiny --ranks 2 --profile-only --out tiny-costs.json      measures alone
penstock tune --model clip --ranks 6                         lays the towers of a CLIP over the ranks
penstock tune --costs gpt2-7b:device=a100 --ranks 16         for devices that are not here
"""

from __future__ import annotations

import hashlib
import json as json_module
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.app import app
from penstock.cli.costs import CostsSource, MemoryLimit
from penstock.cli.failure import Misuse
from penstock.cli.options import Json, ScheduleOption, bytes_of, counts, result_option
from penstock.cli.output import print_json
from penstock.formats.files import write_whole
from penstock.library.options import read_options

if TYPE_CHECKING:
    from penstock.train.settings import Settings
    from penstock.tune.search import SearchFound, TuneCandidate
    from penstock.tune.session import MeasureOptions

Preset = Annotated[
    str | None, typer.Option("--preset", help="Preset that says the sizes of the model. [tiny; of clip nano]")
]
Depth = Annotated[int | None, typer.Option("--depth", min=1, help="Number of blocks. [the model's]")]
Width = Annotated[int | None, typer.Option("--width", min=1, help="Width of the blocks. [the model's]")]
Heads = Annotated[int | None, typer.Option("--heads", min=1, help="Attention heads per block. [the model's]")]
Context = Annotated[int | None, typer.Option("--context", min=1, help="Tokens per sample. [the model's]")]
Dropout = Annotated[float | None, typer.Option("--dropout", help="Probability of dropout. [the model's]")]
Tied = Annotated[
    bool | None,
    typer.Option("--tied/--no-tied", help="Let embedding and head share one weight, or not. [the model's]"),
]
Tokenizer = Annotated[
    str | None, typer.Option("--tokenizer", help="A JSON file of the tokenizers library. [bytes as tokens]")
]
Precision = Annotated[
    str, typer.Option("--precision", help="Type of numbers: float32, or bfloat16 with float32 weights.")
]
Optimizer = Annotated[str, typer.Option("--optimizer", help="A class of torch.optim.")]
OptimizerOptions = Annotated[
    str | None,
    typer.Option("--optimizer-options", metavar="JSON", help="Options of the optimizer other than lr, as JSON."),
]
ModelOptions = Annotated[
    str | None, typer.Option("--model-options", metavar="JSON", help="Arguments of your own model, as JSON.")
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME|PATH",
        help="What is trained: bert, a Hugging Face folder, or your own, nets.py:Net; penstock tune takes clip, too. "
        "[gpt]",
    ),
]
LEARNT_FROM = "What the model learns from: text (a file, folder, .jsonl or .bin/.idx), or your own, data.py:make_data"
Data = Annotated[str | None, typer.Option("--data", help=f"{LEARNT_FROM}.")]
Batch = Annotated[
    int | None, typer.Option("--batch", min=1, help="Samples per step. [16, or those of your own data]")
]
Clip = Annotated[float, typer.Option("--clip", min=0, help="Largest norm of the gradient; 0 for no clipping.")]
Device = Annotated[str, typer.Option("--device", help="Device that ops run on: cpu or cuda.")]
Threads = Annotated[int, typer.Option("--threads", min=1, help="Threads per rank.")]
MeasurementsFolder = Annotated[
    str | None,
    typer.Option("--database", metavar="FOLDER", help="Folder of measurements. [one in your cache folder]"),
]
Seconds = Annotated[
    float,
    typer.Option("--seconds", min=0.01, help="For how many seconds to measure, each microbatch size."),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Measure again what was measured before.")]


@app.command(short_help="Find the fastest way to train a model.")
def tune(
    model: Model = None,
    model_options: ModelOptions = None,
    data: Data = None,
    preset: Preset = None,
    tower: Annotated[
        list[str] | None,
        typer.Option(
            "--tower",
            metavar="NAME=KEY:VALUE",
            help="Settings of one tower of a clip: text=ranks:2, contrast=microbatches:4; may be repeated.",
        ),
    ] = None,
    depth: Depth = None,
    width: Width = None,
    heads: Heads = None,
    context: Context = None,
    dropout: Dropout = None,
    tied: Tied = None,
    tokenizer: Tokenizer = None,
    batch: Batch = None,
    precision: Precision = "float32",
    optimizer: Optimizer = "AdamW",
    optimizer_options: OptimizerOptions = None,
    clip: Clip = 1.0,
    device: Device = "cpu",
    threads: Threads = 1,
    ranks: Annotated[
        int | None, typer.Option("--ranks", min=1, help="Number of ranks, at most. [as many as fit]")
    ] = None,
    pp: Annotated[
        str | None,
        typer.Option("--pp", metavar="N,N,...", help="Number of ranks per pipeline, or several to try: 2,4."),
    ] = None,
    dp: Annotated[
        str | None,
        typer.Option("--dp", metavar="N,N,...", help="Number of replicas of the pipeline, or several to try: 1,2."),
    ] = None,
    microbatch_size: Annotated[
        str | None,
        typer.Option(
            "--microbatch-size", metavar="N,N,...", help="Samples per microbatch: one size, or several as 1,2,4."
        ),
    ] = None,
    schedule: Annotated[
        list[str] | None, typer.Option("--schedule", help="Library schedule by name, to try; may be repeated. [all]")
    ] = None,
    option: ScheduleOption = None,
    dispatch: Annotated[
        str, typer.Option("--dispatch", help="How ranks choose their ops: frozen, hinted, dynamic or auto.")
    ] = "frozen",
    recompute: Annotated[
        bool | None,
        typer.Option(
            "--recompute/--no-recompute",
            help="Let forwards run again, so that blocks keep only their input: try that too, or not. [if memory is "
            "limited]",
        ),
    ] = None,
    shared_ends: Annotated[
        bool | None,
        typer.Option(
            "--shared-ends/--no-shared-ends",
            help="Let all ranks together run the first and the last part, embedding and head, or none. [both, "
            "where one of the ends costs more than a rank's even part, or memory is limited]",
        ),
    ] = None,
    programs: Annotated[
        bool,
        typer.Option(
            "--programs/--no-programs", help="Also search schedules without a name, unless --schedule is given."
        ),
    ] = True,
    memory_limit: MemoryLimit = None,
    costs: CostsSource = None,
    top: Annotated[int, typer.Option("--top", min=1, help="How many candidates to show.")] = 10,
    verify: Annotated[int, typer.Option("--verify", min=0, help="How many of the best to run for real.")] = 0,
    steps: Annotated[
        int, typer.Option("--steps", min=1, help="How many steps to run, each of them twice, with --verify.")
    ] = 10,
    database: MeasurementsFolder = None,
    seconds: Seconds = 1.0,
    fresh: Fresh = False,
    profile_only: Annotated[
        bool,
        typer.Option("--profile-only", help="Measure layers and messages, and search nothing. [--ranks: 1]"),
    ] = False,
    out: Annotated[
        str | None,
        result_option(
            "Where the result goes: the schedule of the choice, .json or .txt. A program, which has no name, "
            "goes to runs/ without it. With --profile-only the measurements, .json, for --costs.",
            "a schedule is written as .json or .txt, measurements as .json",
            ".json",
            ".txt",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Measure a model's layers and messages, simulate every way to train it, and rank them by throughput.

    Measured are F, B, I, W, the update and the memory of every layer. What was measured before is used again.
    """
    from penstock.train.kinds import CLIP, usual_of
    from penstock.train.settings import Settings
    from penstock.tune import report
    from penstock.tune.session import MeasureOptions, TuneRequest
    from penstock.tune.session import tune as run

    limit = bytes_of("--memory-limit", memory_limit)
    options = json_object("--optimizer-options", optimizer_options)
    settings = Settings(
        **measured_model(model, model_options, data, batch),
        preset=preset or (usual_of(CLIP)["preset"] if model == CLIP else Settings.preset),
        towers=shlex.join(tower) if tower else None,
        depth=depth, width=width, heads=heads, context=context, dropout=dropout, tied=tied,
        tokenizer=usual_tokenizer(model, tokenizer, data), microbatches=1, ranks=1, precision=precision,
        optimizer=optimizer, optimizer_options=options, clip=clip, device=device, threads=threads, dispatch=dispatch,
    )  # fmt: skip
    measuring = MeasureOptions(None if database is None else Path(database), seconds, fresh)
    if profile_only:
        if costs is not None:
            raise Misuse("--profile-only measures the layers here; leave out --costs")
        sizes = counts("--microbatch-size", microbatch_size or "1")
        _profile(settings, measuring, ranks or 1, sizes, bool(recompute), out, json)
        return
    asked = TuneRequest(
        settings,
        measuring if costs is None else costs,
        ranks,
        _numbers("--pp", pp),
        _numbers("--dp", dp),
        _numbers("--microbatch-size", microbatch_size),
        schedule,
        recompute,
        programs,
        limit,
        top,
        verify,
        steps,
        shared_ends,
        read_options(option or ()),
    )
    say = None if json else say_line
    outcome = run(asked, say, _Counter() if say is not None and sys.stderr.isatty() else None)
    choice = outcome.choice
    if out is None and choice is not None and choice.candidate.plan.program and outcome.trained is not None:
        out = _place_of(choice.candidate)
    if out is not None and choice is not None:
        from penstock.formats import save

        save(choice.candidate.plan.schedule, out)
    command = _with_settings(report.train_command(outcome, out), settings)
    if json:
        print_json({**report.as_json(outcome), "out": out, "train": command})
    else:
        report.show(outcome, top)
        if out is not None:
            print(f"wrote {out}")
        if command is not None:
            print(command)
    if outcome.interrupted:
        raise typer.Exit(128 + signal.SIGINT)


def _profile(
    settings: Settings,
    measuring: MeasureOptions,
    ranks: int,
    sizes: list[int],
    again: bool,
    out: str | None,
    json: bool,
) -> None:
    """Measures layers and messages, and shows or writes them."""
    import msgspec

    from penstock.formats.profile import profile_to_json
    from penstock.tune import report
    from penstock.tune.session import measure

    meter = measure(settings, measuring, ranks, sizes, again, None if json else say_line)
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


def usual_tokenizer(model: str | None, given: str | None, data: str | None) -> str | None:
    """The tokenizer of a Hugging Face folder, unless another is given; of batches of tokens none."""
    from penstock.train.kinds import is_hugging_face, usual_of

    if given is not None or model is None or not is_hugging_face(model):
        return given
    return usual_of(model, data).get("tokenizer")


def measured_model(model: str | None, options: str | None, data: str | None, batch: int | None) -> dict[str, Any]:
    """The settings of a model of one's own; of another one those that say which. Paths are from anywhere."""
    from penstock.train.kinds import CLIP, check_model, is_path, usual_of
    from penstock.train.own_file import is_own
    from penstock.train.settings import Settings

    if model is not None:
        check_model(model, None)  # by the words given, before they are a path
    own = {"model": model if model is None or not is_path(model) else os.path.abspath(model)}
    paths = {name: path for name, path in own.items() if path is not None}
    paths |= {} if data is None else {"data": os.path.abspath(data)}
    if batch is None and is_own(data) and model is not None and is_path(model):
        from penstock.train.tasks.own_data import own_batch  # here, as it loads torch

        batch = own_batch(paths["data"], 0, 1)
    usual = usual_of(CLIP)["batch"] if model == CLIP else Settings.batch
    found: dict[str, Any] = {**paths, "batch": batch or usual}
    if options is not None or (model is not None and is_own(model)):
        found["model_options"] = json_object("--model-options", options)
    return found


def _numbers(option: str, text: str | None) -> list[int] | None:
    return None if text is None else counts(option, text)


def json_object(option: str, text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json_module.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise Misuse(f"{option} {text}: give a JSON object")
    return value


def _place_of(candidate: TuneCandidate) -> str:
    """Where a program goes for which no --out was given, so that the line that trains with it can be copied."""
    folder = Path("runs")
    folder.mkdir(exist_ok=True)
    digest = hashlib.sha256(str(candidate.plan.schedule).encode()).hexdigest()[:8]
    return str(folder / f"program-{candidate.shape.pp}x{candidate.shape.num_microbatches}-{digest}.json")


def _with_settings(command: str | None, settings: Settings) -> str | None:
    """The training command with what was given instead of its defaults."""
    if command is None:
        return None
    default = type(settings)()
    words: list[str] = []
    for name in _TRAIN_SETTINGS:
        value = getattr(settings, name)
        option = f"--{name.replace('_', '-')}"
        if value == getattr(default, name):
            continue
        if isinstance(value, bool):
            words.append(option if value else f"--no-{name}")
        else:
            words += [option, json_module.dumps(value) if isinstance(value, dict) else str(value)]
    return shlex.join([*shlex.split(command), *words])


_TRAIN_SETTINGS = (
    "depth", "width", "heads", "context", "dropout", "tied", "tokenizer", "precision", "optimizer",
    "optimizer_options", "clip", "dispatch", "device", "threads",
)  # fmt: skip


def say_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class _Counter:
    """Shows on a terminal how far the search is."""

    def __call__(self, found: SearchFound) -> None:
        best = f", best {found.best[0].prediction.step:.1f} ms a step" if found.best else ""
        print(f"\rsimulating: {found.num_tried} candidates{best}\x1b[K", end="\r", file=sys.stderr, flush=True)
