"""Reading and writing schedules and timelines: native JSON (versioned), text, torch's CSV, Perfetto."""

from typing import TYPE_CHECKING, Any

from penstock.formats.native import from_json, load, save, to_json
from penstock.formats.torch_csv import from_torch_csv, to_torch_csv

__all__ = ["from_json", "from_torch_csv", "load", "save", "to_json", "to_perfetto", "to_torch_csv"]

if TYPE_CHECKING:
    from penstock.formats.perfetto import to_perfetto


def __getattr__(name: str) -> Any:
    """Imports what writes timelines when it is first asked for: schedules are read and written without simulation."""
    if name == "to_perfetto":
        from penstock.formats.perfetto import to_perfetto

        return to_perfetto
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
