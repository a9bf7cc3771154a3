"""What a training run is asked to do. One flat value, the same on every rank, written into the run's folder."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.cost import Costs, Links
from penstock.planning.threads import num_cores
from penstock.schedule import Schedule
from penstock.train.checks import SettingsError, read_links
from penstock.train.kinds import check_lora, check_model, check_own
from penstock.train.mesh_sizes import check_mesh
from penstock.train.own_file import is_own
from penstock.train.packing import WINDOWS, check_packing, is_record, usual_packing
from penstock.train.run_settings import ROUTES, RunSettings, host_memory_of


@dataclass(frozen=True)
class Settings(RunSettings):
    """Settings of a run; every field has a value that works.

    Attributes:
        dp, tp: replicas of the pipeline, and processes that share each layer; ranks * dp * tp processes in all.
        sharding: "none", "copies", "zero1" or "fsdp".
        cut: how many layers each stage holds; None for stages of about equal cost.
        model: "gpt", "bert", "clip", "captioner", the path of a Hugging Face folder or config.json, or
            "FILE.py:NAME".
        model_options: arguments of a model of the user's own.
        lora: adapters that are trained in place of a Hugging Face model's weights: arguments of peft's LoraConfig as
            JSON, or a folder with a saved adapter; None for none.
        preset: sizes of the model (see `penstock.models`); depth, width, heads, context, dropout and tied change
            single ones of them.
        towers: for a model of several towers, options of single towers, see `TowerOptions`; None for none.
        data: None for the standard library's text, or a file, folder, .jsonl or .bin/.idx pair; "FILE.py:NAME" for
            the user's own batches.
        tokenizer: a `tokenizers` JSON file, or None for bytes.
        packing: "windows" of the text; whole documents, several in a microbatch, as they come ("arrival") or planned
            for the schedule ("planned"); or the batches.jsonl of a run, whose batches are used again. None for
            windows, or planned for a captioner.
        length_costs: the costs that plans use: "sizes" of the model, "measured" in the run's first steps, or a file.
        microbatch_tokens: most tokens of a planned microbatch; None for no limit of its own.
        batch: samples per step; with whole documents, as many tokens as so many samples have.
        lr: the peak of a warm-up and cosine decay, or constant.
        optimizer: a class of torch.optim by name, or "muon" (`runtime.MuonAdamW`); optimizer_options are its
            arguments besides lr.
        clip: the largest norm of the gradient; 0 for no clipping. See `clip_norm` for asynchronous schedules.
        precision: "float32", or "bfloat16": autocast with float32 master weights.
        recompute: activation checkpointing of every block.
        evaluate_every, save_every: in steps; 0 for at the end only. keep: how many checkpoints are kept.
        device: "cpu" or "cuda".
        threads: of each rank; None for its share of the cores. A resumed run keeps them, since the last digits of a
            sum can depend on them.
        sample: tokens of text written at the end.
    """

    dp: int = 1
    tp: int = 1
    cut: tuple[int, ...] | None = None
    model: str = "gpt"
    model_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    lora: str | None = None
    preset: str = "tiny"
    towers: str | None = None
    depth: int | None = None
    width: int | None = None
    heads: int | None = None
    context: int | None = None
    dropout: float | None = None
    tied: bool | None = None
    data: str | None = None
    tokenizer: str | None = None
    packing: str | None = None
    length_costs: str = "sizes"
    microbatch_tokens: int | None = None
    batch: int = 16
    lr: float = 4e-3
    lr_decay: str = "cosine"
    lr_warmup: int = 30
    optimizer: str = "AdamW"
    optimizer_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    clip: float = 1.0
    precision: str = "float32"
    recompute: bool = False
    seed: int = 0
    evaluate_every: int = 100
    save_every: int = 100
    keep: int = 2
    threads: int | None = None
    sample: int = 160

    def __post_init__(self) -> None:
        self.check_run(
            counts=("dp", "tp", "batch", "keep", "threads", "microbatch_tokens"),
            amounts=("lr_warmup", "evaluate_every", "save_every", "sample", "clip"),
            above_zero=("lr",),
            choices={
                "lr_decay": ("cosine", "constant"),
                "precision": ("float32", "bfloat16"),
                "device": ("cpu", "cuda"),
                "transport": ROUTES,
                "sharding": ("none", "copies", "zero1", "fsdp"),
            },
        )
        if self.packing is None:
            object.__setattr__(self, "packing", usual_packing(self.model))
        check_model(self.model, self.towers)
        check_own(self)
        check_lora(self)
        _ = self.host_units
        check_mesh(self)
        check_packing(self)
        if self.in_process and self.transport != "host":
            raise SettingsError(f"in one process nothing is sent; leave out --transport {self.transport}")
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
    def has_own_code(self) -> bool:
        return is_own(self.model) or is_own(self.data)

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
    except OSError:
        raise SettingsError(f"{path.parent} is no run: it has no {path.name}; give the folder of a run") from None
    except ValueError:
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
