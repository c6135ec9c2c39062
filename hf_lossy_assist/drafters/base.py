"""What every drafter answers: what to propose, and what it learns from a verdict.

`Drafter` is the settings, `DrafterRun` the drafter at work in one call. Drafters never change the output distribution: whatever they
propose is verified.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..artifacts.features import FeatureSpec
from ..batch.logits_processing import Processing
from ..batch.randomness import Randomness
from ..batch.rows import Rows
from ..models.cached_model import CachedModel, NotJoined
from ..models.hidden_state_hook import HiddenStateHook
from ..registry import find_entry, set_base
from ..round import Draft, Verified
from ..stats.clock import Clock
from ..stops import StopRun
from ..validation import nearest, shown


@dataclass(frozen=True)
class DraftContext:
    """What one generate call hands to a drafter.

    Args:
        target: the Transformers model.
        rows (`Rows`): the texts of the call.
        stop (`StopRun`): how much each row may draft; its limits reach `propose`.
        processing: the call's logits processors.
        vocabulary: how many token ids the target has.
        sampling: False: greedy.
        clock: where seconds are counted.
        held: how many tokens of each row the target held before the call, in the cache that it was passed.
        features (`FeatureSpec`): the hidden states that the rule's head reads; None: it has none.
        assistant_run: makes the drafter of `assistant_model=`; None: the call has none.
    """

    target: Any
    rows: Rows
    stop: StopRun
    processing: Processing
    vocabulary: int
    sampling: bool
    clock: Clock
    held: Sequence[int] = ()
    features: FeatureSpec | None = None
    assistant_run: Callable[[], "DrafterRun"] | None = None


@dataclass(frozen=True)
class Drafter:
    """The base of drafters: settings, and `start`. Pass one as `generate(…, lossy_policy=…, drafter=…)`.

    What a subclass says of itself: `needs_assistant`, it drafts with the call's `assistant_model`; `gives_probs`, its drafts have
    distributions, which rules and filters may read; `gives_states`, it has hidden states, which heads may read (`Draft.hidden`); `asks_stop`, it asks the
    call's stop behind each token that it drafts.
    """

    needs_assistant: ClassVar[bool] = False  # drafts with the call's `assistant_model`
    asks_stop: ClassVar[bool] = False  # behind each token that it drafts
    gives_probs: ClassVar[bool] = False  # its drafts have distributions, which rules and filters may read
    gives_states: ClassVar[bool] = False  # it has hidden states, which heads may read

    def start(self, context: DraftContext) -> "DrafterRun":
        """The drafter at work in one generate call."""
        raise NotImplementedError(f"{type(self).__name__} needs a method start(context)")


def as_drafter(given: Any) -> Drafter | None:
    """A drafter as `generate(…, drafter=…)` takes it: one, the name of one, or its JSON form, a dict with the name and parameters.

    Raises: `TypeError` or `ValueError`, one line with the nearest match.
    """
    if given is None or isinstance(given, Drafter):
        return given
    if isinstance(given, str):
        given = {"name": given}
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
        raise TypeError(
            f"drafter: expected a drafter such as SuffixDrafter(), its name, or a dict with its name, got {shown(given)}"
        )
    found, settings = (
        find_entry("drafter", given["name"], "drafter: "),
        {k: v for k, v in given.items() if k != "name"},
    )
    what = f"drafter {found.name}"
    unknown = [str(name) for name in settings if name not in found.parameters]
    if unknown:
        raise ValueError(f"{what}: {nearest('parameter', unknown[0], found.parameters)}")
    missing = [name for name in found.required if name not in settings]
    if missing:
        raise ValueError(f"{what}: the parameter {missing[0]} is missing: it has no default")
    made: Drafter = found.make(**settings)
    return made


def apart(assistant: Any, drafter: Any) -> tuple[Any, Any]:
    """The assistant and the drafter of a call, whose drafter may be passed as either. Raises: `ValueError` where there are two."""
    if not isinstance(assistant, Drafter):
        return assistant, drafter
    if drafter is not None:
        raise ValueError("assistant_model and drafter are two drafters: pass one of them")
    return None, assistant


class DrafterRun:
    """A drafter at work in one generate call.

    What a subclass says of itself: `gives_probs` as in the settings; `tokens_are_sure`, what it proposes needs no look.
    """

    gives_probs = False  # its drafts have distributions, which rules and filters may read
    reads_target = False  # it must see the target read each token: nothing that was read for another call may take a prompt's place
    # Its tokens cannot be other than the target's. False: the engine looks at each draft, which costs a device sync.
    tokens_are_sure = False

    @property
    def cached_models(self) -> Sequence[CachedModel]:
        """Models that the engine gives each row's prompt before the first round."""
        return ()

    @property
    def taps(self) -> Sequence[HiddenStateHook]:
        """Hooks that must be active during the call."""
        return ()

    def prompts_are_read(self, rows: Rows) -> None:
        """Told inside `taps`, where prompts are read before their rounds begin, that the target has read them but for their last tokens."""

    def keep_probs(self) -> None:
        """Told before the first round that a rule or a filter reads `Draft.probs` in greedy decoding too."""

    def propose(self, rows: Rows, limits: Sequence[int], randomness: Randomness) -> Draft:
        """Up to `limits[b]` tokens for row b."""
        raise NotImplementedError(f"{type(self).__name__} needs a method propose(rows, limits, randomness)")

    def learn(self, rows: Rows, verified: Verified, accepted: Sequence[int]) -> None:
        """Take note after each round of how many drafted tokens of each row were accepted; `rows` have grown by them already."""

    def select(self, keep: Sequence[int]) -> None:
        """Keep these rows only."""

    def together(self, seats: int, stop: StopRun, processing: Processing) -> "DrafterRun":
        """This drafter, of a call of one row, for a call of up to `seats` rows with this stop and these processors; other calls' rows come by `take`.

        A drafter that keeps something for each row overrides both. Raises: `NotJoined`, one line, for a drafter that cannot.
        """
        raise NotJoined(f"{type(self).__name__} drafts for the rows that a call began with")

    def take(self, b: int, number: int, other: "DrafterRun") -> None:
        """Row b, number `number` of the call, is from now on what `other` has for the only row of its call."""


def fit_vocabulary(logits: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Logits (…, V') over the target's `vocabulary`: missing ids get −inf, surplus is cut off."""
    missing = vocabulary - logits.shape[-1]
    if missing > 0:
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
    return logits[..., :vocabulary]


def empty_draft(rows: Rows, limits: Sequence[int], sampling: bool) -> Draft:
    """No token for any row."""
    none = torch.zeros(len(limits), dtype=torch.int64, device=rows.ids.device)
    return Draft(rows.ids[:, :0], none, rows.row_ids, max(limits, default=0), sampling)


set_base("drafter", Drafter)
