"""Batches of the user's own, from `--data FILE.py:NAME`: made of a dataset's samples, or as any iterable gives them.

a Dataset                      samples, put into batches of --batch in an order that follows from seed and step
a DataLoader, any iterable     batches as they come, pass after pass; the position is in the checkpoint
a function or class            makes one of these; it gets those of batch, seed, train, replica and num_replicas
                               that it takes
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from penstock.rank_environment import rank_of
from penstock.runtime.stage.batch_rules import split
from penstock.runtime.tensors.digest import batch_digest
from penstock.runtime.tensors.pytree import flatten
from penstock.runtime.tensors.rng import mix
from penstock.train.checks import SettingsError
from penstock.train.own_file import ArgumentNames, OwnName, called, find, made, own_name, seeded
from penstock.train.settings import Settings
from penstock.train.tasks.task import Example, TaskData

OPTION = "--data"
SEEN_AGAIN = 4
"""Batches of training that a run is evaluated on if there are no others."""
HELD_OUT = 10
"""One sample of a dataset in so many is never trained on, unless the function makes other data for evaluation."""

ExampleReader = Callable[[Any, str], Example]
"""Makes inputs and targets of a batch. The text names the batch in errors."""


class OwnSource:
    """The data that `--data FILE.py:NAME` names, for one replica of the pipeline.

    Args:
        batch: samples of a step of this replica, for a function that takes it.

    Raises:
        SettingsError: the errors of find and made; data that is neither samples nor batches.
    """

    def __init__(self, text: str, batch: int, seed: int, replica: int = 0, num_replicas: int = 1) -> None:
        self.own: OwnName = own_name(text)
        self.seed = seed
        _, self._found = find(text, OPTION)
        self.is_made = inspect.isclass(self._found) or (
            callable(self._found)
            and not isinstance(self._found, torch.nn.Module)
            and not any(hasattr(self._found, name) for name in ("__iter__", "__getitem__"))
        )
        self.names = ArgumentNames.of(self._found).named if self.is_made else ()
        self._others = {"batch": batch, "seed": seed, "replica": replica, "num_replicas": num_replicas}
        self.takes_train = "train" in self.names
        self.is_dealt = "replica" in self.names
        """Whether each replica loads its own part."""

    def make(self, train: bool = True) -> Any:
        """A dataset, or an iterable of batches."""
        found = self._found
        if self.is_made:
            with seeded(self.seed):
                found = made(found, self.own, OPTION, {}, {**self._others, "train": train})
        if isinstance(found, IterableDataset):
            raise SettingsError(
                f"{OPTION}: {self.own} is an IterableDataset, which gives single samples; name a DataLoader of it, "
                "which puts them into batches"
            )
        if isinstance(found, Mapping | str | Tensor) or not (hasattr(found, "__iter__") or is_samples(found)):
            raise SettingsError(
                f"{OPTION}: {self.own} is a {type(found).__name__}; name a Dataset, a DataLoader, any iterable of "
                "batches (inputs, targets) or dicts, or a function that returns one"
            )
        if not self.is_made and (isinstance(found, Iterator) or is_stateful(found)):
            what = "an iterator, which runs once" if isinstance(found, Iterator) else "a loader with a state"
            raise SettingsError(
                f"{OPTION}: {self.own} is {what}; name a function that makes it, so that every run starts "
                "from the beginning"
            )
        return found


def is_samples(found: Any) -> bool:
    """Whether it gives samples by number, and not batches."""
    indexed = hasattr(found, "__getitem__") and hasattr(found, "__len__")
    return indexed and not isinstance(found, DataLoader | list | tuple)


def is_stateful(found: Any) -> bool:
    """Whether it can save its position, and continue from it."""
    return all(callable(getattr(found, name, None)) for name in ("state_dict", "load_state_dict"))


def own_batch(text: str, seed: int, dp: int) -> int | None:
    """The samples of a step if the data determines their number: those of the first batch, times the replicas that
    have a part of their own. None if `--batch` determines it.
    """
    source = OwnSource(text, 1, seed, 0, dp)
    found = source.make()
    if is_samples(found) or "batch" in source.names:
        return None
    first = next(iter(_Pass(source, found, 0)), None)
    leaves = [] if first is None else flatten(tensors_of(first))[0]
    if not leaves or not leaves[0].dim():
        return None
    return len(leaves[0]) * (dp if source.is_dealt else 1)


def tensors_of(value: Any) -> Any:
    """A batch in which arrays are tensors, lists are tuples, and other mappings are dicts."""
    if isinstance(value, Mapping):
        return {key: tensors_of(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return tuple(tensors_of(each) for each in value)
    if hasattr(value, "__array__") and not isinstance(value, Tensor):
        return torch.as_tensor(value)
    return value


def require_samples(inputs: Any, targets: Any, what: str) -> None:
    """Raises SettingsError unless all tensors of a batch have the same number of samples; `what` says which it is."""
    leaves = flatten(inputs)[0]
    if not leaves:
        raise SettingsError(f"{OPTION}: {what} holds no tensor; give tensors with the samples in dimension 0")
    sizes = {leaf.shape[0] if leaf.dim() else 0 for leaf in (*leaves, *flatten(targets)[0])}
    if len(sizes) > 1 or 0 in sizes:
        raise SettingsError(
            f"{OPTION}: the tensors of {what} have {', '.join(map(str, sorted(sizes)))} samples in dimension 0; "
            "give all the same number, above 0; in Python, ps.Pipeline(batch=ps.BatchRules(...)) cuts others"
        )


class _Pass:
    """The batches of one pass over an iterable. The random draws of each are seeded by its number."""

    def __init__(self, source: OwnSource, found: Any, number: int) -> None:
        self._source, self._found, self._number = source, found, number
        self._drawn, self._has_begun = 0, False

    def begin(self, drawn: int = 0) -> None:
        """Tells the iterable which pass it is. That may take it back to the beginning.

        Args:
            drawn: batches of the pass that went before; the iterable is about to be given the state to go on there.
        """
        for each in (self._found, getattr(self._found, "sampler", None)):
            if callable(getattr(each, "set_epoch", None)):
                each.set_epoch(self._number)  # type: ignore[union-attr]
        self._drawn, self._has_begun = drawn, True

    def __iter__(self) -> Iterator[Any]:
        source, seed = self._source, mix(self._source.seed, self._number)
        if not self._has_begun:
            self.begin()
        with seeded(mix(seed, 0)):
            batches = called(lambda: iter(self._found), f"{OPTION}: {source.own}", source.own.path)
        count = self._drawn
        while True:
            count += 1
            with seeded(mix(seed, count)):
                what = f"{OPTION}: batch {count - 1} of {source.own}"
                batch = called(lambda: next(batches, _END), what, source.own.path)
            if batch is _END:
                return
            yield batch


_END = object()


class IteratedBatches:
    """Batches as an iterable gives them, by step. Steps can only go forward.

    Its state for a checkpoint is its position: the pass, the batch in it, and the iterable's own state if it has one.
    Without one, a resumed run draws the batches of the pass again up to there.
    """

    def __init__(self, source: OwnSource, read: ExampleReader) -> None:
        self._source, self._read = source, read
        self._found = source.make()
        self.is_stateful = is_stateful(self._found)
        self._pass = self._within = self._steps = 0
        self._batches: Iterator[Any] | None = None
        self._last: Example | None = None

    def __getitem__(self, step: int) -> Example:
        while self._steps <= step:
            self._last = self._next()
            self._steps += 1
        if self._last is None or self._steps != step + 1:
            raise SettingsError(
                f"{OPTION}: {self._source.own} is at batch {self._steps}, and batch {step} has gone by"
            )
        return self._last

    def _next(self) -> Example:
        own = self._source.own
        if self._batches is None:
            self._batches = iter(_Pass(self._source, self._found, self._pass))
        batch = next(self._batches, _END)
        if batch is _END:
            if not self._within:
                raise SettingsError(f"{OPTION}: {own} gives no batch; it has to give at least one a pass")
            if isinstance(self._found, Iterator):
                self._found = self._source.make()
            self._pass, self._within, self._batches = self._pass + 1, 0, None
            return self._next()
        self._within += 1
        return self._read(batch, f"batch {self._within - 1} of {own}")

    def state_dict(self) -> dict[str, Any]:
        state = {"steps": self._steps, "pass": self._pass, "within": self._within}
        return state | ({"own": self._found.state_dict()} if self.is_stateful else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps, self._pass, self._within = state["steps"], state["pass"], state["within"]
        self._last = None
        if isinstance(self._found, Iterator):
            self._found = self._source.make()
        batches = _Pass(self._source, self._found, self._pass)
        self._batches = iter(batches)
        if self.is_stateful:
            batches.begin(self._within)
            self._found.load_state_dict(state["own"])
            return
        for _ in range(self._within):
            next(self._batches)


class DatasetBatches:
    """Batches of a dataset's samples, by step. Each pass is shuffled by the seed, and has only whole batches."""

    def __init__(
        self, source: OwnSource, found: Any, numbers: Sequence[int], batch: int, read: ExampleReader
    ) -> None:
        self._source, self._found, self._read = source, found, read
        self._numbers, self._batch = list(numbers), batch
        self.num_batches = len(self._numbers) // batch
        self._order: tuple[int, list[int]] = -1, []
        if not self.num_batches:
            raise SettingsError(
                f"{OPTION}: {source.own} has {len(self._numbers)} samples to train on, and a batch {batch}; give "
                "a smaller --batch"
            )

    def __getitem__(self, step: int) -> Example:
        number, within = divmod(step, self.num_batches)
        if self._order[0] != number:
            shuffle = torch.Generator().manual_seed(mix(self._source.seed, number))
            self._order = number, torch.randperm(len(self._numbers), generator=shuffle).tolist()
        order = self._order[1]
        return self.of([self._numbers[k] for k in order[within * self._batch : (within + 1) * self._batch]], step)

    def of(self, numbers: Sequence[int], step: int) -> Example:
        """A batch of some samples; `step` seeds the random numbers drawn for them."""
        own = self._source.own

        def collated() -> Any:
            return default_collate([self._found[number] for number in numbers])

        with seeded(mix(self._source.seed, step)):
            batch = called(collated, f"{OPTION}: {own}, samples {numbers[0]}, ...", own.path)
        return self._read(batch, f"a batch of {own}")


class ConcatenatedBatches:
    """The batches of several replicas, each with its own part, as one pipeline runs them one after another."""

    def __init__(self, parts: Sequence[IteratedBatches | DatasetBatches], num_microbatches: int) -> None:
        self._parts, self._num = parts, num_microbatches

    def __getitem__(self, step: int) -> Example:
        return self.join([part[step] for part in self._parts])

    def join(self, found: Sequence[Example]) -> Example:
        """The microbatches of all parts, one part's after another's."""
        num = min(self._num, *(len(flatten(example.inputs)[0][0]) for example in found))
        inputs = [each for example in found for each in split(example.inputs, num, "inputs")]
        if found[0].targets is None:
            return Example(inputs, None)
        return Example(inputs, [each for example in found for each in split(example.targets, num, "targets")])

    def state_dict(self) -> list[Any]:
        return [part.state_dict() for part in self._parts if isinstance(part, IteratedBatches)]

    def load_state_dict(self, state: Sequence[Any]) -> None:
        iterated = [part for part in self._parts if isinstance(part, IteratedBatches)]
        for part, each in zip(iterated, state, strict=True):
            part.load_state_dict(each)


class OwnData(NamedTuple):
    """The user's own data as a run trains on it, and what it is evaluated on, in words."""

    data: TaskData
    unit: str


def own_data(settings: Settings, read: ExampleReader) -> OwnData:
    """The data that `settings.data` names in a Python file.

    Args:
        read: makes inputs and targets of a batch.

    Raises:
        SettingsError: with the line where the user's own code fails; the errors of `read`.
    """
    text = str(settings.data)
    source = OwnSource(text, settings.batch, settings.seed)
    if source.is_dealt:
        return _dealt(settings, text, read)
    found = opened(source, settings.batch, settings.dp * settings.microbatches, read)
    data = TaskData(text, found.digest, found.batches, found.validation, stateful=found.stateful)
    return OwnData(data, found.unit)


def _dealt(settings: Settings, text: str, read: ExampleReader) -> OwnData:
    """If each replica loads its own part of the data, the part of this one; in a single process all parts, one
    after another.
    """
    dp, num = settings.dp, settings.microbatches
    if settings.is_asynchronous:
        raise SettingsError(
            f"{OPTION} {text} takes `replica`, and {settings.schedule} deals the microbatches of whole batches "
            "out, as its updates fall between them; leave `replica` out of its arguments"
        )
    if settings.batch % dp:
        raise SettingsError(f"--batch {settings.batch} cannot be dealt to {dp} replicas; give a multiple of {dp}")
    here = range(dp) if settings.in_process else [rank_of(os.environ) // settings.tp % dp]
    found = [
        opened(OwnSource(text, settings.batch // dp, settings.seed, replica, dp), settings.batch // dp, num, read)
        for replica in here
    ]
    unit = f"{found[0].unit}, of each replica's part"
    if len(found) == 1:
        own = found[0]
        data = TaskData(text, own.form, own.batches, own.validation, stateful=own.stateful, is_dealt=dp > 1)
        return OwnData(data, unit)
    joined = ConcatenatedBatches([each.batches for each in found], num)
    validation = Validation(lambda: map(joined.join, zip(*(each.validation for each in found), strict=False)))
    return OwnData(TaskData(text, found[0].form, joined, validation, stateful={"data": joined}), unit)


class OpenedData(NamedTuple):
    """Batches of training, those to evaluate on, in words what these are, and a digest of the data."""

    batches: IteratedBatches | DatasetBatches
    validation: Iterable[Example]
    unit: str
    digest: str
    form: str
    """The properties that all replicas' parts have in common."""

    @property
    def stateful(self) -> dict[str, Any]:
        """What of it has a place in a checkpoint."""
        return {"data": self.batches} if isinstance(self.batches, IteratedBatches) else {}


def opened(source: OwnSource, batch: int, least: int, read: ExampleReader) -> OpenedData:
    """The data of one replica.

    Args:
        batch: samples of its part of a step. least: the fewest samples that can be cut into its microbatches.

    Raises:
        SettingsError: with the line where the user's own code fails; batches of other sizes.
    """
    found, own = source.make(), source.own
    if is_samples(found):
        return _of_samples(source, found, batch, read)
    _check_last(own, found, least)
    batches = IteratedBatches(source, read)
    first = batches[0]
    size = len(flatten(first.inputs)[0][0])
    if size != batch:
        raise SettingsError(f"{OPTION}: {own} gives batches of {size} samples, not {batch}; leave out --batch")
    form = f"{own.name} {_form(first)}"
    digest = form + ("" if batches.is_stateful else f" {batch_digest(*first):x}")
    if source.takes_train:
        unit = f"on average over the batches of {own.name}(train=False)"
        return OpenedData(batches, Validation(lambda: _others(source, read)), unit, digest, form)
    again = [read(each, f"a batch of {own}") for each in islice(_Pass(source, source.make(), 0), SEEN_AGAIN)]
    unit = f"on average over {len(again)} batches that it is trained on too ({own.name} takes no `train`)"
    return OpenedData(batches, again, unit, digest, form)


def _check_last(own: OwnName, found: Any, least: int) -> None:
    """Raises SettingsError if it is known that the last batch of a pass is too small."""
    if not isinstance(found, DataLoader) or found.batch_size is None or found.drop_last:
        return
    if isinstance(found.dataset, IterableDataset):
        return
    num = len(found.sampler)  # type: ignore[arg-type]
    if 0 < num % found.batch_size < least:
        raise SettingsError(
            f"{OPTION}: the last batch of {own} has {num % found.batch_size} of its {num} samples, and {least} "
            "microbatches need as many; give the DataLoader drop_last=True"
        )


class Validation(Iterable[Example]):
    """Batches that a run is evaluated on. They are drawn again each time."""

    def __init__(self, draw: Callable[[], Iterator[Example]]) -> None:
        self._draw = draw

    def __iter__(self) -> Iterator[Example]:
        return self._draw()


def _others(source: OwnSource, read: ExampleReader) -> Iterator[Example]:
    """The batches with train=False."""
    own, count = source.own, 0
    for batch in _Pass(source, source.make(train=False), 0):
        yield read(batch, f"batch {count} of {own}")
        count += 1
    if not count:
        raise SettingsError(f"{OPTION}: {own} gives no batch with train=False; it has to give at least one")


def _of_samples(source: OwnSource, found: Any, batch: int, read: ExampleReader) -> OpenedData:
    own, num = source.own, len(found)
    digest = f"{own.name} of {num} samples {batch_digest(tensors_of(default_collate([found[0]]))):x}" if num else ""
    if source.takes_train:
        other = source.make(train=False)
        if not is_samples(other):
            raise SettingsError(
                f"{OPTION}: {own} gives samples to train on and batches with train=False; give one kind for both"
            )
        held, unit = list(range(len(other))), f"on average over the samples of {own.name}(train=False)"
        training = DatasetBatches(source, found, range(num), batch, read)
    else:
        shuffled = torch.randperm(num, generator=torch.Generator().manual_seed(source.seed)).tolist()
        most = max(min(batch, num // 2), num // HELD_OUT)
        held, rest = shuffled[:most], sorted(shuffled[most:])
        unit = f"on average over {len(held)} of the {num} samples, which it is not trained on"
        other, training = found, DatasetBatches(source, found, rest, batch, read)
    if not held:
        raise SettingsError(f"{OPTION}: {own} has no sample with train=False to evaluate on; give at least one")
    size = min(batch, len(held))
    kept = DatasetBatches(source, other, held, size, read)

    def draw() -> Iterator[Example]:
        for number in range(kept.num_batches):
            yield kept.of(held[number * size : (number + 1) * size], number)

    return OpenedData(training, Validation(draw), unit, digest, f"{own.name} {_form(training[0])}")


def _form(example: Example) -> list[Any]:
    """Types and shapes of a batch's tensors, without the number of samples."""
    return [(str(leaf.dtype), tuple(leaf.shape[1:])) for leaf in flatten((example.inputs, example.targets))[0]]
