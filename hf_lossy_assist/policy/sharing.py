"""Push this package's folders to the Hub, known files only, and pull them."""

import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open

from ..artifacts.certificate import CERTIFICATE
from ..artifacts.files import check_new, new_folder
from ..artifacts.head import CONFIG, WEIGHTS, Head
from ..artifacts.hub import PICKLES, hub_errors, upload
from ..artifacts.json_io import read_object
from ..artifacts.safe_references import check_shareable, list_subfolders
from ..artifacts.sv_profile import PROFILE, TABLES, Profile
from ..drafters.io import load_drafter
from ..validation import listed, shown
from .policy import POLICY, LossyPolicy
from .serialise import read_spec


CARD = "README.md"
RECORDS = ("collect.json", "mine.json")  # in a dataset of `hf-lossy collect` or `mine`
DATASET = "dataset_info.json"
SHOWN = 5  # number of left-out files to name
DATASETS = "datasets/"  # prefix of dataset repositories on the Hub
HEAD = rf"{re.escape(CONFIG)}|{re.escape(WEIGHTS)}|(?:reliability|roc(?:_\w+)?)\.png"
PROFILED = rf"{re.escape(PROFILE)}|{re.escape(TABLES)}|(?:cells|goodput)\.png"
MODEL = (
    r"(?:generation_|preprocessor_|processor_)?config\.json|model(?:-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
    r"|(?:tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab)\.json|vocab\.txt|merges\.txt|LICENSE(?:\.txt|\.md)?"
    r"|(?:tokenizer|spiece|sentencepiece\.bpe)\.model|chat_template\.(?:jinja|json)"
)
# By kind: regular expressions of the files at the top and in sub-folders.
FILES = {
    "head": (HEAD, rf"fold-\d+/(?:{CARD}|{HEAD})"),
    "policy": (rf"{re.escape(POLICY)}|{re.escape(CERTIFICATE)}", None),  # and the folders that policy.json names
    "models": (MODEL, rf"[\w.-]+/(?:{CARD}|{MODEL}|{HEAD}|{PROFILED}|fit\.json)"),
    "profile": (PROFILED, None),
    "drafter": (rf"{re.escape(CONFIG)}|{re.escape(WEIGHTS)}|fit\.json", None),
    "dataset": (rf"{'|'.join(map(re.escape, RECORDS))}|dataset_info\.json|state\.json|data-\d+-of-\d+\.arrow", None),
    "custom_generate": (r"LICENSE", r"custom_generate/(?:generate\.py|requirements\.txt)"),
}


def list_files(kind: str, folder: Path) -> tuple[list[str], list[str]]:
    """Return the files of `folder` that belong to its kind, and the other visible files, relative to it.

    A policy includes the heads and profiles that its policy.json names. Raises: `ValueError` if one of the files is a link.
    """
    top, below = FILES[kind]
    if kind == "policy":
        names = sorted(map(re.escape, list_subfolders(read_spec(folder / POLICY))))
        below = rf"(?:{'|'.join(names)})/(?:{CARD}|{HEAD}|{PROFILED})" if names else None
    expected = re.compile("|".join(f"(?:{part})" for part in (CARD, top, below) if part))
    paths = {path.relative_to(folder).as_posix(): path for path in _walk(folder)}
    wanted = {name: path for name, path in paths.items() if expected.fullmatch(name)}
    for path in wanted.values():
        if path.is_symlink() or not path.is_file():
            raise ValueError(
                f"{path} is a link: only files are uploaded, not what links lead to; put a copy in its place"
            )
    return [*wanted], [name for name in paths if name not in wanted]


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

    Policies, profiles and heads are loaded to validate them. Raises: `ValueError`, one line, for an unknown or damaged folder.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {shown(str(folder), 200)}")
    if (folder / POLICY).is_file():
        check_shareable(LossyPolicy.from_pretrained(folder).to_dict())
        return "policy"
    if (folder / PROFILE).is_file():
        return _check_part(folder)
    records = [folder / name for name in RECORDS if (folder / name).is_file()]
    if (folder / DATASET).is_file() and records:
        for file in (folder / DATASET, *records):
            read_object(file)
        return "dataset"
    if (folder / "custom_generate" / "generate.py").is_file():
        return "custom_generate"
    alone = (folder / WEIGHTS).is_file() and (folder / CONFIG).is_file()
    if alone and (kind := _check_part(folder)) in ("head", "drafter"):
        return kind
    # One level deep only: the folder may be the root of a disk.
    files = sorted([*folder.glob("model*.safetensors"), *folder.glob("*/model*.safetensors")])
    for part in sorted({file.parent for file in files} | {file.parent for file in folder.glob(f"*/{PROFILE}")}):
        _check_part(part)
    if files:
        return "models"
    found = listed(sorted(p.name for p in folder.iterdir())) or "nothing"
    raise ValueError(
        f"{folder} is no head ({CONFIG} + {WEIGHTS}), policy ({POLICY}), profile ({PROFILE}), drafter, model, dataset or custom_generate folder; it holds {found}"
    )


def _check_part(folder: Path) -> str:
    """Validate one head, profile, drafter or model and return its kind. Of a model, read the config and the headers of its weights."""
    if (folder / PROFILE).is_file():
        Profile.from_pretrained(folder)
        return "profile"
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} holds weights and no {CONFIG}: no model and no head can be made of them")
    spec = read_object(folder / CONFIG, "the config of a head or a model")
    if "speculators_model_type" in spec:
        load_drafter(folder)
        return "drafter"
    # A model's config names its type. A config without a type counts as a head's, if only a damaged one's.
    if "model_type" not in spec:
        Head.from_pretrained(folder)
        return "head"
    for file in sorted(folder.glob("model*.safetensors")):
        try:
            with safe_open(file, "pt"):  # reads the header and compares it with the file's length
                pass
        except SafetensorError as error:
            raise ValueError(f"{file} is not a whole safetensors file ({error})") from None
    return "model"


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
    files, left = list_files(kind, folder)
    if pickles := [name for name in left if set(map(str.lower, Path(name).suffixes)) & set(PICKLES)]:
        raise ValueError(f"{folder} holds {pickles[0]}, a pickle: this package shares safetensors only")
    if left:
        warnings.warn(f"not uploaded, for no {kind} has such files: {listed(left, SHOWN)}", stacklevel=2)
    # A certificate is valid only for the policy that it was pushed with.
    stale = [CERTIFICATE] if kind == "policy" and CERTIFICATE not in files else []
    return upload(
        folder,
        repo_id,
        message or f"Upload {kind} with hf_lossy_assist",
        repo_type="dataset" if kind == "dataset" else "model",
        private=private,
        token=token,
        revision=revision,
        files=files,
        stale=stale,
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
                    repo.removeprefix(DATASETS),
                    repo_type=repo_type,
                    revision=revision or pinned or None,
                    token=token,
                    local_files_only=local_files_only,
                    force_download=force_download,
                )
            )
    except HFValidationError:
        raise ValueError(f"{shown(repo_id, 200)} is not a repository name like org/name") from None
    detect_kind(cached)
    if out is None:
        return cached
    with new_folder(out) as folder:
        shutil.copytree(cached, folder, dirs_exist_ok=True)  # the cache holds links; copies are files
    return Path(out)
