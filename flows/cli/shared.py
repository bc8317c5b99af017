"""What the commands share: options, errors as one message and an exit code, printing."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
import yaml
from pydantic import ValidationError
from rich.console import Console

from tasks.config.messages import problems_of
from tasks.config.shared import TrackingConfig
from tasks.errors import ClusterError, RewardError, RlhfError, TrainingError, sentence
from tasks.workspace import HOME_VARIABLE, Workspace

if TYPE_CHECKING:
    from tasks.tracking.mlflow import Tracker

FAILURE = 1
_BAD_INPUT = 2
_INTERRUPTED = 130
_STORAGE_ERRORS = (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT)


@contextmanager
def reported(is_debug: bool) -> Iterator[None]:
    """Turn errors into one message and an exit code."""
    try:
        yield
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        _fail("Interrupted. Give the same command again to continue.", _INTERRUPTED, is_debug)
    except RlhfError as error:
        is_failure = isinstance(error, ClusterError | TrainingError | RewardError)
        _fail(str(error), FAILURE if is_failure else _BAD_INPUT, is_debug)
    except (ValidationError, yaml.YAMLError) as error:
        wrong = problems_of(error) if isinstance(error, ValidationError) else error
        _fail(f"The configuration cannot be used: {wrong}", _BAD_INPUT, is_debug)
    except BrokenPipeError:
        # Nobody reads the output any more, as with `| head`.
        raise typer.Exit(FAILURE) from None
    except OSError as error:
        if error.errno not in _STORAGE_ERRORS:
            _fail_unexpected(error, is_debug)
        text = sentence(f"Writing {error.filename or 'to the workspace'} failed: {error.strerror}")
        _fail(f"{text} Fix: free space, or choose another {HOME_VARIABLE}.", _BAD_INPUT, is_debug)
    except Exception as error:
        _fail_unexpected(error, is_debug)


def _fail_unexpected(error: Exception, is_debug: bool) -> None:
    workspace = Workspace.from_environment()
    if workspace.is_full:
        text = f"Workspace {workspace.root} is full. Fix: free space and try again"
        _fail(f"{text}, or choose another {HOME_VARIABLE}.", _BAD_INPUT, is_debug)
    cause = sentence(f"Unexpected failure: {type(error).__name__}: {error}".rstrip(": "))
    _fail(f"{cause} Fix: run again with --debug for details.", FAILURE, is_debug)


def _fail(message: str, code: int, is_debug: bool) -> None:
    if is_debug:
        traceback.print_exc()
    say(Console(stderr=True), f"Error: {message}", "red")
    raise typer.Exit(code)


# Options that several commands have.

Debug = Annotated[bool, typer.Option("--debug", help="Show logs and tracebacks.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
TrackingUri = Annotated[
    str | None, typer.Option(help="MLflow address; default: the workspace's database.")
]
Experiment = Annotated[str, typer.Option(help="MLflow experiment.")]


def open_tracker(tracking: TrackingConfig) -> Tracker:
    """Open the experiment from this workspace."""
    # Not at the top: mlflow takes seconds to import, and every command imports this file.
    from tasks.tracking.mlflow import connect

    workspace = Workspace.from_environment()
    workspace.prepare()
    return connect(tracking, workspace)


# Where a command prints.

# Rich takes a pipe for 80 columns wide and folds what does not fit.
_WIDEST = 10_000


def terminal() -> Console:
    """Return a console that fits tables to a terminal; elsewhere every value is on one line."""
    console = Console()
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        console.width = _WIDEST
    return console


def say(console: Console, text: str, style: str | None = None) -> None:
    """Print a text as it is: what models and people named is no markup, and no line is folded."""
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def plain(name: str) -> str:
    """Return a name for a table's cell, where it is no markup."""
    return name.replace("[", r"\[")
