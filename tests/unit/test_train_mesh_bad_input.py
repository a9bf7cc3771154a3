"""What a person can get wrong about meshes, models and towers: told before any process starts, in a line or two."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.cli import main
from penstock.models import clip_presets
from penstock.runtime import launch
from penstock.train.tasks.clip import Tower, schedule_of_towers
from train_runs import error_in

pytestmark = pytest.mark.unit

SIZES = "--preset nano --depth 4 --width 16 --heads 2 --context 16"
RUN = "--batch 16 --microbatches 4 --steps 1 --evaluate-every 0 --sample 0"

BAD: dict[str, tuple[str, list[str]]] = {
    "heads": (f"{SIZES} --pp 1 --tp 3", ["--tp 3", "2 heads", "divides them (1, 2)"]),
    "heads of a BERT": (f"--model bert {SIZES} --tp 4", ["--tp 4", "a BERT", "2 heads"]),
    "heads of a tower": ("--model clip --tp 4", ["--tp 4", "a tower", "2 heads"]),
    "heads of a decoder": ("--model llama --tp 4", ["--tp 4", "a llama", "2 key and value heads"]),
    "words": (f"{SIZES} --heads 4 --tp 4 --tokenizer three.json --data text.txt", ["vocabulary of 3", "4 ranks"]),
    "words of stages that are shared": (
        f"{SIZES} --schedule mllm --ranks 4 --tokenizer three.json --data text.txt",
        ["vocabulary of 3, smaller than the 4 ranks"],
    ),
    "no replica": ("--dp 0", ["dp is 0", "at least 1"]),
    "no shard": ("--tp 0", ["tp is 0", "at least 1"]),
    "a batch too small": (
        "--dp 8 --batch 16",
        ["batch of 16", "4 microbatches in each of 8 replicas", "at least 32"],
    ),
    "sharding": ("--dp 2 --sharding zero3", ["no sharding 'zero3'", "none, copies, zero1 or fsdp"]),
    "sharding without replicas": ("--sharding fsdp", ["--sharding fsdp", "there is one", "add --dp"]),
    "asynchronous replicas in one process": ("--schedule vnag --dp 2 --in-process", ["or --in-process out"]),
    "adapting in one process": ("--adapt --dp 2 --in-process", ["between processes", "or --in-process out"]),
    "a link of nodes that are not there": ("--pp 2 --dp 2 --link 3:4=latency:1ms", ["--link", "link 3:4", "0 to 3"]),
    "shards in one process": ("--tp 2 --in-process", ["--tp 2", "or --in-process out"]),
    "sharding in one process": ("--dp 2 --sharding zero1 --in-process", ["--sharding zero1", "processes"]),
    "a file in one process": ("--dp 2 --schedule four.json --in-process", ["four.json", "or --in-process out"]),
    "a model that is none": ("--model gptt", ["no model 'gptt'", "did you mean gpt?", "bert, clip", "config.json"]),
    "a path that is none": ("--model nowhere/model", ["nowhere/model", "there is no config.json"]),
    "a model of the hub by its name": ("--model microsoft/phi", ["Nothing is downloaded", "save_pretrained(FOLDER)"]),
    "weights in a pickled file alone": (
        "--model pickled",
        ["pickled holds weights in pytorch_model.bin alone", "only safetensors", "pickled/config.json"],
    ),
    "adapters for layers that are not there": (
        """--model llama --lora '{"target_modules": ["qkv_proj"]}'""",
        ["'qkv_proj'", "not found", "all-linear"],
    ),
    "an unknown architecture": (
        "--model unknown",
        [
            "transformers knows no such model",
            "frobnicator",
            "looked for",
            "one module per stage and give ps.Pipeline",
        ],
    ),
    "an encoder with a decoder": ("--model t5", ["t5", "looked for", "one module per stage"]),
    "a config that is no JSON": ("--model broken/config.json", ["broken/config.json", "can't be read"]),
    "a config that is a list": ("--model listed", ["listed/config.json", "no JSON object"]),
    "a decoder's sizes": ("--model llama --width 8", ["--width 8", "config", "leave --width out"]),
    "a decoder's context": ("--model llama --context 100", ["--context 100", "takes 64 tokens"]),
    "a decoder's vocabulary": ("--model small", ["tokenizer bytes has 256", "vocabulary of 200"]),
    "more stages than a decoder has layers": ("--model llama --ranks 8", ["8 stages", "4 layers"]),
    "a branch without the loss": ("--schedule two-ends.json", ["stages 1, 3 feed no other stage", "lead every"]),
    "a branch of a tower without the loss": (
        "--model clip --schedule two-ends.json",
        ["stages 1, 3 feed no other stage", "lead every branch"],
    ),
    "branches for a chain": ("--schedule towers.json", ["the stages of towers branch", "--model clip"]),
    "towers of another model": ("--model clip --schedule towers.json", ["3 towers", "branch"]),
    "a chain for towers": ("--model clip --schedule four.json", ["begins with stage 0", "3 towers", "contrast"]),
    "a chain's schedule": ("--model clip --schedule zb-v", ["--schedule zb-v", "mixed, 1f1b"]),
    "a batch that towers cut apart": (
        "--model clip --microbatches 4 --batch 20 --dp 2 --schedule uneven.json",
        ["batch of 20", "text 4", "each of 2 replicas", "multiple of 8"],
    ),
    "more ranks than towers have layers": ("--model clip --pp 13", ["12 layers in all", "13 ranks", "--ranks 12"]),
    "an option that there is not": ("--model clip --tower text=ranks:2", ["No such option: --tower"]),
    "stages of towers": ("--model clip --stages 8", ["--stages 8", "each tower has its own", "schedule file"]),
    "text for towers": ("--model clip --data text.txt", ["--data", "generated", "leave --data out"]),
    "a preset of another model": ("--model bert --preset small", ["no preset of bert", "nano"]),
    "a context too short": ("--model bert --context 4", ["context 4", "at least 5"]),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, schedule files, and the configs of models."""
    folder = tmp_path_factory.mktemp("mesh")
    (folder / "text.txt").write_text("a b a b b a " * 400)
    words = {"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "added_tokens": []}
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "[UNK]": 2}, "unk_token": "[UNK]"}
    (folder / "three.json").write_text(json.dumps({**words, "model": model}))
    ps.save(ps.build("1f1b", 4, 4), folder / "four.json")
    one = ps.Branch(ps.placements.one_to_one(2), 4)
    ends = ps.Program.of_branches({"left": one, "right": one})
    ps.save(ends.build(), folder / "two-ends.json")
    feeding = {name: ps.Branch(ps.placements.one_to_one(1), 4, feeds=("loss",)) for name in ("left", "right")}
    towers = {**feeding, "loss": ps.Branch(ps.placements.one_to_one(2), 4)}
    ps.save(ps.Program.of_branches(towers, name="towers").build(), folder / "towers.json")
    counts = {"audio": 2, "text": 4, "video": 2}
    uneven = {name: Tower((rank,), 1, count, "1f1b") for rank, (name, count) in enumerate(counts.items())}
    ps.save(schedule_of_towers(clip_presets["nano"], uneven, 2, "uneven"), folder / "uneven.json")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300}
    llama = {**sizes, "model_type": "llama", "num_key_value_heads": 2, "intermediate_size": 64}
    configs: dict[str, Any] = {
        "llama": {**llama, "max_position_embeddings": 64},
        "small": {**llama, "max_position_embeddings": 64, "vocab_size": 200},
        "t5": {"model_type": "t5", "d_model": 32, "num_layers": 2, "d_ff": 64, "num_heads": 4, "vocab_size": 300},
        "unknown": {**sizes, "model_type": "frobnicator"},
        "listed": [1],
    }
    for name, config in configs.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    (folder / "pickled").mkdir()
    (folder / "pickled/config.json").write_text(json.dumps(configs["llama"]))
    (folder / "pickled/pytorch_model.bin").write_bytes(b"weights")
    (folder / "broken").mkdir()
    (folder / "broken/config.json").write_text("{")
    return folder


Tell = Callable[[str], list[str]]


@pytest.fixture
def tell(place: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> Tell:
    """Runs `penstock train` with a mistake, and again with --json; the lines it says. No process may start."""
    monkeypatch.chdir(place)
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    def started(*_: Any, **__: Any) -> int:
        raise AssertionError("processes were started")

    monkeypatch.setattr(launch, "launch", started)
    monkeypatch.setattr("penstock.train.start.launch", started)

    def call(line: str) -> list[str]:
        before = sorted(place.rglob("*"))
        arguments = ["train", *shlex.split(f"{RUN} {line}")]
        code = main(arguments)
        out, err = capfd.readouterr()
        assert (code in (1, 2), out) == (True, ""), err
        lines: list[str] = error_in(err).removeprefix("penstock: ").splitlines()
        assert main([*arguments, "--json"]) == code
        out, err = capfd.readouterr()
        assert err == ""
        assert list(json.loads(out)) == ["error"]
        assert json.loads(out)["error"]["message"].splitlines() == lines
        assert "bug in penstock" not in out
        assert sorted(place.rglob("*")) == before
        return lines

    return call


@pytest.mark.slow
@pytest.mark.parametrize(("options", "words"), BAD.values(), ids=BAD.keys())
def test_a_mistake_is_told(tell: Tell, options: str, words: list[str]) -> None:
    lines = tell(options)
    assert len(lines) <= 2, lines
    for word in words:
        assert word in "\n".join(lines), lines


WORLDS: dict[str, tuple[int, str, list[str]]] = {
    "not a multiple": (6, "--dp 4", ["dp 4 x tp 1 is 4", "6 processes were started"]),
    "another product": (8, "--pp 2 --dp 2 --tp 1", ["pp 2 x dp 2 x tp 1 is 4", "8 processes", "start 4"]),
    "too few": (2, "--ranks 4", ["pp 4 x dp 1 x tp 1 is 4", "2 processes"]),
}


@pytest.mark.slow
@pytest.mark.parametrize(("world", "options", "words"), WORLDS.values(), ids=WORLDS.keys())
def test_sizes_that_do_not_multiply_to_the_world(
    tell: Tell, monkeypatch: pytest.MonkeyPatch, world: int, options: str, words: list[str]
) -> None:
    for name, value in {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WORLD_SIZE", str(world))
    (line,) = tell(options)
    for word in words:
        assert word in line


def test_without_transformers(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    (line,) = tell("--model llama")
    assert "llama: transformers is not installed" in line
    assert line.endswith("in a checkout of Penstock, run: python -m pip install '.[hf]'")


def test_emulated_devices_have_no_replicas(capfd: Any) -> None:
    assert main(["train", "--device", "emulated", "--dp", "2"]) == 2
    assert "penstock emulate runs a schedule on emulated devices" in capfd.readouterr().err
