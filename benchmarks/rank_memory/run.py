"""Peak resident memory of each of 4 processes that load their stage of a folder, or train a model, above importing.

    python benchmarks/rank_memory/run.py loading
    python benchmarks/rank_memory/run.py folder
    python benchmarks/rank_memory/run.py own
    python benchmarks/rank_memory/run.py allocator
    python benchmarks/rank_memory/run.py readme

The README beside says what is asked. Each case is added to the JSON file of its kind as it ends. A case that is there
is not run again. `readme` writes the tables.
"""

from __future__ import annotations

import functools
import importlib
import json
import multiprocessing
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common.readme import write_between
from experiments.common.record import commit
from experiments.common.results import known, save
from experiments.common.results import load as stored

HERE = Path(__file__).resolve().parent
NUM_RANKS = 4
SEED = 0
"""Of every checkpoint, and of the runs."""
AT_ONCE = 2
"""Processes of `loading` that run beside each other."""

FAMILIES = HERE.parent / "hf_families/families.json"
REFUSED = ("led",)
TIMES = {
    48: (
        "hidden_size", "intermediate_size", "n_embd", "moe_intermediate_size", "ffn_dim", "ffn_hidden_size",
        "word_embed_proj_dim", "q_lora_rank", "kv_lora_rank", "mamba_dt_rank", "d_model", "d_ff", "encoder_ffn_dim",
        "decoder_ffn_dim", "projection_dim",
    ),
    6: (
        "num_attention_heads", "num_key_value_heads", "n_head", "num_heads", "encoder_attention_heads",
        "decoder_attention_heads",
    ),
    8: ("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "d_kv"),
}  # fmt: skip
"""By how much numbers of a config grow: widths, heads, and the sizes of heads."""
GROWTH = {name: times for times, names in TIMES.items() for name in names}
DEEPER = 12
DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64}
SMALL = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 2048, "vocab_size": 1000}
LARGE = {"hidden_size": 1536, "num_attention_heads": 12, "intermediate_size": 4096, "vocab_size": 1000}
TINY = {"hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24, "vocab_size": 300}

NET = '''
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Net(nn.Module):
    """A transformer whose constructor initialises every layer once more at its end."""

    def __init__(self, depth=24, width=512, words=4000):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True) for _ in range(depth)
        )
        self.head = nn.Linear(width, words)
        self.apply(self.again)

    def again(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).transpose(1, 2)

loss_fn = nn.CrossEntropyLoss()

def make_data():
    tokens = torch.randint(0, 300, (64, 8), generator=torch.Generator().manual_seed(0))
    return TensorDataset(tokens, tokens.roll(1, 1))
'''
IMPORTED = """
import sys, torch
import penstock.train.run_job, penstock.train.tasks.own, penstock.train.tasks.huggingface
if sys.argv[1] == "folder":
    import transformers, transformers.models.llama.modeling_llama
torch.ones(2) @ torch.ones(2)
print(next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmRSS")))
"""
OPTIONS = "--ranks 4 --microbatches 4 --batch 4 --steps 2 --optimizer SGD --seed 0"
GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""For glibc: whatever has a MiB or more is mapped by itself, and is given back to the system when it is freed."""
STEPS = """
import json, resource, sys, torch
from net import Net, loss_fn
width, samples, tokens = map(int, sys.argv[1:])
model = Net(8, width)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
given = torch.randint(0, 4000, (samples, tokens), generator=torch.Generator().manual_seed(0))

def step():
    for _ in range(2):
        loss_fn(model(given), given).backward()
    optimizer.step()
    optimizer.zero_grad()

step()
before = resource.getrusage(resource.RUSAGE_SELF)
for _ in range(4):
    step()
after = resource.getrusage(resource.RUSAGE_SELF)
names = ("ru_utime", "ru_stime", "ru_minflt")
user, system, faults = ((getattr(after, name) - getattr(before, name)) / 4 for name in names)
print(json.dumps([user, system, faults, after.ru_maxrss * 1024]))
"""
ALLOCATED = {"few tokens": (1024, 1, 8), "many tokens": (256, 8, 256)}
"""Width, samples and tokens of a step of `Net` with 8 blocks, in one process."""
NO_FILE = "/proc"
"""A folder in which no file can be made, so that a model of one's own stays in memory whole."""


class Training(NamedTuple):
    """A run of `penstock train`.

    Attributes:
        model: sizes of a Llama that is saved to a folder, or arguments of `Net`.
        more: options besides `OPTIONS`. gives_back: whether freed memory is given back, see `GIVEN_BACK`.
    """

    kind: str
    model: dict[str, int]
    more: str = ""
    in_file: bool = True
    gives_back: bool = False


MANY_WORDS = {**LARGE, "num_hidden_layers": 12, "vocab_size": 32000}
FOLDERS = {
    "tiny": Training("folder", {**TINY, "num_hidden_layers": 12}),
    "large": Training("folder", {**LARGE, "num_hidden_layers": 12}),
    "small": Training("folder", {**SMALL, "num_hidden_layers": 12}),
    "large, many words, cut by hand": Training("folder", MANY_WORDS, "--cut 3,4,4,3"),
    "large, many words": Training("folder", MANY_WORDS),
}
OWN = {
    "tiny": Training("own", {"depth": 24, "width": 16, "words": 300}),
    "large": Training("own", {"depth": 24, "width": 1024, "words": 4000}),
    "large, once more": Training("own", {"depth": 24, "width": 1024, "words": 4000}),
    "large, freed memory given back": Training("own", {"depth": 24, "width": 1024, "words": 4000}, gives_back=True),
    "small": Training("own", {"depth": 24, "width": 512, "words": 4000}),
    "small, in memory": Training("own", {"depth": 24, "width": 512, "words": 4000}, in_file=False),
}


def wider(config: Any) -> Any:
    """A config of the list with widths that give a checkpoint of some hundred megabytes."""
    if not isinstance(config, dict):
        return config
    return {
        key: value * GROWTH[key] if key in GROWTH else DEEPER if key in DEPTHS else wider(value)
        for key, value in config.items()
    }


def saved(config: dict[str, Any], folder: Path, dtype: str = "float32") -> tuple[int, list[str]]:
    """Saves a model of a config; its bytes, and the modules of transformers that it needs."""
    import torch
    import transformers

    torch.manual_seed(SEED)
    model = getattr(transformers, config["architectures"][0])(transformers.AutoConfig.for_model(**config))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    modules = sorted(name for name in sys.modules if name.startswith("transformers.models."))
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")), modules


def python(code: str, *arguments: str) -> str:
    """The last line that a process prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], check=True, env=ENV, capture_output=True, text=True
    )
    return done.stdout.splitlines()[-1]


ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


def field(name: str) -> int:
    """Bytes of this process, as the system counts them."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def build(folder: str, rank: int) -> dict[str, int]:
    """In a process of its own, which was forked from one that had imported: builds a stage."""
    from penstock.models.huggingface import Decoder

    start, mapped = field("VmRSS"), field("RssFile")
    Path("/proc/self/clear_refs").write_text("5")
    decoder = Decoder(folder)
    compared = field("VmHWM") - start
    stage: Any = decoder.stages(NUM_RANKS)[rank]()
    own = sum({id(p): p.nbytes for p in stage.parameters()}.values())
    libraries = field("RssFile") - mapped
    return {"start": start, "compared": compared, "peak": field("VmHWM") - start, "own": own, "libraries": libraries}


def load(name: str) -> dict[str, Any]:
    """A family's four stages, each built in a process of its own."""
    if name.startswith("llama, large"):
        config: dict[str, Any] = {**LLAMA, **LARGE, "num_hidden_layers": 12}
    else:
        config = wider(json.loads(FAMILIES.read_text(encoding="utf-8"))[name])
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        with fork.Pool(1) as one:
            size, modules = one.apply(saved, (config, Path(folder), "bfloat16" if "bfloat16" in name else "float32"))
        for module in modules:
            importlib.import_module(module)
        with fork.Pool(AT_ONCE, maxtasksperchild=1) as ranks:
            found = ranks.starmap(build, [(folder, rank) for rank in range(NUM_RANKS)], chunksize=1)
    shares = {key: [row[key] / size for row in found] for key in ("own", "compared", "libraries", "peak")}
    return {"case": name, "bytes": size, **shares, "import_bytes": found[0]["start"]}


@functools.cache
def imported(kind: str) -> int:
    """What is resident in a process that has imported what a run imports."""
    return int(python(IMPORTED, kind))


def train(cases: Mapping[str, Training], name: str) -> dict[str, Any]:
    """A whole run of `penstock train`, with what importing takes."""
    case = cases[name]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if case.kind == "folder":
            with multiprocessing.get_context("fork").Pool(1) as one:
                size, _ = one.apply(saved, ({**LLAMA, **case.model}, folder / "model"))
            model = "--model model --context 32"
        else:
            (folder / "net.py").write_text(NET)
            model = (
                f"--model net.py:Net --data net.py:make_data --model-options {shlex.quote(json.dumps(case.model))}"
            )
        options = shlex.split(f"{model} {OPTIONS} {case.more}")
        command = [sys.executable, "-m", "penstock.train", *options, "--out", "run", "--json"]
        env = (ENV if case.in_file else {**ENV, "TMPDIR": NO_FILE}) | (GIVEN_BACK if case.gives_back else {})
        done = subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True, text=True)
        report = json.loads(done.stdout)
        lines = (folder / "run/metrics.jsonl").read_text().splitlines()
    if case.kind == "own":
        size = 4 * report["num_parameters"]
    return {
        "case": name,
        "bytes": size,
        "options": shlex.join(options),
        "peak": [(peak - imported(case.kind)) / size for peak in report["peak_memory"]],
        "peak_bytes": report["peak_memory"],
        "held": [(state["parameters"] + state["gradients"]) / size for state in report["state"]],
        "import_bytes": imported(case.kind),
        "losses": [json.loads(line)["loss"] for line in lines],
    }


def allocate(name: str) -> dict[str, Any]:
    """CPU seconds and page faults of a step and the peak of a process, with freed memory kept and given back, twice
    each in turns.
    """
    found: dict[str, list[Any]] = {"kept": [], "given back": []}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "net.py").write_text(NET)
        for _ in range(2):
            for key, more in (("kept", {}), ("given back", GIVEN_BACK)):
                command = [sys.executable, "-c", STEPS, *map(str, ALLOCATED[name])]
                done = subprocess.run(
                    command, cwd=folder, env={**ENV, **more}, check=True, capture_output=True, text=True
                )
                found[key].append(json.loads(done.stdout))
    return {"case": name, "columns": ["user_s", "system_s", "faults", "peak_bytes"], **found}


class Kind(NamedTuple):
    """What is measured, and of which cases."""

    measure: Callable[[str], dict[str, Any]]
    cases: Sequence[str]


def main(kind: str) -> None:
    families = [name for name in json.loads(FAMILIES.read_text(encoding="utf-8")) if name not in REFUSED]
    kinds = {
        "loading": Kind(load, [*families, "llama, large", "llama, large, stored in bfloat16"]),
        "folder": Kind(functools.partial(train, FOLDERS), list(FOLDERS)),
        "own": Kind(functools.partial(train, OWN), list(OWN)),
        "allocator": Kind(allocate, list(ALLOCATED)),
    }
    os.environ |= ENV  # before torch is imported, here once for all processes that are forked
    for module in ("penstock.train.run_job", "penstock.train.tasks.huggingface", "transformers"):
        importlib.import_module(module)
    rows = known(HERE, kind)
    for name in kinds[kind].cases:
        if any(row["case"] == name for row in rows):
            continue
        row = {**kinds[kind].measure(name), "commit": commit()}
        rows = sorted([*rows, row], key=lambda each: kinds[kind].cases.index(each["case"]))
        save(HERE, kind, rows, seeds=[SEED])
        print(table(kind, rows), flush=True)


def table(kind: str, rows: Sequence[dict[str, Any]]) -> str:
    """The table of the README."""
    if kind == "allocator":
        return allocator_table(rows)
    own = "own" if kind == "loading" else "held"
    lines = ["| | MB | own weights | peak above importing | highest |", "|---|---:|---|---|---:|"]
    if own == "held":
        lines = [
            "| | MB | weights and gradients | peak above importing | peak above tiny |",
            "|---|---:|---|---|---|",
        ]
    least = next((row["peak_bytes"] for row in rows if row["case"] == "tiny"), [])
    for row in rows:
        last = f"{max(row['peak']):.3f}"
        if own == "held":
            last = shares([(peak - base) / row["bytes"] for peak, base in zip(row["peak_bytes"], least, strict=True)])
        if row["case"] != "tiny":
            cells = (row["case"], f"{row['bytes'] / 1e6:,.0f}", shares(row[own]), shares(row["peak"]), last)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def allocator_table(rows: Sequence[dict[str, Any]]) -> str:
    """Means of both runs."""
    lines = ["| | freed memory | user s a step | system s a step | page faults a step | peak MB |"]
    lines.append("|---|---|---:|---:|---:|---:|")
    for row in rows:
        for key in ("kept", "given back"):
            user, system, faults, peak = (sum(values) / len(values) for values in zip(*row[key], strict=True))
            lines.append(f"| {row['case']} | {key} | {user:.2f} | {system:.2f} | {faults:,.0f} | {peak / 1e6:,.0f} |")
    return "\n".join(lines)


def shares(values: Sequence[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


def write_readme() -> None:
    """Puts the tables between the lines of the README that name them."""
    for kind in ("loading", "folder", "own", "allocator"):
        write_between(HERE / "README.md", kind, table(kind, stored(HERE, kind)))


if __name__ == "__main__":
    if sys.argv[1] == "readme":
        write_readme()
    else:
        main(sys.argv[1])
