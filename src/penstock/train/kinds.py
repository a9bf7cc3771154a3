"""The kinds of model by name, and the defaults of each.

Needs no torch, as it is read before anything else.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.train.checks import SettingsError
from penstock.train.own_file import is_own

if TYPE_CHECKING:
    from penstock.train.settings import Settings


STYLES = ("1f1b", "interleaved-1f1b", "gpipe")
"""Schedules that one tower can have."""
MIXED = "mixed"
"""The tower with most ranks interleaved, the others 1F1B."""
CONTRAST = "contrast"
"""The name of the stage that all towers feed."""

GPT, BERT, CLIP = "gpt", "bert", "clip"
KINDS = (GPT, BERT, CLIP)

USUAL: Mapping[str, Mapping[str, Any]] = {
    GPT: {},
    BERT: {"lr": 2e-3},
    CLIP: {"preset": "nano", "schedule": MIXED, "batch": 64, "microbatches": 2, "steps": 200, "lr": 5e-3},
}
"""Settings that replace the usual defaults, unless they are given."""
FRESH, STORED = 1e-3, 1e-4
"""Learning rates of a decoder or a model of the user's own: with fresh weights, and with weights that were
trained before.
"""


def is_path(model: str) -> bool:
    """Whether a model is given by its path, and not by its name."""
    return model not in KINDS


def is_hugging_face(model: str) -> bool:
    """Whether a model is a folder or config.json of transformers."""
    return is_path(model) and not is_own(model)


def usual_of(model: str, data: str | None = None) -> Mapping[str, Any]:
    """The defaults of a kind of model. There is no tokenizer if batches of the user's own hold tokens already."""
    if not is_path(model):
        return USUAL[model]
    if is_own(model):
        return {"lr": FRESH}
    folder, has_weights = place_of(model)
    own = folder / "tokenizer.json"
    reads_text = own.is_file() and not is_own(data)
    return {"lr": STORED if has_weights else FRESH, **({"tokenizer": str(own)} if reads_text else {})}


def place_of(model: str) -> tuple[Path, bool]:
    """The folder that a path means, and whether weights are read from it. With a config.json alone they are drawn."""
    path = Path(model)
    if path.name == "config.json":
        return path.parent, False
    return path, any(path.glob("*.safetensors"))


def check_model(model: str) -> None:
    """Raises SettingsError for a model that is neither a name nor a path."""
    looks_like_path = "/" in model or model.endswith(".json") or is_own(model)
    if is_path(model) and not os.path.exists(model) and not looks_like_path:
        near = difflib.get_close_matches(model, KINDS, n=1)
        hint = f"did you mean {near[0]}? Else give" if near else "give"
        raise SettingsError(
            f"no model {model!r}; {hint} {', '.join(KINDS)}, the path of a Hugging Face folder or config.json, or a "
            "model of your own as FILE.py:NAME; sizes by name, like tiny, are given by --preset"
        )


def check_lora_words(text: str) -> None:
    """Raises SettingsError for a `--lora` that is neither JSON nor a folder."""
    if text.lstrip().startswith("{") or os.path.isdir(text):
        return
    raise SettingsError(
        f"--lora {text} is neither JSON nor a folder; give the arguments of peft's LoraConfig as JSON, like "
        f"'{{\"r\": 8}}', '{{}}' for peft's defaults, or a folder with a saved adapter"
    )


def lora_of(settings: Settings) -> Mapping[str, Any] | str | None:
    """The arguments of a LoraConfig, or the folder of an adapter. Raises SettingsError."""
    text = settings.lora
    if text is None or not text.lstrip().startswith("{"):
        return text
    try:
        value: dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingsError(
            f"--lora {text!r} is not JSON: {error}; write the arguments of peft's LoraConfig like '{{\"r\": 8}}'"
        ) from None
    return value
