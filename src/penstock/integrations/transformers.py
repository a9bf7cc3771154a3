"""A `transformers.Trainer` whose model runs as a pipeline: one rank per process, or all ranks in one.

    trainer = PipelineTrainer(model, args, train_dataset=data, schedule="zb-h1")
    trainer.train()

The Trainer keeps its loop: arguments, callbacks, logs, learning rates, evaluation, checkpoints. What a step computes
is the schedule's: the batches that one update gathers are its microbatches.

    Trainer                                          here
    gradient_accumulation_steps batches         ->   the microbatches of one step of the schedule
    backward of each                            ->   the schedule, once
    clip_grad_norm_, optimizer.step             ->   Pipeline.clip, Pipeline.update
    the accelerator's GradScaler (fp16)         ->   PrecisionOptions(scaler=)
    optimizer.pt in a checkpoint                ->   a folder `pipeline` beside it, as Pipeline.save writes it

Every process has the whole model and the whole batch; the optimizer's state lies where a stage runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch import Tensor
from torch.optim import Optimizer
from transformers import Trainer
from transformers.trainer_utils import get_last_checkpoint

from penstock.dispatch import Dispatch
from penstock.library import build
from penstock.models.huggingface import Decoder
from penstock.runtime import Pipeline, PrecisionOptions, RuntimeFailure, TransportOptions
from penstock.runtime.checkpoint import CheckpointError
from penstock.schedule import Schedule

__all__ = ["PipelineTrainer"]

FOLDER = "pipeline"
"""In a checkpoint of the Trainer, what the pipeline saved."""


class PipelineTrainer(Trainer):
    """Trains a model over pipeline ranks, as `transformers.Trainer` does on one: whatever a `Decoder` takes, such as
    language models, classifiers, and models with a loss of their own.

    For language models, losses, gradient norms, learning rates and weights are those of the plain Trainer in one
    process with the same arguments, bit for bit, where the model has no dropout. If the model's own forward works out
    the loss, an update's loss is that of its batches taken as one. (For some of these classes the plain Trainer adds
    up the means of the batches, unless it is told `loss_is_scaled_for_ga = False`.) Under `torchrun` each process
    runs one rank; on a CPU say `use_cpu=True` in the arguments then.

    Args:
        model: a model of transformers, or a PeftModel around one.
        args: the Trainer's; `gradient_accumulation_steps` is the number of microbatches, and
            `per_device_train_batch_size` the samples in each.
        schedule: one of the library's names, or a schedule over as many ranks and microbatches.
        num_ranks: pipeline ranks; one per process by default. In one process all ranks take turns.
        cut: how many layers each stage holds, embedding and head counted; by default they are cut by their costs.
        dispatch, transport, timeout: as for `ps.Pipeline`.
        others: the Trainer's keywords: data_collator, train_dataset, callbacks, optimizers, compute_metrics, ...

    Raises:
        RuntimeFailure: an argument that a pipeline does not take, by its name.
        ScheduleError: a schedule that cannot have these ranks and microbatches.
        DecoderError: a model that cannot be cut, or whose stages do not give its own loss and gradients.
    """

    optimizer: Any
    accelerator: Any

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *,
        schedule: str | Schedule = "1f1b",
        num_ranks: int | None = None,
        cut: Sequence[int] | None = None,
        dispatch: Dispatch | str = Dispatch.FROZEN,
        transport: TransportOptions | str | None = None,
        timeout: float = 60.0,
        **others: Any,
    ) -> None:
        if args is None:
            raise RuntimeFailure("args is None; give transformers.TrainingArguments with gradient_accumulation_steps")
        _require_taken(type(self), args, model, others)
        self.schedule = _scheduled(schedule, args, num_ranks)
        self._cut, self._dispatch, self._transport, self._timeout = cut, dispatch, transport, timeout
        self._decoder = Decoder(model)
        self._pipe: Pipeline | None = None
        self._window: list[Any] = []
        self._shares: deque[Tensor] = deque()
        self._resumed: Path | None = None
        super().__init__(model, args, **others)
        if self._decoder.has_own_loss and args.label_names is None:
            self.label_names = list(self._decoder.anatomy.labels)
        _require_steps_plainly(self.optimizer)
        if self.label_smoother is not None and self._decoder.has_router_loss:
            raise RuntimeFailure(
                "label_smoothing_factor replaces the model's own loss, which has its routers' in it; leave it 0"
            )

    # What the Trainer builds.

    def create_accelerator_and_postprocess(self) -> None:
        """Makes the accelerator, which leaves model and batches whole."""
        super().create_accelerator_and_postprocess()
        made = self.accelerator
        self.accelerator = _WholeBatches(
            mixed_precision=self.args.mixed_precision,
            dataloader_config=made.dataloader_config,
            step_scheduler_with_optimizer=made.step_scheduler_with_optimizer,
        )
        self.accelerator.clip = lambda max_norm: self.pipeline.clip(max_norm)
        self.accelerator.native_amp = made.native_amp
        # The pipeline scales losses and gradients, so that all processes leave out the same updates.
        self._scaler, self.accelerator.scaler = made.scaler, None
        self.gather_function = self.accelerator.gather_for_metrics

    def create_optimizer(self, model: Any = None) -> Optimizer:
        """Makes the optimizer as the Trainer does, and the pipeline; each process keeps what its stages have."""
        known = getattr(self.optimizer, "optimizer", self.optimizer)
        if not isinstance(known, _PipelineOptimizer):
            made = super().create_optimizer(model)
            _require_steps_plainly(made)
            self.optimizer = _PipelineOptimizer(self._build(made), made, self._load)
        return self.optimizer

    def _build(self, optimizer: Optimizer | None) -> Pipeline:
        if self._pipe is not None:
            self._pipe.close()
        self._pipe = Pipeline(
            self._decoder.stages(self.schedule.num_stages, self._cut),
            self.schedule,
            loss_fn=_Loss(self),
            optimizer=optimizer,
            dispatch=self._dispatch,
            seed=self.args.seed,
            timeout=self._timeout,
            precision=PrecisionOptions(autocast=self._autocast(), scaler=None if optimizer is None else self._scaler),
            transport=self._transport,
        )
        return self._pipe

    def _autocast(self) -> torch.dtype | None:
        """The type that Accelerate would compute in. It takes no notice of fp16 on a CPU."""
        if not self.accelerator.native_amp:
            return None
        return torch.float16 if self.args.fp16 else torch.bfloat16 if self.args.bf16 else None

    @property
    def pipeline(self) -> Pipeline:
        """What runs the schedule. Before training it is made without an optimizer, for evaluation."""
        return self._pipe if self._pipe is not None else self._build(None)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Samples per update: all processes work on the same."""
        return int(args.train_batch_size * args.gradient_accumulation_steps)

    # Training.

    def train(self, resume_from_checkpoint: str | bool | None = None, **how: Any) -> Any:
        """Trains, as the Trainer does; afterwards every process's model has all trained weights.

        Raises CheckpointError where the checkpoint has nothing of a pipeline.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise CheckpointError(f"{self.args.output_dir} has no checkpoint to resume from; leave it out")
        self._resumed = Path(str(resume_from_checkpoint)) if resume_from_checkpoint else None
        if self._resumed is not None and not (self._resumed / FOLDER).is_dir():
            raise CheckpointError(
                f"{self._resumed} has no folder {FOLDER!r}: it was written by a plain Trainer, with save_only_model, "
                "or not to its end; give another checkpoint, or load its weights with from_pretrained and begin anew"
            )
        ended = super().train(resume_from_checkpoint=resume_from_checkpoint or None, **how)
        self.gather_model()
        return ended

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """The batches of one update, and how many labels they have."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._window = batches
        self._shares.clear()
        return batches, num_items

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """A microbatch's share of the loss. With the first of an update's batches the schedule runs over them all."""
        if not self._shares:
            model.train()
            num = self.schedule.num_microbatches
            pairs = [self._taken_apart(batch) for batch in self._window]
            counted = self._targets([labels for _, labels in pairs], num_items_in_batch)
            idle = num - len(pairs)  # in the last update of an epoch
            taken = [given for given, _ in pairs] + [pairs[-1][0]] * idle
            result = self.pipeline.step(
                taken, counted + [{**counted[-1], "share": torch.zeros(())}] * idle, update=False
            )
            self._shares.extend(result.losses[: len(pairs)].to(self.args.device))
        return self._shares.popleft()

    @property
    def _replaces_loss(self) -> bool:
        """Whether the arguments give another loss than the model's."""
        return self.compute_loss_func is not None or self.label_smoother is not None

    def _taken_apart(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """The pipeline's inputs and its labels, which do not go along where the loss is not the model's."""
        inputs, labels = self._decoder.inputs_and_targets(batch)
        if self._replaces_loss and "labels" in inputs:
            labels = inputs.pop("labels")
        return inputs, labels

    def _targets(self, labels: Sequence[Any], num_items: Any) -> list[dict[str, Any]]:
        """The labels of each microbatch, and what its loss is divided by: by all labels of the update, or by its
        batches; a mean that the model works out itself by the share of its labels. 0 where nothing counts.
        """
        parts = [float(len(labels))] * len(labels)
        if not self._replaces_loss and (self._decoder.has_own_loss or self._decoder.has_encoder):
            weights = [self._decoder.loss.weight(each) for each in labels]
            parts = [sum(weights) / each if each else 0.0 for each in weights]
        given = {} if num_items is None else {"num_items": torch.as_tensor(num_items)}
        return [
            {"labels": each, "share": torch.tensor(part), **given} for each, part in zip(labels, parts, strict=True)
        ]

    # Evaluation.

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """Loss, logits and labels of an evaluation batch, cut into microbatches, on every process."""
        (batch,), num_items = super().get_batch_samples(iter([inputs]), 1, self.args.device)
        has_labels = all(batch.get(name) is not None for name in self.label_names)
        given, labels = self._taken_apart(batch) if has_labels else (dict(batch), None)
        size = len(next(value for value in given.values() if isinstance(value, Tensor)))
        adds_up = self.compute_loss_func is None and not self._decoder.has_router_loss
        adds_up &= num_items is not None or (self._decoder.has_own_loss and not self._replaces_loss)
        num = min(size, self.schedule.num_microbatches) if adds_up or labels is None else 1
        parts = _parts(given, size, num)
        targets = None
        if labels is not None:
            cut = _parts(labels if isinstance(labels, Mapping) else {"": labels}, size, num)
            targets = self._targets([each.get("", each) for each in cut], num_items)
        if prediction_loss_only:
            loss = None if targets is None else self.pipeline.evaluate(parts, targets).loss.to(self.args.device)
            return loss, None, None
        outputs = self.pipeline.predict(parts)
        loss = None
        if targets is not None:
            with torch.no_grad():
                shares = [_Loss(self)(output, target) for output, target in zip(outputs, targets, strict=True)]
            loss = torch.stack(shares).sum()
        if not self._decoder.has_own_loss:
            outputs = [{"logits": _logits(output)} for output in outputs]
        names = [name for name in outputs[0] if name not in (ignore_keys or ()) and name != "loss"]
        logits = [torch.cat([output[name] for output in outputs]).to(self.args.device) for name in names]
        found = [batch[name] for name in self.label_names] if has_labels else [None]
        given_back = [each[0] if len(each) == 1 else tuple(each) for each in (logits, found)]
        return loss, given_back[0], given_back[1]

    # Weights and checkpoints.

    def gather_model(self) -> None:
        """Gives every process's model all weights, as they are now. Every process must call it."""
        if self._pipe is None or not dist.is_initialized():
            return
        held = dict(self._pipe.named_parameters())
        owners = [set(names) for names in self._pipe.gather(list(held))]
        alike = {name: group for group in self._decoder.tied for name in group}
        with torch.no_grad():
            for name, parameter in self._decoder.model.named_parameters():
                names = alike.get(name, [name])
                owner, found = next((o, n) for o, there in enumerate(owners) for n in names if n in there)
                value = held[found].detach().clone() if found in held else torch.empty_like(parameter)
                dist.broadcast(value, owner)
                parameter.copy_(value)

    def save_model(self, output_dir: str | None = None, **how: Any) -> None:
        """Writes a folder that `from_pretrained` opens; in a checkpoint also what the pipeline needs to go on."""
        self.gather_model()
        super().save_model(output_dir, **how)
        if how.get("_internal_call") and self._pipe is not None and not self.args.save_only_model:
            self._pipe.save(Path(output_dir or self.args.output_dir) / FOLDER, keep=1)

    def _load(self) -> None:
        if self._resumed is None:
            raise CheckpointError("the optimizer's state is loaded with train(resume_from_checkpoint=...)")
        self.pipeline.load(self._resumed / FOLDER)

    def hyperparameter_search(self, *_: Any, **__: Any) -> Any:
        """Refused."""
        raise RuntimeFailure("hyperparameter_search makes a new model for each trial; search with the plain Trainer")

    def end(self) -> None:
        """Closes the pipeline, which leaves the model without hooks, and ends the process group."""
        if self._pipe is not None:
            self._pipe.close()
        super().end()


class _Loss:
    """A microbatch's share of the batch's loss, by the function that the plain Trainer would have called."""

    adds_up = True

    def __init__(self, trainer: PipelineTrainer) -> None:
        self._trainer = trainer

    def __call__(self, output: Any, target: Mapping[str, Tensor]) -> Tensor:
        trainer, logits, labels, num_items = self._trainer, _logits(output), target["labels"], target.get("num_items")
        decoder = trainer._decoder
        if not target["share"]:  # no sample of its own, to fill up the schedule, or none that counts
            return logits.float().sum() * 0.0  # no float16, in which the scale of a loss is infinite
        if trainer.compute_loss_func is not None:
            outputs = output if decoder.has_own_loss else {"logits": logits}
            return trainer.compute_loss_func(outputs, labels, num_items_in_batch=num_items)
        if trainer.label_smoother is not None:
            shifted = not (decoder.is_masked or decoder.has_encoder or decoder.has_own_loss)
            loss = trainer.label_smoother(
                {"logits": logits}, labels, shift_labels=shifted, num_items_in_batch=num_items
            )
        elif decoder.has_own_loss or decoder.has_encoder:
            return decoder.loss(output, labels) / target["share"]
        else:
            loss = decoder.model.loss_function(
                logits=logits, labels=labels, vocab_size=logits.shape[-1], num_items_in_batch=num_items
            )
        if decoder.has_router_loss:
            loss = loss + output["router_loss"]
        return loss if num_items is not None else loss / target["share"]


class _PipelineOptimizer(Optimizer):
    """The Trainer's optimizer, which steps where the pipeline updates. Its state is in the pipeline's checkpoint."""

    was_skipped = False
    """Whether the last update was left out, as some gradient was not finite, and Accelerate would have seen that: the
    steps of fused optimizers are called, and leave out the update by themselves."""

    def __init__(self, pipe: Pipeline, kept: Optimizer, load: Any) -> None:
        self._pipe, self._kept, self._load = pipe, kept, load
        self.defaults = kept.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self._kept.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self._kept.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise RuntimeFailure("a closure computes the loss again, for which a pipeline has no place; give none")
        before = self._pipe.num_updates
        self._pipe.update()
        is_seen = not any(group.get("fused") for group in self.param_groups)
        self.was_skipped = is_seen and self._pipe.num_updates == before

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._pipe.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {"state": {}, "param_groups": [], FOLDER: self._pipe.num_updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._load()


class _WholeBatches(Accelerator):
    """An accelerator for processes that work on one model and the same batches: nothing is wrapped, cut or gathered.

    Attributes:
        clip: clips by the norm of the whole model's gradient, and returns it.
    """

    clip: Any

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        return super().prepare_model(model, device_placement, evaluation_mode=True)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        config = self.dataloader_config
        return prepare_data_loader(
            data_loader,
            self.device,
            num_processes=1,
            process_index=0,
            put_on_device=True,
            rng_types=list(self.rng_types or ()),
            dispatch_batches=False,
            use_seedable_sampler=config.use_seedable_sampler,
            data_seed=config.data_seed,
            non_blocking=config.non_blocking,
        )

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        return super().prepare_optimizer(optimizer, device_placement=False)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        return any(each.optimizer.was_skipped for each in self._optimizers)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        if norm_type != 2:
            raise RuntimeFailure(f"gradients are clipped by their 2-norm, not by norm {norm_type}")
        return self.clip(max_norm)

    def gather(self, tensor: Any) -> Any:
        return tensor

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        return tensor


def _parts(given: Mapping[str, Any], size: int, num: int) -> list[dict[str, Any]]:
    cut = {
        name: value.tensor_split(num)
        if isinstance(value, Tensor) and value.dim() and len(value) == size
        else [value] * num
        for name, value in given.items()
    }
    return [{name: values[m] for name, values in cut.items()} for m in range(num)]


def _logits(output: Any) -> Tensor:
    """The logits in the last stage's output, or its first tensor besides the loss."""
    if isinstance(output, Mapping):
        output = output.get("logits", next(each for name, each in output.items() if name != "loss"))
    found: Tensor = output
    return found


def _scheduled(schedule: str | Schedule, args: Any, num_ranks: int | None) -> Schedule:
    """The schedule. Raises RuntimeFailure where it does not fit the processes or the arguments, ScheduleError."""
    processes, num = args.world_size, args.gradient_accumulation_steps
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() != processes:
        raise RuntimeFailure(
            f"there are {dist.get_world_size()} processes, and the arguments know of {processes}; without a GPU say "
            "TrainingArguments(use_cpu=True)"
        )
    if isinstance(schedule, str):
        schedule = build(schedule, processes if num_ranks is None else num_ranks, num)
    ranks = schedule.num_ranks if num_ranks is None else num_ranks
    if schedule.num_ranks != ranks or (processes > 1 and ranks != processes):
        raise RuntimeFailure(
            f"the schedule has {schedule.num_ranks} ranks, num_ranks is {ranks}, there are {processes} processes; "
            "each process runs one rank, or one process all of them. For replicas use ps.Pipeline over a device mesh"
        )
    if schedule.num_microbatches != num:
        raise RuntimeFailure(
            f"{schedule.name} has {schedule.num_microbatches} microbatches, and gradient_accumulation_steps is "
            f"{num}; they are one number"
        )
    if schedule.updates is not None:
        raise RuntimeFailure(
            f"{schedule.name} has updates as ops of its order, and the Trainer updates once per step; give a "
            "synchronous schedule, or train with ps.Pipeline"
        )
    return schedule


REFUSED: Mapping[str, str] = {
    "fp16_full_eval": "casts the model under the pipeline; leave it out",
    "bf16_full_eval": "casts the model under the pipeline; leave it out",
    "fsdp": "shards the model on its own; leave it out",
    "deepspeed": "has an engine of its own; leave it out",
    "parallelism_config": "lays out processes on its own; leave it out",
    "torch_compile": "compiles the whole model; compile its blocks instead",
    "auto_find_batch_size": "trains again from the start with other batches; choose per_device_train_batch_size",
    "activation_checkpointing": "recomputes inside blocks; give a schedule with ps.passes.recompute instead",
    "gradient_checkpointing": "recomputes inside blocks; give a schedule with ps.passes.recompute instead",
    "neftune_noise_alpha": "draws its noise from random numbers that depend on the rank; leave it out",
    "use_liger_kernel": "replaces the model's loss; leave it out",
    "enable_jit_checkpoint": "saves when one process gets a signal, and all must save together; leave it out",
    "torch_empty_cache_steps": "empties the cache between backwards, which the schedule runs; leave it out",
    "debug": "hooks into the whole model's forward, which no process runs; leave it out",
}
"""Arguments of the Trainer that must be off, each with the reason and what to do."""


def _require_taken(kind: Any, args: Any, model: Any, others: Mapping[str, Any]) -> None:
    for name, why in REFUSED.items():
        if value := getattr(args, name, None):
            raise RuntimeFailure(f"TrainingArguments({name}={value!r}): {name} {why}")
    optim = str(getattr(args.optim, "value", args.optim))
    if "lomo" in optim or "layerwise" in optim or "schedule_free" in optim:
        raise RuntimeFailure(
            f"TrainingArguments(optim={optim!r}): it steps while gradients come, or must know whether the model "
            "trains, where the schedule decides; take another optimizer"
        )
    if args.train_sampling_strategy == "batch_rebalance":
        raise RuntimeFailure(
            "TrainingArguments(train_sampling_strategy='batch_rebalance') deals batches to processes, and here all "
            "work on the same; take 'random', 'sequential' or 'group_by_length'"
        )
    if args.accelerator_config.split_batches or args.accelerator_config.dispatch_batches:
        raise RuntimeFailure(
            "accelerator_config: split_batches and dispatch_batches deal batches to processes, and here all work on "
            "the same; leave them out"
        )
    if args.n_gpu > 1:
        raise RuntimeFailure(
            f"this process sees {args.n_gpu} GPUs; start one process for each with torchrun, or hide all but one"
        )
    if kind.compute_loss is not Trainer.compute_loss:
        raise RuntimeFailure(
            f"{kind.__name__} has a compute_loss of its own, and no process runs the whole model that it calls; give "
            "compute_loss_func=, or a model whose own forward works out the loss"
        )
    if model is None or others.get("model_init") is not None:
        raise RuntimeFailure("model_init makes the model anew for each training; give the model")
    if getattr(model, "hf_quantizer", None) is not None:
        raise RuntimeFailure(
            "the model is quantized, and its stages would not be; load it without quantization_config"
        )
    if getattr(model, "is_distributed_loading_by_transformers", False):
        raise RuntimeFailure("the model was sharded when it was loaded; load it without distributed_config")


def _require_steps_plainly(optimizer: Any) -> None:
    if callable(getattr(optimizer, "train", None)):
        raise RuntimeFailure(
            f"{type(optimizer).__name__} must know whether the model trains (it has a method train); take another one"
        )
