"""Settings of a server: the options of `hf-lossy serve`, and the arguments of `hf_lossy_assist.ray.app`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from ..setting_fields import check_bounds
from ..validation import MOST, MOST_NEW_TOKENS, MOST_ROWS


KEY = "HF_LOSSY_API_KEY"  # an environment variable


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of the operator, with the bounds of numbers and the help. Raises: `ValueError`, one line, beyond the bounds."""

    policies: Annotated[str, "policies that requests may name, with commas; the first is used where none is named"] = (
        "svip"
    )
    name: Annotated[str | None, "what clients call the model (default: the name of its folder)"] = None
    api_key: Annotated[str | None, f"what clients must present (default: the variable {KEY}, if it is set)"] = field(
        default=None, repr=False
    )
    batch_size: Annotated[int, (1, MOST_ROWS), "texts that are written at a time"] = 16
    max_waiting: Annotated[int, (0, 1_000_000), "requests that may wait beside them; more are turned away"] = 256
    max_new_tokens: Annotated[int, (1, MOST_NEW_TOKENS), "most new tokens that a request may ask for"] = 512
    max_length: Annotated[
        int | None, (2, MOST), "most tokens of a prompt and its text (default: the model's own limit)"
    ] = None
    grace: Annotated[float, (0, 86_400), "seconds to finish running requests at shutdown, e.g. 120"] = 30

    def __post_init__(self) -> None:
        check_bounds(self)
        key = self.api_key
        if key is not None and not (key and key.isascii() and key.isprintable() and key == key.strip()):
            raise ValueError(
                f"the API key, or {KEY}: expected ASCII characters, no blanks at its ends, and not nothing"
            )

    def name_model(self, model: str | None) -> str:
        """Return what clients call the model of this folder or Hub id; None: the demo's."""
        return self.name or ("demo" if model is None else Path(model).name)
