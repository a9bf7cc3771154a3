"""Names that there are not: hints at the nearest one, and calls with such arguments refused with an error of ours."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar

T = TypeVar("T", bound=Callable[..., Any])


def refuse_unknown(error: type[Exception]) -> Callable[[T], T]:
    """Makes a function or a class refuse a call that does not fit it, with its own error: a keyword that it does not
    have, with the nearest that it has or what else has it; more arguments by place than it has places; and a call
    without what it needs.
    """

    def wrap(target: T) -> T:
        if not isinstance(target, type):
            return _refusing(target, error)
        target.__init__ = _refusing(target.__init__, error)  # type: ignore[misc]
        return target

    return wrap


def _refusing(function: T, error: type[Exception]) -> T:
    known = inspect.signature(function).parameters
    kinds = {each.kind for each in known.values()}
    places = [name for name, each in known.items() if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    own = [name for name in known if name not in ("self", "cls")]
    needed = [
        name
        for name, each in known.items()
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    called_as = function.__qualname__.removesuffix(".__init__")
    _TAKEN[called_as] = own

    @wraps(function)
    def called(*args: Any, **given: Any) -> Any:
        for name in given:
            if name not in known and inspect.Parameter.VAR_KEYWORD not in kinds:
                raise error(f"{called_as} has no argument {name!r}; {_instead(name, own, called_as)}")
        if len(args) > len(places) and inspect.Parameter.VAR_POSITIONAL not in kinds:
            so = [name for name in places if name in own]
            by_name = ", ".join(f"{name}=" for name in own if name not in so)
            raise error(
                f"{called_as} was given {len(args) - len(places) + len(so)} arguments by place and takes "
                f"{len(so)} so ({', '.join(so)}); "
                + (f"give the others by name: {by_name}" if by_name else "leave the others out")
            )
        if lacking := [name for name in needed if name not in given and name not in places[: len(args)]]:
            near = [name for name in given if name not in known and _near(name, lacking)]
            got = f"; it was given {' and '.join(f'{name}=' for name in near)} instead" if near else ""
            raise error(f"{called_as} needs {' and '.join(f'{name}=' for name in lacking)}{got}")
        return function(*args, **given)

    return called  # type: ignore[return-value]


_TAKEN: dict[str, list[str]] = {}
"""By the name of a function or class that refuses others, the arguments that it takes."""


def _instead(name: str, known: list[str], called_as: str) -> str:
    """What to write in place of a keyword that there is not."""
    others = [each for each, taken in _TAKEN.items() if name in taken and each != called_as]
    if options := [each for each in others if each.endswith("Options")]:
        return f"give {' or '.join(f'{each}({name}=...)' for each in options)}"
    if near := _near(name, known):
        return f"did you mean {' or '.join(f'{each}=' for each in near)}?"
    calls = [f"{each}({name}=...)" for each in others if each == "Pipeline" or each.islower()]
    return f"it takes {', '.join(known)}" + (f"; {' and '.join(calls)} would take it" if calls else "")


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "", cutoff: float = 0.6) -> str:
    """A question that proposes the known names closest to a mistyped one; `otherwise` if none is close."""
    near = difflib.get_close_matches(name, list(known), cutoff=cutoff)
    return f"did you mean {' or '.join(near)}?" if near else otherwise


def _near(name: str, known: list[str]) -> list[str]:
    near = difflib.get_close_matches(name, known, n=2, cutoff=0.6)
    return near + [each for each in known if name in each.split("_") and each not in near]
