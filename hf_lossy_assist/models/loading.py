"""Models and tokenizers by name: no code of theirs is run and no pickle is read, whatever their repository holds."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..validation import listed, one_line


def load_model(source: str, **settings: object) -> PreTrainedModel:
    """Load the causal model in a folder or on the Hub; `settings` as for `from_pretrained`.

    Raises: `OSError`, one line with the name: it is not there, it needs code of its own, it has no safetensors, its files are
    damaged, or they lack weights (which Transformers would draw at random).
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
    """Load the tokenizer in a folder or on the Hub; `settings` and errors as for `load_model`."""
    with in_one_line(source):
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False, **settings)


@contextmanager
def in_one_line(source: str) -> Iterator[None]:
    """Raise errors of any kind, in which damaged files end, as one line."""
    try:
        yield
    except (ImportError, MemoryError, torch.OutOfMemoryError):  # not the files' fault
        raise
    except Exception as error:
        raise _why(source, error) from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # a tokenizer's Rust; of no kind that could be imported
            raise
        raise _why(source, error) from None


def _why(source: str, error: BaseException) -> OSError:
    """Return what Transformers says in several lines, and with advice that is none here, as one."""
    reason = " ".join(str(error).split())
    if "trust_remote_code" in reason:
        reason = "it needs code of its own, which is never run here; load it in Python and pass the model"
    elif "safetensors" in reason and ("no file named" in reason or "does not appear to have a file" in reason):
        reason = "it has no model.safetensors, and pickles are never loaded: save it as safetensors first"
    elif not isinstance(error, OSError | ValueError):
        reason = f"its files are damaged or do not belong together ({type(error).__name__}: {one_line(reason)})"
    return OSError(f"{one_line(source)} was not loaded: {one_line(reason, 1000)}")
