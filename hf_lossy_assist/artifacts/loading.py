"""Load models and tokenizers by name, without running code or unpickling files from their repositories."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..models.introspection import base_of, named_int8, plain_name
from ..models.packed_linears import Int8Config
from ..validation import listed, nearest, one_line, shown


INT8 = "int8"
DTYPES = ("auto", "bfloat16", "float16", "float32", INT8)
_tokenizers: WeakKeyDictionary[PreTrainedModel, PreTrainedTokenizerBase | None] = WeakKeyDictionary()
NO_WEIGHTS = "it has no model.safetensors, and pickles are never loaded: save it as safetensors first"


def load(
    source: str | Path, dtype: str | torch.dtype = "auto", device: str | torch.device = "cpu", **settings: object
) -> PreTrainedModel:
    """Load the causal model in a folder or on the Hub, in evaluation mode, without running its code or reading pickles.

    Args:
        source (`str` or `Path`): the folder or the Hub id.
        dtype (`str` or `torch.dtype`): "float32", "bfloat16", "float16", "auto" for that of its files, or "int8": linear
            layers with int8 weights on the CPU, and the rest in float32. `save_pretrained` writes such a model, whose
            folder is then loaded without converting it again.
        device (`str` or `torch.device`): where it computes.
        settings: as for `from_pretrained`.

    Raises: `ValueError`, one line, for an unknown dtype or unusable device; `OSError`, one line, for missing or damaged
    files.
    """
    on_device = check_device(device)  # before the weights are read
    check_dtype(dtype, on_device)
    if dtype == INT8:
        with warnings.catch_warnings():  # of a folder in int8 already
            warnings.filterwarnings("ignore", message="You passed `quantization_config`")
            model = load_model(str(source), dtype="auto", quantization_config=Int8Config(), **settings).eval()
        if not named_int8(model.config.name_or_path):
            raise ValueError(f"{one_line(source)} is quantised already: load it without int8, or name another")
        return model
    return load_model(str(source), dtype=dtype, **settings).to(on_device).eval()


def check_device(name: str | torch.device, option: str = "load: device") -> torch.device:
    """Return the device of this name, on which tensors can be made here. `option`: for the error. Raises: `ValueError`, one line."""
    try:
        torch.ones(1, device=name).item()  # fails for "meta", too
        return torch.device(name)
    except Exception as error:  # its backend may be missing in any way
        raise ValueError(f"{option} {shown(str(name))} cannot be used here: {one_line(error)}") from None


def check_dtype(name: str | torch.dtype, device: torch.device | None = None, option: str = "load") -> None:
    """Refuse a dtype that `load` does not know, or that cannot compute on `device`. Raises: `ValueError`, one line."""
    if not isinstance(name, torch.dtype) and name not in DTYPES:
        raise ValueError(f"{option}: {nearest('dtype', str(name), DTYPES)}")
    if name == INT8 and device is not None and device.type != "cpu":
        raise ValueError(f"{option}: int8 computes on the CPU alone, and device is {device}: pass device cpu")


def load_model(source: str, **settings: object) -> PreTrainedModel:
    """Load the causal model in a folder or on the Hub; `settings` are passed to `from_pretrained`.

    Raises: `OSError`, one line with the name, if it does not exist, needs custom code, has no safetensors, has damaged files, or lacks weights
    (which Transformers would initialise at random).
    """
    with in_one_line(source):
        model, info = AutoModelForCausalLM.from_pretrained(
            source, trust_remote_code=False, use_safetensors=True, output_loading_info=True, **settings
        )
        lacking = sorted(info["missing_keys"])
        if lacking:
            raise ValueError(
                f"{len(lacking)} of its weights are not in its files ({listed(lacking, 3)}): save the whole causal model"
            )
        return model


def load_tokenizer(source: str, **settings: object) -> PreTrainedTokenizerBase:
    """Load the tokenizer in a folder or on the Hub. Settings and errors: see `load_model`."""
    with in_one_line(source):
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False, **settings)


def find_tokenizer(model: PreTrainedModel) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer in a model's folder or in the Hub's cache, which is read once; None if there is none."""
    base = base_of(model)
    if base not in _tokenizers:
        name, commit = plain_name(str(base.config.name_or_path)), getattr(base.config, "_commit_hash", None)
        try:
            tokenizer = load_tokenizer(name, local_files_only=True, revision=commit or "main") if name else None
        except (ImportError, OSError):
            tokenizer = None
        _tokenizers[base] = tokenizer
    return _tokenizers[base]


def check_weights(source: str) -> None:
    """Refuse a folder without weights, before anything is loaded. Errors: see `load_model`."""
    if Path(source).is_dir() and not any(Path(source).glob("*.safetensors")):
        raise OSError(f"{one_line(source)} was not loaded: {NO_WEIGHTS}")


@contextmanager
def in_one_line(source: str) -> Iterator[None]:
    """Reraise any error that damaged files cause as an `OSError` of one line."""
    try:
        yield
    except (ImportError, MemoryError, torch.OutOfMemoryError):  # not caused by the files
        raise
    except Exception as error:
        raise _why(source, error) from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of a tokenizer's Rust code; its class cannot be imported
            raise
        raise _why(source, error) from None


def _why(source: str, error: BaseException) -> OSError:
    """Return Transformers' message of several lines, whose advice does not apply here, as one."""
    reason = " ".join(str(error).split())
    if "trust_remote_code" in reason:
        reason = "it needs code of its own, which is never run here; load it in Python and pass the model"
    elif "safetensors" in reason and ("no file named" in reason or "does not appear to have a file" in reason):
        reason = NO_WEIGHTS
    elif reason.startswith("Repo id must"):
        reason = "it is neither a folder here nor a Hub id"
    elif not isinstance(error, OSError | ValueError):
        reason = f"its files are damaged or do not belong together ({type(error).__name__}: {one_line(reason)})"
    return OSError(f"{one_line(source)} was not loaded: {one_line(reason, 300)}")
