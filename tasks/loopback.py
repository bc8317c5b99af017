"""This machine's own servers, where a proxy is set: none of the proxies leads here."""

from __future__ import annotations

import os
import urllib.request
from typing import Final

HOSTS: Final = ("127.0.0.1", "localhost", "::1")
# Some clients read one of the two only, and most prefer the first.
_NAMES: Final = ("no_proxy", "NO_PROXY")


def bypass_proxies() -> None:
    """Have this machine reached without a proxy, by this process and all that it starts.

    Prefect's and MLflow's clients go by these variables. Without a proxy in the environment they
    stay as they are: their presence would hide the proxies that macOS keeps elsewhere.
    """
    if not urllib.request.getproxies_environment():
        return
    given = {name: os.environ[name] for name in _NAMES if name in os.environ}
    for name in _NAMES:
        value = given.get(name, next(iter(given.values()), ""))
        hosts = [host.strip() for host in value.split(",") if host.strip()]
        # Alone it means all; in a list most clients take no notice of it.
        if hosts != ["*"]:
            os.environ[name] = ",".join([*hosts, *(host for host in HOSTS if host not in hosts)])
