"""The pictures that a model takes. They have one size, and each takes the place of some tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.models.huggingface.anatomy import DecoderError
from penstock.models.huggingface.frame import on_meta

__all__ = ["IMAGES", "PictureForm", "picture_form", "sees"]

IMAGES = "pixel_values"
"""The prefix of the inputs for a tower for images."""


@dataclass(frozen=True)
class PictureForm:
    """The form of a model's pictures.

    Attributes:
        num_channels, size: a picture is [num_channels, size, size].
        num_tokens: the number of tokens whose place a picture takes.
        token: the number of such a token in the vocabulary.
    """

    num_channels: int
    size: int
    num_tokens: int
    token: int

    def check(self, tokens: Tensor, pictures: Tensor | None) -> None:
        """Raises DecoderError for tokens[B, T] that stand for pictures where there are none, and for raw pixels.

        The model's own code refuses pictures of another shape, and of another number than the tokens say.
        """
        if pictures is not None and not pictures.is_floating_point():
            raise DecoderError(
                f"{IMAGES} are {pictures.dtype}; give the pictures as the model's processor makes them"
            )
        if pictures is None and (count := int((tokens == self.token).sum())):
            raise DecoderError(
                f"input_ids hold {count} image tokens (number {self.token}), and there are no {IMAGES}; give the "
                "pictures too, or texts without such tokens"
            )


def sees(model: Any) -> bool:
    """Whether a model takes pictures besides tokens."""
    return hasattr(model, "get_image_features") and getattr(model.config, "vision_config", None) is not None


def picture_form(model: Any) -> PictureForm | None:
    """The form of a model's pictures, found by running its tower for shapes alone.

    None if the model takes no pictures, or pictures of no one size, or more than their numbers.
    """
    if not sees(model):
        return None
    images, token = model.config.vision_config, getattr(model.config, "image_token_id", None)
    size, num_channels = getattr(images, "image_size", None), getattr(images, "num_channels", 3)
    if not isinstance(size, int) or not isinstance(token, int):
        return None
    try:
        with torch.no_grad():
            found = on_meta(model).get_image_features(
                pixel_values=torch.zeros(1, num_channels, size, size, device="meta")
            )
    except Exception:  # whatever a model's code raises if it needs more than pictures
        return None
    features = getattr(found, "pooler_output", found)
    return PictureForm(num_channels, size, int(features[0].shape[-2]), token)
