"""From a REF, a module or a dictionary to a checkpoint."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from mergeway.checkpoint.lora import CONFIG as LORA_CONFIG
from mergeway.checkpoint.lora import LoraCheckpoint
from mergeway.checkpoint.pickled import pickles_in, read_pickles, refuse
from mergeway.checkpoint.remote import ON_DISK, fetched
from mergeway.checkpoint.source import Checkpoint, InMemory, SafetensorsFiles, open_directory
from mergeway.core.files import reading, regular
from mergeway.errors import CheckpointError

_HUB_ID = re.compile(r"^(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?$")
# As one writes it, or as pathlib does, with one slash.
_URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]+):/{1,3}(?P<rest>[^/].*)")
_FILES = (".safetensors", ".bin", ".pt", ".pth")
_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]
_REMOTE_FILES = [*_HUB_FILES, "*.bin", "*.md", "LICENSE*", "NOTICE*"]


# What a caller may give where a checkpoint is wanted.
Reference = str | Path | Mapping[str, Tensor] | nn.Module | Checkpoint


def open_checkpoint(ref: Reference, base: Checkpoint | None = None, allow_pickle: bool = False) -> Checkpoint:
    """The checkpoint a REF stands for; `base` is what an adapter is added to."""
    if isinstance(ref, nn.Module | Mapping):
        return InMemory(ref)
    if not isinstance(ref, str | Path):
        if isinstance(ref, Checkpoint):
            return ref
        raise CheckpointError(
            f"a checkpoint is a path, a hub id, a module or a dictionary of tensors, not {type(ref).__name__}"
        )
    source, path = str(ref), Path(ref)
    if url := url_of(source):
        path = fetched(url, _REMOTE_FILES)
        with reading(path):
            if not path.exists():
                raise CheckpointError(f"{source}: there is nothing there")
    elif not _exists(path):
        path = from_hub(source)
    regular(path)
    if pickles := pickles_in(path):
        if not allow_pickle:
            raise refuse(source, path, pickles)
        return read_pickles(source, pickles, path if path.is_dir() else None)
    if path.is_file():
        return SafetensorsFiles(source, [path])
    if (path / LORA_CONFIG).exists():
        if base is None:
            raise CheckpointError(f"{source}: an adapter cannot be a base; name the model it was trained on")
        return LoraCheckpoint(source, path, base)
    return open_directory(source, path)


def url_of(ref: object) -> str | None:
    """The URL that a reference is, if nothing on this disk is called so."""
    match = _URL.fullmatch(str(ref)) if isinstance(ref, str | Path) else None
    if match is None or Path(str(ref)).exists():
        return None
    slashes = ":///" if match["scheme"] in ON_DISK else "://"
    return match["scheme"] + slashes + match["rest"]


def _exists(path: Path) -> bool:
    with reading(path):
        try:
            return path.exists()
        except OSError as problem:
            if problem.errno == errno.ENAMETOOLONG:  # a name that no file can have
                return False
            raise


@dataclass(frozen=True)
class HubId:
    """A repository of the hub, and a revision of it if one was asked for."""

    repo: str
    revision: str | None


def hub_id(source: str) -> HubId | None:
    """The repository that a reference stands for; None for what is on this disk, or in memory."""
    match = _HUB_ID.match(source)
    if not match or source.endswith(_FILES) or _exists(Path(source)):
        return None
    return HubId(match["repo"], match["revision"])


def from_hub(source: str) -> Path:
    """The snapshot of a hub id, downloaded or from the cache."""
    nothing = CheckpointError(f"{source}: no such file or directory, and not a hub id of the form org/name[@revision]")
    match = _HUB_ID.match(source)
    if not match or source.endswith(_FILES):
        raise nothing
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repo, revision = match["repo"], match["revision"]
    command = f"hf download {repo}" + (f" --revision {revision}" if revision else "")
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=_HUB_FILES))
    except HFValidationError:
        raise nothing from None
    except RevisionNotFoundError:
        raise CheckpointError(f"{source}: the hub has no revision '{revision}' of {repo}") from None
    except RepositoryNotFoundError:
        raise CheckpointError(
            f"{source}: neither a local path nor a repository on the hub (a private one needs 'hf auth login')"
        ) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError):
        raise CheckpointError(
            f"{source}: no such path, and not in the hub cache; download it with '{command}'"
        ) from None
