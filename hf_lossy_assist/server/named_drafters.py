"""Pairs of models and drafters by the names that options give: files, and registered drafters."""

import os
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import demo
from ..artifacts.files import parse_json
from ..artifacts.identity import same_ids
from ..artifacts.loading import INT8, check_device, check_dtype, check_weights, load, load_tokenizer
from ..drafters.auto import AutoDrafter
from ..drafters.base import Drafter, as_drafter, split_assistant_and_drafter
from ..drafters.composite import CompositeDrafter
from ..drafters.hidden_state import HiddenStateDrafter
from ..drafters.io import load_drafter
from ..drafters.suffix import SuffixDrafter
from ..models.early_exit import early_exit
from ..models.packed_linears import quantised
from ..validation import DEMO, EXIT, SUFFIX, is_model, one_line


def load_trained(name: str) -> HiddenStateDrafter:
    """Load a trained drafter by its name. Raises: `ValueError`, one line, for other drafters; any error of loading."""
    if not _is_trained(name):
        raise ValueError(
            f"--drafter {name}: expected a trained drafter's folder, its Hub id or `{DEMO}`; other drafters are for hf-lossy generate and serve"
        )
    return demo.drafter() if name == DEMO else load_drafter(name)


def _is_trained(name: str) -> bool:
    """Return whether a drafter's name is one of files, not of a registered drafter."""
    return name == DEMO or (not name.lstrip().startswith("{") and ("/" in name or Path(name).is_dir()))


def fit_drafter(drafter: HiddenStateDrafter, target: PreTrainedModel, dtype: str | torch.dtype) -> HiddenStateDrafter:
    """Return a drafter in the precision that its target was loaded in. Raises: `ValueError`, one line, if it is another target's."""
    drafter = drafter.int8() if dtype == INT8 else drafter
    drafter.check(target)
    return drafter


def load_pair(
    target: str | Path | None, draft: str | Path | None, dtype: str | torch.dtype, device: str
) -> tuple[PreTrainedModel, PreTrainedModel | Drafter | None, PreTrainedTokenizerBase]:
    """Load target, draft (see `load_draft`) and tokenizer by name; without names the demo's. `device`: "auto" for this process's GPU, if there is one.

    Raises: `ValueError` or `OSError`, one line.
    """
    tokenizer = check_names(target, draft, dtype, device)
    if device == "auto":  # under `accelerate launch` each process has a separate one, as has each actor of Ray
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    check_dtype(dtype, check_device(device))
    if tokenizer is None:
        kind = torch.float32 if dtype in ("auto", INT8) else getattr(torch, str(dtype).removeprefix("torch."))
        pair = demo.load(kind, torch.device(device))
        model, tokenizer = quantised(pair.target) if dtype == INT8 else pair.target, pair.tokenizer
        if draft in (None, DEMO):
            return model, quantised(pair.draft) if dtype == INT8 else pair.draft, tokenizer
    else:
        model = load(str(target), dtype, device)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
    return model, None if draft is None else load_draft(draft, model, dtype, device), tokenizer


def load_draft(
    name: str | Path, target: PreTrainedModel, dtype: str | torch.dtype, device: str | torch.device
) -> PreTrainedModel | Drafter:
    """Load a draft by the name that every command's `--assistant` takes: `suffix`, `exit:N` (the target's first N layers), or a model's files."""
    if name == SUFFIX:
        return SuffixDrafter()
    if str(name).startswith(EXIT):
        return early_exit(target, int(str(name)[len(EXIT) :]))
    return load(name, dtype, device)


def check_names(
    target: str | Path | None, draft: str | Path | None, dtype: str | torch.dtype, device: str
) -> PreTrainedTokenizerBase | None:
    """Refuse names of which nothing can be loaded on any machine, before weights are read; return the target's tokenizer, None for the demo's.

    Raises: `ValueError` or `OSError`, one line.
    """
    on_gpu = device.startswith("cuda")  # perhaps that of another machine
    check_dtype(dtype, None if device == "auto" else torch.device(device) if on_gpu else check_device(device))
    is_named = draft is not None and is_model(draft)
    if target is None:
        if is_named:
            raise ValueError(f"draft {one_line(draft)} has no target: pass both, or neither for the demo's")
        return None
    tokenizer = load_tokenizer(str(target), padding_side="left")
    check_weights(str(target))
    if is_named:
        check_weights(str(draft))
        check_tokenizers(tokenizer, target, str(draft))
    return tokenizer


def check_tokenizers(tokenizer: PreTrainedTokenizerBase, target: str | Path, draft: str | Path) -> None:
    """Refuse a draft whose token ids mean other words, before weights are read. A draft without a tokenizer uses the target's."""
    try:
        other = load_tokenizer(str(draft))
    except OSError:  # it has none, or the model does not exist, which loading it will report
        return
    if not same_ids(tokenizer, other):
        raise ValueError(
            f"the draft {one_line(draft)} has another tokenizer than {one_line(target)}: token ids mean other words; pass a draft of the target's family"
        )


def load_served(
    model: str | None, assistant: str | None, drafter: str | None, dtype: str | torch.dtype, device: str
) -> tuple[tuple[PreTrainedModel, PreTrainedModel | None, PreTrainedTokenizerBase], Drafter | None]:
    """Load what a server needs by name: target, draft and tokenizer, and a drafter. Raises: `ValueError` or `OSError`, one line."""
    read = check_served(model, assistant, drafter, dtype, device)
    target, draft, tokenizer = load_pair(model, assistant, dtype, device)
    if isinstance(draft, Drafter):
        draft, read = split_assistant_and_drafter(draft, read)
    if isinstance(read, HiddenStateDrafter):
        read = fit_drafter(read, target, dtype)
    used = read is None or read.needs_assistant or read.takes_assistant
    return (target, draft if used else None, tokenizer), read


def check_served(
    model: str | None, assistant: str | None, drafter: str | None, dtype: str | torch.dtype, device: str
) -> Drafter | None:
    """Refuse what `load_served` would refuse on any machine, before the models' weights are read; return the drafter.

    `drafter`: a registered one's name, JSON with the name and parameters, a trained drafter's folder or Hub id, or auto+FOLDER. Errors: see there.
    """
    read: Drafter | None = None
    if drafter is not None:
        name, _, files = drafter.partition("+")
        if files and name in ("auto", "composite"):
            read = (AutoDrafter if name == "auto" else CompositeDrafter)().over(load_trained(files))
        elif _is_trained(drafter):
            read = load_trained(drafter)
        else:
            read = as_drafter(parse_json(drafter, "--drafter") if drafter.lstrip().startswith("{") else drafter)
    if read is not None and assistant is not None and not (read.needs_assistant or read.takes_assistant):
        raise ValueError(f"drafter {one_line(drafter)} drafts without a model: leave assistant out")
    alone = assistant is not None and not is_model(assistant)  # neither a model's files nor the demo's
    if (read is None or read.needs_assistant) and not alone and (model is None) != (assistant is None):
        raise ValueError(
            "model and assistant: expected both (or a drafter), or neither for the demo's, got one of them"
        )
    check_names(model, assistant, dtype, device)
    return read
