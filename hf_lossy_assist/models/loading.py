"""Models and tokenizers by name: no code of theirs is run and no pickle is read, whatever their repository holds."""

from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer


def load_model(source: str, **settings: Any) -> Any:
    """The causal model in a folder or on the Hub; `settings` as for `from_pretrained`.

    Raises: `OSError`, one line with the name: it is not there, it needs code of its own, or it has no safetensors.
    """
    try:
        return AutoModelForCausalLM.from_pretrained(source, trust_remote_code=False, use_safetensors=True, **settings)
    except (OSError, ValueError) as error:
        raise _why(source, error) from None


def load_tokenizer(source: str, **settings: Any) -> Any:
    """The tokenizer in a folder or on the Hub; `settings` and errors as for `load_model`."""
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False, **settings)
    except (OSError, ValueError) as error:
        raise _why(source, error) from None


def _why(source: str, error: Exception) -> OSError:
    """What Transformers says in several lines, and with advice that is none here, as one."""
    said = " ".join(str(error).split())
    if "trust_remote_code" in said:
        said = "it needs code of its own, which is never run here; load it in Python and pass the model"
    elif "safetensors" in said and ("no file named" in said or "does not appear to have a file" in said):
        said = "it has no model.safetensors, and pickles are never loaded: save it as safetensors first"
    return OSError(f"{source} was not loaded: {said}")
