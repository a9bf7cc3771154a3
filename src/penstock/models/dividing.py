"""What tensor-parallel ranks can divide among them, and the error that says what they cannot."""

from __future__ import annotations

__all__ = ["ParallelError", "require_heads", "require_vocabulary", "require_width"]


class ParallelError(ValueError):
    """A model that does not divide into so many tensor-parallel ranks.

    Examples:
        >>> import penstock as ps
        >>> from penstock.models import ParallelError, presets, require_parallel
        >>> try:
        ...     require_parallel(presets["gpt2-1.5b"], 7)
        ... except ParallelError as error:
        ...     print(type(error).__name__)
        ParallelError
    """


def require_heads(what: str, num_heads: int, num_ranks: int, kind: str = "heads") -> None:
    """Raises ParallelError where ranks would not have as many whole heads each."""
    if num_heads % num_ranks:
        fits = ", ".join(str(n) for n in range(1, num_heads + 1) if num_heads % n == 0)
        raise ParallelError(
            f"{what} has {num_heads} {kind}, which {num_ranks} tensor-parallel ranks cannot share out whole; give a "
            f"number of ranks that divides them ({fits})"
        )


def require_width(what: str, width: int, num_ranks: int) -> None:
    """Raises ParallelError where ranks would not have as many features each."""
    if width % num_ranks:
        raise ParallelError(
            f"{what} is {width} wide, which {num_ranks} tensor-parallel ranks cannot divide evenly; give a number "
            "of ranks that divides it"
        )


def require_vocabulary(what: str, vocab_size: int, num_ranks: int) -> None:
    """Raises ParallelError where there are fewer tokens than ranks; they need not divide."""
    if vocab_size < num_ranks:
        raise ParallelError(
            f"{what} has a vocabulary of {vocab_size}, smaller than the {num_ranks} ranks that are to share it; give "
            "fewer ranks"
        )
