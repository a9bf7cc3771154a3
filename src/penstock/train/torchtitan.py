"""A TOML file of TorchTitan's as options of `penstock train`.

    [parallelism]                                         --ranks 4
    pipeline_parallel_degree = 4                          --schedule zb-v
    pipeline_parallel_schedule = "ZBVZeroBubble"    ->    --batch 8
    [training]                                            --microbatches 8
    local_batch_size = 8                                  ...

What a file leaves out has TorchTitan's default. An unknown key that may change a number, or the number of devices, is
refused by its name. Other unknown keys are named and ignored. An option on the command line overrides the file, so it
also settles what can't be taken over.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from penstock.library.registry import TORCH_NAMES
from penstock.rank_environment import RankEnvironment
from penstock.train.checks import SettingsError
from penstock.train.own_file import is_own

CONSTANT, FULL = "constant", "full"
SECTIONS_ASIDE = ("job", "profiling", "metrics", "comm", "compile", "float8", "mx", "quantize", "memory_estimation")
"""Sections that change no number. That of float8 is for a converter, which is refused."""
ASIDE = {
    "parallelism": (
        "fsdp_reshard_after_forward", "enable_async_tensor_parallel", "disable_loss_parallel",
        "context_parallel_rotate_method", "enable_compiled_autograd", "pipeline_parallel_first_stage_less_layers",
        "pipeline_parallel_last_stage_less_layers",
    ),
    "training": ("gc_freq", "gc_debug", "deterministic", "enable_cpu_offload", "mixed_precision_reduce", "compile"),
    "model": ("name", "flavor", "hf_assets_path", "tokenizer_path", "tokenizer_type", "print_after_conversion"),
    "optimizer": ("implementation",),
    "checkpoint": (
        "folder", "last_save_model_only", "last_save_in_hf", "export_dtype", "async_mode", "keep_latest_k",
        "load_step", "exclude_from_loading", "create_seed_checkpoint", "enable_first_step_checkpoint",
        "initial_load_model_only",
    ),
    "activation_checkpoint": (
        "selective_ac_option", "per_op_sac_force_recompute_mm_shapes_by_fqns", "early_stop", "memory_budget",
    ),
    "debug": ("print_config",),
}  # fmt: skip
"""Other keys that change no number: here the cut follows from costs, and checkpoints have a format of their own."""
OFF: dict[str, dict[str, Any]] = {
    "parallelism": {
        "context_parallel_degree": 1, "expert_parallel_degree": 1, "expert_tensor_parallel_degree": 1,
        "pipeline_parallel_expert_parallel_overlap": False,
    },
    "model": {"converters": []},
    "optimizer": {"early_step_in_backward": False},
    "experimental": {"custom_import": "", "custom_args_module": ""},
    "debug": {"deterministic": False},
}  # fmt: skip
"""Features that we lack, with the values that do not ask for them."""
SWITCHED = ("validation", "fault_tolerance")
"""Sections of features that we lack. They matter only if they are enabled."""


class TorchTitanConfig(NamedTuple):
    """What a file says.

    Attributes:
        options: of `penstock train`, by the names of its parameters.
        aside: names in the file that were left aside.
    """

    options: dict[str, Any]
    aside: list[str]

    def line(self) -> str:
        """The options as one would type them."""
        words = []
        for name, value in self.options.items():
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        return shlex.join(words)


def titan_options(path: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a file. The first process of a machine prints them. See `read_titan`."""
    if given.get("device") == "emulated":
        raise SettingsError("--torchtitan is for training; emulated devices learn nothing, so leave it out")
    titan = read_titan(path, given)
    environment = RankEnvironment.of(os.environ)
    if environment is None or environment.local_rank == 0:
        print(f"{path} says {titan.line()}", file=sys.stderr)
        if titan.aside:
            print(f"{path}: left aside {', '.join(titan.aside)}", file=sys.stderr, flush=True)
    return titan.options


def read_titan(path: str, given: Mapping[str, Any]) -> TorchTitanConfig:
    """Reads a file for a run with some options given at the prompt.

    Args:
        given: by the names of the parameters of `penstock train`; what they say is not asked of the file.

    Raises:
        SettingsError: a file that can't be read, and everything in it that can't be taken over, each by its name.

    Examples:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp(), "job.toml")
        >>> _ = file.write_text('''[parallelism]
        ... pipeline_parallel_degree = 4
        ... pipeline_parallel_schedule = "ZBVZeroBubble"''')
        >>> given = {"preset": "nano", "data": "text.txt", "dp": 1, "lr_decay": "constant"}
        >>> read_titan(str(file), given).options["schedule"]
        'zb-v'
    """
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"--torchtitan {path} can't be read: {error}") from None
    reading = _ConfigReader(content, {("ranks" if name == "pp" else name) for name in given})
    _read_mesh(reading)
    _read_batch(reading, given)
    _read_training(reading, given)
    problems = [*reading.problems, *reading.unknown()]
    if problems:
        raise SettingsError(
            f"--torchtitan {path} cannot be taken over as it is, with what is given beside it:\n  "
            + "\n  ".join(problems)
        )
    return TorchTitanConfig(reading.options, reading.aside)


class _ConfigReader:
    """What has been read from a file, and what prevents taking it over."""

    def __init__(self, content: Mapping[str, Any], given: set[str]) -> None:
        self.content, self.given = content, given
        self.options: dict[str, Any] = {}
        self.problems: list[str] = []
        self.aside: list[str] = []
        self._read: set[tuple[str, str]] = set()

    def get(self, section: str, *names: str, default: Any) -> Any:
        """The value under one of the names that a key has had, of the same type as the default."""
        value = default
        table = self.content.get(section, {})
        for name in names:
            self._read.add((section, name))
            if isinstance(table, Mapping) and name in table:
                value = table[name]
                kinds = (int, float) if isinstance(default, float) else (type(default),)
                if not isinstance(value, kinds) or (isinstance(value, bool) and not isinstance(default, bool)):
                    self.refuse(section, name, value, f"give it as TorchTitan has it, like {json.dumps(default)}")
                    value = default
        return value

    def has(self, section: str, name: str) -> bool:
        return isinstance(self.content.get(section), Mapping) and name in self.content[section]

    def set(self, option: str, value: Any) -> None:
        """Sets an option, unless the command line sets it."""
        if option not in self.given:
            self.options[option] = value

    def refuse(self, section: str, name: str, value: Any, why: str) -> None:
        self.problems.append(_problem(section, name, value, why))

    def unknown(self) -> list[str]:
        """Handles what has not been read: refuses it if it may change a number, otherwise notes that it is
        ignored.
        """
        found = []
        for section, table in self.content.items():
            if section in SECTIONS_ASIDE:
                self.aside.append(section)
                continue
            if not isinstance(table, Mapping):
                found.append(f"{section}: no section of TorchTitan's; take it out")
                continue
            if section in SWITCHED:
                on = [name for name in ("enable", "enabled") if table.get(name)]
                self.aside += [] if on else [section]
                found += [f"{section}.{name} = true: there is none here; take it out" for name in on]
                continue
            for name, value in table.items():
                if (section, name) in self._read or name in ASIDE.get(section, ()):
                    self.aside += [] if (section, name) in self._read else [f"{section}.{name}"]
                elif name in OFF.get(section, {}):
                    off = OFF[section][name]
                    if value not in (off, None, ""):
                        found.append(_problem(section, name, value, f"not there; only {json.dumps(off)} is"))
                else:
                    why = "not known here, and it may change a number; take it out"
                    found.append(_problem(section, name, value, why))
        return found


def _problem(section: str, name: str, value: Any, why: str) -> str:
    return f"{section}.{name} = {json.dumps(value, default=str)}: {why}"


def _read_mesh(reading: _ConfigReader) -> None:
    """Ranks, replicas, shards and the schedule."""
    get = reading.get
    ranks = get("parallelism", "pipeline_parallel_degree", "pipeline_parallel_size", default=1)
    tp = get("parallelism", "tensor_parallel_degree", "tensor_parallel_size", default=1)
    replicas = get("parallelism", "data_parallel_replicate_degree", default=1)
    shards = get("parallelism", "data_parallel_shard_degree", default=-1)
    reading.set("ranks", ranks)
    if tp > 1:
        reading.set("tp", tp)
    if "dp" not in reading.given:
        environment = RankEnvironment.of(os.environ)
        if shards < 0 and environment is not None:
            shards = max(1, environment.num_ranks // max(1, ranks * tp * replicas))
        if shards < 0:
            reading.refuse(
                "parallelism",
                "data_parallel_shard_degree",
                -1,
                "all processes that are left, which no file says; give --dp",
            )
        elif shards > 1 and replicas > 1:
            reading.refuse(
                "parallelism", "data_parallel_shard_degree", shards,
                f"with {replicas} replicas of the shards; give --dp and --sharding",
            )  # fmt: skip
        elif max(shards, replicas) > 1:
            reading.set("dp", max(shards, replicas))
            reading.set("sharding", "fsdp" if shards > 1 else "copies")
    csv = get("parallelism", "pipeline_parallel_schedule_csv", default="")
    name = get("parallelism", "pipeline_parallel_schedule", default="1F1B")
    layers = get("parallelism", "pipeline_parallel_layers_per_stage", default=0)
    for key in ("module_fqns_per_model_part", "pipeline_parallel_split_points"):
        if get("parallelism", key, default=[]) and "cut" not in reading.given:
            value = reading.content["parallelism"][key]
            reading.refuse("parallelism", key, value, "these are names in TorchTitan's model; give --cut")
    if ranks == 1 or "schedule" in reading.given:
        return
    if csv:
        reading.set("schedule", csv)
        return
    ours = TORCH_NAMES.get(name.lower().removeprefix("schedule"))
    if ours is None or " " in ours:
        why = (
            "torch has no such schedule" if ours is None else f"it is {ours} here; give --schedule with a file of it"
        )
        reading.refuse("parallelism", "pipeline_parallel_schedule", name, why)
        return
    reading.set("schedule", ours)
    if ours in ("interleaved-1f1b", "looped-bfs"):
        if layers and "stages" not in reading.given:
            why = "how many stages that makes depends on the model; give --stages"
            reading.refuse("parallelism", "pipeline_parallel_layers_per_stage", layers, why)
        else:
            reading.set("stages", 2 * ranks)


def _read_batch(reading: _ConfigReader, given: Mapping[str, Any]) -> None:
    """A batch of all replicas, and its microbatches in each of them."""
    get = reading.get
    local = get("training", "local_batch_size", "batch_size", default=8)
    whole = get("training", "global_batch_size", default=-1)
    each = get("parallelism", "pipeline_parallel_microbatch_size", default=1)
    num = get("parallelism", "num_pp_microbatches", default=0)
    if reading.problems:
        return
    dp = given.get("dp") or reading.options.get("dp", 1)
    ranks = given.get("pp") or given.get("ranks") or reading.options.get("ranks", 1)
    batch = whole if whole > 0 else local * dp
    if ranks == 1:
        each = local  # which TorchTitan does not cut without a pipeline
    elif num:
        each = local // num if local % num == 0 else 0
    if min(each, local, dp) < 1 or batch % (dp * local) or local % each:
        if not {"batch", "microbatches"} <= reading.given:
            reading.problems.append(
                f"training: a batch of {batch} samples over {dp} replicas, {local} at a time in microbatches of "
                f"{each}, does not divide; give --batch and --microbatches"
            )
        return
    reading.set("batch", batch)
    reading.set("microbatches", batch // (dp * each))


def _read_training(reading: _ConfigReader, given: Mapping[str, Any]) -> None:
    """Model and data, which the command line gives; steps, rates, clipping, precision and checkpoints."""
    get = reading.get
    if not {"model", "preset"} & reading.given:
        name = reading.content.get("model", {}).get("name", "llama3")
        reading.refuse("model", "name", name, "a model of TorchTitan's own; give --model or --preset")
    dataset = get("training", "dataset", default="c4_test")
    get("training", "dataset_path", default="")
    if "data" not in reading.given:
        reading.refuse("training", "dataset", dataset, "nothing is downloaded; give --data")
    steps = get("training", "steps", default=10000)
    length = get("training", "seq_len", default=2048)
    reading.set("steps", steps)
    if not is_own(given.get("data")):
        reading.set("context", length)
    reading.set("clip", float(get("training", "max_norm", default=1.0)))
    precision = get("training", "mixed_precision_param", default="")
    if precision:
        reading.set("precision", precision)
    dtype = get("training", "dtype", default="float32")
    if dtype != "float32":
        reading.refuse("training", "dtype", dtype, "weights are float32 here")
    for section in ("training", "debug"):
        if reading.has(section, "seed"):
            reading.set("seed", get(section, "seed", default=0))
    _read_optimizer(reading, steps)
    enabled = get("checkpoint", "enable", "enable_checkpoint", default=False)
    interval = get("checkpoint", "interval", default=500)
    if enabled:
        reading.set("save_every", interval)
    for name in ("initial_load_path", "initial_load_in_hf"):
        if (value := get("checkpoint", name, default=False if name.endswith("hf") else "")) and "model" not in given:
            reading.refuse("checkpoint", name, value, "weights are those of a Hugging Face folder; give --model")
    if get("activation_checkpoint", "mode", default="none") == FULL:
        reading.set("recompute", True)
    elif reading.has("activation_checkpoint", "mode"):
        reading.aside.append("activation_checkpoint.mode")


def _read_optimizer(reading: _ConfigReader, steps: int) -> None:
    get = reading.get
    reading.set("optimizer", get("optimizer", "name", default="AdamW"))
    reading.set("lr", float(get("optimizer", "lr", default=8e-4)))
    betas = [float(get("optimizer", name, default=value)) for name, value in (("beta1", 0.9), ("beta2", 0.95))]
    rest = {name: float(get("optimizer", name, default=v)) for name, v in (("eps", 1e-8), ("weight_decay", 0.1))}
    if "optimizer" not in reading.given:
        reading.set("optimizer_options", json.dumps({"betas": betas, **rest}))
    reading.set("lr_warmup", min(steps, get("lr_scheduler", "warmup_steps", default=200)))
    ratio = get("lr_scheduler", "decay_ratio", default=-1.0)
    kind = get("lr_scheduler", "decay_type", default="linear")
    least = get("lr_scheduler", "min_lr_factor", "lr_min", default=0.0)
    if ratio == 0 or least == 1:
        reading.set("lr_decay", CONSTANT)
    elif "lr_decay" not in reading.given:
        why = "here the rate falls along a cosine to a tenth of its peak, or stays; give --lr-decay"
        reading.refuse("lr_scheduler", "decay_type", kind, why)
