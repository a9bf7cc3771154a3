"""TorchTitan's own trainer on a CPU: two ranks train a tiny Llama, and return losses and gradients.

TorchTitan is written for GPUs. What it asks of one is answered here: the name, size and use of a device, barriers and
time limits of NCCL, and modules that it imports and does not use on a CPU.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import types
import zlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules

import penstock as ps

SITE = Path(__file__).parents[1] / "build" / "torchtitan"
"""Where `make titan` installs it. Only ranks that train with it see this folder."""

IS_MISSING = find_spec("torchtitan") is None and not (SITE / "torchtitan").is_dir()

MICROBATCHES, LAYERS, WORDS = 4, 6, 61


def write_data(folder: Path) -> None:
    """A tokenizer of a few words, and documents of these words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[UNK]", "<s>", "</s>", *(f"w{number}" for number in range(WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "tokenizer" / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    (folder / "data").mkdir()
    lines = (" ".join(f"w{(7 * row + at * at) % WORDS}" for at in range(50)) for row in range(40))
    (folder / "data" / "data.json").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))


def prepare(folder: str) -> None:
    """Lets TorchTitan be imported, and answers as a GPU would."""
    sys.path.append(str(SITE))
    os.environ |= {"HF_HOME": f"{folder}/hf", "HF_HUB_OFFLINE": "1", "LOCAL_RANK": str(dist.get_rank())}
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


def make_config(
    folder: str, schedule: str, *, is_chunked: bool = False, dtype: str = "float32", **parallelism: Any
) -> Any:
    """The config of Llama's debug model, made tiny, with a named schedule of TorchTitan's."""
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
    from torchtitan.models import llama3
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    model, width, vocabulary = config.model_spec.model, 32, WORDS + 3
    model.dim, model.vocab_size = width, vocabulary
    model.tok_embeddings.num_embeddings, model.tok_embeddings.embedding_dim = vocabulary, width
    model.norm.normalized_shape = model.lm_head.in_features = width
    model.lm_head.out_features = vocabulary
    model.layers = llama3._build_llama3_layers(
        n_layers=LAYERS,
        dim=width,
        n_heads=2,
        hidden_dim=48,
        rope=llama3.ComplexRoPE.Config(dim=width // 2, max_seq_len=64, theta=10000),
        attn_backend="flex",
    )
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # flex has no backward on a CPU
    loss = CrossEntropyLoss.Config(global_vocab_size=vocabulary)
    if schedule == "ZBVZeroBubble":
        config.activation_checkpoint = None  # a SelectiveAC allows one backward of a region, and not I and W
    config.loss = ChunkedLossWrapper.Config(loss_fn=loss) if is_chunked else loss
    config.training = TrainingConfig(
        local_batch_size=MICROBATCHES,
        seq_len=32,
        steps=2,
        max_norm=1e9,
        disable_cuda_graphs=True,
        mixed_precision_param=dtype,
    )
    config.parallelism = ParallelismConfig(
        **({"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": schedule} | parallelism)
    )
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset="c4_test", dataset_path=f"{folder}/data")
    config.hf_assets_path, config.dump_folder = f"{folder}/tokenizer", f"{folder}/out"
    return config


def train(config: Any) -> dict[str, Tensor]:
    """Losses of both steps, where the last stage is, and the last step's gradients and the weights by their names."""
    from torchtitan.trainer import Trainer

    trainer = Trainer(config)
    for part in trainer.model_parts:
        for name, parameter in part.named_parameters():
            draws = torch.Generator().manual_seed(zlib.crc32(_plain(name).encode()))
            with torch.no_grad():
                local = _local(parameter)
                local.copy_(0.1 * torch.randn(local.shape, generator=draws) + (local.ndim == 1))
    losses, step = [], trainer.pp_forward_backward_step

    def keep(**given: Any) -> Tensor:
        losses.append(step(**given).detach().clone())
        return losses[-1]

    trainer.pp_forward_backward_step = keep  # type: ignore[method-assign]
    trainer.train()
    trainer.close()
    found = {"losses": torch.stack(losses)} if trainer.pp_has_last_stage else {}
    for part in trainer.model_parts:
        for name, parameter in part.named_parameters():
            found[_plain(name)] = _local(parameter).detach().clone()
            if parameter.grad is not None:
                found[f"gradient of {_plain(name)}"] = _local(parameter.grad).clone()
    return found


def _plain(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "")


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def own_placement() -> ps.Schedule:
    """Stage 1 on rank 0, and the three others on rank 1."""
    placement, costs = ps.Placement(((1, 0, 1, 1),)), ps.Costs.uniform(4, f=1, i=1, w=1)
    return ps.plan(costs, 2, MICROBATCHES, placement=placement, time_limit=1.0).schedule


def split_inside() -> ps.Schedule:
    """Interleaved 1F1B whose last stage has its backwards whole, and stages 1 and 2 split."""
    rows = [
        ",".join(
            f"{op.stage}I{op.microbatch},{op.stage}W{op.microbatch}"
            if op.kind == "B" and op.stage in (1, 2)
            else str(op)
            for op in row
        )
        for row in ps.build("interleaved-1f1b", 2, MICROBATCHES).order
    ]
    return ps.formats.from_torch_csv("\n".join(rows))


PLANS: dict[str, tuple[Callable[[], ps.Schedule], dict[str, Any]]] = {
    "1f1b, chunked loss": (lambda: ps.build("1f1b", 2, MICROBATCHES), {}),
    "1f1b, replan": (lambda: ps.build("1f1b", 2, MICROBATCHES), {"replan": True}),
    "zb": (lambda: ps.build("zb", 2, MICROBATCHES), {}),
    "interleaved-1f1b": (lambda: ps.build("interleaved-1f1b", 2, MICROBATCHES), {"channels": "nccl"}),
    "zb-v": (lambda: ps.build("zb-v", 2, MICROBATCHES), {}),
    "zb-v, bfloat16": (lambda: ps.build("zb-v", 2, MICROBATCHES), {}),
    "placement": (own_placement, {}),
    "split inside, chunked loss": (split_inside, {}),
}

Runs = dict[str, dict[str, Tensor]]


def by_name(rank: int, folder: str) -> Runs:
    """Runs of TorchTitan's own schedules."""
    prepare(folder)
    return {
        "1F1B, chunked loss": train(make_config(folder, "1F1B", is_chunked=True)),
        "1F1B": train(make_config(folder, "1F1B")),
        "Interleaved1F1B": train(make_config(folder, "Interleaved1F1B")),
        "ZBVZeroBubble, bfloat16": train(make_config(folder, "ZBVZeroBubble", dtype="bfloat16")),
        "ZBVZeroBubble, chunked loss": train(make_config(folder, "ZBVZeroBubble", is_chunked=True)),
    }


def by_plans(rank: int, folder: str) -> Runs:
    """Runs of plans, each read from a file."""
    prepare(folder)
    return {name: train(planned_config(rank, folder, name)) for name in PLANS}


def with_shards(rank: int, folder: str) -> Runs:
    """Two pipelines over which parameters are sharded."""
    prepare(folder)
    more = {"data_parallel_shard_degree": 2, "spmd_backend": "partial_dtensor"}  # the default needs a newer torch
    return {
        "1F1B": train(make_config(folder, "1F1B", **more)),
        "zb": train(planned_config(rank, folder, "zb", **more)),
        "zb-v": train(planned_config(rank, folder, "zb-v", **more)),
        "1f1b, replan": train(planned_config(rank, folder, "1f1b, replan", **more)),
    }


def planned_config(rank: int, folder: str, name: str, **parallelism: Any) -> Any:
    from penstock.integrations.torchtitan import planned

    make_plan, options = PLANS[name]
    path = Path(folder, f"{name}.json")
    if rank == 0:
        ps.save(make_plan(), path)
    dist.barrier()
    plan = ps.load(path)
    home = plan.rank_of(plan.num_stages - 1, 0)
    dtype = "bfloat16" if "bfloat16" in name else "float32"
    config = make_config(
        folder, "1F1B" if home else "ZBVZeroBubble", is_chunked="chunked" in name, dtype=dtype, **parallelism
    )
    if plan.splits_backward():
        config.activation_checkpoint = None
    config.model_spec.pipelining_fn = planned(path, **options)
    return config
