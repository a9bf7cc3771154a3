"""How each part of a batch is cut into microbatches: a rule for each tensor, and what comes of it.

    {"input_ids": [B, T], "position_ids": [3, B, T], "table": [V], "scale": 2.0}

    BatchRules(inputs={"position_ids": 1, "table": ps.WHOLE})

    microbatch m: input_ids[m's samples], position_ids[:, m's samples], table, 2.0

Without a rule the samples are in dimension 0. Numbers, text and tensors without dimensions go whole to every
microbatch. All tensors that are cut along a dimension must have the same number of samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import mode
from typing import Any, Final, final

import torch
from torch import Tensor

from penstock.runtime.errors import RuntimeFailure, require_value
from penstock.runtime.tensors.block_mask import is_block_mask, num_samples_of, split_block_mask
from penstock.runtime.tensors.pytree import Skeleton, flatten, form_of_dict, kind_of, unflatten
from penstock.schedule.short_repr import short_repr
from penstock.unknown_names import did_you_mean, refuse_unknown


@final
class Whole:
    """The rule of a value that every microbatch is given whole; see `BatchRules`.

    Examples:
        >>> import penstock as ps
        >>> ps.BatchRules(inputs={"cu_seqlens": ps.WHOLE}).inputs
        {'cu_seqlens': ps.WHOLE}
    """

    def __repr__(self) -> str:
        return "ps.WHOLE"

    def __reduce__(self) -> str:
        return "WHOLE"


WHOLE: Final = Whole()
"""The rule of a value that every microbatch is given whole."""

Signature = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""Shapes and types of what goes into a microbatch: what stage outputs' shapes are expected to follow from."""
Rule = int | Whole | Callable[[Any, int], Sequence[Any]]
RuleTree = Rule | Mapping[Any, "RuleTree"] | None
"""One rule, or rules by key and position. None: dimension 0."""
WANTED = (
    "a dimension, ps.WHOLE, a function (value, num_microbatches) -> list, or a dict of these by the inputs' keys or "
    "positions"
)


@refuse_unknown(RuntimeFailure)
@dataclass(frozen=True)
class BatchRules:
    """How a batch is cut into microbatches, where its samples are not in dimension 0 of every tensor.

    A rule is one of these:

    - an int: the dimension in which the samples are;
    - `ps.WHOLE`: every microbatch is given the whole value;
    - a function `(value, num_microbatches) -> list`, which returns one entry per microbatch.

    One rule holds for all tensors. A dict gives rules by the keys of dicts and the positions in tuples, and its key
    `...` the rule for all others. What lies deeper is cut by the rule of the nearest key above it that has one, or by
    a dict inside the dict. A function is given all that lies at its key. If it has an attribute `num_samples`, it is
    taken to cut so many samples as evenly as possible, the larger microbatches first.

    A model, or a list of stages, may have an attribute `batch_rules`: its `BatchRules`, or a function from inputs to
    them. What `ps.Pipeline(batch=...)` is given comes before that, key by key. The first training step refuses a key
    of those that its batch does not have; the model's own rules may name keys that only some batches have.

    Attributes:
        inputs: the rules for inputs. None: dimension 0.
        targets: the rules for targets. None: dimension 0.

    Raises:
        RuntimeFailure: a rule of another type.

    Examples:
        >>> import penstock as ps
        >>> rules = ps.BatchRules(inputs={"position_ids": 1, "table": ps.WHOLE}, targets=1)
        >>> rules.inputs["table"]
        ps.WHOLE
    """

    inputs: RuleTree = None
    targets: RuleTree = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        _require_rules("inputs", self.inputs)
        _require_rules("targets", self.targets)


def _require_rules(what: str, rules: Any) -> None:
    if isinstance(rules, Mapping):
        for key, rule in rules.items():
            require_value(isinstance(key, str | int) or key is ..., f"a key of {what}", key, "a name or a position")
            _require_rules(f"{what}[{key!r}]", rule)
        return
    fits = rules is None or (isinstance(rules, int) and not isinstance(rules, bool))
    require_value(fits or isinstance(rules, Whole) or callable(rules), f"the rule for {what}", rules, WANTED)


def _over(rules: RuleTree, defaults: RuleTree) -> RuleTree:
    if rules is None:
        return defaults
    if not isinstance(rules, Mapping) or defaults is None or callable(defaults):
        return rules
    if not isinstance(defaults, Mapping):
        return {...: defaults, **rules}
    return {**defaults, **{key: _over(rule, defaults.get(key)) for key, rule in rules.items()}}


def in_words(rules: RuleTree) -> str:
    """Rules as text that is the same in every process: functions by name."""
    if isinstance(rules, Mapping):
        return str({str(key): in_words(rule) for key, rule in rules.items()})
    return getattr(rules, "__qualname__", type(rules).__qualname__) if callable(rules) else repr(rules)


PLAIN = BatchRules()
"""All samples are in dimension 0."""


def rules_of(model: Any, given: BatchRules | None, inputs: Any) -> BatchRules:
    """The rules for a batch: those given, and the model's own where these say nothing.

    Raises:
        RuntimeFailure: the model's attribute `batch_rules` is something else.
    """
    own = getattr(model, "batch_rules", None)
    if callable(own):
        own = None if inputs is None else own(inputs)
    if own is None:
        return given or PLAIN
    wanted = "ps.BatchRules(...), or a function from inputs to them"
    require_value(isinstance(own, BatchRules), "the model's attribute batch_rules", own, wanted)
    given = given or PLAIN
    return BatchRules(_over(given.inputs, own.inputs), _over(given.targets, own.targets))


def require_keys(rules: BatchRules | None, inputs: Any, targets: Any) -> None:
    """Raises RuntimeFailure if a rule is for a key that inputs or targets do not have."""
    if rules is not None:
        _require_keys("inputs", inputs, rules.inputs)
        _require_keys("targets", targets, rules.targets)


def _require_keys(name: str, value: Any, rules: RuleTree) -> None:
    if not isinstance(rules, Mapping) or not isinstance(value, dict | tuple):
        return
    below = value if isinstance(value, dict) else dict(enumerate(value)) | getattr(value, "_asdict", dict)()
    for key, rule in rules.items():
        if key is not ... and key not in below:
            raise RuntimeFailure(
                f"ps.BatchRules has a rule for {name}[{key!r}]; the keys in {name} are {str([*below])[1:-1]}: "
                f"{did_you_mean(str(key), map(str, below), 'name one of these, or leave the rule out.')} A rule for "
                "a key that only some batches have belongs in an attribute batch_rules of the model"
            )
        _require_keys(f"{name}[{key!r}]", below.get(key), rule)


@dataclass(frozen=True)
class _Piece:
    """A tensor, or another value that one rule cuts.

    Attributes:
        name: for errors. keys: where it lies.
        num_samples: along the rule's dimension; None where the rule is no dimension.
    """

    name: str
    keys: tuple[Any, ...]
    value: Any
    rule: Rule
    num_samples: int | None

    def cut(self, num: int) -> Sequence[Any]:
        if isinstance(self.rule, Whole):
            return [self.value] * num
        if isinstance(self.rule, int):
            parts: Sequence[Any] = self.value.tensor_split(num, self.rule)
            return parts
        parts = self.rule(self.value, num)
        if not isinstance(parts, list | tuple) or len(parts) != num:
            got = f"{len(parts)} entries" if isinstance(parts, list | tuple) else f"a {type(parts).__name__}"
            raise RuntimeFailure(
                f"the rule for {self.name} returned {got} for {num} microbatches; let the function return a list "
                "with one entry per microbatch"
            )
        return parts


class Cut(list[Any]):
    """The microbatches of inputs or of targets.

    Attributes:
        sizes: by microbatch, its samples along the dimensions of the rules; None where no rule is a dimension.
        is_listed: whether they were given as a list.
    """

    def __init__(self, parts: Sequence[Any], sizes: list[float] | None, is_listed: bool = False) -> None:
        super().__init__(parts)
        self.sizes, self.is_listed = sizes, is_listed


class Uncut:
    """Inputs or targets of a batch, read by their rules, which can be cut into any number of microbatches.

    Args:
        value: a tensor, or a tuple or dict of values; or a list with an entry per microbatch, which is cut already.
        what: "inputs" or "targets", for errors.
        keys: where the value lies in them.

    Attributes:
        is_listed: whether the value is such a list.

    Raises:
        RuntimeFailure: a value that can't be cut, or a rule that does not fit.
    """

    def __init__(self, value: Any, what: str, rules: RuleTree = None, keys: tuple[Any, ...] = ()) -> None:
        self.value, self._what, self.is_listed = value, what, isinstance(value, list)
        self._pieces: list[_Piece] = []
        if self.is_listed:
            return
        self._skeleton = self._read(value, keys, rules)
        if not self._pieces or (rules is None and all(piece.rule is WHOLE for piece in self._pieces)):
            raise RuntimeFailure(f"the {what} hold no tensor to cut; give tensors with the samples in dimension 0")

    @cached_property
    def num_samples(self) -> int | None:
        """The samples along the dimensions of the rules; None where no rule is a dimension, and of a list."""
        sizes = {piece.num_samples for piece in self._pieces} - {None}
        if len(sizes) > 1 or 0 in sizes:
            raise RuntimeFailure(self._why_sizes_differ())
        return sizes.pop() if sizes else None

    @property
    def most(self) -> int:
        """Into how many microbatches it can be cut at most; 0 where no rule is a dimension, which would tell."""
        return len(self.value) if self.is_listed else self.num_samples or 0

    def cut(self, num: int) -> Cut:
        """Cuts it as evenly as possible, the larger microbatches first.

        Raises:
            RuntimeFailure: fewer samples than microbatches, a list of another length, or a function that returns
                something else.
        """
        if self.is_listed:
            if len(self.value) != num:
                raise RuntimeFailure(
                    f"{len(self.value)} {self._what} given as a list, the schedule runs {num} microbatches; "
                    "give one entry per microbatch, or what is to be cut: a tensor, a tuple of positional arguments "
                    "or a dict of keyword arguments"
                )
            return Cut(self.value, None, is_listed=True)
        total, sizes = self.num_samples, None
        if total is not None:
            if total < num:
                raise RuntimeFailure(
                    f"a batch of {total} samples can't be cut into {num} microbatches; "
                    f"give at least {num} samples, leave the batch out (DataLoader(drop_last=True)), or build a "
                    "schedule with fewer microbatches"
                )
            least, larger = divmod(total, num)
            sizes = [float(least + (m < larger)) for m in range(num)]  # as Tensor.tensor_split cuts
        parts = zip(*(piece.cut(num) for piece in self._pieces), strict=True)
        return Cut([unflatten([*leaves], self._skeleton) for leaves in parts], sizes)

    def _read(self, value: Any, keys: tuple[Any, ...], rules: RuleTree) -> Skeleton:
        """Adds the pieces of a value. Returns its form, with their numbers in place of tensors."""
        if callable(rules) or isinstance(value, Tensor) or is_block_mask(value):
            name = self._what + "".join(f"[{key!r}]" for key in keys)
            known = (rules, getattr(rules, "num_samples", None)) if callable(rules) else _fitted(value, name, rules)
            for place, other in enumerate(self._pieces):
                if other.value is value and other.rule is known[0]:
                    return place  # one tensor at several places is one in each microbatch too
            self._pieces.append(_Piece(name, keys, value, *known))
            return len(self._pieces) - 1
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            below = [[key, self._read(v, (*keys, key), rules_at(rules, key))] for key, v in value.items()]
            return form_of_dict(type(value), below)
        if isinstance(value, tuple | list):
            fields = getattr(value, "_fields", ())
            return [
                kind_of(type(value)),
                [self._read(v, (*keys, k), rules_at(rules, k, *fields[k : k + 1])) for k, v in enumerate(value)],
            ]
        return flatten(value)[1]

    def _why_sizes_differ(self) -> str:
        """Names each tensor, its shape and its rule, and says which rule would fit."""
        cut = [piece for piece in self._pieces if piece.num_samples is not None]
        given = [
            f"{p.name} has shape {_shape(p.value)}, {p.num_samples} "
            + (f"in dimension {p.rule}" if isinstance(p.rule, int) else "in its batch")
            for p in cut
        ]
        text = f"the {self._what} must have the same number of samples, above 0: {'; '.join(given)}"
        usual = mode(piece.num_samples for piece in cut)
        other = next((piece for piece in cut if piece.num_samples != usual), None)
        if usual and other is not None:
            shape = [*getattr(other.value, "shape", ())]
            rule: Any = shape.index(usual) if usual in shape else WHOLE
            for key in reversed(other.keys):
                rule = {key: rule}
            text += (
                f". Say how each is cut, such as batch=ps.BatchRules({self._what}={rule}); a rule is the "
                "dimension of the samples, ps.WHOLE, or a function (value, num_microbatches) -> list"
            )
        return text


def uncut(value: Any, what: str, rules: RuleTree = None, keys: tuple[Any, ...] = ()) -> Uncut:
    """Inputs or targets, read by their rules, unless they have been read before; arguments as of `Uncut`."""
    return value if isinstance(value, Uncut) else Uncut(value, what, rules, keys)


def split(value: Any, num_microbatches: int, what: str, rules: RuleTree = None) -> Cut:
    """Inputs or targets, cut by their rules; see `Uncut`."""
    return uncut(value, what, rules).cut(num_microbatches)


def rules_at(rules: RuleTree, *names: Any) -> RuleTree:
    """The rules for what lies at a key, or at a position with a name."""
    if not isinstance(rules, Mapping):
        return rules
    return next((rules[name] for name in names if name in rules), rules.get(...))


def _fitted(value: Any, name: str, rule: RuleTree) -> tuple[Rule, int | None]:
    """The rule for a tensor or a BlockMask, and the samples. Raises RuntimeFailure for one that does not fit."""
    num = value.dim() if isinstance(value, Tensor) else 1  # a mask is cut along its batch alone
    if isinstance(rule, Whole) or (rule is None and not num):
        return WHOLE, None
    dimension = 0 if rule is None else rule
    if not isinstance(dimension, int) or not -num <= dimension < num:
        raise RuntimeFailure(
            f"{name} has shape {_shape(value)}, and its rule is {rule!r}; give one of its dimensions, ps.WHOLE or a "
            "function (value, num_microbatches) -> list"
        )
    if not isinstance(value, Tensor):
        samples = num_samples_of(value)
        return (WHOLE if samples is None else split_block_mask), samples
    if value.is_nested or value.layout is not torch.strided:
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.").strip("_")
        raise RuntimeFailure(
            f"{name} is a tensor of layout {kind}, which torch can't cut along dimension {dimension}; give a list "
            f"with one entry per microbatch{', each with layout=torch.jagged' * value.is_nested}, or a rule for it: "
            "ps.WHOLE or a function"
        )
    return dimension % num, value.shape[dimension]


def _shape(value: Any) -> str:
    return str(tuple(getattr(value, "shape", ())))
