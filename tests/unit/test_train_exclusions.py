"""Options that exclude each other: each pair is refused, with its reason."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import penstock as ps
from penstock.runtime.transport.choose import NAMES
from penstock.train import run_job
from penstock.train.checks import ROUTES, SettingsError
from penstock.train.inputs import gather_inputs, optimizer_class
from penstock.train.job import order_of, read_schedule_file
from penstock.train.options import options_of
from penstock.train.settings import Settings

pytestmark = pytest.mark.unit

OWN, FOLDER, BATCHES = "net.py:Net", "models/mine", "data.py:make"
AMDP = {"schedule": "amdp", "ranks": 4, "microbatches": 4, "window": 4}
TWO = {"in_process": True, "dp": 2}
SHARED = {"schedule": "mllm", "ranks": 4, "microbatches": 8, "batch": 8}
NET = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Embedding(256, 8), Turned(), nn.BatchNorm1d(8), Turned(), nn.Linear(8, 256))

class Turned(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)

made = Net()
"""

CASES: dict[str, list[dict[str, Any]]] = {
    "`--tp` or `--sharding fsdp` with `--optimizer muon`": [
        {"tp": 2, "optimizer": "muon"},
        {"sharding": "fsdp", "dp": 2, "optimizer": "muon"},
    ],
    "`--tp`, or `--schedule mllm`, with a Hugging Face model that has an encoder": [
        {"model": "t5/config.json", "tp": 2},
        {"model": "t5/config.json", **SHARED},
    ],
    "`--schedule mllm` with `--model FILE.py:NAME`": [{"model": OWN, **SHARED}],
    "`--transport nccl` without `--device cuda`": [{"transport": "nccl"}],
    "`--model-options` with a `FILE.py:NAME` that is a module already": [
        {"model": "net.py:made", "model_options": {"width": 8}}
    ],
    "`--model clip` with the `--schedule` of a chain of stages": [
        {"model": "clip", "preset": "nano", "schedule": "zb-v"}
    ],
    "`--verify` with an asynchronous schedule": [AMDP | {"verify": True}],
    "`--resume` with another `--out`": [{"resume": "runs/one", "out": "runs/two"}],
    "`--export NAME.safetensors` with `--lora`": [{"export": "tuned.safetensors", "lora": "{}", "model": "t5"}],
}

WHY = dict(
    zip(
        CASES,
        (
            "whole matrices",
            "knows for decoders|t5/config.json has an encoder",
            "has stages that several ranks share, which must be the embedding of words and the head",
            "GPU to GPU",
            "is made already",
            "is for a chain of stages",
            "compares with a plain loop",
            "goes on in its own folder",
            "adapters are written as a folder",
        ),
        strict=True,
    )
)
"""Of each row, in their order, what its message says."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a model of one's own, and with a small one of Hugging Face's that has an encoder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET, encoding="utf-8")
    transformers.T5Config(
        vocab_size=300, d_model=16, d_ff=16, num_layers=2, num_heads=2, d_kv=8, decoder_start_token_id=0
    ).save_pretrained("t5")


@pytest.mark.parametrize("row", CASES)
def test_each_row_is_refused_for_what_it_names(row: str, here: None) -> None:
    for given in CASES[row]:
        with pytest.raises(SettingsError, match=WHY[row]):
            refuse(dict(given))


def refuse(given: dict[str, Any]) -> None:
    """Goes the way of a run that is asked for, up to where its model would be built."""
    run = {"out": None, "resume": None, "export": None, "verify": False}
    told = {name: given.pop(name, usual) for name, usual in run.items()}
    if told == run and not given.keys() - {field.name for field in dataclasses.fields(Settings)}:
        gather_inputs(Settings(**given))
        return
    order = order_of(read_schedule_file(given), as_json=False, **told)  # type: ignore[arg-type]
    run_job.checked_inputs(order)


def test_bug_the_help_said_nothing_of_what_adamw_has_otherwise_than_in_torch() -> None:
    (group,) = optimizer_class(Settings())([torch.nn.Parameter(torch.zeros(1))]).param_groups
    said = options_of(Settings)["optimizer"].help
    assert group["betas"] + (group["weight_decay"],) == (0.9, 0.95, 0.1)
    assert "AdamW: betas 0.9, 0.95, weight_decay 0.1" in said


def test_a_run_takes_every_transport_that_a_pipeline_has() -> None:
    assert ROUTES == NAMES
    assert [Settings(transport=name).transport for name in ROUTES] == list(NAMES)


def test_a_run_over_delegates_could_not_adapt_though_a_pipeline_could() -> None:
    assert Settings(transport="delegate", adapt=True).transport_options().delegates is not None


def test_ops_with_a_function_of_somebodys_are_refused_before_anything_starts(tmp_path: Path) -> None:
    look = ps.NewOp("LOOK", stage=0, after={("B", 0): 2})
    path = tmp_path / "look.json"
    ps.Program(ps.placements.one_to_one(2), 4, ops=[look]).build().save(path)
    with pytest.raises(SettingsError, match=r"ops of kind LOOK.*ps\.Pipeline\(\.\.\., ops=\{'LOOK': function\}\)"):
        gather_inputs(Settings(schedule=str(path), ranks=2, microbatches=4, preset="nano"))
