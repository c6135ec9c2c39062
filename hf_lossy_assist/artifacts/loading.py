"""Load models and tokenizers by name, without running code or unpickling files from their repositories."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..models.introspection import base_of, plain_name
from ..validation import listed, one_line


_tokenizers: WeakKeyDictionary[PreTrainedModel, PreTrainedTokenizerBase | None] = WeakKeyDictionary()
NO_WEIGHTS = "it has no model.safetensors, and pickles are never loaded: save it as safetensors first"


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
            found = load_tokenizer(name, local_files_only=True, revision=commit or "main") if name else None
        except (ImportError, OSError):
            found = None
        _tokenizers[base] = found
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
