"""TorchTitan's own trainer without GPUs. What TorchTitan asks of a GPU, this file answers.

    torchrun --nproc-per-node 4 examples/torchtitan/titan_on_cpu.py --module titan_job --config before

The arguments are those of `torchtitan.train`. `make titan` installs TorchTitan. As the model is tiny, ops of stages
sleep until they have taken as long as on a GPU might: 40 ms for a forward, 80 ms for a backward. Only the last rank,
which has the loss, prints what TorchTitan logs.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import sys
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, schedules

SITE = Path(__file__).resolve().parents[2] / "build" / "torchtitan"
"""Where `make titan` installs TorchTitan."""

NUM_MICROBATCHES, NUM_LAYERS, NUM_WORDS = 8, 6, 61
FORWARD, BACKWARD = 0.040, 0.080
"""Seconds that an op of a stage takes."""


def prepare(folder: str) -> None:
    """Lets TorchTitan be imported, answers as a GPU would, and keeps what is cached in a folder."""
    sys.path.append(str(SITE))
    os.environ |= {"HF_HOME": str(Path(folder, "cache").resolve()), "HF_HUB_OFFLINE": "1"}
    torch.compile(len)  # torch looks for triton when this is first called, and must not find what comes next
    for name in ("triton", "triton.language", "torch.utils.tensorboard"):
        if name not in sys.modules:
            sys.modules[name] = _unused(name)
    torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[assignment]
    size = types.SimpleNamespace(total_memory=2**30)
    answers = {
        "get_device_name": lambda *_: "cpu",
        "get_device_properties": lambda *_: size,
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda: None,
        "memory_stats": lambda *_: {},
    }
    for name, answer in answers.items():
        setattr(torch.cpu, name, answer)
    barrier = dist.barrier
    dist.barrier = lambda *_, **__: barrier()  # type: ignore[assignment]
    dist.set_timeout = lambda *_: None  # type: ignore[attr-defined]
    divide = FSDPModule.set_gradient_divide_factor

    def divide_and_sum(self: FSDPModule, factor: float) -> None:
        divide(self, factor)
        self.set_force_sum_reduction_for_comms(True)  # gloo has no sum that multiplies first

    FSDPModule.set_gradient_divide_factor = divide_and_sum  # type: ignore[method-assign]
    torch.autograd.set_multithreading_enabled(False)  # as TorchTitan does when it makes the group itself
    if "arg_mbs" not in inspect.signature(schedules.PipelineScheduleMulti.step).parameters:
        for each in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
            each.step = _with_microbatches(each.step)  # type: ignore[method-assign]


def _unused(name: str) -> types.ModuleType:
    """A module whose every name is a decorator that does nothing."""

    def get(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        if f"{name}.{attribute}" in sys.modules:
            return sys.modules[f"{name}.{attribute}"]
        return lambda *given, **_: given[0] if given else lambda function: function

    module = types.ModuleType(name)
    module.__path__ = []  # type: ignore[attr-defined]
    module.__getattr__ = get  # type: ignore[method-assign]
    return module


def _with_microbatches(step: Any) -> Any:
    """`step` as it is since torch 2.14, where it also takes a batch that is cut into microbatches already."""

    def run(self: Any, *args: Any, kwarg_mbs: Any = None, **given: Any) -> Any:
        if kwarg_mbs is None:
            return step(self, *args, **given)
        for stage in [self._stage] if isinstance(self, schedules.PipelineScheduleSingle) else self._stages:
            stage.has_backward = self._has_backward
            stage.clear_runtime_states()
        cut = given["arg_mbs"], kwarg_mbs, given["target_mbs"]
        return self._step_microbatches(*cut, given["losses"], False, loss_kwargs=given.get("loss_kwargs"))

    return run


def make_small(config: Any, folder: str = "runs/titan") -> Any:
    """Makes the config of Llama's debug model tiny, lets it run on a CPU, and trains it on words in a folder."""
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.config import TrainingConfig
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
    from torchtitan.models import llama3
    from torchtitan.models.common.attention import ScaledDotProductAttention

    model, width, vocabulary = config.model_spec.model, 32, NUM_WORDS + 3
    model.dim, model.vocab_size = width, vocabulary
    model.tok_embeddings.num_embeddings, model.tok_embeddings.embedding_dim = vocabulary, width
    model.norm.normalized_shape = model.lm_head.in_features = width
    model.lm_head.out_features = vocabulary
    model.layers = llama3._build_llama3_layers(
        n_layers=NUM_LAYERS,
        dim=width,
        n_heads=2,
        hidden_dim=48,
        rope=llama3.ComplexRoPE.Config(dim=width // 2, max_seq_len=128, theta=10000),
        attn_backend="flex",
    )
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # flex has no backward on a CPU
    config.loss = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=vocabulary))
    config.training = TrainingConfig(
        local_batch_size=NUM_MICROBATCHES,
        seq_len=128,
        steps=10,
        disable_cuda_graphs=True,
        mixed_precision_param="float32",
    )
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset="c4_test", dataset_path=f"{folder}/data")
    config.metrics.disable_color_printing = True
    config.hf_assets_path, config.dump_folder = f"{folder}/tokenizer", f"{folder}/out"
    return config


def write_data(folder: Path) -> None:
    """Writes a tokenizer of a few words, and documents of these words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[UNK]", "<s>", "</s>", *(f"w{number}" for number in range(NUM_WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    (folder / "tokenizer").mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "tokenizer" / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    (folder / "data").mkdir(exist_ok=True)
    lines = (" ".join(f"w{(7 * row + at * at) % NUM_WORDS}" for at in range(50)) for row in range(400))
    (folder / "data" / "data.json").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))


def take_time() -> None:
    """Lets each op of a stage sleep until it has taken as long as it might on a GPU."""

    def lasting(call: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            end = time.monotonic() + (seconds if kwargs.get("full_backward", True) else seconds / 2)
            result = call(*args, **kwargs)
            time.sleep(max(0.0, end - time.monotonic()))
            return result

        return run

    for name, seconds in (
        ("forward_one_chunk", FORWARD),
        ("backward_one_chunk", BACKWARD),
        ("backward_weight_one_chunk", BACKWARD / 2),
    ):
        setattr(PipelineStage, name, lasting(getattr(PipelineStage, name), seconds))


def main() -> None:
    torch.set_num_threads(1)
    prepare("runs/titan")
    take_time()
    warnings.filterwarnings("ignore", message="DTensor random operators|'set_vital' is deprecated")
    rank, last = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
    if rank == 0:
        write_data(Path("runs/titan"))  # which other ranks read after they have met this one
    if rank < last:
        logging.disable(logging.WARNING)
    os.environ["LOG_RANK"] = str(last)
    from torchtitan.train import main as train

    train()


if __name__ == "__main__":
    main()
