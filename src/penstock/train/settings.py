"""What a training run is asked to do. One flat value, the same on every rank, written into the run's folder.

And which options exclude each other: of the mesh, and of how text becomes microbatches. Needs no torch.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.cost import Costs, Links
from penstock.planning.threads import num_cores
from penstock.schedule import Schedule
from penstock.train.checks import SettingsError, read_links
from penstock.train.exclusions import check_exclusions
from penstock.train.kinds import check_model, lora_of, read_towers
from penstock.train.options import DATA, MACHINE, MESH, MODEL, RUN, SCHEDULE, TRAINING, setting
from penstock.train.run_settings import ROUTES, RunSettings, host_memory_of

WINDOWS, ARRIVAL, PLANNED = "windows", "arrival", "planned"
"""Fixed lengths of the text; whole documents as they come; whole documents, planned for the schedule."""
SIZES, MEASURED = "sizes", "measured"
"""Where costs by length come from: the model's sizes, or the first steps of the run."""


@dataclass(frozen=True)
class Settings(RunSettings):
    """Settings of a run that learns; every field has a value that works, and an option."""

    dp: int = setting(1, "Number of replicas of the pipeline.", MESH, is_common=True)
    tp: int = setting(1, "Number of processes that share each layer.", MESH, is_common=True)
    cut: tuple[int, ...] | None = setting(
        None, "How many layers each stage has. [stages of about equal cost]", SCHEDULE, metavar="N0,N1,..."
    )
    model: str = setting(
        "gpt",
        "What is trained: gpt, bert, clip, a Hugging Face folder or config.json, or your own, nets.py:Net.",
        MODEL,
        is_common=True,
        metavar="NAME|PATH",
    )
    model_options: Mapping[str, Any] = setting({}, "Arguments of your own model, as JSON.", MODEL, metavar="JSON")
    lora: str | None = setting(
        None,
        "Train adapters of a Hugging Face model: peft's LoraConfig as JSON, or a folder.",
        MODEL,
        metavar="JSON|DIR",
    )
    preset: str = setting("tiny", "Preset that says the sizes of the model.", MODEL, is_common=True)
    towers: str | None = setting(
        None,
        "Settings of one tower of a clip: text=ranks:2+microbatches:8+schedule:1f1b; may be repeated.",
        MODEL,
        flags=("--tower",),
        metavar="NAME=KEY:VALUE",
        is_repeated=True,
    )
    depth: int | None = setting(None, "Number of blocks. [the preset's]", MODEL)
    width: int | None = setting(None, "Width of the blocks. [the preset's]", MODEL)
    heads: int | None = setting(None, "Attention heads per block. [the preset's]", MODEL)
    context: int | None = setting(None, "Tokens per sample. [the preset's]", MODEL)
    dropout: float | None = setting(None, "Probability of dropout. [the preset's]", MODEL)
    tied: bool | None = setting(None, "Let embedding and head share one weight, or not. [the preset's]", MODEL)
    data: str | None = setting(
        None,
        "What the model learns from: text (a file, folder, .jsonl or .bin/.idx), or your own, data.py:make_data. "
        "[Python's own library]",
        DATA,
        is_common=True,
    )
    tokenizer: str | None = setting(None, "A JSON file of the tokenizers library. [bytes as tokens]", DATA)
    packing: str = setting(
        WINDOWS,
        "windows of the text, or whole documents, several in a microbatch: arrival as they come, planned for the "
        "schedule, or a run's batches.jsonl.",
        DATA,
        metavar="HOW|FILE",
    )
    length_costs: str = setting(
        "sizes",
        "Costs that plans of documents use: by the model's sizes, measured in the first steps, or a file.",
        DATA,
        metavar="HOW|FILE",
    )
    microbatch_tokens: int | None = setting(None, "Most tokens in a planned microbatch.", DATA)
    batch: int = setting(16, "Samples per step, or as many tokens of whole documents.", DATA, is_common=True)
    lr: float = setting(4e-3, "Peak learning rate.", TRAINING, is_common=True)
    lr_decay: str = setting("cosine", "How the learning rate goes on: cosine or constant.", TRAINING)
    lr_warmup: int = setting(30, "Steps in which the learning rate rises to its peak.", TRAINING)
    optimizer: str = setting(
        "AdamW", "A class of torch.optim, or muon: Muon for hidden matrices, AdamW for the rest.", TRAINING
    )
    optimizer_options: Mapping[str, Any] = setting(
        {}, "Options of the optimizer other than lr, as JSON.", TRAINING, metavar="JSON"
    )
    clip: float = setting(1.0, "Largest norm of the gradient; 0 for no clipping.", TRAINING)
    precision: str = setting(
        "float32",
        "Type of numbers: float32; or bfloat16 or float16, which is autocast with float32 weights.",
        TRAINING,
        is_common=True,
    )
    recompute: bool = setting(
        False,
        "Let forwards run again, so that blocks keep only their input until their backward.",
        TRAINING,
    )
    seed: int = setting(0, "Seed of random numbers: weights, data order and dropout.", TRAINING, is_common=True)
    evaluate_every: int = setting(100, "Steps between evaluations; 0 evaluates only at the end.", RUN)
    save_every: int = setting(100, "Steps between checkpoints; 0 saves only at the end.", RUN)
    keep: int = setting(2, "How many checkpoints to keep.", RUN)
    threads: int | None = setting(
        None, "Threads per rank; the last digits of sums can depend on them. [its share of the cores]", MACHINE
    )
    sample: int = setting(160, "How many tokens of text the model writes at the end.", DATA)

    def __post_init__(self) -> None:
        self.check_run(
            counts=("dp", "tp", "batch", "keep", "threads", "microbatch_tokens"),
            amounts=("lr_warmup", "evaluate_every", "save_every", "sample", "clip"),
            above_zero=("lr",),
            choices={
                "lr_decay": ("cosine", "constant"),
                "precision": ("float32", "bfloat16", "float16"),
                "device": ("cpu", "cuda"),
                "transport": ROUTES,
                "sharding": ("none", "copies", "zero1", "fsdp"),
            },
        )
        check_model(self.model)
        check_exclusions(self)
        _ = self.host_units, lora_of(self), read_towers(self.towers)
        if self.batch < self.dp * self.microbatches:
            whole = self.dp * self.microbatches
            replicas = "" if self.dp == 1 else f" in each of {self.dp} replicas"
            raise SettingsError(
                f"a batch of {self.batch} can't be cut into {self.microbatches} microbatches{replicas}; "
                f"give a batch of at least {whole}, or fewer microbatches"
            )

    @property
    def num_processes(self) -> int:
        """Of the whole mesh."""
        return self.ranks * self.dp * self.tp

    @property
    def environment(self) -> dict[str, str]:
        return {"OMP_NUM_THREADS": str(self.num_threads)}

    @property
    def is_packed(self) -> bool:
        """Whether whole documents are packed into microbatches."""
        return self.packing != WINDOWS

    @property
    def record(self) -> str | None:
        """The file whose batches are used again."""
        return self.packing if is_record(self.packing) else None

    @property
    def is_sharded(self) -> bool:
        """Whether replicas keep parts of what they train."""
        return self.sharding in ("zero1", "fsdp")

    @property
    def is_flat(self) -> bool:
        """Whether there is one pipeline of whole layers."""
        return self.dp == self.tp == 1

    def link_conditions(self) -> Links | None:
        """The conditions to inject: between ranks or, if there are replicas, between the nodes of their mesh. Raises
        SettingsError for invalid ones.
        """
        return read_links(self.link, self.ranks * self.dp // self.replicas_here)

    @property
    def replicas_here(self) -> int:
        """Replicas whose microbatches one pipeline runs: all of them in one process, otherwise its own."""
        return self.dp if self.in_process else 1

    @property
    def num_threads(self) -> int:
        """Threads of each rank: as asked for, or its share of the cores, whether ranks share a process or not."""
        if self.threads is not None:
            return self.threads
        if os.environ.get("OMP_NUM_THREADS", "").isdigit():
            return max(1, int(os.environ["OMP_NUM_THREADS"]))
        return max(1, num_cores() // self.num_processes)

    def clip_norm(self, schedule: Schedule) -> float | None:
        """The limit that the pipeline clips by. If updates are ops, each stage's gradient is clipped by its
        share of the whole.

        With S stages that is clip / sqrt(S), so that the norm over the model is never above `clip`.
        """
        if schedule.updates is None or not self.clip:
            return self.clip or None
        return self.clip / math.sqrt(schedule.num_stages)

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step (from 0)."""
        return learning_rate(step, self.steps, self.lr, self.lr_warmup, self.lr_decay)

    @property
    def host_units(self) -> float:
        """Host memory in activations. Raises SettingsError for bytes, as the size of a model's activations
        is not measured.
        """
        return host_memory_of(self.host_memory, Costs.uniform(1))


def read_settings(path: Path) -> dict[str, Any]:
    """The saved settings of a run. Raises SettingsError if there are none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise SettingsError(f"{path.parent} is no run: it has no {path.name}; give the folder of a run") from None
    except OSError as error:
        raise SettingsError(f"{path} can't be read: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise SettingsError(
            f"{path} is damaged: it is no JSON object; copy it from a run with the same settings, or start again"
        )
    return values


FLOOR = 0.1
"""Share of the peak at which a cosine decay ends."""


def learning_rate(step: int, steps: int, peak: float, warmup: int, decay: str) -> float:
    """The rate of `step` (from 0) of `steps`: a linear warm-up, then a cosine decay to a tenth; or constant."""
    if step < warmup:
        return peak * (step + 1) / warmup
    if decay == "constant":
        return peak
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def check_ties(schedule: Schedule, tied: Sequence[Sequence[str]]) -> None:
    """Raises SettingsError for a weight of two stages, if one of them could not have the version that it is to
    read.
    """
    if not tied or schedule.num_stages == 1:
        return
    # Here, for sizes need no torch.
    from penstock.runtime.compatibility import FeatureCombination, RuntimeFailure, require_compatible

    tie = {"embedding and head": [0, schedule.num_stages - 1]}
    try:
        require_compatible(FeatureCombination(schedule, tied=tie))
    except RuntimeFailure as error:
        raise SettingsError(str(error).replace("untie them", "give --no-tied")) from None


def check_precision(precision: str, schedule: Schedule) -> None:
    """Raises SettingsError for a precision in which a schedule does not train."""
    if precision == "float16" and schedule.updates is not None:
        raise SettingsError(
            f"{schedule.name} updates each stage by itself, and --precision float16 leaves an update out in all "
            "stages where the gradient of one overflows; give --precision bfloat16"
        )


def mesh_words(settings: Settings) -> str:
    """`4 ranks`, or `2 ranks x 2 replicas x 2 shards`."""
    parts = [f"{settings.ranks} ranks"]
    if settings.dp > 1:
        parts.append(f"{settings.dp} replicas")
    if settings.tp > 1:
        parts.append(f"{settings.tp} shards")
    return " x ".join(parts)


def share_out(ranks: int | None, dp: int, tp: int, world: int) -> int:
    """The ranks of a pipeline if a launcher has started `world` processes; `ranks` if they are given.

    Raises:
        SettingsError: sizes that do not multiply to `world`.
    """
    if ranks is None and world % (dp * tp) == 0 and world:
        return world // (dp * tp)
    if ranks is not None and ranks * dp * tp == world:
        return ranks
    sizes = [("pp", ranks), ("dp", dp), ("tp", tp)]
    given = " x ".join(f"{name} {size}" for name, size in sizes if size is not None)
    product = (ranks or 1) * dp * tp
    made = f"is {product}" if ranks is not None else f"is {product}, and pp a whole number of times that"
    raise SettingsError(
        f"{given} {made}; {world} processes were started: start {product}, or give sizes whose product is {world}"
    )


def is_record(packing: str | None) -> bool:
    """Whether it names a file with the batches of a run."""
    return packing not in (None, WINDOWS, ARRIVAL, PLANNED)
