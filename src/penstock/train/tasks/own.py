"""A model of the user's own, from `--model FILE.py:NAME`: built, tried on its first microbatch, and cut
without changes.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.data import Corpus
from penstock.models import CrossEntropy
from penstock.runtime import Split
from penstock.runtime import split as cut_model
from penstock.runtime.stage.batch_rules import split
from penstock.runtime.stage.loss import module_of
from penstock.runtime.stage.module_state import untouched
from penstock.runtime.stage.stage import with_arguments
from penstock.schedule import Schedule
from penstock.train.checks import SettingsError
from penstock.train.own_file import ArgumentNames, called, find, is_own, made, own_name, seeded
from penstock.train.settings import Settings
from penstock.train.tasks.layers import of_first, recomputed, refuse_shared, require_chain
from penstock.train.tasks.own_data import own_data, require_samples, tensors_of
from penstock.train.tasks.task import Example, Task, TaskData
from penstock.train.tasks.text import next_tokens, tokenizer_of

USUAL_CONTEXT = 128
"""Default tokens of a sample of text."""
LOSS = "loss_fn"
"""The name of the loss in a file."""

_BUILT: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The models that functions have returned in this process."""


class ModelTrial(NamedTuple):
    """A model of the user's own with its data, and the microbatch that it was run on."""

    model: nn.Module
    data: TaskData
    inputs: Any
    targets: Any


class OwnTask(Task):
    """See `Task`.

    Raises:
        SettingsError: the file, the name in it, the model, its loss or its data are not what they must be; with the
            line.
        PartitionError: what stands in the way of cutting it, with its line; more stages than layers.
    """

    def __init__(self, settings: Settings, schedule: Schedule) -> None:
        require_chain(schedule)
        refuse_shared(schedule, f"{settings.model} is your own")
        self._settings, self._schedule = settings, schedule
        self._own = own_name(settings.model)
        self._module, _ = find(settings.model, "--model")
        self.config = None
        self.sizes = {"name": self._own.name, **settings.model_options}
        self.num_tokens = None if is_own(settings.data) else settings.context or USUAL_CONTEXT
        self._split: Split | None = None
        self.loss = self._find_loss()

    def _find_loss(self) -> Callable[..., Tensor]:
        found = getattr(self._module, LOSS, None)
        if found is None and is_own(self._settings.data):
            found = getattr(find(self._settings.data or "", "--data")[0], LOSS, None)
        if found is None:
            return CrossEntropy() if self.num_tokens is not None else ModelLoss(str(self._own))
        if inspect.isclass(found) or not callable(found):
            raise SettingsError(f"--model: {LOSS} in {self._own.path.name} is no function (output, targets) -> loss")
        if isinstance(found, nn.Module) and any(p.requires_grad for p in found.parameters()):
            raise SettingsError(
                f"--model: {LOSS} in {self._own.path.name} has parameters, which nothing would train; make it a "
                "layer of the model"
            )
        return found

    def build(self) -> nn.Module:
        """The model, with weights drawn from its seed."""
        return built(self._settings.model, self._settings.model_options, self._settings.seed)

    def stages(self) -> list[Callable[[], nn.Module]]:
        assert self._split is not None, "data was read"
        sizes = list(map(len, self._split.layers))
        if (wanted := of_first(sizes, self._settings)) != sizes:
            whole, example = self._split.model, self._split.tracing.example
            self._split = cut_model(whole, len(wanted), sizes=wanted, example=example)
        for layer in {id(layer): layer for stage in self._split for layer in stage.in_order}.values():
            if self._settings.recompute:
                recomputed(layer)
        return list(self._split)

    def message_bytes(self, schedule: Schedule) -> list[float]:
        assert self._split is not None, "data was read"
        assert self._split.sent is not None, "on an example"
        return [float(each) for each in self._split.sent]

    def read(self, corpus: Corpus | None) -> TaskData:
        """Reads the data, and builds the model, which is tried on the first microbatch and cut."""
        tried = self.tried(corpus)
        sizes = self._settings.cut or ()
        self._split = cut_model(tried.model, self._schedule.num_stages, sizes=sizes, example=tried.inputs)
        return tried.data

    def tried(self, corpus: Corpus | None = None) -> ModelTrial:
        """The model and its data, after a run on the first microbatch."""
        settings, model = self._settings, self.build()
        if is_own(settings.data):
            reader = BatchReader(model, str(self._own), not isinstance(self.loss, ModelLoss))
            data = own_data(settings, reader)
        else:
            assert self.num_tokens is not None
            data = next_tokens(settings, tokenizer_of(settings), self.num_tokens, corpus)
        return ModelTrial(model, data, *self._try(model, data.batches[0], data.is_dealt))

    def _try(self, model: nn.Module, first: Example, part: bool) -> Example:
        """Runs forward and loss on the first microbatch of a batch, or of a replica's part, and returns
        this microbatch.
        """
        settings = self._settings
        num = settings.microbatches if part else settings.microbatches * settings.dp
        inputs = split(first.inputs, num, "inputs")[0]
        targets = None if first.targets is None else split(first.targets, num, "targets")[0]
        with torch.no_grad(), untouched(model, module_of(self.loss)), seeded(settings.seed):
            where, path = str(self._own), self._own.path
            forward = f"--model: the forward of {where}"
            hint = self._text_hint()
            if isinstance(self.loss, ModelLoss):
                hint = self._loss_hint(forward)
            output = called(lambda: with_arguments(model, inputs), forward, path, hint)
            loss = called(lambda: self.loss(output, targets), f"--model: {LOSS} of {where}", path, hint)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise SettingsError(
                f"--model: {LOSS} of {self._own} returns {got}; return one number, a mean over the samples"
            )
        return Example(inputs, targets)

    def _text_hint(self) -> str:
        """A hint if a forward fails on text: perhaps the model was to learn from something else."""
        if self.num_tokens is None:
            return ""
        return (
            f"its inputs are tokens of text, integers of shape (samples, {self.num_tokens}); "
            "to train on other data give --data FILE.py:NAME"
        )

    def _loss_hint(self, forward: str) -> str:
        """A hint if a forward that is to return its loss fails: perhaps the file has a loss under another name."""
        return (
            f"{forward} gets the whole batch and returns the loss, as neither the model's file nor that of the data "
            f"has a {LOSS}; name the loss {LOSS} if there is one, and the forward gets the inputs alone"
        )


def built(text: str, options: Mapping[str, Any], seed: int) -> nn.Module:
    """A new model of the user's own.

    Args:
        seed: of its weights, if a class or function makes it.

    Raises:
        SettingsError: it is no module, needs other arguments or fails, with the line.
    """
    own, (_, found) = own_name(text), find(text, "--model")
    if isinstance(found, nn.Module):
        if options:
            raise SettingsError(f"--model-options: {own} is made already; leave them out, or name its class")
        return copy.deepcopy(found)
    if not callable(found):
        raise SettingsError(
            f"--model: {own} is a {type(found).__name__}; name a class of modules, a function that returns a module, "
            "or a module"
        )
    with seeded(seed):
        model = made(found, own, "--model", options)
    if not isinstance(model, nn.Module):
        raise SettingsError(f"--model: {own} makes a {type(model).__name__}, not an nn.Module; return the module")
    if model in _BUILT:
        raise SettingsError(
            f"--model: {own} returns the same module again, with what it has learnt; make a new one in each call"
        )
    _BUILT.add(model)
    return model


class ModelLoss:
    """The loss that a model returns itself: in "loss" of a dict or object, first in a tuple, or alone."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, output: Any, targets: Any) -> Tensor:
        found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if found is None:
            found = output[0] if isinstance(output, tuple | list) and output else output
        if not isinstance(found, Tensor) or found.numel() != 1:
            what = f"a dict with {', '.join(map(str, output))}" if isinstance(output, Mapping) else "a value"
            what = f"a tensor of shape {tuple(output.shape)}" if isinstance(output, Tensor) else what
            raise SettingsError(
                f"--model: {self._name} returns {what}, which has no loss, and its file has no {LOSS}; define "
                f"`def {LOSS}(output, targets)` there, a mean over the samples"
            )
        return found


class BatchReader:
    """Turns a batch of the user's data into inputs and targets, in the form that the model's forward takes.

    (inputs, targets), (a, b, targets)    with a loss_fn: the last entry is the targets
    (a, b, ...)                           without a loss_fn: all goes into the forward, which returns its loss
    {"x": ..., "y": ...}                  entries that the forward names go in; the others are the targets
    """

    def __init__(self, model: nn.Module, name: str, has_targets: bool) -> None:
        self._name, self._has_targets = name, has_targets
        self._takes = ArgumentNames.of(model.forward)

    def __call__(self, batch: Any, what: str) -> Example:
        batch = tensors_of(batch)
        if isinstance(batch, dict):
            inputs, targets = self._of_dict(batch, what)
        elif isinstance(batch, tuple):
            inputs, targets = (batch[:-1], batch[-1]) if self._has_targets and len(batch) > 1 else (batch, None)
            inputs = inputs[0] if len(inputs) == 1 else inputs
        else:
            inputs, targets = batch, None
        # Of a dict the forward itself may have taken the labels.
        if self._has_targets and targets is None and not isinstance(batch, dict):
            raise SettingsError(
                f"--data: {what} is a {type(batch).__name__} without targets, and {LOSS} needs some; give "
                "(inputs, targets), or a dict with a key that the forward does not take"
            )
        require_samples(inputs, targets, what)
        return Example(inputs, targets)

    def _of_dict(self, batch: dict[Any, Any], what: str) -> tuple[Any, Any]:
        inputs = {key: value for key, value in batch.items() if key in self._takes.named or self._takes.takes_all}
        rest = {key: value for key, value in batch.items() if key not in inputs}
        if missing := [name for name in self._takes.needed if name not in inputs]:
            raise SettingsError(
                f"--data: {what} has {_listed(batch)}, and the forward of {self._name} needs {', '.join(missing)}; "
                "name the keys as the forward does"
            )
        if rest and not self._has_targets:
            raise SettingsError(
                f"--data: {what} has {_listed(rest)}, which the forward of {self._name} does not take "
                f"({', '.join(self._takes.named)}), and there is no {LOSS} that would; leave it out"
            )
        return inputs, (None if not rest else next(iter(rest.values())) if len(rest) == 1 else rest)


def _listed(batch: Mapping[Any, Any]) -> str:
    return ", ".join(map(str, batch))
