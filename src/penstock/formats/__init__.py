"""Reading and writing schedules and timelines: native JSON (versioned), text, torch's CSV, Perfetto."""

from penstock.formats.files import load, save
from penstock.formats.native import from_json, to_json
from penstock.formats.perfetto import to_perfetto
from penstock.formats.torch_csv import from_torch_csv
from penstock.formats.torch_csv_write import to_torch_csv

__all__ = ["from_json", "from_torch_csv", "load", "save", "to_json", "to_perfetto", "to_torch_csv"]
