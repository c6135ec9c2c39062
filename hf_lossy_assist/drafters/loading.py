"""Trained drafters from a folder or the Hub: EAGLE and DFlash. No code of a folder is run, and no pickle is read unless the caller says so."""

from pathlib import Path
from typing import Any

from ..artifacts.hub import fetch
from ..artifacts.json_io import read_json
from ..validation import check_flag, shown
from . import dflash_files, eagle1_files, eagle3_files
from .dflash import DFlashDrafter
from .eagle3 import Eagle3Drafter
from .weights import CONFIG, read_weights


def load_drafter(source: str | Path, *, pickle: bool = False, **kwargs: Any) -> Eagle3Drafter | DFlashDrafter:
    """A trained drafter from a folder or from the Hub, for `generate(assistant_model=drafter, lossy_policy=…)`: EAGLE, EAGLE-3 or DFlash.

    Args:
        source: a folder, or `org/name` on the Hub (`org/name@revision` pins one).
        pickle: read `pytorch_model.bin` where there is no model.safetensors. Tensors alone are taken from it (`torch.load(weights_only=True)`).
        kwargs: `revision`, `token`, `cache_dir`, `local_files_only`, `force_download`, as everywhere on the Hub.

    Raises: `ValueError`, one line, for files that are missing, damaged, of another kind of drafter, or do not fit their config; the errors
    of `huggingface_hub` for repositories that are missing, private or gated.
    """
    source = str(source)
    check_flag("pickle", pickle)
    config_file = fetch(source, [CONFIG], **kwargs)[0]
    where, spec = str(config_file), read_json(config_file)
    if not isinstance(spec, dict):
        raise ValueError(f"{where}: expected an object, the config of a drafter, got {shown(spec)}")
    files: Any = next((its for its in (dflash_files, eagle1_files) if its.is_its(spec)), eagle3_files)
    try:
        config = files.read_config(spec, where)
        proposal = eagle3_files.read_proposal(spec, where)
    except TypeError as error:  # a file's mistake, and no caller's
        raise ValueError(str(error)) from None
    weights, weights_file = read_weights(source, pickle, **kwargs)
    network = files.network_of(config, weights, weights_file)
    return (DFlashDrafter if files is dflash_files else Eagle3Drafter)(network, source, proposal)
