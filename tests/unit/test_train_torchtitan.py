"""A TOML of TorchTitan's at the prompt: what it says, what stands before it, and what is refused by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from penstock.train.checks import SettingsError
from penstock.train.torchtitan import read_titan

pytestmark = pytest.mark.unit

BESIDE = {"preset": "nano", "data": "text.txt"}
JOB = """
[job]
description = "a pipeline"

[metrics]
log_freq = 1

[model]
name = "llama3"
flavor = "debugmodel"
converters = []

[optimizer]
name = "AdamW"
lr = 3e-4
eps = 1e-7

[lr_scheduler]
warmup_steps = 2
decay_ratio = 0.0

[training]
local_batch_size = 8
seq_len = 16
max_norm = 0.5
steps = 6

[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 1
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "ZBVZeroBubble"
pipeline_parallel_microbatch_size = 2

[checkpoint]
enable = true
interval = 3

[activation_checkpoint]
mode = "full"

[validation]
enable = false
freq = 5
"""


def job(tmp_path: Path, text: str) -> str:
    file = tmp_path / "job.toml"
    file.write_text(text)
    return str(file)


def refused(tmp_path: Path, text: str, **given: Any) -> str:
    with pytest.raises(SettingsError) as error:
        read_titan(job(tmp_path, text), {**BESIDE, "dp": 1, "lr_decay": "cosine", **given})
    return str(error.value)


def test_a_file_becomes_options(tmp_path: Path) -> None:
    titan = read_titan(job(tmp_path, JOB), BESIDE)
    assert titan.options == {
        "ranks": 2, "dp": 2, "sharding": "copies", "schedule": "zb-v", "batch": 16, "microbatches": 4, "steps": 6,
        "context": 16, "clip": 0.5, "optimizer": "AdamW", "lr": 3e-4, "lr_warmup": 2, "lr_decay": "constant",
        "optimizer_options": '{"betas": [0.9, 0.95], "eps": 1e-07, "weight_decay": 0.1}', "save_every": 3,
        "recompute": True,
    }  # fmt: skip
    assert titan.aside == ["job", "metrics", "model.name", "model.flavor", "validation"]
    assert titan.line().startswith("--ranks 2 --dp 2 --sharding copies --schedule zb-v --batch 16")


def test_an_option_at_the_prompt_stands_before_the_file(tmp_path: Path) -> None:
    given = {**BESIDE, "schedule": "1f1b", "dp": 1, "pp": 4, "lr_decay": "cosine", "optimizer": "SGD"}
    options = read_titan(job(tmp_path, JOB), given).options
    assert not {"schedule", "dp", "sharding", "ranks", "lr_decay", "optimizer", "optimizer_options"} & set(options)
    assert (options["batch"], options["microbatches"]) == (8, 4)


def test_what_a_file_leaves_out_is_as_torchtitan_has_it(tmp_path: Path) -> None:
    options = read_titan(job(tmp_path, ""), {**BESIDE, "dp": 1, "lr_decay": "cosine"}).options
    assert (options["steps"], options["context"], options["lr_warmup"], options["lr"]) == (10000, 2048, 200, 8e-4)
    assert (options["ranks"], options["batch"], options["microbatches"]) == (1, 8, 1)
    assert "schedule" not in options


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("1F1B", {"schedule": "1f1b"}), ("Interleaved1F1B", {"schedule": "interleaved-1f1b", "stages": 8})],
)
def test_schedules_by_their_names(theirs: str, ours: dict[str, Any], tmp_path: Path) -> None:
    text = f'[parallelism]\npipeline_parallel_degree = 4\npipeline_parallel_schedule = "{theirs}"'
    options = read_titan(job(tmp_path, text), {**BESIDE, "dp": 1, "lr_decay": "cosine"}).options
    assert {name: options.get(name) for name in ("schedule", "stages") if name in options} == ours


def test_the_processes_that_are_left_share_out_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = job(tmp_path, "[parallelism]\npipeline_parallel_degree = 2\ndata_parallel_shard_degree = -1")
    with pytest.raises(SettingsError, match=r"data_parallel_shard_degree = -1: .* give --dp"):
        read_titan(text, {**BESIDE, "lr_decay": "cosine"})
    for name, value in {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WORLD_SIZE", "8")
    options = read_titan(text, {**BESIDE, "lr_decay": "cosine"}).options
    assert (options["dp"], options["sharding"], options["batch"], options["microbatches"]) == (4, "fsdp", 32, 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[parallelism]\ncontext_parallel_degree = 2", "parallelism.context_parallel_degree = 2: not there"),
        ('[model]\nconverters = ["float8"]', 'model.converters = ["float8"]: not there'),
        ("[training]\nseq_lenght = 4", "training.seq_lenght = 4: not known here"),
        ("[parallelism]\npipeline_parallel_degree = true", "parallelism.pipeline_parallel_degree = true: give it as"),
        ("steps = 4", "steps: no section of TorchTitan's"),
        ("[validation]\nenable = true", "validation.enable = true: there is none here"),
        (
            '[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = "InterleavedZeroBubble"',
            'it is interleaved-1f1b with backward="split" here; give --schedule with a file of it',
        ),
        ("[training]\nglobal_batch_size = 12", "a batch of 12 samples over 1 replicas, 8 at a time"),
        ("[parallelism", "can't be read"),
    ],
)
def test_what_may_change_a_number_is_refused_by_name(text: str, message: str, tmp_path: Path) -> None:
    assert message in refused(tmp_path, text)


def test_everything_that_stands_in_the_way_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as error:
        read_titan(job(tmp_path, "[training]\nsteps = 4"), {})
    lines = str(error.value).splitlines()[1:]
    assert [line.split()[0] for line in lines] == [
        "parallelism.data_parallel_shard_degree", "model.name", "training.dataset", "lr_scheduler.decay_type",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_file_trains_as_its_options_do(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the pump lifts the water " * 400)
    more = f"--preset nano --data {text} --dp 1 --evaluate-every 0 --threads 1 --sample 0 --in-process --json"
    first = f"train --torchtitan {job(tmp_path, JOB)} --out {tmp_path / 'a'} {more}"
    assert main(first.split()) == 0
    said = capfd.readouterr()
    assert "says --ranks 2 --schedule zb-v --batch 8 --microbatches 4" in said.err
    json.loads(said.out)
    options = said.err.splitlines()[0].partition(" says ")[2]
    import shlex

    assert main([*f"train --out {tmp_path / 'b'} {more}".split(), *shlex.split(options)]) == 0
    runs = [json.loads((tmp_path / name / "settings.json").read_text()) for name in ("a", "b")]
    assert runs[0] == runs[1]
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("a", "b")
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6
    assert main(f"train --torchtitan {job(tmp_path, JOB)} --device emulated --json".split()) == 2
    assert "--torchtitan is for training" in capfd.readouterr().out
