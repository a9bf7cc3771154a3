"""The kinds of model by name, and what is usual for each. Needs no torch: it is read before anything else."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.train.checks import SettingsError
from penstock.train.towers import MIXED, read_towers

GPT, BERT, CLIP = "gpt", "bert", "clip"
KINDS = (GPT, BERT, CLIP)

USUAL: Mapping[str, Mapping[str, Any]] = {
    GPT: {},
    BERT: {"lr": 2e-3},
    CLIP: {"preset": "nano", "schedule": MIXED, "batch": 64, "microbatches": 2, "steps": 200, "lr": 5e-3},
}
"""Settings in place of the usual ones, where they are not given."""
FRESH, STORED = 1e-3, 1e-4
"""Learning rates of a decoder whose weights are drawn, and of one that has learnt before."""


def is_path(model: str) -> bool:
    """Whether a model is meant by its path and not by its name."""
    return model not in KINDS


def usual_of(model: str) -> Mapping[str, Any]:
    """What is usual for a kind of model."""
    if not is_path(model):
        return USUAL[model]
    folder, has_weights = place_of(model)
    own = folder / "tokenizer.json"
    return {"lr": STORED if has_weights else FRESH, **({"tokenizer": str(own)} if own.is_file() else {})}


def place_of(model: str) -> tuple[Path, bool]:
    """The folder that a path means, and whether weights are to be read from it: a config.json alone draws them."""
    path = Path(model)
    if path.name == "config.json":
        return path.parent, False
    return path, any(path.glob("*.safetensors"))


def check_model(model: str, towers: str | None) -> None:
    """Raises SettingsError for a model that is neither a name nor a path, or towers where there are none."""
    if is_path(model) and not os.path.exists(model) and not ("/" in model or model.endswith(".json")):
        near = difflib.get_close_matches(model, KINDS, n=1)
        hint = f"did you mean {near[0]}? Else give" if near else "give"
        raise SettingsError(
            f"no model {model!r}; {hint} {', '.join(KINDS)}, or the path of a Hugging Face folder or config.json"
        )
    asked = read_towers(towers)
    if asked and model != CLIP:
        raise SettingsError(f"--tower {next(iter(asked))}=... is for models of several towers; add --model clip")
