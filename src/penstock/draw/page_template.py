"""Fills the templates of pages: `{{title}}` in an HTML file beside its style and script."""

from __future__ import annotations

import re
from collections.abc import Mapping

_SLOT = re.compile(r"\{\{(\w+)\}\}")


def filled(template: str, slots: Mapping[str, str]) -> str:
    """The template with a text in every slot. Slots in the texts themselves are not filled."""
    return _SLOT.sub(lambda slot: slots[slot[1]], template)
