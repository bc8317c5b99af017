"""Commands about runs that are done: lineage, compare, promote, rollback, reproduce."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated

import typer

from flows.cli_errors import FAILURE as _FAILURE
from flows.cli_options import AsJson, Debug, Experiment, TrackingUri
from flows.terminal import terminal
from tasks.config import STAGES, TrackingConfig
from tasks.errors import ConfigError
from tasks.workspace import Workspace

_STAGE_LIST = ", ".join(STAGES)

Why = Annotated[str, typer.Option(help="The reason; it becomes a tag of the version.")]

# Turns errors into one message and an exit code; given whether to show tracebacks.
Reported = Callable[[bool], AbstractContextManager[None]]


def add_run_commands(app: typer.Typer, reported: Reported) -> None:
    """Add the commands to the program."""
    _add_lineage(app, reported)
    _add_compare(app, reported)
    _add_promotion(app, reported)
    _add_reproduce(app, reported)


def _add_lineage(app: typer.Typer, reported: Reported) -> None:
    @app.command("lineage")
    def lineage_command(  # noqa: PLR0913 - one argument per option
        ref: Annotated[
            str,
            typer.Argument(
                help="A path, `runs:/<id>`, `models:/<name>@<alias>`, `models:/<name>/<version>`, "
                f"latest, or a stage: {_STAGE_LIST}."
            ),
        ],
        as_json: AsJson = False,
        as_mermaid: Annotated[
            bool, typer.Option("--mermaid", help="Print a Mermaid diagram.")
        ] = False,
        verify: Annotated[
            bool, typer.Option("--verify", help="Check the hash of every file of every artefact.")
        ] = False,
        tracking_uri: TrackingUri = None,
        experiment: Experiment = "rlhf-flows",
        debug: Debug = False,
    ) -> None:
        """Print the tree from an artefact, a run or a version back to the raw files, with hashes.

        The exit code is 1 when a link is broken: an artefact or a run that was deleted, a torn or
        edited artefact, a raw file that has changed.
        """
        with reported(debug):
            from flows.lineage import lineage_mermaid, print_lineage
            from tasks.lineage import lineage_tree
            from tasks.tracking import connect

            if as_json and as_mermaid:
                raise ConfigError("--json and --mermaid were both given", "one", "remove one")
            workspace = Workspace.from_environment()
            workspace.prepare()
            tracking = TrackingConfig(tracking_uri=tracking_uri, experiment=experiment)
            tree = lineage_tree(connect(tracking, workspace), ref, is_deep=verify)
            if as_json:
                print(tree.model_dump_json(indent=2))
            elif as_mermaid:
                print(lineage_mermaid(tree))
            else:
                print_lineage(terminal(), tree)
            if tree.broken:
                raise typer.Exit(_FAILURE)


def _add_compare(app: typer.Typer, reported: Reported) -> None:
    @app.command("compare")
    def compare_command(  # noqa: PLR0913 - one argument per option
        refs: Annotated[
            list[str] | None,
            typer.Argument(
                metavar="[REF]...",
                help="Runs: latest (the newest chain), a stage, `runs:/<id>` or the id, "
                "`models:/<name>@<alias>`, `models:/<name>/<version>`, or an artefact's path. "
                "Default: the two newest chains.",
            ),
        ] = None,
        html: Annotated[
            Path | None, typer.Option(help="Also write a page, with curves, to this file.")
        ] = None,
        show_all: Annotated[
            bool, typer.Option("--all", help="Show settings that are the same in all runs, too.")
        ] = False,
        as_json: AsJson = False,
        tracking_uri: TrackingUri = None,
        experiment: Experiment = "rlhf-flows",
        debug: Debug = False,
    ) -> None:
        """Put runs side by side: settings that differ, inputs, packages, metrics."""
        with reported(debug):
            from flows.compare import CompareRequest, print_comparison, run_compare
            from flows.compare import as_json as plain

            tracking = TrackingConfig(tracking_uri=tracking_uri, experiment=experiment)
            found = run_compare(CompareRequest(tuple(refs or ()), tracking, show_all, html))
            if as_json:
                print(json.dumps(plain(found), indent=2, allow_nan=False))
            else:
                print_comparison(terminal(), found)


def _add_promotion(app: typer.Typer, reported: Reported) -> None:
    @app.command("promote")
    def promote_command(
        version: Annotated[
            str,
            typer.Argument(
                help="A version's number, candidate, `models:/<name>@<alias>`, "
                "`models:/<name>/<version>`, or `runs:/<id>` of the run that made the student."
            ),
        ],
        why: Why = "by hand",
        force: Annotated[bool, typer.Option("--force", help="Although the gate failed.")] = False,
        tracking_uri: TrackingUri = None,
        experiment: Experiment = "rlhf-flows",
        debug: Debug = False,
    ) -> None:
        """Make a student the champion; who, when and why become tags of its version."""
        with reported(debug):
            from flows.promote import PromoteRequest, promote

            tracking = TrackingConfig(tracking_uri=tracking_uri, experiment=experiment)
            print(promote(PromoteRequest(version, why, tracking, force)))

    @app.command("rollback")
    def rollback_command(
        why: Why = "by hand",
        tracking_uri: TrackingUri = None,
        experiment: Experiment = "rlhf-flows",
        debug: Debug = False,
    ) -> None:
        """Make the champion before this one the champion again."""
        with reported(debug):
            from flows.promote import rollback

            tracking = TrackingConfig(tracking_uri=tracking_uri, experiment=experiment)
            print(rollback(why, tracking))


def _add_reproduce(app: typer.Typer, reported: Reported) -> None:
    @app.command("reproduce")
    def reproduce_command(
        ref: Annotated[
            str,
            typer.Argument(
                help="A stage's run: `runs:/<id>` or the id, `models:/<name>@<alias>`, a stage, or "
                "an artefact's path."
            ),
        ],
        as_json: AsJson = False,
        keep: Annotated[
            bool, typer.Option("--keep", help="Keep the repeat's files when they are equal, too.")
        ] = False,
        tracking_uri: TrackingUri = None,
        experiment: Experiment = "rlhf-flows",
        debug: Debug = False,
    ) -> None:
        """Run a stage again from its recorded config, parents and seed, and compare the results.

        The exit code is 1 when they differ; what differs in packages, code and device is listed.
        """
        with reported(debug):
            from flows.reproduce import ReproduceRequest, print_reproduction, reproduce

            tracking = TrackingConfig(tracking_uri=tracking_uri, experiment=experiment)
            found = reproduce(ReproduceRequest(ref, tracking, keep, debug))
            if as_json:
                print(found.model_dump_json(indent=2))
            else:
                print_reproduction(terminal(), found)
            if not found.is_equal:
                raise typer.Exit(_FAILURE)
