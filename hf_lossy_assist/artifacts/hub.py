"""Folders here or on the Hub."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import HFValidationError

from ..validation import one_line, shown


# Used by huggingface_hub, by version; their errors are not OSErrors.
HTTP_CLIENTS = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3")
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib")
AGAIN = "force_download=True, or hf-lossy pull --force-download"  # bypasses the cache
CERTIFICATE, POLICY = "certificate.json", "policy.json"


def unreached(error: Exception) -> str:
    """Return why an HTTP client did not reach the Hub, in one line without headers, which hold the token."""
    if "header" in str(error).lower() or isinstance(error, UnicodeEncodeError):
        return (
            "a header cannot be sent; check the token (--token, token= or HF_TOKEN) for characters that belong to none"
        )
    return one_line(error)


@contextmanager
def hub_errors(repo: str) -> Iterator[None]:
    """Shorten the Hub client's errors to one line each; their types stay, so callers can distinguish them."""
    try:
        yield
    except UnicodeEncodeError as error:  # of a header, whose value the error contains
        raise ValueError(f"{repo}: the Hub was not asked: {unreached(error)}") from None
    except HFValidationError:
        raise ValueError(f"{shown(repo, 200)} is neither a folder here nor a repository name like org/name") from None
    except (OSError, ValueError) as error:
        error.args = (f"{repo}: {one_line(error, 300)}", *error.args[1:])
        raise
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in HTTP_CLIENTS:
            raise
        raise ConnectionError(f"{repo}: the Hub was not reached: {unreached(error)}") from None


def fetch(source: str, names: Sequence[str], **kwargs: Any) -> Path:
    """Return a folder, or the local copy of a repository's files of these names or patterns; see `download`."""
    return Path(source) if os.path.isdir(source) else download(source, allow_patterns=list(names), **kwargs)


def download(source: str, *, revision: str | None = None, **kwargs: Any) -> Path:
    """Return the folder in the Hub's cache of `org/name` or `org/name@revision`; `kwargs`: as for `snapshot_download`.

    Raises: `ValueError`, one line, for a name that is none; `huggingface_hub`'s errors for the repository.
    """
    repo, _, pinned = source.partition("@")
    if pinned and revision not in (None, pinned):
        raise ValueError(
            f"{shown(source, 200)} pins a revision, and revision={shown(revision)} another: pass one of them"
        )
    if "/" not in repo:  # repositories without a slash are the Hub's, not of this package, and a query would take time
        raise ValueError(f"there is no folder {shown(source, 200)} here, and a name on the Hub has the form org/name")
    with hub_errors(source):
        return Path(snapshot_download(repo, revision=revision or pinned or None, **kwargs))


def is_data(path: Path) -> bool:
    """Return whether a path names a file of a dataset on the Hub: hf://datasets/ORG/NAME[@REVISION]/FILE."""
    return path.parts[:2] == ("hf:", "datasets")


def fetch_data(path: Path) -> tuple[Path, Path]:
    """Return the local copy of a file of a dataset on the Hub, and the path with the commit that it is of. Errors: `huggingface_hub`'s, one line."""
    names = path.parts[2:]
    if len(names) < 3:
        raise ValueError(f"expected hf://datasets/ORG/NAME/FILE, got {shown(str(path), 200)}")
    repo, _, revision = "/".join(names[:2]).partition("@")
    with hub_errors(f"the dataset {repo}"):
        file = Path(hf_hub_download(repo, "/".join(names[2:]), repo_type="dataset", revision=revision or None))
    commit = file.parts[file.parts.index("snapshots") + 1]
    return file, Path("hf:", "datasets", f"{repo}@{commit}", *names[2:])


def upload(
    folder: Path,
    repo_id: str,
    message: str,
    *,
    repo_type: str = "model",
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    allow_patterns: Sequence[str] | None = None,
) -> str:
    """Upload a folder to a repository, made if needed; return the commit's URL."""
    api = HfApi(token=token)
    with hub_errors(repo_id):
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True, repo_type=repo_type).repo_id
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True, repo_type=repo_type)
        return str(
            api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                revision=revision,
                repo_type=repo_type,
                commit_message=message,
                allow_patterns=list(allow_patterns) if allow_patterns else None,
                # A certificate is valid only for the policy that it was pushed with.
                delete_patterns=[CERTIFICATE] if (folder / POLICY).is_file() else None,
            )
        )
