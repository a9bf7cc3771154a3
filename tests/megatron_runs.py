"""Megatron-Core on a CPU: four ranks run its own schedules and plans, and return losses, gradients and events.

Megatron is written for GPUs. What it asks of one is answered here, and it imports triton, which a CPU
does not use.
"""

from __future__ import annotations

import contextlib
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock as ps

SITE = Path(__file__).parents[1] / "build" / "megatron"
"""Where `make megatron` installs it. Only ranks that run it see this folder."""

IS_MISSING = find_spec("megatron") is None and not (SITE / "megatron" / "core").is_dir()

RANKS, MICROBATCHES, WIDTH, LENGTH, SAMPLES = 4, 8, 8, 6, 2

Run = dict[str, Any]
"""Of one rank: losses, gradients, and what else a case looks at."""


def prepare() -> None:
    """Lets Megatron be imported, answers as a GPU would, and makes its groups."""
    sys.path.append(str(SITE))
    if find_spec("triton") is None:
        sys.modules |= {name: _unused(name) for name in ("triton", "triton.language")}
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    zeros = torch.zeros

    def zeros_anywhere(*args: Any, **given: Any) -> Tensor:
        return zeros(*args, **{key: value for key, value in given.items() if (key, value) != ("device", "cuda")})

    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment, method-assign]
    torch.cuda.current_stream = lambda: None  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda: None  # type: ignore[assignment, misc]
    torch.zeros = zeros_anywhere  # type: ignore[assignment]
    warnings.simplefilter("ignore")
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

    init_num_microbatches_calculator(0, None, MICROBATCHES * SAMPLES, SAMPLES, 1)


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
    module.__version__ = "3.4.0"  # type: ignore[attr-defined]
    module.__getattr__ = get  # type: ignore[method-assign]
    return module


class Toy(nn.Module):
    """A stage that has what Megatron asks of a model."""

    def __init__(self, config: Any, stage: int, num_stages: int) -> None:
        from megatron.core.enums import ModelType

        super().__init__()
        torch.manual_seed(100 + stage)
        self.config, self.stage, self.post_process = config, stage, stage == num_stages - 1
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.received: Tensor | None = None
        self.model_type = ModelType.encoder_or_decoder
        self.embedding_activation_buffer, self.grad_output_buffer = [1], [2]
        self.share_embeddings_and_output_weights, self.output_layer = True, self.layers[0]

    def set_input_tensor(self, tensors: list[Tensor]) -> None:
        self.received = tensors[0]

    def forward(self, x: Tensor) -> Tensor:
        x = self.received if self.stage else x
        return x + self.layers(x)  # no view, as Megatron frees it


class Timers:
    """Notes which of Megatron's timers run."""

    def __init__(self, events: list[Any]) -> None:
        self.events = events

    def __call__(self, name: str, log_level: int = 0) -> Timers:
        self.name = name
        return self

    def start(self, barrier: bool = False) -> None:
        if self.name in ("forward-backward", "forward-compute", "backward-compute"):  # others are named for exchanges
            self.events.append(("start", self.name, barrier))

    def stop(self) -> None:
        pass


def forward_step(iterator: Iterator[Tensor], model: Any, checkpointed: bool | None = None) -> tuple[Tensor, Any]:
    x = next(iterator)
    model.config.events.append(("forward", model.stage, checkpointed))
    output = model(x)
    if output.requires_grad:
        output.register_hook(lambda _: model.config.events.append(("backward", model.stage)))

    def loss(out: Tensor) -> tuple[Tensor, Tensor]:
        mean = (out - x).square().mean()
        return mean, mean.detach().clone()

    return output, loss


def counting_loss(iterator: Iterator[Tensor], model: Any) -> tuple[Tensor, Any]:
    output, loss = forward_step(iterator, model)
    return output, lambda out: (loss(out)[0] * 3, torch.tensor(3, dtype=torch.int), loss(out)[1])


def record_syncs(config: Any, models: list[Toy], by_function: bool) -> None:
    """Notes when gradients and parameters would travel between replicas, and when a step ends."""
    events = config.events

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        events.append("no sync")
        yield
        events.append("sync")

    def note(name: str) -> Callable[[Any], None]:
        numbers = {id(next(model.parameters())): model.stage for model in models}
        return lambda parameters: events.append((name, numbers[id(next(iter(parameters)))]))

    def finalize(models: list[Toy], num_tokens: Any, pg_collection: Any, force_all_reduce: bool) -> None:
        assert pg_collection is not None
        events.append(
            ("finalize", [m.stage for m in models], None if num_tokens is None else int(num_tokens), force_all_reduce)
        )

    config.no_sync_func = no_sync if len(models) == 1 else [no_sync] * len(models)
    config.finalize_model_grads_func = finalize
    config.defer_embedding_wgrad_compute = True
    config.timers = Timers(events)
    if by_function:
        config.grad_sync_func = note("reduce")
        config.param_sync_func = note("gather")


def one_step(
    run: Callable[..., Any],
    chunks: int = 1,
    communicator: Any = None,
    microbatches: int = MICROBATCHES,
    lengths: Sequence[int] = (),
    forward_only: bool = False,
    syncs: str = "",
    step: Any = forward_step,
    num_steps: int = 2,
    **options: Any,
) -> Run:
    """Two steps of the toy with a function of Megatron's kind."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.transformer import TransformerConfig

    rank = dist.get_rank()
    if chunks > 1:
        options |= {"virtual_pipeline_model_parallel_size": chunks, "microbatch_group_size_per_vp_stage": RANKS}
    config = TransformerConfig(
        num_layers=8, hidden_size=WIDTH, num_attention_heads=2, batch_p2p_sync=False, use_cpu_initialization=True,
        pipeline_model_parallel_size=RANKS, pipeline_dtype=torch.float32, overlap_p2p_comm=False,
        moe_token_dispatcher_type="alltoall", **options,
    )  # fmt: skip
    config.events = []
    models = [Toy(config, chunk * RANKS + rank, chunks * RANKS) for chunk in range(chunks)]
    if syncs:
        record_syncs(config, models, syncs == "function")
    made = (communicator or P2PCommunicator)(GROUPS[0].pp, config)
    losses = []
    for _ in range(num_steps):
        iterators = [samples(lengths or [LENGTH] * microbatches) for _ in models]
        losses += run(
            forward_step_func=step,
            data_iterator=iterators if chunks > 1 else iterators[0],
            model=models if chunks > 1 else models[0],
            num_microbatches=microbatches,
            seq_length=LENGTH,
            micro_batch_size=SAMPLES,
            forward_only=forward_only,
            p2p_communicator=made,
            pg_collection=GROUPS[0],
            force_all_reduce=bool(syncs),
        )
    grads = {
        f"{model.stage} {name}": p.grad.tolist()
        for model in models
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    return {"losses": [loss.tolist() for loss in losses], "grads": grads, "events": config.events}


def samples(lengths: Sequence[int]) -> Iterator[Tensor]:
    draws = torch.Generator().manual_seed(5)
    return iter([torch.randn(length, SAMPLES, WIDTH, generator=draws) for length in lengths])


GROUPS: list[Any] = []
"""Megatron's collection of process groups."""


def toy(rank: int) -> dict[str, dict[str, Run]]:
    """Of each kind of step, what Megatron's own function gives ("theirs"), and what plans give."""
    prepare()
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.process_groups_config import ProcessGroupCollection

    from penstock.integrations.megatron import PlannedCommunicator, follow, planned_1f1b

    alone = [dist.new_group([each]) for each in range(RANKS)][rank]
    GROUPS.append(ProcessGroupCollection(tp=alone, cp=alone, pp=dist.group.WORLD))
    own = schedules.forward_backward_pipelining_without_interleaving
    chunked = schedules.forward_backward_pipelining_with_interleaving
    drain = "drain_embedding_wgrad_compute"  # a kernel for GPUs
    setattr(schedules, drain, lambda config, *_: config.events.append(("drain", len(_[0]))))
    late = planned_1f1b([7, 5, 3, 1], MICROBATCHES)

    def planned(warmup: list[int], **more: Any) -> Any:
        return partial(PlannedCommunicator, warmup=warmup, **more)

    def several(theirs: Any, ours: dict[str, tuple[Any, Any]], **options: Any) -> dict[str, Run]:
        runs = {"theirs": one_step(theirs, **options)}
        return runs | {name: one_step(run, communicator=made, **options) for name, (run, made) in ours.items()}

    follows = {
        name: (follow(plan), None)
        for name, plan in {
            "follow 1f1b": ps.build("1f1b", RANKS, MICROBATCHES),
            "follow planned": late,
            "follow gpipe": ps.build("gpipe", RANKS, MICROBATCHES),
            "follow placed": ps.passes.add_communication(late, channels="nccl"),
        }.items()
    }
    ahead = {
        str(w): (own, planned(w)) for w in ([4, 3, 2, 1], [7, 5, 3, 1], [8, 8, 8, 8], [9, 4, 4, 2], [1, 1, 1, 1])
    }
    both = follows | {"planned": ahead["[7, 5, 3, 1]"]}
    same = {"follow": follows["follow 1f1b"], "planned": ahead["[4, 3, 2, 1]"]}
    window = {"num_microbatches_with_partial_activation_checkpoints": 1}
    interleaved = {
        name: (follow(ps.build(name, RANKS, MICROBATCHES, num_stages=2 * RANKS)), None)
        for name in ("interleaved-1f1b", "looped-bfs")
    }
    three = {"follow": (follow(ps.build("interleaved-1f1b", RANKS, MICROBATCHES, num_stages=3 * RANKS)), None)}
    runs = {
        "1f1b": several(own, follows | ahead),
        "variable lengths": several(own, both, lengths=range(3, 3 + MICROBATCHES), variable_seq_lengths=True),
        "freed outputs": several(own, both, deallocate_pipeline_outputs=True),
        "fewer microbatches": several(
            own,
            {
                "planned": (own, planned([7, 5, 3, 1], num_microbatches=2)),
                "follow": (follow(planned_1f1b([2, 2, 1, 1], 2)), None),
            },
            microbatches=2,
        ),
        "forward only": several(own, both, forward_only=True),
        "forward only, other number": several(
            own,
            {"follow": follows["follow planned"], "planned": (own, planned([7, 5, 3, 1], num_microbatches=3))},
            forward_only=True,
            microbatches=3,
        ),
        "hooks": several(own, same, syncs="hooks", **window),
        "function": several(own, same, syncs="function"),
        "tokens": several(own, same, syncs="function", step=counting_loss, calculate_per_token_loss=True),
        "chunks": several(chunked, interleaved, chunks=2),
        "chunks, variable lengths": several(
            chunked, interleaved, chunks=2, lengths=range(3, 3 + MICROBATCHES), variable_seq_lengths=True
        ),
        "chunks, freed outputs": several(chunked, interleaved, chunks=2, deallocate_pipeline_outputs=True),
        "chunks, forward only": several(chunked, interleaved, chunks=2, forward_only=True),
    }
    for syncs in ("hooks", "function"):
        runs[f"chunks, {syncs}"] = several(chunked, three, chunks=3, syncs=syncs, **window)
    return runs


VOCABULARY = 32


def gpt_step(iterator: Iterator[Tensor], model: Any) -> tuple[Tensor, Any]:
    tokens = next(iterator)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    mask = torch.ones(tokens.shape[1], tokens.shape[1]).triu(1).bool()[None, None]
    output = model(tokens, positions, mask, labels=tokens)

    def loss(out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        total = out.float().sum()
        return total, torch.tensor(out.numel(), dtype=torch.int), total.detach().clone()

    return output, loss


def one_gpt_step(run: Callable[..., Any], chunks: int = 1, make: Any = None) -> Run:
    """A step of Megatron's GPT in its wrapper for replicas, with its own end of a step and tied embeddings."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

    size = parallel_state.get_pipeline_model_parallel_world_size()
    options: dict[str, Any] = {"overlap_p2p_comm": False}
    if chunks > 1:  # Megatron swaps messages between two ranks unless it overlaps them
        options = {"virtual_pipeline_model_parallel_size": chunks, "microbatch_group_size_per_vp_stage": size}
        options |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    config = TransformerConfig(
        num_layers=size * chunks, hidden_size=16, num_attention_heads=2, use_cpu_initialization=True,
        pipeline_model_parallel_size=size, pipeline_dtype=torch.float32, batch_p2p_sync=False,
        hidden_dropout=0.0, attention_dropout=0.0, bias_dropout_fusion=False, masked_softmax_fusion=False,
        persist_layer_norm=False, calculate_per_token_loss=True, deallocate_pipeline_outputs=True,
        **options,
    )  # fmt: skip
    groups = ProcessGroupCollection.use_mpu_process_groups()
    wrapped = []
    for chunk in range(chunks):
        torch.manual_seed(7 + chunk)
        model = GPTModel(
            config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
            share_embeddings_and_output_weights=True, vp_stage=chunk if chunks > 1 else None,
        )  # fmt: skip
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True)
        wrapped.append(DistributedDataParallel(config, ddp, model))
        wrapped[-1].zero_grad_buffer()
    config.no_sync_func = [each.no_sync for each in wrapped] if chunks > 1 else wrapped[0].no_sync
    config.finalize_model_grads_func = finalize_model_grads
    draws = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    tokens = [torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=draws) for _ in range(MICROBATCHES)]
    given = {} if make is None else {"p2p_communicator": make(groups.pp, config), "pg_collection": groups}
    iterators = [iter(tokens) for _ in wrapped]
    losses = run(
        forward_step_func=gpt_step,
        data_iterator=iterators if chunks > 1 else iterators[0],
        model=wrapped if chunks > 1 else wrapped[0],
        num_microbatches=MICROBATCHES,
        seq_length=LENGTH,
        micro_batch_size=SAMPLES,
        **given,
    )
    grads = {
        f"{chunk} {name}": p.main_grad.tolist()
        for chunk, model in enumerate(wrapped)
        for name, p in model.named_parameters()
    }
    return {"losses": [loss.tolist() for loss in losses], "grads": grads, "events": []}


def gpt(rank: int) -> dict[str, dict[str, Run]]:
    """The same of Megatron's GPT on four ranks, and on two with two replicas."""
    prepare()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.pipeline_parallel import schedules

    from penstock.integrations.megatron import PlannedCommunicator, follow, planned_1f1b

    tensor_parallel.get_cuda_rng_tracker = lambda: types.SimpleNamespace(fork=contextlib.nullcontext)
    runs = {}
    for size, warmup in ((4, [7, 5, 3, 1]), (2, [5, 2])):
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=size)
        own = schedules.forward_backward_pipelining_without_interleaving
        runs[f"{size} ranks"] = {
            "theirs": one_gpt_step(own),
            "planned": one_gpt_step(own, make=partial(PlannedCommunicator, warmup=warmup)),
            "follow planned": one_gpt_step(follow(planned_1f1b(warmup, MICROBATCHES))),
            "follow gpipe": one_gpt_step(follow(ps.build("gpipe", size, MICROBATCHES))),
        }
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    runs["2 ranks, chunks"] = {
        "theirs": one_gpt_step(schedules.forward_backward_pipelining_with_interleaving, 2),
        "follow": one_gpt_step(follow(ps.build("interleaved-1f1b", 2, MICROBATCHES)), 2),
    }
    schedules.forward_backward_pipelining_with_interleaving = follow(ps.build("looped-bfs", 2, MICROBATCHES))
    runs["2 ranks, chunks"]["put in the place"] = one_gpt_step(schedules.get_forward_backward_func(), 2)
    return runs


def refusals(rank: int) -> list[str]:
    """What steps say that do not fit the plan, or the job."""
    prepare()
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.process_groups_config import ProcessGroupCollection

    from penstock.integrations.megatron import PlannedCommunicator, follow

    alone = [dist.new_group([each]) for each in range(2)][rank]
    GROUPS.append(ProcessGroupCollection(tp=alone, cp=alone, pp=dist.group.WORLD))
    plan = ps.build("1f1b", 2, MICROBATCHES)
    said = []

    def refuse(run: Callable[..., Any], **options: Any) -> None:
        try:
            one_step(run, **options)
        except ps.ScheduleError as error:
            said.append(str(error))

    def changed(**more: Any) -> Callable[..., Any]:
        return lambda **given: follow(plan)(**given | more)

    def with_stash(**given: Any) -> Any:
        given["model"].config.moe_paged_stash = True
        return follow(plan)(**given)

    refuse(follow(plan), microbatches=3)
    refuse(follow(ps.build("interleaved-1f1b", 2, MICROBATCHES)))
    refuse(follow(ps.build("1f1b", 4, MICROBATCHES)))
    refuse(with_stash)
    refuse(changed(data_iterator=[None, None]))
    refuse(changed(pg_collection=None))
    destroy_num_microbatches_calculator()
    refuse(
        schedules.forward_backward_pipelining_without_interleaving,
        communicator=partial(PlannedCommunicator, warmup=[2, 1]),
    )
    return said
