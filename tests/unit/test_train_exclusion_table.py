"""The table of settings that exclude each other: each row refuses what it names, for its reason."""

from __future__ import annotations

import re
from typing import Any

import pytest

from penstock.train.checks import SettingsError
from penstock.train.exclusions import EXCLUSIONS, table
from penstock.train.settings import Settings

pytestmark = pytest.mark.unit

OWN, FOLDER, BATCHES = "net.py:Net", "models/mine", "data.py:make"
AMDP = {"schedule": "amdp", "ranks": 4, "microbatches": 4, "window": 4}
TWO = {"in_process": True, "dp": 2}

EXCLUDED: dict[str, list[dict[str, Any]]] = {
    "store without --adapt": [{"store": "redis://localhost:1"}, {"host_memory": "1GB"}],
    "window with --schedule {schedule}": [
        {"schedule": "1f1b", **given}
        for given in ({"window": 8}, {"rule": "none"}, {"max_mismatch": 1}, {"drain_every": 2})
    ],
    "lora with --tp {tp}": [{"tp": 2, "lora": "{}", "model": FOLDER}],
    "lora with --model {model}": [{"lora": "{}", "model": name} for name in ("gpt", OWN)],
    "tp with --model {model}": [{"tp": 2, "model": OWN}],
    "tp with --in-process": [{"tp": 2, "in_process": True}],
    "sharding with --in-process": [TWO | {"sharding": name} for name in ("zero1", "fsdp")],
    "sharding without --dp": [{"sharding": name} for name in ("zero1", "fsdp")],
    "transport with --in-process": [
        {"in_process": True, "transport": name} for name in ("gloo", "direct", "delegate", "nccl")
    ],
    "adapt with --in-process and --dp {dp}": [TWO | {"adapt": True}],
    "schedule with --in-process and --dp {dp}": [TWO | AMDP, TWO | {"schedule": "mine.json"}],
    "model_options with --model {model}": [{"model_options": {"width": 8}}],
    "depth with --model {model}": [
        {"model": model, **given}
        for model in (OWN, FOLDER)
        for given in ({"depth": 2}, {"width": 8}, {"heads": 2}, {"dropout": 0.1}, {"tied": True}, {"preset": "nano"})
    ],
    "context with --model {model}": [
        {"model": "clip", **given}
        for given in ({"context": 8}, {"tied": False}, {"data": "story.txt"}, {"tokenizer": "words.json"})
    ],
    "stages with --model {model}": [
        {"model": "clip", "schedule": "mixed", **given}
        for given in ({"stages": 8}, {"cut": (1, 1, 1)}, {"schedule_options": {"overlap": True}})
    ],
    "context with --data {data}": [
        {"model": model, "data": BATCHES, **given}
        for model in (OWN, FOLDER)
        for given in ({"context": 8}, {"tokenizer": "words.json"})
    ]
    + [{"model": FOLDER, "data": BATCHES, "packing": name} for name in ("arrival", "planned")],
    "data with --model {model}": [{"model": name, "data": BATCHES} for name in ("gpt", "bert")],
    "packing with --model {model}": [
        {"model": model, "packing": name} for model in ("bert", "clip", OWN) for name in ("arrival", "planned")
    ],
    "packing with --schedule {schedule}": [AMDP | {"packing": name} for name in ("arrival", "planned")],
    "microbatch_tokens without --packing planned": [
        {"packing": packing, "microbatch_tokens": 512} for packing in ("windows", "arrival", "run/batches.jsonl")
    ],
}
"""Settings that each row of the table of exclusions refuses, by its first setting and what stands beside it."""


def test_each_exclusion_is_refused_for_its_reason() -> None:
    rules = {f"{rule.names[0]} {rule.beside}": rule for rule in EXCLUSIONS}
    assert list(rules) == list(EXCLUDED)
    for name, rule in rules.items():
        assert len(EXCLUDED[name]) >= len(rule.names)
        for given in EXCLUDED[name]:
            words = f"{rule.beside.format(**{**vars(Settings()), **given})}: {rule.why}"
            with pytest.raises(SettingsError, match=re.escape(words)) as told:
                Settings(**given)
            assert str(told.value).startswith("--")


def test_settings_at_their_defaults_exclude_nothing() -> None:
    for given in ({}, {"in_process": True, "dp": 2}, {"sharding": "none", "in_process": True}, AMDP):
        Settings(**given)
    assert all(each.count("`") >= 4 for each, _ in table(Settings))
