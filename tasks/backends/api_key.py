"""Keys of endpoints: from the environment, and nowhere else."""

from __future__ import annotations

import os

from tasks.errors import ConfigError


def read_key(variable: str | None) -> str:
    """Return the key in an environment variable; empty where no variable is named.

    Raises:
        ConfigError: the variable holds none, or one that no header can carry.
    """
    if variable is None:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(
            f"The environment variable {variable} holds no key",
            "the key of the endpoint",
            f"export {variable}=..., or set api_key_env to null for a server that asks for none",
        )
    if not key.isascii() or not key.isprintable():
        raise ConfigError(
            f"The key in {variable} has characters that no header can carry",
            "printable ASCII",
            f"export {variable} again",
        )
    return key
