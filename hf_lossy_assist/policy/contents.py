"""What the folders of this package consist of, file by file: nothing else in them is ever uploaded."""

import re
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ..artifacts.certificate import CERTIFICATE
from ..artifacts.heads import CONFIG, WEIGHTS, Head
from ..artifacts.profile import PROFILE, TABLES, Profile
from ..artifacts.reading import read_object
from ..artifacts.references import check_shareable, own_folders
from ..drafters.loading import load_drafter
from ..validation import listed, shown
from .policy import POLICY, LossyPolicy
from .serialise import spec_in


CARD = "README.md"
RECORDS = ("collect.json", "mine.json")  # what a dataset of `hf-lossy collect` or `mine` holds
DATASET = "dataset_info.json"
HEAD = rf"{re.escape(CONFIG)}|{re.escape(WEIGHTS)}|(?:reliability|roc(?:_\w+)?)\.png"
PROFILED = rf"{re.escape(PROFILE)}|{re.escape(TABLES)}|(?:cells|goodput)\.png"
MODEL = (
    r"(?:generation_|preprocessor_|processor_)?config\.json|model(?:-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
    r"|(?:tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab)\.json|vocab\.txt|merges\.txt|LICENSE(?:\.txt|\.md)?"
    r"|(?:tokenizer|spiece|sentencepiece\.bpe)\.model|chat_template\.(?:jinja|json)"
)
# By kind: the files at the top, and those of its sub-folders, as regular expressions.
FILES = {
    "head": (HEAD, rf"fold-\d+/(?:{CARD}|{HEAD})"),
    "policy": (rf"{re.escape(POLICY)}|{re.escape(CERTIFICATE)}", None),  # and the folders that it names
    "models": (MODEL, rf"[\w.-]+/(?:{CARD}|{MODEL}|{HEAD}|{PROFILED}|fit\.json)"),
    "drafter": (rf"{re.escape(CONFIG)}|{re.escape(WEIGHTS)}|fit\.json", None),
    "dataset": (rf"{'|'.join(map(re.escape, RECORDS))}|dataset_info\.json|state\.json|data-\d+-of-\d+\.arrow", None),
    "custom_generate": (r"LICENSE", r"custom_generate/(?:generate\.py|requirements\.txt)"),
}


def files_of(kind: str, folder: Path) -> tuple[list[str], list[str]]:
    """The files of `folder` that one of its kind consists of, and the others that are not hidden, relative to it.

    Of a policy these are its own and those of the heads and profiles that its policy.json names: others in the folder may be left
    from an older one.

    Raises: `ValueError` where one of the former is a link: what it leads to was not put here to be shared.
    """
    top, below = FILES[kind]
    if kind == "policy":
        names = sorted(map(re.escape, own_folders(spec_in(folder / POLICY))))
        below = rf"(?:{'|'.join(names)})/(?:{CARD}|{HEAD}|{PROFILED})" if names else None
    own = re.compile("|".join(f"(?:{part})" for part in (CARD, top, below) if part))
    found, left = [], []
    for path in _walk(folder):
        name = path.relative_to(folder).as_posix()
        if not own.fullmatch(name):
            left.append(name)
        elif path.is_symlink() or not path.is_file():
            raise ValueError(
                f"{path} is a link: only files are uploaded, not what links lead to; put a copy in its place"
            )
        else:
            found.append(name)
    return found, left


def _walk(folder: Path) -> Iterator[Path]:
    """Everything in a folder that is not hidden, but for folders; a link to a folder is not gone into."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name == "__pycache__":
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path)
        else:
            yield path


def kind_of(folder: Path) -> str:
    """What a folder holds: "policy", "head", "drafter", "models", "dataset" or "custom_generate".

    Heads, profiles and policies are loaded to be sure; of a model its config is read and the headers of its weights, of a dataset
    its records.

    Raises: `ValueError`, one line, for what is none of these or damaged.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {shown(str(folder), 200)}")
    if (folder / POLICY).is_file():
        check_shareable(LossyPolicy.from_pretrained(folder).to_dict())
        return "policy"
    records = [folder / name for name in RECORDS if (folder / name).is_file()]
    if (folder / DATASET).is_file() and records:
        for file in (folder / DATASET, *records):
            read_object(file)
        return "dataset"
    if (folder / "custom_generate" / "generate.py").is_file():
        return "custom_generate"
    if (
        (folder / WEIGHTS).is_file()
        and (folder / CONFIG).is_file()
        and (kind := _check_part(folder)) in ("head", "drafter")
    ):
        return kind
    # Where the files of models may lie, and no deeper: the folder may be the root of a disk.
    files = sorted([*folder.glob("model*.safetensors"), *folder.glob("*/model*.safetensors")])
    for part in sorted({file.parent for file in files} | {file.parent for file in folder.glob(f"*/{PROFILE}")}):
        _check_part(part)
    if files:
        return "models"
    found = listed(sorted(p.name for p in folder.iterdir())) or "nothing"
    raise ValueError(
        f"{folder} is no head ({CONFIG} + {WEIGHTS}), policy ({POLICY}), model, dataset or custom_generate folder; it holds {found}"
    )


def _check_part(folder: Path) -> str:
    """Check one head, profile, drafter or model; returns "head", "profile", "drafter" or "model"."""
    if (folder / PROFILE).is_file():
        Profile.from_pretrained(folder)
        return "profile"
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} holds weights and no {CONFIG}: no model and no head can be made of them")
    spec = read_object(folder / CONFIG, "the config of a head or a model")
    if "speculators_model_type" in spec:
        load_drafter(folder)
        return "drafter"
    # A head's config says what its weights must be, a model's of which kind it is; what says neither is a damaged one of a head.
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
