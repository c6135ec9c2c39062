"""`--set NAME=VALUE`: a setting of the target's generation config, for one run."""

import difflib
import json
from typing import Any

from ..validation import one_line, shown


# What commands ask for by options of their own, which would win.
OPTIONS = {
    name: f"--{name.replace('_', '-')}" for name in ("max_new_tokens", "do_sample", "temperature", "top_k", "top_p")
}


def override(target: Any, given: list[str] | None) -> None:
    """Write each NAME=VALUE into the target's generation config; a VALUE is JSON, or else a text.

    Raises: `ValueError`, one line, for an unknown name, one that has an option of its own, and a value that Transformers refuses.
    """
    config = target.generation_config
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--set: expected NAME=VALUE such as num_beams=1, got {shown(text)}")
        if name in OPTIONS:
            raise ValueError(f"--set {name}: the command decides it: pass {OPTIONS[name]}")
        known = [other for other in vars(config) if not other.startswith("_")]
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else "see transformers.GenerationConfig"
            raise ValueError(f"--set: there is no setting {shown(name)}: {hint}")
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = value
        try:
            config.update(**{name: parsed})
        except (TypeError, ValueError) as error:
            raise ValueError(f"--set {shown(text)}: {one_line(error)}") from None
