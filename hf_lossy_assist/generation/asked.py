"""What one call asks of the draft: settings at the call, in its generation config and of the runner's own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from ..validation import shown
from .draft_stop import DRAFT_SETTINGS
from .drafting import CANDIDATES


@dataclass(frozen=True)
class Asked:
    """The draft's settings in one call, by the names in `DRAFT_SETTINGS` and in `CANDIDATES`."""

    settings: Mapping[str, Any]
    candidates: Mapping[str, Any]

    def beside(self, at_call: Mapping[str, Any], config: Any, own: Any) -> "Asked":
        """These, a runner's own, with those that came with the call.

        Args:
            at_call: by the names in `DRAFT_SETTINGS`, None where the call has none.
            config: the generation config that `generate` prepared; own: the model's.

        Raises: `ValueError`, one line, where the call says something else than the runner.
        """
        given = settings_in(config, own) | {name: value for name, value in at_call.items() if value is not None}
        mine = {name: value for name, value in self.settings.items() if value is not None}
        for name in mine.keys() & given.keys():
            if mine[name] != given[name]:
                raise ValueError(
                    f"{name} is {shown(given[name])} at the call and {shown(mine[name])} in the settings of Runner: pass one of them"
                )
        # Ways to draft that the call names; what stands in the model's own config does not take an assistant's place.
        named = {name: getattr(config, name, None) for name in CANDIDATES}
        candidates = {name: value for name, value in named.items() if value != getattr(own, name, None)}
        return Asked(given | mine, candidates | dict(self.candidates))


def settings_in(config: Any, own: Any) -> dict[str, Any]:
    """What the generation config of a call says of the draft, by the names in `DRAFT_SETTINGS`.

    Neither Transformers' defaults, which it writes into every config, nor what the model's own config (`own`) has: as in Transformers
    that is for calls in which the model is the draft.
    """
    found = {name: getattr(config, name, None) for name in DRAFT_SETTINGS}
    default = GenerationConfig._get_default_generation_params()
    return {
        name: value for name, value in found.items() if value not in (None, default[name], getattr(own, name, None))
    }
