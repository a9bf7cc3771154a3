"""What is installed besides planning, by name: `pip install '.[torch]'` in a checkout, and so on."""

from __future__ import annotations

EXTRAS = {
    "torch": "torch",
    "safetensors": "torch",
    "ortools": "exact",
    "redis": "redis",
    "transformers": "hf",
    "accelerate": "trainer",
    "peft": "peft",
    "tokenizers": "tokenizers",
    "pyarrow": "traces",
    "tensorboard": "tensorboard",
}
"""By module, the extra that brings it."""


def what_to_install(error: BaseException) -> str | None:
    """What a missing module calls for; None where it is none of an extra."""
    module = (getattr(error, "name", None) or "").split(".")[0]
    if not isinstance(error, ModuleNotFoundError) or module not in EXTRAS:
        return None
    return f"{module} is not installed; in a checkout of Penstock, run: python -m pip install '.[{EXTRAS[module]}]'"
