"""A store's address as it may be shown and written down."""

from __future__ import annotations


def without_password(address: str) -> str:
    """The address without the name and the password in it, whatever else is wrong with it."""
    scheme, mark, rest = address.partition("://")
    return f"{scheme}{mark}{rest.rpartition('@')[2]}" if mark else address.rpartition("@")[2]
