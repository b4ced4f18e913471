"""`mergeway push`: the deployed model on the hub."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from mergeway.cli import completion
from mergeway.cli.app import DEPLOY, app, command_line
from mergeway.cli.options import Json, TrunkPath


@app.command(rich_help_panel=DEPLOY)
def push(
    trunk: TrunkPath,
    repo: Annotated[str, typer.Argument(metavar="ORG/NAME", help="The repository; it is made if it is not there.")],
    task: Annotated[
        str | None,
        typer.Option(
            "--task",
            help="Put this task's own head into the model.",
            show_default=False,
            autocompletion=completion.trunk_tasks,
        ),
    ] = None,
    backbone: Annotated[
        bool, typer.Option("--backbone", help="Keep the base's head, and write those of all tasks beside it.")
    ] = False,
    revision: Annotated[
        str | None, typer.Option("--revision", help="The branch to commit to; by default main.", show_default=False)
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make the repository private if it is new.")] = False,
    message: Annotated[
        str | None,
        typer.Option("--message", help="The commit's message; by default step and trunk.", show_default=False),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Export and show the files, upload nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Export the deployed model and upload it to the hub as one commit."""
    from mergeway.cli.display import console, print_json, progress, table
    from mergeway.trunk import Trunk
    from mergeway.trunk.push import push as push_model

    with progress() as bar:
        done = push_model(
            Trunk.open(trunk, progress=bar),
            repo,
            task=task,
            backbone=backbone,
            revision=revision,
            private=private or None,
            message=message,
            dry_run=dry_run,
            command=command_line(),
        )
    if as_json:
        print_json(asdict(done))
        return
    if done.commit is None:
        console().print(table(("file", "bytes"), [(n, str(s)) for n, s in done.files.items()], numbers=("bytes",)))
        console().print(f"step {done.step} of {trunk} would be pushed to {repo}", markup=False)
        return
    console().print(f"step {done.step} of {trunk} pushed to {repo} ({done.url})", markup=False)
