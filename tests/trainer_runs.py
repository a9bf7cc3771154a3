"""A tiny Llama and its data for the Trainer, and what a run of it leaves to be compared."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

SAMPLES, LENGTH = 22, 12


class Tokens(Dataset):
    """Samples of one length, whose labels leave out now and then what is not to be guessed."""

    def __init__(self, size: int = SAMPLES) -> None:
        draw = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(64, (size, LENGTH), generator=draw)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = self.tokens[index]
        labels = tokens.clone()
        labels[: index % 5] = -100
        return {"input_ids": tokens, "labels": labels, "attention_mask": torch.ones_like(tokens)}


def tiny(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    options = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 32, "tie_word_embeddings": True,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**options, **changes}))


def arguments(folder: Path, **changes: Any) -> Any:
    from transformers import TrainingArguments

    options = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "num_train_epochs": 2, "logging_steps": 1,
        "learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.5, "lr_scheduler_type": "cosine",
        "save_steps": 4, "eval_strategy": "epoch", "use_cpu": True, "report_to": "none", "disable_tqdm": True,
        "seed": 3, "dataloader_pin_memory": False, "per_device_eval_batch_size": 4,
    }  # fmt: skip
    return TrainingArguments(output_dir=str(folder), **{**options, **changes})


LOGGED = ("loss", "grad_norm", "learning_rate", "epoch", "eval_loss", "eval_tokens")


def logged(trainer: Any) -> list[dict[str, float]]:
    """What the run said, but for times."""
    return [{key: line[key] for key in LOGGED if key in line} for line in trainer.state.log_history]


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def counted(prediction: Any) -> dict[str, float]:
    """What a user measures: how often the likeliest token is the one that follows."""
    guessed = prediction.predictions[:, :-1].argmax(-1)
    labels = prediction.label_ids[:, 1:]
    return {"tokens": float((guessed == labels).sum())}


def run(trainer: Any, **how: Any) -> dict[str, Any]:
    ended = trainer.train(**how)
    return {"logged": logged(trainer), "weights": weights(trainer.model), "loss": ended.training_loss}


def as_torchrun_says(rank: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(dist.get_world_size())}
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]


def trained(rank: int, folder: Path, schedule: str) -> dict[str, Any]:
    """One rank: a run to its end, then one that goes on from its checkpoint in the middle."""
    from penstock.integrations.transformers import PipelineTrainer

    as_torchrun_says(rank)
    common = {"train_dataset": Tokens(), "eval_dataset": Tokens(6), "schedule": schedule}
    first = PipelineTrainer(tiny(), arguments(folder), compute_metrics=counted, **common)
    whole = run(first)
    first.save_model(str(folder / "final"))
    again = PipelineTrainer(tiny(), arguments(folder), compute_metrics=counted, **common)
    resumed = run(again, resume_from_checkpoint=str(folder / "checkpoint-4"))
    return {"whole": whole, "resumed": resumed, "held": first.pipeline.state_bytes()}
