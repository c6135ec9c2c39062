"""Push this package's folders to the Hub, known files only, and pull them."""

import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import snapshot_download

from ..artifacts.certificate import CERTIFICATE
from ..artifacts.files import check_new, new_folder
from ..artifacts.head import CONFIG, WEIGHTS, Head
from ..artifacts.hub import PICKLES, hub_errors, split_revision, upload
from ..artifacts.json_io import read_object
from ..artifacts.safe_references import check_shareable
from ..artifacts.sv_profile import PROFILE, Profile
from ..drafters.io import load_drafter
from ..validation import listed
from .policy import POLICY, LossyPolicy


CARD = "README.md"
DATASETS = "datasets/"  # prefix of dataset repositories on the Hub
SHOWN = 5  # number of left-out files to name
# The files that are uploaded, at the top and in sub-folders: what Transformers, `datasets` and this package write.
JSON = (
    r"(?:generation_|preprocessor_|processor_)?config|policy|certificate|profile|fit|collect|mine|dataset_info|state|vocab|"
    r"tokenizer|tokenizer_config|special_tokens_map|added_tokens|chat_template|model\.safetensors\.index"
)
FILES = re.compile(
    rf"(?:[\w-][\w.-]*/)?(?:README\.md|LICENSE(?:\.txt|\.md)?|(?:{JSON})\.json|(?:merges|vocab)\.txt|"
    r"[\w-][\w.-]*\.(?:safetensors|png|arrow|jinja|model)|generate\.py|requirements\.txt)"
)


def list_files(folder: Path) -> tuple[list[str], list[str]]:
    """Return the files of `folder` that are shared, and the other visible files, relative to it.

    Raises: `ValueError` if one of the former is a link, or one of the latter a pickle.
    """
    files, left = [], []
    for path in _walk(folder):
        name = path.relative_to(folder).as_posix()
        if not FILES.fullmatch(name):
            left.append(name)
            if set(map(str.lower, path.suffixes)) & set(PICKLES):
                raise ValueError(f"{folder} holds {name}, a pickle: this package shares safetensors only")
        elif path.is_symlink() or not path.is_file():
            raise ValueError(f"{path} is a link: only files are uploaded; put a copy in its place")
        else:
            files.append(name)
    return files, left


def _walk(folder: Path) -> Iterator[Path]:
    """Yield every visible file below a folder, and links, which are not followed."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name == "__pycache__":
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path)
        else:
            yield path


def detect_kind(folder: Path) -> str:
    """Return the kind of a folder: "policy", "profile", "head", "drafter", "models", "dataset" or "custom_generate".

    Policies, profiles, heads and drafters are loaded to validate them. Raises: `ValueError`, one line, for an unknown or
    damaged folder.
    """
    if (folder / POLICY).is_file():
        check_shareable(LossyPolicy.from_pretrained(folder).to_dict())
        return "policy"
    if (folder / PROFILE).is_file():
        Profile.from_pretrained(folder)
        return "profile"
    if (folder / "dataset_info.json").is_file():
        return "dataset"
    if (folder / "custom_generate" / "generate.py").is_file():
        return "custom_generate"
    if (folder / WEIGHTS).is_file() and (folder / CONFIG).is_file():
        spec = read_object(folder / CONFIG, "the config of a head or a model")
        if "speculators_model_type" in spec:
            load_drafter(folder)
            return "drafter"
        if "model_type" not in spec:
            Head.from_pretrained(folder)
            return "head"
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
    if not (folder / CARD).is_file():
        raise ValueError(f"{folder} has no {CARD}, the model card: write one, or save the {kind} again")
    files, left = list_files(folder)
    if left:
        warnings.warn(f"not uploaded, for this package has no such files: {listed(left, SHOWN)}", stacklevel=2)
    return upload(
        folder,
        repo_id,
        message or f"Upload {kind} with hf_lossy_assist",
        repo_type="dataset" if kind == "dataset" else "model",
        private=private,
        token=token,
        revision=revision,
        allow_patterns=files,
        # A certificate is valid only for the policy that it was pushed with.
        delete_patterns=[CERTIFICATE] if kind == "policy" and CERTIFICATE not in files else None,
    )


def pull(
    repo_id: str,
    out: str | Path | None = None,
    *,
    revision: str | None = None,
    token: str | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
) -> Path:
    """Download and validate a repository of this package; return its folder.

    A dataset's `repo_id` is "datasets/org/name". `force_download`: ignore the cache. Without `out`, the files stay in the Hub's cache; with
    `out`, they are copied there after all were downloaded and validated.
    """
    if out is not None:  # before the download
        check_new(out, "download again")
    repo, revision = split_revision(repo_id, revision)
    with hub_errors(repo_id):
        cached = Path(
            snapshot_download(
                repo.removeprefix(DATASETS),
                repo_type="dataset" if repo.startswith(DATASETS) else "model",
                revision=revision,
                token=token,
                local_files_only=local_files_only,
                force_download=force_download,
            )
        )
    detect_kind(cached)
    if out is None:
        return cached
    with new_folder(out) as folder:
        shutil.copytree(cached, folder, dirs_exist_ok=True)  # the cache holds links; copies are files
    return Path(out)
