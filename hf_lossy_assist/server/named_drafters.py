"""Pairs of models and drafters by the names that options give: files, and registered drafters."""

import os
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import demo
from ..artifacts.identity import same_ids
from ..artifacts.json_io import parse_json
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


def is_trained(given: str) -> bool:
    """Return whether a drafter's name is one of files, not of a registered drafter."""
    return given == DEMO or (
        not given.lstrip().startswith("{") and (os.sep in given or "/" in given or Path(given).is_dir())
    )


def load_trained(given: str) -> HiddenStateDrafter:
    """Load a trained drafter by its name. Raises: `ValueError`, one line, for other drafters; any error of loading."""
    if not is_trained(given):
        raise ValueError(
            f"--drafter {given}: expected a trained drafter's folder, its Hub id or `{DEMO}`; other drafters are for hf-lossy generate and serve"
        )
    return demo.drafter() if given == DEMO else load_drafter(given)


def fit_drafter(drafter: HiddenStateDrafter, target: PreTrainedModel, dtype: str | torch.dtype) -> HiddenStateDrafter:
    """Return a drafter in the precision that its target was loaded in. Raises: `ValueError`, one line, if it is another target's."""
    drafter = drafter.int8() if dtype == INT8 else drafter
    drafter.check(target)
    return drafter


def read_drafter(given: str) -> Drafter | None:
    """Read a drafter: a registered one's name, JSON with the name and parameters, or a trained drafter's folder or Hub id.

    Raises: `ValueError`, one line, if there is none.
    """
    name, plus, files = given.partition("+")
    if plus and name in ("auto", "composite"):
        return (AutoDrafter if name == "auto" else CompositeDrafter)().over(load_trained(files))
    if is_trained(given):
        return load_trained(given)
    return as_drafter(parse_json(given, "--drafter") if given.lstrip().startswith("{") else given)


def load_pair(
    target: str | Path | None, draft: str | Path | None, dtype: str | torch.dtype, device: str
) -> tuple[PreTrainedModel, PreTrainedModel | Drafter | None, PreTrainedTokenizerBase]:
    """Load target, draft (see `load_draft`) and tokenizer by name; without names the demo's. `device`: "auto" for this process's GPU, if there is one.

    Raises: `ValueError` or `OSError`, one line.
    """
    tokenizer = check_names(target, draft, dtype, device)
    if device == "auto":  # under `accelerate launch` each process has a separate one, as has each actor of Ray
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    place = check_device(device)
    check_dtype(dtype, place)
    if target is None:
        kinds = {"bfloat16": torch.bfloat16, "float16": torch.float16}
        found = demo.load(dtype if isinstance(dtype, torch.dtype) else kinds.get(dtype, torch.float32), place)
        models = [quantised(model) if dtype == INT8 else model for model in (found.target, found.draft)]
        return (
            models[0],
            models[1] if draft in (None, DEMO) else load_draft(draft, models[0], dtype, place),
            found.tokenizer,
        )
    assert tokenizer is not None
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = load(target, dtype, place)
    return model, None if draft is None else load_draft(draft, model, dtype, place), tokenizer


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

    Raises: `ValueError`, one line, for a dtype or a device that does not exist, and a draft with another tokenizer; `OSError`, one line, without
    files or weights.
    """
    if device != "auto":
        # A GPU may be that of another machine.
        place = torch.device(device) if str(device).startswith("cuda") else check_device(device)
    check_dtype(dtype, None if device == "auto" else place)
    if draft is not None and not is_model(draft):
        draft = None
    if target is None:
        if draft is not None:
            raise ValueError(f"draft {one_line(draft)} has no target: pass both, or neither for the demo's")
        return None
    tokenizer = load_tokenizer(str(target), padding_side="left")
    check_weights(str(target))
    if draft is not None:
        check_weights(str(draft))
        check_tokenizers(tokenizer, target, draft)
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
    found = check_served(model, assistant, drafter, dtype, device)
    target, draft, tokenizer = load_pair(model, assistant, dtype, device)
    if isinstance(draft, Drafter):
        draft, found = split_assistant_and_drafter(draft, found)
    if isinstance(found, HiddenStateDrafter):
        found = fit_drafter(found, target, dtype)
    used = found is None or found.needs_assistant or found.takes_assistant
    return (target, draft if used else None, tokenizer), found


def check_served(
    model: str | None, assistant: str | None, drafter: str | None, dtype: str | torch.dtype, device: str
) -> Drafter | None:
    """Refuse what `load_served` would refuse on any machine, before the models' weights are read; return the drafter. Errors: see there."""
    found = None if drafter is None else read_drafter(drafter)
    if found is not None and assistant is not None and not (found.needs_assistant or found.takes_assistant):
        raise ValueError(f"drafter {one_line(drafter)} drafts without a model: leave assistant out")
    alone = assistant is not None and not is_model(assistant)  # neither a model's files nor the demo's
    if (found is None or found.needs_assistant) and not alone and (model is None) != (assistant is None):
        raise ValueError(
            "model and assistant: expected both (or a drafter), or neither for the demo's, got one of them"
        )
    check_names(model, assistant, dtype, device)
    return found
