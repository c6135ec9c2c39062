"""Load models by name in any precision. Weights converted to int8 are cached, so that only the first load converts them.

A model in int8 is a Transformers folder beside the Hub's cache, with a record of the files that it was made from and of its files: sizes and times,
and the SHA-256 of its files. If anything does not match, it is made again.
"""

import hashlib
import shutil
import time
import warnings
from pathlib import Path

import torch
import transformers
from huggingface_hub import constants
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.utils import cached_file

from ..models.packed_linears import MARK, METHOD, Int8Config
from ..validation import nearest, one_line, shown
from .files import format_json, hash_file, new_folder, write_text
from .identity import weights_hash
from .json_io import JSONObject, read_object
from .loading import in_one_line, load_model


RECORD = "made_of.json"
INT8 = "int8"
DTYPES = ("auto", "bfloat16", "float16", "float32")
# Settings of `from_pretrained` that name the files on the Hub, and do not affect the model made from them.
OF_THE_HUB = {"revision", "subfolder", "cache_dir", "token", "local_files_only", "force_download"}
OF_THE_RUN = {
    "attn_implementation",
    "device_map",
}  # not saved with a model; any other setting may change the model
ABANDONED = 3600  # seconds after which an unfinished folder counts as abandoned


def find_device(name: str | torch.device, option: str = "load: device") -> torch.device:
    """Return the device of this name, which this machine may lack. `option`: for the error. Raises: `ValueError` or `TypeError`, one line."""
    line = f'{option}: expected "cpu", "cuda" or another of PyTorch\'s, got {shown(name)}'
    if not isinstance(name, str | torch.device):
        raise TypeError(line)
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(line) from None
    if device.type == "meta":
        raise ValueError(f"{line}: it holds no weights, so nothing can run there")
    return device


def check_usable(name: str | torch.device, option: str = "load: device") -> torch.device:
    """Return the device of this name, on which tensors can be made here. Raises: `ValueError` or `TypeError`, one line."""
    device = find_device(name, option)
    try:
        torch.empty(0, device=device)
    except Exception as error:  # its backend may be missing in any way
        raise ValueError(f"{option} {shown(str(name))} cannot be used here: {one_line(error)}") from None
    return device


def check_dtype(name: str | torch.dtype, device: torch.device | None = None, option: str = "load") -> None:
    """Raise `ValueError` or `TypeError`, one line, unless `load` knows a dtype by this name, and can compute with it on `device`."""
    if isinstance(name, torch.dtype):
        return
    if not isinstance(name, str):
        raise TypeError(f"load: dtype: expected a name or a torch.dtype, got {shown(name)}")
    if name not in (*DTYPES, INT8):
        raise ValueError(f"{option}: {nearest('dtype', name, (*DTYPES, INT8))}")
    if name == INT8 and device is not None and device.type != "cpu":
        raise ValueError(f"{option}: int8 computes on the CPU alone, and device is {device}: pass device cpu")


def load(
    source: str | Path, dtype: str | torch.dtype = "auto", device: str | torch.device = "cpu", **settings: object
) -> PreTrainedModel:
    """Load the causal model in a folder or on the Hub, in evaluation mode, without running its code or reading pickles.

    Args:
        source (`str` or `Path`): the folder or the Hub id.
        dtype (`str` or `torch.dtype`): "float32", "bfloat16", "float16", "auto" for that of its files, or "int8": linear layers with int8
            weights on the CPU, and the rest in float32. The int8 weights are cached in `$HF_HOME/hf_lossy_assist/int8` and loaded from there
            while the model's files are unchanged, unless a setting changes the model.
        device (`str` or `torch.device`): where it computes.
        settings: as for `from_pretrained`.

    Raises: `ValueError` or `TypeError`, one line, for an invalid dtype or device; `OSError`, one line, for missing or damaged files.
    """
    if not isinstance(source, str | Path):
        raise TypeError(f"load: source: expected a folder or a Hub id, got {shown(source)}")
    source = str(source)
    check_dtype(dtype, find_device(device))
    if dtype != INT8:
        place = check_usable(device)  # before the weights are read
        return load_model(source, dtype=dtype, **settings).to(place).eval()
    files = {name: settings[name] for name in OF_THE_HUB if name in settings}
    with in_one_line(source):
        config = Path(cached_file(source, "config.json", **files))
        facts = read_object(config)
        quantised = (
            facts.get("quantization_config") or (facts.get("text_config") or {}).get("quantization_config") or {}
        )
        method = quantised.get("quant_method")
    if method == METHOD:
        return load_model(source, **settings).eval()
    if quantised:  # old versions of bitsandbytes recorded no method
        raise ValueError(f"{one_line(source)} is quantised already: load it without int8, or name another")
    made_of = _describe(config.parent.absolute())
    folder = Path(constants.HF_HOME) / "hf_lossy_assist" / "int8" / _name(config.parent.absolute())
    plain = settings.keys() <= OF_THE_HUB | OF_THE_RUN
    found = _load_converted(folder, made_of, settings) if plain else ""
    if isinstance(found, str):
        if found:
            warnings.warn(f"{folder} cannot be used ({found}), so it is made again", stacklevel=2)
        model = load_model(source, dtype="auto", quantization_config=Int8Config(), **settings)
        if plain:
            _save(model, folder, made_of)
    else:
        model = found
    model.config.name_or_path = source + MARK
    return model.eval()


def _load_converted(folder: Path, made_of: JSONObject, settings: dict[str, object]) -> PreTrainedModel | str:
    """Load the int8 model made from these files; return the reason if that fails, "" if the folder is for other files or does not exist."""
    reason = _refuse(folder, made_of)
    if reason is not None:
        return reason
    try:
        model = load_model(str(folder), **{name: settings[name] for name in settings if name not in OF_THE_HUB})
        record = read_object(folder / RECORD)
        if record["weights"] != weights_hash(model):
            return f"{type(model).__name__} was not loaded as it was saved"
        model.config._commit_hash = record["revision"]
    except (OSError, ValueError, KeyError) as error:  # not every architecture loads as it was saved
        return one_line(error, 200)
    return model


def _name(folder: Path) -> str:
    return f"{folder.name}-{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"


def _describe(folder: Path) -> JSONObject:
    """Return the files that a model is made from, as far as they are on this machine: folder, sizes and times."""
    files = [folder / "config.json", *folder.glob("*.safetensors"), *folder.glob("generation_config.json")]
    stats = {file.name: file.stat() for file in sorted(files)}
    return {
        "folder": str(folder),
        "files": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
        "transformers": transformers.__version__,
    }


def _refuse(folder: Path, made_of: JSONObject) -> str | None:
    """Return why a folder is not the int8 model of these files: "" if it is for other files or does not exist; None if it is that model."""
    try:
        record = read_object(folder / RECORD)
        if record["made_of"] != made_of:
            return ""
        wrong = [name for name, digest in record["sha256"].items() if hash_file(folder / name) != digest]
        wrong += {file.name for file in folder.iterdir()} - {RECORD, *record["sha256"]}
        return f"{one_line(wrong[0], 100)} was changed" if wrong else None
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing" if folder.exists() else ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return one_line(error, 200)


def _save(model: PreTrainedModel, folder: Path, before: JSONObject) -> None:
    """Write an int8 model with its record; a full disk only causes a warning. before: the files it was made from when loading began."""
    try:
        made_of = _describe(Path(before["folder"]))  # the Hub's weights have been downloaded by now
        if changed := [name for name, facts in before["files"].items() if made_of["files"].get(name) != facts]:
            raise ValueError(f"{changed[0]} was changed while it was read")
        for left in folder.parent.glob(f".{folder.name}.*"):
            if time.time() - left.stat().st_mtime > ABANDONED:
                shutil.rmtree(left, ignore_errors=True)
        with new_folder(folder) as made:
            model.save_pretrained(made)
            digests = {file.name: hash_file(file) for file in sorted(made.iterdir())}
            revision = getattr(model.config, "_commit_hash", None)
            record = {"made_of": made_of, "revision": revision, "weights": weights_hash(model), "sha256": digests}
            write_text(made / RECORD, format_json(record))
        for other in {file.name for file in folder.iterdir()} - {RECORD, *digests}:
            (folder / other).unlink()  # of the previous version; Transformers might read it instead of these
    # Transformers does not save a generation config with contradictory settings; safetensors raises its own error on a full disk.
    except (OSError, ValueError, SafetensorError) as error:
        line = f"the weights in int8 were not kept, so that the next load converts again ({one_line(error, 300)})"
        warnings.warn(line, stacklevel=3)
