"""The families of Hugging Face models that the tests and the docs go through, and a plain loop over each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LISTED = Path(__file__).parents[1] / "benchmarks/hf_families/families.json"
FAMILIES: dict[str, dict[str, Any]] = json.loads(LISTED.read_text(encoding="utf-8"))
REFUSED = {"led": "runs as a whole, and not cut into stages"}
"""With a part of the reason: LED pads what it reads before its blocks."""
TRAINED = [name for name in FAMILIES if name not in REFUSED]


def config_of(name: str, **changes: Any) -> Any:
    """A config without dropout, as the plain loop draws other numbers."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(**{**FAMILIES[name], **changes})
    for key, value in vars(config).items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    return config


def model_of(name: str, **changes: Any) -> Any:
    """With weights, biases and buffers that are all of their own."""
    import transformers

    config = config_of(name, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = getattr(transformers, config.architectures[0])(config)
        never_saved = model._keys_to_ignore_on_save or ()
        with torch.no_grad():
            for key, each in model.state_dict().items():
                if each.is_floating_point() and key not in never_saved:
                    each.add_(torch.randn_like(each), alpha=0.01)
    return model.train()


def reads_and_writes(name: str) -> bool:
    """Whether a family has an encoder."""
    return "decoder_start_token_id" in FAMILIES[name]


def batch_of(name: str, num_samples: int = 6) -> dict[str, Tensor]:
    """Samples of several lengths; for the model that sees, with an image each."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 290, (num_samples, 11), generator=draw)
    mask = torch.ones_like(tokens)
    mask[1, 8:] = 0
    mask[3, 5:] = 0
    batch = {"input_ids": tokens.masked_fill(mask == 0, 0), "attention_mask": mask}
    batch["labels"] = tokens.masked_fill(mask == 0, -100)
    if reads_and_writes(name):
        batch["labels"] = torch.randint(3, 290, (num_samples, 7), generator=draw)
        batch["labels"][2, 5:] = -100
    if "vision_config" in FAMILIES[name]:
        batch["input_ids"][:, 1:5] = FAMILIES[name]["image_token_index"]
        batch["pixel_values"] = torch.randn(num_samples, 3, 8, 8, generator=draw)
    return batch


def plain_step(model: Any, batch: dict[str, Tensor], num: int, loss_fn: Any) -> tuple[Tensor, dict[str, Any]]:
    """The model's own loss over microbatches, each weighed by its tokens, and the gradients by all their names."""
    parts = [{key: value.tensor_split(num)[m] for key, value in batch.items()} for m in range(num)]
    weights = [loss_fn.weight(part["labels"]) for part in parts]
    total = torch.zeros(())
    for part, weight in zip(parts, weights, strict=True):
        loss = model(**part, use_cache=False).loss * (weight / sum(weights))
        loss.backward()
        total = total + loss.detach()
    return total, {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}


def table() -> str:
    """The families as the docs list them; the tests that go through them hold what it says."""
    rows = ["| family | class | | |", "|---|---|---|---|"]
    for name, config in FAMILIES.items():
        notes = [
            "with the loss of its routers" if config.get("output_router_logits") else "",
            "image tower and decoder" if "vision_config" in config else "",
            "encoder and decoder" if reads_and_writes(name) else "",
            "guesses masked tokens" if config["architectures"][0].endswith("MaskedLM") else "",
        ]
        verdict = "refused" if name in REFUSED else "trains"
        said = f"a small copy {REFUSED[name]}" if name in REFUSED else ", ".join(note for note in notes if note)
        rows.append(f"| {name} | {config['architectures'][0]} | {verdict} | {said} |")
    return "\n".join(rows)
