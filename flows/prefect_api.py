"""Requests to a Prefect server that is not necessarily ours: it may ask for a login."""

from __future__ import annotations

import os

import httpx

from tasks.errors import ClusterError

AUTH_VARIABLE = "PREFECT_API_AUTH_STRING"


def api_client(api_url: str, timeout_seconds: float) -> httpx.Client:
    """Return a client that logs in with what ``PREFECT_API_AUTH_STRING`` (user:password) says."""
    user, _, password = os.environ.get(AUTH_VARIABLE, "").partition(":")
    auth = httpx.BasicAuth(user, password) if user else None
    return httpx.Client(base_url=api_url, timeout=timeout_seconds, auth=auth)


def api_failure(api_url: str, error: httpx.HTTPError) -> ClusterError:
    """Return the project's error for a request that failed."""
    refused = (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)
    if isinstance(error, httpx.HTTPStatusError) and error.response.status_code in refused:
        return ClusterError(
            f"The Prefect server at {api_url} refused the login: {error.response.status_code}",
            f"{AUTH_VARIABLE}=user:password, as the server has it",
            f"set or correct {AUTH_VARIABLE}",
        )
    return ClusterError(
        f"The Prefect server at {api_url} failed: {error}",
        "a server that answers",
        "look at its log, or start one with `rlhf up`",
    )
