"""The deployed model on the hub: exported, then uploaded as one commit."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from mergeway.checkpoint.mapped import one_line
from mergeway.core.files import alive
from mergeway.errors import OptionError, TrunkError, UnsureError
from mergeway.trunk.exports import Exports

# What an earlier model may have left in the repository and this one does not have: other shards, another index.
_STALE = ["*.safetensors", "*.safetensors.index.json", "heads/*"]
_FOLDER = "mergeway-push-"  # of its export, below the directory for temporary files
_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Pushed:
    """What was uploaded, or with a dry run would have been: file names with their bytes, and the commit."""

    repo: str
    step: int
    files: dict[str, int]
    commit: str | None
    url: str | None


def push(
    trunk: Exports,
    repo: str,
    *,
    task: str | None = None,
    backbone: bool = False,
    revision: str | None = None,
    private: bool | None = None,
    message: str | None = None,
    dry_run: bool = False,
    command: str | None = None,
) -> Pushed:
    """Export the deployed model and upload it as one commit; files of an earlier model that it does not have are deleted."""
    if not _NAME.fullmatch(repo):
        raise OptionError(f"'{repo}': a repository of the hub is ORG/NAME")
    step = trunk.log()[-1].step
    _sweep()
    # What cannot be removed at the end goes with the next push; the model is on the hub all the same.
    prefix = f"{_FOLDER}{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
        try:
            out = trunk.export(Path(folder) / "model", task=task, backbone=backbone, command=command)
        except UnsureError as problem:
            raise TrunkError(f"{folder}: cannot be written ({problem.cause}); nothing was pushed") from None
        files = {str(p.relative_to(out)): p.stat().st_size for p in sorted(out.rglob("*")) if p.is_file()}
        if dry_run:
            return Pushed(repo, step, files, None, None)
        from huggingface_hub import HfApi

        api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
        with _talking_to_the_hub(repo):
            api.create_repo(repo, private=private, exist_ok=True)
            done = api.upload_folder(
                repo_id=repo,
                folder_path=out,
                commit_message=message or f"Step {step} of {trunk.name}, merged by mergeway",
                revision=revision,
                delete_patterns=_STALE,
            )
    return Pushed(repo, step, files, done.oid, done.commit_url)


def _sweep() -> None:
    """Remove the exports of pushes that were killed."""
    with suppress(OSError):
        for left in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
            number = left.name.removeprefix(_FOLDER).partition("-")[0]
            if number.isdecimal() and not alive(int(number)):
                shutil.rmtree(left, ignore_errors=True)


@contextmanager
def _talking_to_the_hub(repo: str) -> Generator[None]:
    """Turn what the hub or the network says into one line."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        yield
    except HFValidationError as problem:
        raise OptionError(f"'{repo}': {one_line(problem)}") from None
    except OfflineModeIsEnabled:
        raise TrunkError(f"{repo}: nothing was pushed, because HF_HUB_OFFLINE is set; unset it") from None
    except HfHubHTTPError as problem:
        code = problem.response.status_code
        hint = "; log in with 'hf auth login'" if code in (401, 403) else ""
        raise TrunkError(f"{repo}: the hub refused the push ({code}: {one_line(problem)}){hint}") from None
    except Exception as problem:
        # An HfHubHTTPError is built on the error of whichever HTTP library the hub's package uses.
        if not isinstance(problem, (OSError, *HfHubHTTPError.__bases__)):
            raise
        raise TrunkError(f"{repo}: the hub cannot be reached ({one_line(problem)}); nothing was pushed") from None
