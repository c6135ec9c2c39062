"""Push and pull: folders that this package made, to the Hub and back."""

import shutil
import warnings
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HFValidationError

from ..artifacts.certificate import CERTIFICATE
from ..artifacts.files import MADE_WITH, check_new, new_folder
from ..artifacts.hub import PICKLES, hub_errors
from ..validation import listed, shown
from .contents import CARD, files_of, kind_of


SHOWN = 5  # of the files that are not uploaded
DATASETS = "datasets/"  # how the Hub's addresses tell a dataset's repository from a model's


def push(
    folder: str | Path, repo_id: str, *, private: bool | None = None, token: str | None = None, message: str | None = None,
    revision: str | None = None,
) -> str:  # fmt: skip
    """Upload a folder that this package can use (a head, a policy, models, a dataset, the custom_generate repository).

    Creates the repository where there is none. What is there and unchanged is not uploaded again. Only the files that a folder
    of its kind consists of are uploaded (`contents.FILES`); a warning names those that stay here.

    Returns: the commit's URL. Raises: `ValueError`, one line, for a folder that is none of these, has no README.md or holds
    a pickle or, among those files, a link; `huggingface_hub`'s errors, for a missing token for example.
    """
    folder = Path(folder)
    kind = kind_of(folder)
    if not (folder / CARD).is_file():
        raise ValueError(f"{folder} has no {CARD}, the model card: write one, or save the {kind} again")
    files, left = files_of(kind, folder)
    pickles = [name for name in left if set(map(str.lower, Path(name).suffixes)) & set(PICKLES)]
    if pickles:
        raise ValueError(f"{folder} holds {pickles[0]}, a pickle: this package shares safetensors only")
    if left:
        warnings.warn(f"not uploaded, for no {kind} has such files: {listed(left, SHOWN)}", stacklevel=2)
    api, repo_type = HfApi(token=token), "dataset" if kind == "dataset" else "model"
    with hub_errors(repo_id):
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True, repo_type=repo_type).repo_id
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True, repo_type=repo_type)
        # A certificate stands for the policy that it was pushed with, and for no later one.
        stale = [name for name in (CERTIFICATE,) if kind == "policy" and name not in files]
        return str(
            api.upload_folder(
                repo_id=repo_id, folder_path=folder, revision=revision, repo_type=repo_type, allow_patterns=files, delete_patterns=stale or None,
                commit_message=message or f"Upload {kind} with hf_lossy_assist",
            )
        )  # fmt: skip


def pull(
    repo_id: str, out: str | Path | None = None, *, revision: str | None = None, token: str | None = None,
    local_files_only: bool = False, force_download: bool = False,
) -> Path:  # fmt: skip
    """Download a repository and check that it is one that this package can use; returns its folder.

    A dataset's `repo_id` is "datasets/org/name". `force_download`: also what is in the cache already. Without `out` it stays in the Hub's cache. With `out` its files are copied there, once they are all here and checked.
    """
    if out is not None:  # before anything is downloaded
        check_new(out, "download again")
    repo, _, pinned = repo_id.partition("@")
    repo_type = "dataset" if repo.startswith(DATASETS) else "model"
    if pinned and revision is not None and pinned != revision:
        raise ValueError(
            f"{shown(repo_id, 200)} pins {shown(pinned)}, and revision={shown(revision)} another: pass one of them"
        )
    try:
        with hub_errors(repo_id):
            cached = Path(
                snapshot_download(
                    repo.removeprefix(DATASETS), repo_type=repo_type, revision=revision or pinned or None, token=token,
                    local_files_only=local_files_only, force_download=force_download,
                )
            )  # fmt: skip
    except HFValidationError:
        raise ValueError(f"{shown(repo_id, 200)} is not a repository name like org/name") from None
    kind_of(cached)
    if out is None:
        return cached
    with new_folder(out) as folder:
        # The cache holds links; copies are files. What names models of this machine was not written here.
        shutil.copytree(cached, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MADE_WITH))
    return Path(out)
