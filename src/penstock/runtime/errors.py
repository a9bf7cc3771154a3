"""Errors of a run and of checkpoints, and checks of single values that a user gave as options."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

__all__ = ["CheckpointError", "DamagedCheckpointError"]


class RuntimeFailure(RuntimeError):
    """A run can't start or continue. The message says what was found, which rule it breaks, and what to do.

    Examples:
        >>> import penstock as ps
        >>> try:
        ...     ps.TransportOptions("carrier-pigeon")
        ... except ps.RuntimeFailure as error:
        ...     print(error)
        transport 'carrier-pigeon': give 'host', 'gloo', 'direct', 'delegate' or 'nccl'
    """

    exit_code = 1


class BrokenContract(RuntimeFailure):
    """A model or a loss broke a sentence of the contract (docs/contract.md).

    Attributes:
        sentence: the number of the sentence.
    """

    def __init__(self, message: str, sentence: int) -> None:
        super().__init__(message)
        self.sentence = sentence


class VerifyError(RuntimeFailure):
    """`Pipeline.verify` found that ways to compute a step differ. The message is the table of what was compared.

    Attributes:
        verification: what was compared, a `Verification`.

    Examples:
        >>> import penstock as ps
        >>> issubclass(ps.VerifyError, ps.RuntimeFailure)
        True
    """

    def __init__(self, message: str, verification: Any = None) -> None:
        super().__init__(message)
        self.verification = verification


class PeerLost(RuntimeFailure):
    """Another rank is gone. The cause is there, not on this rank.

    Examples:
        >>> import penstock as ps
        >>> try:
        ...     raise ps.runtime.PeerLost("rank 1 is gone")
        ... except ps.RuntimeFailure as failure:
        ...     print(failure)
        rank 1 is gone
    """


class LinkLost(PeerLost):
    """A link between processes broke in a step, which all of them begin anew over another interface."""


class PeerFailed(RuntimeFailure):
    """Another process could not do its part. The message has its error; look for the cause there.

    Examples:
        >>> import penstock as ps
        >>> try:
        ...     raise ps.runtime.PeerFailed("process 1 could not do its part of the step: ValueError: no")
        ... except ps.RuntimeFailure as failure:
        ...     print(failure)
        process 1 could not do its part of the step: ValueError: no
    """


class DeadlineExceeded(RuntimeFailure):
    """A wait reached its deadline. The message says which rank waited for what, and from whom.

    Examples:
        >>> import penstock as ps
        >>> try:
        ...     raise ps.runtime.DeadlineExceeded("rank 1 waited 3 s for F0 of stage 0 from rank 0")
        ... except ps.RuntimeFailure as failure:
        ...     print(failure)
        rank 1 waited 3 s for F0 of stage 0 from rank 0
    """


class CheckpointError(ValueError):
    """A checkpoint can't be written or loaded. The message says what was given, which rule it breaks, what to do."""


class DamagedCheckpointError(CheckpointError):
    """Files of a checkpoint are missing, or differ from what was written. An older checkpoint may be whole.

    Attributes:
        damage: which file is damaged, and how.
        older: the newest older checkpoint that looks whole. None if there is none, or if none was looked for.
    """

    def __init__(self, damage: str, older: Path | None = None) -> None:
        offer = "use an older checkpoint"
        if older is not None:
            offer = f'{older} before it is whole: load("{older}"), or give load(..., fallback=True)'
        super().__init__(f"{damage}; {offer}")
        self.damage, self.older = damage, older


SHOWN = 3
"""Names that an error lists of each kind."""


def listed(names: Sequence[str]) -> str:
    """The first few of some names, and how many more there are."""
    first = ", ".join(names[:SHOWN])
    return first if len(names) <= SHOWN else f"{first} and {len(names) - SHOWN} more"


def is_number(value: Any) -> bool:
    """Whether it is a real number: neither a bool nor NaN."""
    return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)


def is_amount(value: Any) -> bool:
    """Whether it is a finite number of at least 0."""
    return is_number(value) and 0 <= value < math.inf


def is_count(value: Any) -> bool:
    """Whether it is a whole number of at least 1."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def require_value(fits: bool, what: str, given: Any, wanted: str) -> None:
    """Raises RuntimeFailure unless a value fits.

    Args:
        what: the option. wanted: what it takes, in words.
    """
    if not fits:
        text = repr(given)
        shown = text if len(text) <= 60 else f"a {type(given).__name__}"
        raise RuntimeFailure(f"{what} is {shown}; give {wanted}")
