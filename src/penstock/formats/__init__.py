"""Reading and writing schedules and timelines: native JSON (versioned), text, Perfetto."""

from penstock.formats.native import from_json, load, save, to_json
from penstock.formats.perfetto import to_perfetto

__all__ = ["from_json", "load", "save", "to_json", "to_perfetto"]
