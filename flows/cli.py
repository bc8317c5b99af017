"""The `rlhf` command: a thin shell over the flows."""

from __future__ import annotations

import errno
import json
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
import yaml
from pydantic import ValidationError
from rich.console import Console

from flows.run_commands import add_run_commands
from tasks.config import TrackingConfig
from tasks.errors import ClusterError, RewardError, RlhfError, TrainingError
from tasks.loading_config import find_config, load_config, parse_stage
from tasks.provenance import DISTRIBUTION, package_versions
from tasks.workspace import HOME_VARIABLE, Workspace

app = typer.Typer(
    name="rlhf",
    help="Offline RLHF: from preference pairs to a small aligned model with a score.",
    epilog=f"Everything is written under ${HOME_VARIABLE} (default ./var).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
_FAILURE = 1
_BAD_INPUT = 2
_INTERRUPTED = 130
_STORAGE_ERRORS = (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT)

Overrides = Annotated[
    list[str] | None,
    typer.Option("-o", "--override", metavar="SECTION.KEY=VALUE", help="Change one value; repeat."),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show logs and tracebacks.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
TrackingUri = Annotated[
    str | None, typer.Option(help="MLflow address; default: the workspace's database.")
]
Experiment = Annotated[str, typer.Option(help="MLflow experiment.")]


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"rlhf {package_versions()[DISTRIBUTION]}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Offline RLHF: from preference pairs to a small aligned model with a score."""


@app.command("run")
def run_command(
    config: Annotated[
        str,
        typer.Argument(
            metavar="[CONFIG]", help="YAML file, or demo, demo_ablation, demo_distill, hh_cpu..."
        ),
    ] = "demo",
    override: Overrides = None,
    from_stage: Annotated[
        str | None,
        typer.Option("--from", metavar="STAGE", help="Rerun this stage and all after it."),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            "--only", metavar="STAGE", help="Run one stage on the newest finished inputs."
        ),
    ] = None,
    no_reuse: Annotated[
        bool, typer.Option("--no-reuse", help="Run stages that are finished already, too.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Run the chain: ingest, sft, reward_model, offline_ppo, distill, evaluate.

    With a section `ablation`, compare methods of offline_ppo instead.

    Finished stages with the same config, inputs and code are reused. A killed run continues from
    its last checkpoint when the same command is given again. No server is needed.
    """
    from flows.command import RunRequest, run
    from flows.console import print_ablation, print_places, print_result

    with _reported(debug):
        cfg = load_config(find_config(config), override or [])
        if no_reuse:
            cfg = cfg.model_copy(update={"reuse": False})
        request = RunRequest(
            cfg,
            rerun_from=parse_stage(from_stage) if from_stage else None,
            only=parse_stage(only) if only else None,
            is_debug=debug,
        )
        prefect_url = os.environ.get("PREFECT_API_URL")
        monitor = run(request)
        console = Console()
        if cfg.ablation is None:
            print_result(console, monitor)
        else:
            print_ablation(console, Workspace.from_environment(), monitor)
        print_places(console, Workspace.from_environment(), cfg.tracking, prefect_url)


@app.command("score")
def score_command(  # noqa: PLR0913 - one argument per option
    file: Annotated[
        Path, typer.Argument(help="Pairs or responses: .jsonl, .jsonl.gz or .parquet.")
    ],
    reward_model: Annotated[
        str, typer.Option(help="`latest`, `runs:/<id>`, `models:/<name>@<alias>`, or a path.")
    ] = "latest",
    output: Annotated[
        Path | None,
        typer.Option(help="A .jsonl or .parquet file; default: FILE with .scored.jsonl."),
    ] = None,
    override: Overrides = None,
    as_json: AsJson = False,
    tracking_uri: TrackingUri = None,
    experiment: Experiment = "rlhf-flows",
    debug: Debug = False,
) -> None:
    """Add the reward model's score to each row of a file.

    Known rows: HH pairs, prompt with chosen and rejected, RewardBench's, prompt with response, and
    messages. A row that cannot be scored keeps its place, with the reason in score_error. Of the
    settings only the runtime can be changed: -o runtime.device=cpu.
    """
    with _reported(debug):
        from flows.score import ScoreRequest, print_scored, run_score

        tracking = TrackingConfig(tracking_uri=tracking_uri, experiment=experiment)
        request = ScoreRequest(file, reward_model, output, tuple(override or ()), tracking)
        scored = run_score(request, is_debug=debug)
        if as_json:
            print(json.dumps(scored.as_json(), indent=2))
        else:
            print_scored(Console(), scored)


@app.command("score-judgments")
def score_judgments_command(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...", help="FastChat's judgments (single or pairwise), or AlpacaEval's."
        ),
    ],
    questions: Annotated[
        Path | None, typer.Option(help="question.jsonl: adds the means by category.")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="Model that the others are compared with.")
    ] = None,
    reparse: Annotated[
        bool, typer.Option("--reparse", help="Read the ratings from the judges' texts again.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Print the leaderboard of judgment files that anybody made.

    A later judgment of the same question and turn replaces an earlier one. A failed judgment is
    no number: it lowers the coverage.
    """
    with _reported(debug):
        from flows.score_judgments import JudgmentRequest, print_judgments, score_judgments

        found = score_judgments(JudgmentRequest(files, questions, baseline, reparse))
        if as_json:
            print(json.dumps(found.as_json(), indent=2, allow_nan=False))
        else:
            print_judgments(Console(), found)


@app.command("export")
def export_command(
    ref: Annotated[
        str, typer.Argument(help="A dataset: a path, `runs:/<id>`, or `latest`.")
    ] = "latest",
    to: Annotated[
        str, typer.Option(help="`verl`, `trl` or `jsonl`: whose loaders take the files.")
    ] = "jsonl",
    output: Annotated[
        Path | None, typer.Option(help="A new directory; default: ./preferences-TO.")
    ] = None,
    tracking_uri: TrackingUri = None,
    experiment: Experiment = "rlhf-flows",
    debug: Debug = False,
) -> None:
    """Write an ingested dataset in another project's format."""
    with _reported(debug):
        from flows.export import ExportRequest, run_export

        tracking = TrackingConfig(tracking_uri=tracking_uri, experiment=experiment)
        target = output or Path(f"preferences-{to}")
        for line in run_export(ExportRequest(ref, to, target, tracking)):
            print(line)


@app.command("doctor")
def doctor_command(
    config: Annotated[
        str, typer.Argument(metavar="[CONFIG]", help="What is going to be run.")
    ] = "demo",
    override: Overrides = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Tell what this machine has, and what of a config would fail on it.

    The exit code is 1 when something that the config needs would fail.
    """
    with _reported(debug):
        from flows.doctor import examine, print_findings

        cfg = load_config(find_config(config), override or [])
        findings = examine(cfg, Workspace.from_environment())
        if as_json:
            print(json.dumps([finding.model_dump() for finding in findings], indent=2))
        else:
            print_findings(Console(), findings)
        if any(finding.status == "fail" for finding in findings):
            raise typer.Exit(_FAILURE)


@contextmanager
def _reported(is_debug: bool) -> Iterator[None]:
    """Turn errors into one message and an exit code."""
    try:
        yield
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        _fail("Interrupted. Give the same command again to continue.", _INTERRUPTED, is_debug)
    except RlhfError as error:
        is_failure = isinstance(error, ClusterError | TrainingError | RewardError)
        _fail(str(error), _FAILURE if is_failure else _BAD_INPUT, is_debug)
    except (ValidationError, yaml.YAMLError) as error:
        _fail(f"The configuration cannot be used: {error}", _BAD_INPUT, is_debug)
    except BrokenPipeError:
        # Nobody reads the output any more, as with `| head`.
        raise typer.Exit(_FAILURE) from None
    except OSError as error:
        if error.errno not in _STORAGE_ERRORS:
            _fail_unexpected(error, is_debug)
        text = f"Writing {error.filename or 'to the workspace'} failed: {error.strerror}."
        _fail(f"{text} Fix: free space, or choose another {HOME_VARIABLE}.", _BAD_INPUT, is_debug)
    except Exception as error:
        _fail_unexpected(error, is_debug)


def _fail_unexpected(error: Exception, is_debug: bool) -> None:
    workspace = Workspace.from_environment()
    if workspace.is_full:
        text = f"Workspace {workspace.root} is full. Fix: free space and try again"
        _fail(f"{text}, or choose another {HOME_VARIABLE}.", _BAD_INPUT, is_debug)
    cause = f"{type(error).__name__}: {error}".strip().rstrip(".")
    _fail(
        f"Unexpected failure: {cause}. Fix: run again with --debug for details.", _FAILURE, is_debug
    )


def _fail(message: str, code: int, is_debug: bool) -> None:
    if is_debug:
        traceback.print_exc()
    Console(stderr=True).print(
        f"Error: {message}", style="red", markup=False, highlight=False, soft_wrap=True
    )
    raise typer.Exit(code)


add_run_commands(app, _reported)


def main() -> None:
    """Entry point of the console command."""
    app(prog_name="rlhf")


if __name__ == "__main__":
    main()
