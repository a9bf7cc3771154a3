"""Batches of the user's own, from `--data FILE.py:NAME`.

a Dataset             samples by number, put into batches of --batch in an order that follows from seed and step, by
                      the file's collate_fn if it has one
with state_dict       batches as they come, like those of torchdata's StatefulDataLoader; a checkpoint has its state
a function or class   makes one of these; it gets those of batch, seed, train, replica and num_replicas that it takes
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from penstock.rank_environment import RankEnvironment
from penstock.runtime.tensors.digest import batch_digest
from penstock.runtime.tensors.pytree import flatten
from penstock.runtime.tensors.rng import mix
from penstock.train.checks import SettingsError
from penstock.train.own_file import ArgumentNames, called, find, made, own_name, seeded
from penstock.train.settings import Settings
from penstock.train.tasks.task import Example, TaskData

OPTION = "--data"
SEEN_AGAIN = 4
"""Batches of training that a run is evaluated on if there are no others."""
COLLATE = "collate_fn"
"""The name in a file of the function that makes a batch of samples."""
HELD_OUT = 10
"""One sample of a dataset in so many is never trained on, unless the function makes other data for evaluation."""

ExampleReader = Callable[[Any, str], Example]
"""Makes inputs and targets of a batch. The text names the batch in errors."""


class OwnSource:
    """The data that `--data FILE.py:NAME` names, for one replica of the pipeline.

    Args:
        batch: samples of a step of this replica, for a function that takes it.

    Raises:
        SettingsError: the errors of find and made; data of none of the kinds above.
    """

    def __init__(self, text: str, batch: int, seed: int, replica: int = 0, num_replicas: int = 1) -> None:
        self.text, self.own = text, own_name(text)
        self.seed = seed
        module, self._found = find(text, OPTION)
        self.collate: Callable[[Any], Any] = getattr(module, COLLATE, default_collate)
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
        """A dataset, or a loader that has a state."""
        found = self._found
        if self.is_made:
            with seeded(self.seed):
                found = made(found, self.own, OPTION, {}, {**self._others, "train": train})
        if is_stateful(found):
            if not self.is_made:
                raise SettingsError(
                    f"{OPTION}: {self.own} is a loader with a state; name a function that makes it, so that every "
                    "run starts from the beginning"
                )
            if hasattr(found, "worker_init_fn"):  # a DataLoader
                found.worker_init_fn = partial(_begin_worker, found.worker_init_fn)
            return found
        is_indexed = hasattr(found, "__getitem__") and hasattr(found, "__len__")
        if not is_indexed or isinstance(found, DataLoader | IterableDataset | Mapping | str | Tensor | list | tuple):
            raise SettingsError(
                f"{OPTION}: {self.own} is a {type(found).__name__}, which does not say where a run goes on; name a "
                f"Dataset whose samples have numbers ({COLLATE} in the file puts them into batches), a loader with "
                "state_dict and load_state_dict like torchdata's StatefulDataLoader, or a function that returns one"
            )
        return found


def _begin_worker(own: Callable[[int], object] | None, number: int) -> None:
    """Begins a worker of a DataLoader, in a process group of its own: torchrun ends a run by a signal to the group of
    each rank, and the rank needs its workers until it has saved. They end with it.

    Args:
        own: what the user's loader begins its workers by.
    """
    os.setpgid(0, 0)
    if own is not None:
        own(number)


def is_stateful(found: Any) -> bool:
    """Whether it can save its position, and continue from it."""
    needed = ("state_dict", "load_state_dict", "__iter__")
    has_state = all(callable(getattr(found, name, None)) for name in needed)
    return has_state and not isinstance(found, torch.nn.Module | IterableDataset)  # which gives single samples


def own_batch(text: str, seed: int, dp: int) -> int | None:
    """The samples of a step if the data determines their number: those of a loader's first batch, times the replicas
    that have a part of their own. None if `--batch` determines it.
    """
    source = OwnSource(text, 1, seed, 0, dp)
    found = source.make()
    if "batch" in source.names or not is_stateful(found):
        return None
    leaves = flatten(tensors_of(next(iter(found), ())))[0]
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


_END = object()


class IteratedBatches:
    """Batches as a loader with a state gives them, by step. Steps can only go forward.

    Its state for a checkpoint is the loader's own and its position: the pass, and the batch in it. The random draws
    of each batch are seeded by that position.
    """

    def __init__(self, source: OwnSource, found: Any, read: ExampleReader) -> None:
        self._source, self._found, self._read = source, found, read
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

    def first_pass(self) -> Iterator[Example]:
        """The batches of the first pass."""
        while not self._pass:
            batch = self._next()
            if not self._pass:
                yield batch

    def _next(self) -> Example:
        source, own = self._source, self._source.own
        seed = mix(source.seed, self._pass)
        if self._batches is None:
            self._begin()
            self._batches = self._iterator(seed)
        with seeded(mix(seed, self._within + 1)):
            what = f"batch {self._within} of {own}"
            batch = called(partial(next, self._batches, _END), f"{OPTION}: {what}", own.path)
        if batch is _END:
            if not self._within:
                raise SettingsError(f"{OPTION}: {own} gives no batch; it has to give at least one a pass")
            self._pass, self._within, self._batches = self._pass + 1, 0, None
            return self._next()
        self._within += 1
        return self._read(batch, what)

    def _begin(self) -> None:
        """Tells the loader which pass it is, which may take it back to the beginning."""
        for each in (self._found, getattr(self._found, "sampler", None)):
            if callable(getattr(each, "set_epoch", None)):
                each.set_epoch(self._pass)  # type: ignore[union-attr]

    def _iterator(self, seed: int) -> Any:
        own = self._source.own
        with seeded(mix(seed, 0)):
            return called(lambda: iter(self._found), f"{OPTION}: {own}", own.path)

    def state_dict(self) -> dict[str, Any]:
        own = self._found.state_dict()
        return {"steps": self._steps, "pass": self._pass, "within": self._within, "own": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps, self._pass, self._within = state["steps"], state["pass"], state["within"]
        self._last = None
        self._begin()
        self._found.load_state_dict(state["own"])
        self._batches = self._iterator(mix(self._source.seed, self._pass))


class DatasetBatches:
    """Batches of a dataset's samples, by step. Each pass is shuffled by the seed, and has only whole batches.

    Args:
        numbers: of the samples that are drawn from.
        batch: samples of a batch.
    """

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
        return self._read(self.collated(numbers, step), f"a batch of {self._source.own}")

    def collated(self, numbers: Sequence[int], step: int) -> Any:
        """Some samples as the file puts them into a batch. Raises SettingsError where the user's own code fails."""
        collate, found, own = self._source.collate, self._found, self._source.own
        with seeded(mix(self._source.seed, step)):
            what = f"{OPTION}: {own}, samples {numbers[0]}, ..."
            return called(lambda: collate([found[number] for number in numbers]), what, own.path)

    def in_order(self) -> Iterator[Example]:
        """All samples in their order, in batches that are as large as each other, to a sample."""
        parts = torch.tensor(self._numbers).tensor_split(-(-len(self._numbers) // self._batch))
        yield from (self.of(part.tolist(), number) for number, part in enumerate(parts))


def own_data(settings: Settings, read: ExampleReader) -> TaskData:
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
    return opened(source, settings.batch, read)


def _dealt(settings: Settings, text: str, read: ExampleReader) -> TaskData:
    """The part of the data of this process's replica, if each replica loads its own."""
    dp = settings.dp
    if settings.is_asynchronous:
        raise SettingsError(
            f"{OPTION} {text} takes `replica`, and {settings.schedule} deals the microbatches of whole batches "
            "out, as its updates fall between them; leave `replica` out of its arguments"
        )
    if settings.in_process and dp > 1:
        raise SettingsError(
            f"{OPTION} {text} takes `replica`, and in one process one pipeline runs the microbatches of all {dp} "
            "replicas; leave out --in-process"
        )
    if settings.batch % dp:
        raise SettingsError(f"--batch {settings.batch} cannot be dealt to {dp} replicas; give a multiple of {dp}")
    environment, batch = RankEnvironment.of(os.environ), settings.batch // dp
    replica = 0 if environment is None else environment.rank // settings.tp % dp
    own = opened(OwnSource(text, batch, settings.seed, replica, dp), batch, read)
    # All replicas' parts have types and numbers of dimensions in common, but neither samples nor padded lengths.
    digest = f"{own_name(text).name} {[(dtype, len(shape)) for dtype, shape in _form(own.batches[0])]}"
    return replace(own, unit=f"{own.unit}, of each replica's part", digest=digest, is_dealt=dp > 1)


class Validation(Iterable[Example]):
    """Batches that a run is evaluated on. They are drawn again each time."""

    def __init__(self, draw: Callable[[], Iterator[Example]]) -> None:
        self._draw = draw

    def __iter__(self) -> Iterator[Example]:
        return self._draw()


def opened(source: OwnSource, batch: int, read: ExampleReader) -> TaskData:
    """The data of one replica.

    Args:
        batch: samples of its part of a step.

    Raises:
        SettingsError: with the line where the user's own code fails; batches of other sizes.
    """
    found, own = source.make(), source.own
    if not is_stateful(found):
        return _of_samples(source, found, batch, read)
    batches = IteratedBatches(source, found, read)
    first = batches[0]
    size = len(flatten(first.inputs)[0][0])
    if size != batch:
        raise SettingsError(f"{OPTION}: {own} gives batches of {size} samples, not {batch}; leave out --batch")
    form = f"{own.name} {_form(first)}"
    if source.takes_train:
        unit = f"on the batches of {own.name}(train=False)"
        others = Validation(lambda: _others(source, read))
        return TaskData(source.text, unit, form, batches, others, stateful={"data": batches})
    again = list(islice(IteratedBatches(source, source.make(), read).first_pass(), SEEN_AGAIN))
    unit = f"on {len(again)} batches that it is trained on too ({own.name} takes no `train`)"
    return TaskData(source.text, unit, form, batches, again, stateful={"data": batches})


def _others(source: OwnSource, read: ExampleReader) -> Iterator[Example]:
    """The batches with train=False."""
    found = source.make(train=False)
    _require_kind(source, is_stateful(found))
    return IteratedBatches(source, found, read).first_pass()


def _require_kind(source: OwnSource, is_same: bool) -> None:
    """Raises SettingsError unless the data with train=False is of the same kind as the other."""
    if not is_same:
        raise SettingsError(
            f"{OPTION}: {source.own} gives samples for one of train=True and train=False and batches for the other; "
            "give one kind for both"
        )


def _of_samples(source: OwnSource, found: Any, batch: int, read: ExampleReader) -> TaskData:
    own, num = source.own, len(found)
    if source.takes_train:
        other = source.make(train=False)
        _require_kind(source, not is_stateful(other))
        held, unit = list(range(len(other))), f"on the {len(other)} samples of {own.name}(train=False)"
        training = DatasetBatches(source, found, range(num), batch, read)
    else:
        shuffled = torch.randperm(num, generator=torch.Generator().manual_seed(source.seed)).tolist()
        most = max(min(batch, num // 2), num // HELD_OUT)
        held, rest = shuffled[:most], sorted(shuffled[most:])
        unit = f"on {len(held)} of the {num} samples, which it is not trained on"
        other, training = found, DatasetBatches(source, found, rest, batch, read)
    if not held:
        raise SettingsError(f"{OPTION}: {own} has no sample with train=False to evaluate on; give at least one")
    kept = DatasetBatches(source, other, held, min(batch, len(held)), read)
    first = training.collated([0], 0)  # seeded: of samples with random numbers all ranks have the same digest
    digest = f"{own.name} of {num} samples {batch_digest(tensors_of(first)):x}"
    _ = training[0]  # an error in a batch comes before the run
    return TaskData(source.text, unit, digest, training, Validation(kept.in_order))


def _form(example: Example) -> list[Any]:
    """Types and shapes of a batch's tensors, without the number of samples."""
    return [(str(leaf.dtype), tuple(leaf.shape[1:])) for leaf in flatten((example.inputs, example.targets))[0]]
