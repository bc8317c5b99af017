"""The `rlhf` command: a thin shell over the flows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.runs import runs_app
from flows.cli.services import services_app
from flows.cli.shared import (
    FAILURE,
    AsJson,
    Debug,
    Experiment,
    TrackingUri,
    open_tracker,
    reported,
    terminal,
)
from tasks.config.loading import find_config, load_config, parse_stage
from tasks.config.shared import TrackingConfig
from tasks.workspace import DISTRIBUTION, HOME_VARIABLE, Workspace, bypass_proxies, package_versions

app = typer.Typer(
    name="rlhf",
    help="Offline RLHF: from preference pairs to a small aligned model with a score.",
    epilog=f"Everything is written under ${HOME_VARIABLE} (default ./var).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Overrides = Annotated[
    list[str] | None,
    typer.Option("-o", "--override", metavar="SECTION.KEY=VALUE", help="Change one value; repeat."),
]


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
    bypass_proxies()


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

    With a section `ablation`, compare methods of one stage instead.

    Finished stages with the same config, inputs and code are reused. A killed run continues from
    its last checkpoint when the same command is given again. No server is needed.
    """
    from flows.cli.run import RunRequest, print_ablation, print_places, print_result, run
    from flows.services.prefect_server import API_URL, is_temporary

    with reported(debug):
        cfg = load_config(find_config(config), override or [])
        if no_reuse:
            cfg = cfg.model_copy(update={"reuse": False})
        request = RunRequest(
            cfg,
            rerun_from=parse_stage(from_stage) if from_stage else None,
            only=parse_stage(only) if only else None,
            is_debug=debug,
        )
        monitor = run(request)
        console = terminal()
        if cfg.ablation is None:
            print_result(console, monitor)
        else:
            print_ablation(console, Workspace.from_environment(), monitor)
        prefect_url = None if is_temporary() else os.environ.get(API_URL)
        print_places(console, Workspace.from_environment(), cfg.tracking, prefect_url)


@app.command("score")
def score_command(
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
    with reported(debug):
        from flows.cli.score import print_scored, score_alone

        tracking = TrackingConfig(tracking_uri=tracking_uri, experiment=experiment)
        scored = score_alone(file, reward_model, output, override or (), tracking, debug)
        if as_json:
            print(json.dumps(scored.as_json(), indent=2))
        else:
            print_scored(terminal(), scored)


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
    with reported(debug):
        from flows.cli.score_judgments import print_judgments, score_judgments

        found = score_judgments(files, questions, baseline, reparse)
        if as_json:
            print(json.dumps(found.as_json(), indent=2, allow_nan=False))
        else:
            print_judgments(terminal(), found)


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
    with reported(debug):
        from tasks.artifacts import PreferenceDataset
        from tasks.data.export import export_dataset
        from tasks.tracking.lineage import resolve_reference

        tracker = open_tracker(TrackingConfig(tracking_uri=tracking_uri, experiment=experiment))
        dataset = resolve_reference(tracker, ref, "ingest", PreferenceDataset)
        written = export_dataset(dataset, to, output or Path(f"preferences-{to}"))
        for path, n_rows in written.items():
            print(f"{path}: {n_rows} rows")


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
    with reported(debug):
        from flows.cli.doctor import examine, print_findings

        cfg = load_config(find_config(config), override or [])
        findings = examine(cfg, Workspace.from_environment())
        if as_json:
            print(json.dumps([finding.model_dump() for finding in findings], indent=2))
        else:
            print_findings(terminal(), findings)
        if any(finding.status == "fail" for finding in findings):
            raise typer.Exit(FAILURE)


app.add_typer(runs_app)
app.add_typer(services_app)


def main() -> None:
    """Entry point of the console command."""
    app(prog_name="rlhf")


if __name__ == "__main__":
    main()
