"""What a training run is asked to do. One flat value, the same on every rank, written into the run's folder.

And which options exclude each other: of the mesh, and of how text becomes microbatches. Needs no torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from penstock.cost import Costs, Links
from penstock.dispatch import Dispatch
from penstock.host_process import num_cores
from penstock.rank_environment import RankEnvironment
from penstock.schedule import Schedule
from penstock.schedule.updates import RULES
from penstock.train.asynchronous import Passes, check_windows
from penstock.train.checks import (
    ROUTES,
    STORES,
    SettingsError,
    check_choices,
    check_known,
    check_numbers,
    host_memory_of,
    read_links,
    read_schedule,
)
from penstock.train.exclusions import check_exclusions
from penstock.train.kinds import check_model, lora_of
from penstock.train.options import DATA, LINKS, MACHINE, MESH, MODEL, RUN, SCHEDULE, TRAINING, UPDATES, setting

if TYPE_CHECKING:
    from penstock.runtime.transport.choose import TransportOptions

WINDOWS, ARRIVAL, PLANNED = "windows", "arrival", "planned"
"""Fixed lengths of the text; whole documents as they come; whole documents, planned for the schedule."""


@dataclass(frozen=True)
class Settings:
    """Settings of a run; every field has a value that works, and an option. Without `window` updates are not ops of
    the schedule.
    """

    transport: str = setting("host", "What carries messages: host, gloo, direct, delegate or nccl.", LINKS)
    adapt: bool = setting(False, "Measure links, and change to a faster plan.", LINKS, is_common=True)
    store: str | None = setting(
        None, "Where ranks that adapt report. [the job's own store]", LINKS, metavar="redis://HOST:PORT", is_rare=True
    )
    host_memory: str | None = setting(
        None,
        "How many activations may wait in each rank's host memory while a link is delegated, such as 4.",
        LINKS,
        metavar="N",
        is_rare=True,
    )
    schedule: str = setting("1f1b", "Library schedule by name, or a schedule file.", SCHEDULE, is_common=True)
    ranks: int = setting(
        4, "Number of ranks, of the pipeline, a process each.", SCHEDULE, is_common=True, flags=("--ranks", "--pp")
    )
    microbatches: int = setting(8, "Number of microbatches, per step. [8; amdp: 4 a rank]", SCHEDULE, is_common=True)
    stages: int | None = setting(None, "Number of stages, over the whole model (interleaved-1f1b).", SCHEDULE)
    schedule_options: Mapping[str, Any] = setting(
        {},
        "Another option of a library schedule, as for ps.build: overlap=true, warmup=[7,5,3,1]; may be repeated.",
        SCHEDULE,
        flags=("--option",),
        metavar="KEY=VALUE",
        is_repeated=True,
    )
    dispatch: str = setting(
        "frozen", "How ranks choose their ops: frozen, hinted, dynamic or auto.", SCHEDULE, is_common=True
    )
    steps: int = setting(400, "How many steps to run.", TRAINING, is_common=True)
    sharding: str = setting("copies", "What the holders of a stage divide: none, copies, zero1 or fsdp.", MESH)
    device: str = setting(
        "cpu", "Device that ops run on: cpu (even where there are GPUs) or cuda.", MACHINE, is_common=True
    )
    in_process: bool = setting(False, "Run all ranks in one process, in turn.", SCHEDULE)
    timeout: float = setting(60.0, "Most seconds that any wait may last.", MACHINE, is_rare=True)
    link: str | None = setting(
        None,
        "What messages between A and B meet, made slow on purpose: 0:1=latency:30ms+loss:1%; may be repeated.",
        LINKS,
        is_common=True,
        metavar="A:B=CONDITION",
        is_repeated=True,
    )
    window: int | None = setting(None, "Microbatches whose gradients an update adds up.", UPDATES)
    rule: str | None = setting(None, f"Which weights ops read: {', '.join(RULES)}.", UPDATES, metavar="NAME")
    max_mismatch: int | None = setting(
        None, "Most updates between a microbatch's forward and its backward. [amdp: 0; with --rule 1]", UPDATES
    )
    drain_every: int | None = setting(None, "Steps after which the pipeline drains. [about 8]", UPDATES)
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
    depth: int | None = setting(None, "Number of blocks. [the preset's]", MODEL)
    width: int | None = setting(None, "Width of the blocks. [the preset's]", MODEL)
    heads: int | None = setting(None, "Attention heads per block. [the preset's]", MODEL)
    context: int | None = setting(None, "Tokens per sample. [the preset's]", MODEL)
    dropout: float | None = setting(None, "Probability of dropout. [the preset's]", MODEL, is_rare=True)
    tied: bool | None = setting(
        None, "Let embedding and head share one weight, or not. [the preset's]", MODEL, is_rare=True
    )
    data: str | None = setting(
        None,
        "What the model learns from: text (a file, folder, .jsonl or .bin/.idx), or your own, data.py:make_data. "
        "[Python's own library]",
        DATA,
        is_common=True,
    )
    tokenizer: str | None = setting(None, "A tokenizer.json, or a folder with one. [bytes as tokens]", DATA)
    packing: str = setting(
        WINDOWS,
        "windows of the text, or whole documents, several in a microbatch: arrival as they come, planned for the "
        "schedule, or a run's batches.jsonl.",
        DATA,
        metavar="HOW|FILE",
    )
    microbatch_tokens: int | None = setting(None, "Most tokens in a planned microbatch.", DATA, is_rare=True)
    batch: int = setting(16, "Samples per step, or as many tokens of whole documents.", DATA, is_common=True)
    lr: float = setting(4e-3, "Peak learning rate; another by default for some models.", TRAINING, is_common=True)
    lr_decay: str = setting("cosine", "How the learning rate goes on: cosine or constant.", TRAINING, is_rare=True)
    lr_warmup: int = setting(30, "Steps in which the learning rate rises to its peak.", TRAINING, is_rare=True)
    optimizer: str = setting(
        "AdamW",
        "A class of torch.optim (AdamW: betas 0.9, 0.95, weight_decay 0.1), or muon, with AdamW for the rest.",
        TRAINING,
    )
    optimizer_options: Mapping[str, Any] = setting(
        {}, "Options of the optimizer other than lr, as JSON.", TRAINING, metavar="JSON", is_rare=True
    )
    clip: float = setting(1.0, "Largest norm of the gradient; 0 for no clipping.", TRAINING)
    precision: str = setting(
        "float32",
        "Type of numbers: float32; or bfloat16 or float16, which is autocast with float32 weights.",
        TRAINING,
        is_common=True,
    )
    recompute: bool = setting(
        False, "Let forwards run again, so that blocks keep only their input until their backward.", TRAINING
    )
    seed: int = setting(0, "Seed of random numbers: weights, data order and dropout.", TRAINING, is_common=True)
    evaluate_every: int = setting(100, "Steps between evaluations; 0 evaluates only at the end.", RUN)
    save_every: int = setting(100, "Steps between checkpoints; 0 saves only at the end.", RUN)
    keep: int = setting(2, "How many checkpoints to keep.", RUN, is_rare=True)
    threads: int | None = setting(
        None, "Threads per rank; sums can depend on them. [OMP_NUM_THREADS, or its share of the cores]", MACHINE
    )
    sample: int = setting(160, "How many tokens of text the model writes at the end.", DATA)

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises SettingsError for a value out of range, for settings that exclude each other, and for words that
        can't be read.
        """
        counts = ("ranks", "dp", "tp", "microbatches", "steps", "batch", "keep", "threads", "window", "drain_every")
        amounts = ("max_mismatch", "lr_warmup", "evaluate_every", "save_every", "sample", "clip")
        least = dict.fromkeys((*counts, "microbatch_tokens"), 1) | dict.fromkeys(amounts, 0)
        check_numbers(self, least=least, above_zero=("timeout", "lr"))
        check_choices(
            self,
            {
                "dispatch": (*map(str, Dispatch), "auto"),
                "lr_decay": ("cosine", "constant"),
                "precision": ("float32", "bfloat16", "float16"),
                "device": ("cpu", "cuda"),
                "transport": ROUTES,
                "sharding": ("none", "copies", "zero1", "fsdp"),
            },
        )
        check_model(self.model)
        check_exclusions(self)
        check_windows(self)
        self._check_schedule_options()
        if self.store is not None and STORES.fullmatch(self.store) is None:
            from penstock.runtime.adapt.store import without_password  # here, for it imports torch

            raise SettingsError(f"store {without_password(self.store)!r}: write redis://HOST:PORT")
        _ = self.link_conditions(), self.host_units, lora_of(self)
        if self.batch < self.dp * self.microbatches:
            whole = self.dp * self.microbatches
            replicas = "" if self.dp == 1 else f" in each of {self.dp} replicas"
            raise SettingsError(
                f"a batch of {self.batch} can't be cut into {self.microbatches} microbatches{replicas}; "
                f"give a batch of at least {whole}, or fewer microbatches"
            )

    def _check_schedule_options(self) -> None:
        """Raises SettingsError for options of the schedule that have a setting of their own."""
        own = {"num_ranks": "ranks", "num_microbatches": "microbatches", "num_stages": "stages"}
        own |= {name: name for name in ("window", "max_mismatch", "rule")}
        if both := sorted(own.keys() & self.schedule_options):
            raise SettingsError(f"--option {both[0]}: give --{own[both[0]].replace('_', '-')}")

    @property
    def num_processes(self) -> int:
        """Of the whole mesh."""
        return self.ranks * self.dp * self.tp

    @property
    def num_local(self) -> int:
        """The processes of the mesh that run on this host."""
        launched = RankEnvironment.of(os.environ)
        return self.num_processes if launched is None else launched.num_local

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
        return max(1, num_cores() // self.num_local)

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

    def transport_options(self, links: Links | None = None) -> TransportOptions:
        """What carries messages, under these conditions of links. Imports torch.

        Single links of a run that adapts may use delegates where that is faster.
        """
        from penstock.runtime.transport.choose import DelegateOptions, TransportOptions

        delegates = DelegateOptions() if self.transport == "delegate" or self.adapt else None
        return TransportOptions(self.transport, delegates, links=links)

    def injected(self) -> list[str]:
        """What is injected into the links, in words. The simulation applies the same from its time 0 on."""
        conditions = self.link_conditions()
        return [] if conditions is None else [f"link {text} was injected" for text in conditions.texts()]

    @property
    def is_asynchronous(self) -> bool:
        """Whether the schedule has its updates among the other ops."""
        return self.window is not None

    @property
    def passes(self) -> Passes:
        """How steps form windows and passes. Without updates in the schedule, each step is a window and a pass."""
        return Passes(self.microbatches, self.drain_every or 1, self.window or self.microbatches)

    def replica_schedule(self, num_replicas: int = 1) -> Schedule:
        """The schedule of a pass, checked, for the microbatches of so many replicas. Raises ScheduleError."""
        count = self.passes.num_microbatches * num_replicas
        window = self.passes.window_in_pass if self.is_asynchronous else None
        updates = window, self.max_mismatch, self.rule
        return read_schedule(self.schedule, self.ranks, count, self.stages, *updates, self.schedule_options)

    def to_json(self) -> str:
        """Everything except the store's password, which must be given again to resume the run."""
        from penstock.runtime.adapt.store import without_password  # here, for settings are read before torch is

        values = dataclasses.asdict(self)
        if self.store is not None:
            values["store"] = without_password(self.store)
        return json.dumps(values, indent=2)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], where: str = "") -> Self:
        """Reads settings. Errors begin with `where`. Raises SettingsError for unknown names and wrong types."""
        values = check_known(cls, values, where)
        try:
            return cls(**values)
        except SettingsError as error:
            raise SettingsError(f"{where}{error}") from None


def read_settings(path: Path) -> dict[str, Any]:
    """The saved settings of a run. Raises SettingsError if there are none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise SettingsError(
            f"{path.parent} is no run: it has no {path.name}; give the folder of a run, or begin one there with --out"
        ) from None
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
        raise SettingsError(str(error).replace("untie them", "give --set tied=false")) from None


def check_precision(precision: str, schedule: Schedule) -> None:
    """Raises SettingsError for a precision in which a schedule does not train."""
    if precision == "float16" and schedule.updates is not None:
        raise SettingsError(
            f"{schedule.name} updates each stage by itself, and --precision float16 leaves an update out in all "
            "stages where the gradient of one overflows; give --precision bfloat16"
        )


def mesh_words(settings: Settings) -> str:
    """`4 ranks`, or `2 ranks x 2 replicas x 2 shards`."""
    parts = [f"{settings.ranks} rank{'s' * (settings.ranks > 1)}"]
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
