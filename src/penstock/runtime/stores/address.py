"""A store's address as it may be shown and written down."""

from __future__ import annotations


def without_password(address: str) -> str:
    """The address without the name and the password in it."""
    scheme, _, rest = address.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"
