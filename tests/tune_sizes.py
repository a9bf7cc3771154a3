"""Files of settings with the sizes of the small models that tests of the tuner use."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "tune_sizes"
NANO = ["--config", str(FOLDER / "nano.toml")]
"""A GPT of two blocks."""
SMALL = ["--config", str(FOLDER / "small.toml")]
"""A GPT of two blocks with a width of 16, one head and a context of 8."""
NARROW = ["--config", str(FOLDER / "narrow.toml")]
"""A GPT of two blocks with a width of 8, one head and a context of 8."""
