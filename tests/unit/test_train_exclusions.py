"""The table of options that exclude each other, in docs/train.md: each row is refused, and has a case here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.runtime.transport.choose import NAMES
from penstock.train.checks import SettingsError
from penstock.train.inputs import optimizer_class
from penstock.train.settings import Settings
from penstock.train.transport_settings import ROUTES

pytestmark = pytest.mark.unit

PAGE = Path(__file__).parents[2] / "docs" / "train.md"
OWN, FOLDER, BATCHES = "net.py:Net", "models/mine", "data.py:make"
AMDP = {"schedule": "amdp", "ranks": 4, "microbatches": 4, "window": 4}
TWO = {"in_process": True, "dp": 2}

CASES: dict[str, list[dict[str, Any]]] = {
    "`--tp` with `--lora`": [{"tp": 2, "lora": "{}", "model": FOLDER}],
    "`--tp` with `--model FILE.py:NAME`": [{"tp": 2, "model": OWN}],
    "`--tp` or `--sharding fsdp` with `--optimizer muon`": [
        {"tp": 2, "optimizer": "muon"},
        {"sharding": "fsdp", "dp": 2, "optimizer": "muon"},
    ],
    "`--tp` with `--in-process`": [{"tp": 2, "in_process": True}],
    "`--sharding zero1` or `fsdp` with `--in-process`": [TWO | {"sharding": name} for name in ("zero1", "fsdp")],
    "`--sharding zero1` or `fsdp` without `--dp`": [{"sharding": name} for name in ("zero1", "fsdp")],
    "`--in-process` with another `--transport` than host": [
        {"in_process": True, "transport": name} for name in ("gloo", "direct", "delegate", "nccl")
    ],
    "`--in-process` and `--dp` with `--adapt`": [TWO | {"adapt": True}],
    "`--in-process` and `--dp` with an asynchronous schedule": [TWO | AMDP],
    "`--in-process` and `--dp` with a schedule file": [TWO | {"schedule": "mine.json"}],
    "`--adapt` with `--transport delegate` or `nccl`": [
        {"adapt": True, "transport": name} for name in ("delegate", "nccl")
    ],
    "`--delegates` or `--interfaces` without `--adapt` and without `--transport delegate`": [
        {"delegates": 2},
        {"interfaces": "lo"},
    ],
    "`--store` or `--host-memory` without `--adapt`": [{"store": "tcp://localhost:1"}, {"host_memory": "1GB"}],
    "`--lora` with a model that is not Hugging Face's": [{"lora": "{}", "model": name} for name in ("gpt", OWN)],
    "`--model-options` without `--model FILE.py:NAME`": [{"model_options": {"width": 8}}],
    "`--depth`, `--width`, `--heads`, `--dropout` or `--tied` with `--model FILE.py:NAME`": [
        {"model": OWN, **given}
        for given in ({"depth": 2}, {"width": 8}, {"heads": 2}, {"dropout": 0.1}, {"tied": True})
    ],
    "`--context` or `--tokenizer` with `--data FILE.py:NAME`": [
        {"model": model, "data": BATCHES, **given}
        for model in (OWN, FOLDER)
        for given in ({"context": 8}, {"tokenizer": "words.json"})
    ],
    "`--data FILE.py:NAME` with `--model` gpt, bert, clip or captioner": [
        {"model": name, "data": BATCHES} for name in ("gpt", "bert", "clip", "captioner")
    ],
    "`--tower` with another `--model` than clip": [
        {"model": name, "towers": "text=ranks:1"} for name in ("gpt", "bert", "captioner", FOLDER, OWN)
    ],
    "`--packing arrival` or `planned` with `--model` bert, clip or `FILE.py:NAME`": [
        {"model": model, "packing": name} for model in ("bert", "clip", OWN) for name in ("arrival", "planned")
    ],
    "`--packing arrival` or `planned` with `--data FILE.py:NAME`": [
        {"model": FOLDER, "data": BATCHES, "packing": name} for name in ("arrival", "planned")
    ],
    "`--packing arrival` or `planned` with an asynchronous schedule": [
        AMDP | {"packing": name} for name in ("arrival", "planned")
    ],
    "`--packing windows` with `--model captioner`": [{"model": "captioner", "packing": "windows"}],
    "`--packing arrival` with `--microbatch-tokens`": [{"packing": "arrival", "microbatch_tokens": 512}],
    "`--packing windows` with `--length-costs` or `--microbatch-tokens`": [
        {"packing": "windows", "length_costs": "measured"},
        {"packing": "windows", "microbatch_tokens": 512},
    ],
    "`--window`, `--rule`, `--max-mismatch` or `--drain-every` with a schedule that drains": [
        {"schedule": "1f1b", **given}
        for given in ({"window": 8}, {"rule": "none"}, {"max_mismatch": 1}, {"drain_every": 2})
    ],
}

WHY = dict(
    zip(
        CASES,
        (
            "those with adapters stay whole",
            "layers that are known",
            "whole matrices",
            "--tp 2 .* leave out --in-process",
            "among processes",
            "among replicas",
            "nothing is sent",
            "measures links between processes",
            "the updates of amdp",
            "mine.json is for those of one",
            "delegates single links",
            "for --transport delegate or --adapt",
            "a run that adapts",
            "--lora is for Hugging Face models",
            "--model-options are for",
            "for models of ours",
            "says what it learns from|gives tokens already",
            "makes batches for a model of your own",
            "models of several towers",
            "several documents into one row",
            "gives batches that are made already",
            "what each update gathers",
            "images and texts of their own lengths",
            "documents as they come",
            "is for whole documents",
            "updates among the other ops",
        ),
        strict=True,
    )
)
"""Of each row, in their order, what its message says."""


def test_the_table_has_the_cases() -> None:
    section = PAGE.read_text(encoding="utf-8").split("### Options that exclude each other\n")[1].split("\n## ")[0]
    rows = [line.split(" | ")[0].removeprefix("| ") for line in section.splitlines() if line.startswith("| `")]
    assert rows == list(CASES)


@pytest.mark.parametrize("row", CASES)
def test_each_row_is_refused_for_what_it_names(row: str) -> None:
    for given in CASES[row]:
        with pytest.raises(SettingsError, match=WHY[row]):
            optimizer_class(Settings(**given))


def test_a_run_takes_every_transport_that_a_pipeline_has() -> None:
    assert ROUTES == NAMES
    assert [Settings(transport=name).transport for name in ROUTES] == list(NAMES)
