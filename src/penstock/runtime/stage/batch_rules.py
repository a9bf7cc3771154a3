"""How each part of a batch is cut into microbatches: a rule for each tensor, and what comes of it.

    {"input_ids": [B, T], "position_ids": [3, B, T], "table": [V], "scale": 2.0}

    BatchRules(inputs={"position_ids": 1, "table": ps.WHOLE})

    microbatch m: input_ids[m's samples], position_ids[:, m's samples], table, 2.0

Without a rule the samples are in dimension 0. Numbers, text and tensors without dimensions go whole to every
microbatch. All tensors that are cut along a dimension must have the same number of samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, final

import torch
from torch import Tensor

from penstock.renamed import refuse_unknown
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.option_values import require_value
from penstock.runtime.tensors.block_mask import is_block_mask, num_samples_of, split_block_mask
from penstock.runtime.tensors.pytree import flatten
from penstock.schedule.short_repr import short_repr


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

Rule = int | Whole | Callable[[Any, int], Sequence[Any]]
Rules = Rule | Mapping[Any, "Rules"] | None
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
    a dict inside the dict. A function is given all that lies at its key.

    A model, or a list of stages, may have an attribute `batch_rules`: its `BatchRules`, or a function from inputs to
    them. What `ps.Pipeline(batch=...)` is given comes before that, key by key.

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

    inputs: Rules = None
    targets: Rules = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        _require_rules("inputs", self.inputs)
        _require_rules("targets", self.targets)

    def over(self, defaults: BatchRules) -> BatchRules:
        """These rules, and the defaults where these say nothing."""
        return BatchRules(_over(self.inputs, defaults.inputs), _over(self.targets, defaults.targets))


def _require_rules(what: str, rules: Any) -> None:
    if isinstance(rules, Mapping):
        for key, rule in rules.items():
            require_value(isinstance(key, str | int) or key is ..., f"a key of {what}", key, "a name or a position")
            _require_rules(f"{what}[{key!r}]", rule)
        return
    fits = rules is None or (isinstance(rules, int) and not isinstance(rules, bool))
    require_value(fits or isinstance(rules, Whole) or callable(rules), f"the rule for {what}", rules, WANTED)


def _over(rules: Rules, defaults: Rules) -> Rules:
    if rules is None:
        return defaults
    if not isinstance(rules, Mapping) or defaults is None or callable(defaults):
        return rules
    if not isinstance(defaults, Mapping):
        return {...: defaults, **rules}
    return {**defaults, **{key: _over(rule, defaults.get(key)) for key, rule in rules.items()}}


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
    found: BatchRules = own
    return found if given is None else given.over(found)


@dataclass(frozen=True)
class _Piece:
    """A tensor or another value of the batch that is cut as one, its name, and its rule."""

    name: str
    keys: tuple[Any, ...]
    value: Any
    rule: Rule

    @property
    def num_samples(self) -> int | None:
        """Samples along the rule's dimension; None where the rule is none."""
        if not isinstance(self.rule, int):
            return None
        if isinstance(self.value, Tensor):
            return self.value.shape[self.rule]
        return num_samples_of(self.value)

    def cut(self, num: int) -> Sequence[Any]:
        if isinstance(self.rule, Whole):
            return [self.value] * num
        if isinstance(self.rule, int):
            if isinstance(self.value, Tensor):
                return self.value.tensor_split(num, self.rule)
            return split_block_mask(self.value, num)
        try:
            parts = self.rule(self.value, num)
        except Exception as error:
            error.add_note(f"in the rule for {self.name}, a function that cuts it into {num} microbatches")
            raise
        if not isinstance(parts, list | tuple) or len(parts) != num:
            got = f"{len(parts)} entries" if isinstance(parts, list | tuple) else f"a {type(parts).__name__}"
            raise RuntimeFailure(
                f"the rule for {self.name} returned {got} for {num} microbatches; let the function return a list "
                "with one entry per microbatch"
            )
        return parts


class Cut(Sequence[Any]):
    """The microbatches of inputs or of targets.

    Args:
        sizes: by microbatch, its samples along the dimensions of the rules; None where no rule is a dimension.
        is_listed: whether they were given as a list.
    """

    def __init__(self, parts: Sequence[Any], sizes: list[float] | None, is_listed: bool = False) -> None:
        self._parts, self.sizes, self.is_listed = parts, sizes, is_listed

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, place: Any) -> Any:
        return self._parts[place]


class CutTensor(Cut):
    """A tensor's microbatches, as even as possible, the larger ones first; cut where one is first asked for, as most
    ranks of a pipeline ask for none.
    """

    def __init__(self, tensor: Tensor, dimension: int, num: int) -> None:
        super().__init__((), _even(tensor.shape[dimension], num))
        self._tensor, self._dimension, self._num = tensor, dimension, num

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, place: Any) -> Any:
        if not self._parts:
            self._parts = self._tensor.tensor_split(self._num, self._dimension)
        return self._parts[place]

    @property
    def signatures(self) -> list[tuple[tuple[tuple[int, ...], torch.dtype], ...]]:
        """Of each part."""
        shape, dtype, at = list(self._tensor.shape), self._tensor.dtype, self._dimension
        known = {}
        for size in {*(self.sizes or ())}:
            shape[at] = int(size)
            known[size] = ((tuple(shape), dtype),)
        return [known[size] for size in self.sizes or ()]


def _even(total: int, num: int) -> list[float]:
    """As `Tensor.tensor_split` cuts."""
    least, larger = divmod(total, num)
    return [float(least + (m < larger)) for m in range(num)]


class Listed:
    """Inputs or targets that are cut already: a list with one entry per microbatch."""

    num_samples = None

    def __init__(self, value: list[Any], what: str) -> None:
        self.value, self._what = value, what

    @property
    def most(self) -> int:
        """Into how many microbatches it can be cut at most."""
        return len(self.value)

    def cut(self, num: int) -> Cut:
        """Its entries. Raises RuntimeFailure for another number of them."""
        if len(self.value) != num:
            raise RuntimeFailure(
                f"{len(self.value)} {self._what} given as a list, the schedule runs {num} microbatches; "
                "give one entry per microbatch, or what is to be cut: a tensor, a tuple of positional arguments or a "
                "dict of keyword arguments"
            )
        return Cut(self.value, None, is_listed=True)


class Uncut:
    """Inputs or targets of a batch, read by their rules, which can be cut into any number of microbatches.

    Args:
        value: a tensor, or a tuple or dict of values. what: "inputs" or "targets", for errors.
        keys: where the value lies in them.

    Raises:
        RuntimeFailure: a value that can't be cut, or a rule that does not fit.
    """

    def __init__(self, value: Any, what: str, rules: Rules = None, keys: tuple[Any, ...] = ()) -> None:
        self.value, self._what, self._rules = value, what, rules
        self._pieces: list[_Piece] = []
        self._names: set[Any] = set()
        self._form = self._read(value, keys, rules)
        if not self._pieces or (rules is None and all(piece.rule is WHOLE for piece in self._pieces)):
            raise RuntimeFailure(f"the {what} hold no tensor to cut; give tensors with the samples in dimension 0")

    @cached_property
    def num_samples(self) -> int | None:
        """The samples along the dimensions of the rules; None where no rule is a dimension."""
        sizes = {piece.num_samples for piece in self._pieces} - {None}
        if len(sizes) > 1 or 0 in sizes:
            raise RuntimeFailure(self._why_sizes_differ())
        return sizes.pop() if sizes else None

    @property
    def most(self) -> int:
        """Into how many microbatches it can be cut at most; 0 where no rule is a dimension, which would tell."""
        return self.num_samples or 0

    def cut(self, num: int) -> Cut:
        """Cuts it as evenly as possible, the larger microbatches first.

        Raises:
            RuntimeFailure: fewer samples than microbatches, or a function that returns something else.
        """
        total = self.num_samples
        if total is not None and total < num:
            raise RuntimeFailure(
                f"a batch of {total} samples can't be cut into {num} microbatches; "
                f"give at least {num} samples or build a schedule with fewer microbatches"
            )
        first = self._pieces[0]
        if type(self.value) is Tensor and isinstance(first.rule, int):
            return CutTensor(self.value, first.rule, num)
        parts = [piece.cut(num) for piece in self._pieces]
        return Cut([self._form(parts, m) for m in range(num)], None if total is None else _even(total, num))

    def _read(self, value: Any, keys: tuple[Any, ...], rules: Rules) -> Callable[[list[Any], int], Any]:
        """Adds the pieces of a value. Returns what puts a microbatch of it together, from all pieces' parts."""
        self._names.add(keys[-1] if keys else None)
        name = self._what + "".join(f"[{key!r}]" for key in keys)
        if callable(rules):
            return self._add(_Piece(name, keys, value, rules))
        if isinstance(value, Tensor) or is_block_mask(value):
            if isinstance(rules, Mapping):
                kind = "BlockMask" if is_block_mask(value) else f"tensor {list(value.shape)}"
                raise RuntimeFailure(
                    f"{name} is one {kind}, and batch=ps.BatchRules(...) has rules by key for it, "
                    f"{', '.join(map(repr, rules))}; give one rule"
                )
            return self._add(_Piece(name, keys, value, _fitting(value, name, rules)))
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            below = {key: self._read(v, (*keys, key), rules_at(rules, key)) for key, v in value.items()}
            return lambda parts, m: {key: form(parts, m) for key, form in below.items()}
        if isinstance(value, tuple | list):
            fields = getattr(value, "_fields", ())
            forms = [self._read(v, (*keys, k), rules_at(rules, k, *fields[k : k + 1])) for k, v in enumerate(value)]
            make = value._make if hasattr(value, "_make") else type(value) if type(value) is list else tuple
            return lambda parts, m: make(form(parts, m) for form in forms)
        flatten(value)  # raises for what can't pass between stages
        return lambda parts, m: value

    def _add(self, piece: _Piece) -> Callable[[list[Any], int], Any]:
        """One tensor at several places is one in each microbatch too."""
        for place, other in enumerate(self._pieces):
            if other.value is piece.value and other.rule is piece.rule:
                return lambda parts, m: parts[place][m]
        self._pieces.append(piece)
        at = len(self._pieces) - 1
        return lambda parts, m: parts[at][m]

    def _why_sizes_differ(self) -> str:
        """Names each tensor, its shape and its rule, and says which rules would fit."""
        cut = [piece for piece in self._pieces if piece.num_samples is not None]
        found = [f"{p.name} has shape {_shape(p.value)}, {p.num_samples} in dimension {p.rule}" for p in cut]
        usual = Counter(p.num_samples for p in cut if p.num_samples).most_common(1)
        lines = f"the {self._what} must have the same number of samples, above 0: {'; '.join(found)}"
        if usual and len(cut) > 1:
            others = [piece for piece in cut if piece.num_samples != usual[0][0]]
            lines += f". Say how each is cut: batch=ps.BatchRules({self._what}={_proposed(others, usual[0][0])})"
            lines += "; a rule is the dimension of the samples, ps.WHOLE, or a function (value, num) -> list"
        named = set(self._rules) - {...} if isinstance(self._rules, Mapping) else set()
        if unknown := named - self._names:
            lines += f". There is nothing at {', '.join(map(repr, unknown))}, for which a rule was given"
        return lines


def uncut(value: Any, what: str, rules: Rules = None, keys: tuple[Any, ...] = ()) -> Uncut | Listed:
    """Inputs or targets, read by their rules; a list is cut already.

    Args:
        value: also what this returned before. what, keys: as for `Uncut`.
    """
    if isinstance(value, Uncut | Listed):
        return value
    return Listed(value, what) if isinstance(value, list) else Uncut(value, what, rules, keys)


def split(value: Any, num_microbatches: int, what: str, rules: Rules = None) -> Cut:
    """Cuts a batch by its rules, as evenly as possible, the larger microbatches first.

    A list is taken as cut already, one entry per microbatch.

    Args:
        what: "inputs" or "targets". rules: for them; dimension 0 where not given.

    Raises:
        RuntimeFailure: fewer samples than microbatches, a list of another length, or tensors that disagree.
    """
    return uncut(value, what, rules).cut(num_microbatches)


def rules_at(rules: Rules, *names: Any) -> Rules:
    """The rules for what lies at a key, or at a position with a name."""
    if not isinstance(rules, Mapping):
        return rules
    return next((rules[name] for name in names if name in rules), rules.get(...))


def _fitting(value: Any, name: str, rule: Rule | None) -> Rule:
    """The rule for a tensor or a BlockMask. Raises RuntimeFailure for one that it has no dimension for."""
    if isinstance(rule, Whole) or (rule is None and isinstance(value, Tensor) and not value.dim()):
        return WHOLE
    dimension = 0 if rule is None else rule
    assert isinstance(dimension, int)
    if not isinstance(value, Tensor):
        if num_samples_of(value) is None:
            return WHOLE
        if dimension:
            raise RuntimeFailure(f"{name} is a BlockMask, which is cut along its batch; give rule 0 or ps.WHOLE")
        return 0
    if value.is_nested or value.layout is not torch.strided:
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.").strip("_")
        raise RuntimeFailure(
            f"{name} is a tensor of layout {kind}, which torch can't cut along dimension {dimension}; give a list "
            f"with one entry per microbatch{', each with layout=torch.jagged' * value.is_nested}, or a rule for it: "
            "ps.WHOLE or a function"
        )
    if not -value.dim() <= dimension < value.dim():
        raise RuntimeFailure(
            f"{name} has shape {_shape(value)}, and its rule is dimension {dimension}, which it does not have; give "
            f"{WANTED}"
        )
    return dimension % value.dim()


def _shape(value: Any) -> str:
    return str(tuple(value.shape))


def _proposed(pieces: Sequence[_Piece], num: int) -> str:
    """Rules, in Python, by which tensors would have so many samples."""
    proposed: dict[Any, Any] = {}
    for piece in pieces:
        *above, last = piece.keys
        place = proposed
        for key in above:
            place = place.setdefault(key, {})
        shape = list(piece.value.shape)
        place[last] = shape.index(num) if num in shape else WHOLE
    return repr(proposed)
