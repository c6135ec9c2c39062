"""Files of a folder or of a repository on the Hub."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import _CACHED_NO_EXIST, HfApi, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError

from ..validation import listed, one_line, shown


# Used by huggingface_hub, by version; their errors are not OSErrors.
HTTP_CLIENTS = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3")
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib")
AGAIN = "force_download=True, or hf-lossy pull --force-download"  # bypasses the cache


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


def split_revision(source: str, revision: str | None) -> tuple[str, str | None]:
    """Return the repository and the revision of `org/name@revision`. Raises: `ValueError` if `revision` is another."""
    repo, _, pinned = source.partition("@")
    if pinned and revision not in (None, pinned):
        raise ValueError(
            f"{shown(source, 200)} pins {shown(pinned)}, and revision={shown(revision)} another: pass one of them"
        )
    return repo, revision or pinned or None


def fetch(
    source: str, names: Sequence[str], *, revision: str | None = None, subfolder: str = "", **kwargs: Any
) -> list[Path]:
    """Return the local paths of the files `names` of `source`: a folder, or a model repository on the Hub.

    `org/name@revision` pins a revision as `revision=` does. Keyword arguments: `token`, `cache_dir`, `local_files_only`,
    `force_download`. Raises: `ValueError` if a file is missing; `huggingface_hub`'s errors for the repository.
    """
    if os.path.isdir(source):
        folder = Path(source, subfolder)
        for name in names:
            if not (folder / name).is_file():
                present = sorted(p.name for p in folder.glob("*"))
                hint = " (a pickle, which is never loaded)" if any(n.endswith(PICKLES) for n in present) else ""
                raise ValueError(f"{folder} has no {name}; it holds {listed(present) or 'nothing'}{hint}")
        return [folder / name for name in names]
    repo, revision = split_revision(source, revision)
    if "/" not in repo:  # repositories without a slash are the Hub's, not of this package, and a query would take time
        raise ValueError(f"there is no folder {shown(source, 200)} here, and a name on the Hub has the form org/name")
    try:
        settings = kwargs | {"revision": revision, "subfolder": subfolder or None}
        with hub_errors(source):
            return [Path(hf_hub_download(repo, name, **settings)) for name in names]
    except LocalEntryNotFoundError:  # offline
        raise
    except EntryNotFoundError:
        raise ValueError(
            f"{source} on the Hub has no {' and '.join(names)}: not a head, policy or profile of this package"
        ) from None


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
        found = Path(hf_hub_download(repo, "/".join(names[2:]), repo_type="dataset", revision=revision or None))
    commit = found.parts[found.parts.index("snapshots") + 1]
    return found, Path("hf:", "datasets", f"{repo}@{commit}", *names[2:])


def has_file(source: str, name: str, **kwargs: Any) -> bool:
    """Return whether a folder, or a repository on the Hub, has the file `name`; keyword arguments: see `fetch`."""
    if os.path.isdir(source):
        return Path(source, name).is_file()
    try:
        return bool(fetch(source, [name], **kwargs))
    except LocalEntryNotFoundError:
        # Offline: the cache may record that the file is missing, else its existence is unknown.
        repo, revision = split_revision(source, kwargs.get("revision"))
        cached = try_to_load_from_cache(repo, name, cache_dir=kwargs.get("cache_dir"), revision=revision)
        if cached is _CACHED_NO_EXIST:
            return False
        raise
    except ValueError as error:
        if isinstance(error.__context__, EntryNotFoundError):
            return False
        raise


def upload(
    folder: Path,
    repo_id: str,
    message: str,
    *,
    repo_type: str = "model",
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    **patterns: Any,
) -> str:
    """Upload a folder to a repository, made if needed; return the commit's URL. `patterns`: as for `HfApi.upload_folder`."""
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
                **patterns,
            )
        )
