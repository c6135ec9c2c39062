"""Push this package's folders to the Hub, known files only, and pull them."""

import re
import shutil
import warnings
from pathlib import Path
from typing import Any

from ..artifacts.cards import README
from ..artifacts.files import check_new, new_folder, read_object
from ..artifacts.head import CONFIG, WEIGHTS, Head
from ..artifacts.hub import PICKLES, POLICY, download, upload
from ..artifacts.sv_profile import PROFILE, Profile
from ..drafters.io import load_drafter
from ..validation import listed
from .json_form import check_shareable
from .policy import LossyPolicy


DATASETS = "datasets/"  # prefix of dataset repositories on the Hub
# The files that are uploaded, at the top and in sub-folders: what Transformers, `datasets` and this package write.
JSON = (
    r"(?:generation_|preprocessor_|processor_)?config|policy|certificate|profile|fit|collect|mine|dataset_info|state|vocab|"
    r"tokenizer|tokenizer_config|special_tokens_map|added_tokens|chat_template|model\.safetensors\.index"
)
FILES = re.compile(
    rf"(?:[\w-][\w.-]*/)?(?:README\.md|LICENSE(?:\.txt|\.md)?|(?:{JSON})\.json|(?:merges|vocab)\.txt|"
    r"[\w-][\w.-]*\.(?:safetensors|png|arrow|jinja|model)|generate\.py|requirements\.txt)"
)
HIDDEN = re.compile(r"(?:.*/)?(?:\.|__pycache__).*")


def list_files(folder: Path) -> tuple[list[str], list[str]]:
    """Return the files of `folder` that are shared, and the other visible files, relative to it.

    Raises: `ValueError` if one of the former is a link, or one of the latter a pickle.
    """
    shared, others = [], []
    for path in sorted(folder.rglob("*")):  # which does not follow links
        name = path.relative_to(folder).as_posix()
        if HIDDEN.fullmatch(name) or (path.is_dir() and not path.is_symlink()):
            continue
        if FILES.fullmatch(name):
            shared.append(name)
        elif set(map(str.lower, path.suffixes)) & set(PICKLES):
            raise ValueError(f"{folder} holds {name}, a pickle: this package shares safetensors only")
        else:
            others.append(name)
        if name in shared and path.is_symlink():
            raise ValueError(f"{path} is a link: only files are uploaded; put a copy in its place")
    return shared, others


def detect_kind(folder: Path) -> str:
    """Return the kind of a folder: "policy", "profile", "head", "drafter", "models", "dataset" or "custom_generate".

    Policies, profiles, heads and drafters are loaded to validate them. Raises: `ValueError`, one line, for an unknown or
    damaged folder.
    """
    if (folder / POLICY).is_file():
        check_shareable(LossyPolicy.from_pretrained(folder).to_dict())
        return "policy"
    if (folder / PROFILE).is_file():
        return Profile.read(folder).kind
    if (folder / "dataset_info.json").is_file():
        return "dataset"
    if (folder / "custom_generate" / "generate.py").is_file():
        return "custom_generate"
    spec = read_object(folder / CONFIG) if (folder / WEIGHTS).is_file() and (folder / CONFIG).is_file() else {}
    if "speculators_model_type" in spec:
        load_drafter(folder)
        return "drafter"
    if spec and "model_type" not in spec:
        return Head.read(folder).kind
    # One level deep only: the folder may be the root of a disk.
    if [*folder.glob("model*.safetensors"), *folder.glob("*/model*.safetensors")]:
        return "models"
    raise ValueError(f"{folder} is no folder of a head, policy, profile, drafter, model, dataset or custom_generate")


def push(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    message: str | None = None,
    revision: str | None = None,
) -> str:
    """Upload a folder of this package: a head, a policy, a profile, a drafter, models, a dataset, the custom_generate repository.

    Creates the repository if needed. Only known files (`FILES`) are uploaded; a warning names the others. Returns: the commit's URL.
    Raises: `ValueError`, one line, for any other folder, one without README.md, and one with a pickle or a link in it;
    `huggingface_hub`'s errors.
    """
    folder = Path(folder)
    kind = detect_kind(folder)
    files, others = list_files(folder)
    if README not in files:
        raise ValueError(f"{folder} has no {README}, the model card: write one, or save the {kind} again")
    if others:
        warnings.warn(f"not uploaded, for this package has no such files: {listed(others, 5)}", stacklevel=2)
    return upload(
        folder,
        repo_id,
        message or f"Upload {kind} with hf_lossy_assist",
        repo_type="dataset" if kind == "dataset" else "model",
        private=private,
        token=token,
        revision=revision,
        allow_patterns=files,
    )


def pull(repo_id: str, out: str | Path | None = None, **settings: Any) -> Path:
    """Download and validate a repository of this package; return its folder.

    Without `out`, the files stay in the Hub's cache; with `out`, they are copied there after all were downloaded and validated.

    Args:
        repo_id: "org/name", "org/name@revision", or a dataset's "datasets/org/name".
        settings: `revision`, `token`, `local_files_only`, `force_download`, as for `huggingface_hub.snapshot_download`.
    """
    if out is not None:  # before the download
        check_new(out, "download again")
    kind = "dataset" if repo_id.startswith(DATASETS) else "model"
    cached = download(repo_id.removeprefix(DATASETS), repo_type=kind, **settings)
    detect_kind(cached)
    if out is None:
        return cached
    with new_folder(out) as folder:
        shutil.copytree(cached, folder, dirs_exist_ok=True)  # the cache holds links; copies are files
    return Path(out)
