"""The seam of drafters: `Drafter` is the settings, `DrafterRun` the drafter at work in one call.

Drafters never change the output distribution: whatever they propose is verified.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import torch
from transformers import PreTrainedModel

from ..artifacts.features import FeatureSpec
from ..batch.logits_processing import Processing
from ..batch.randomness import Randomness
from ..batch.rows import Rows
from ..models.cached_model import CachedModel, NotJoined
from ..models.compiled.static_model import StaticRowModel
from ..models.hidden_state_hook import HiddenStateHook
from ..registry import find_entry, set_base
from ..round import Draft, Verified
from ..stats.clock import Clock
from ..stops import StopRun
from ..validation import nearest, shown


Given = TypeVar("Given")


@dataclass(frozen=True)
class DraftContext:
    """The part of a generate call that a drafter is started with.

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
        reads_probs: a rule or a filter reads `Draft.probs` in greedy decoding too.
        assistant_run: makes the drafter of `assistant_model=`; None: the call has none.
        compiled_target: the target on its cache, where its forwards are to be compiled.
    """

    target: PreTrainedModel
    rows: Rows
    stop: StopRun
    processing: Processing
    vocabulary: int
    sampling: bool
    clock: Clock
    held: Sequence[int] = ()
    features: FeatureSpec | None = None
    reads_probs: bool = False
    assistant_run: Callable[[], "DrafterRun"] | None = None
    compiled_target: StaticRowModel | None = None


@dataclass(frozen=True)
class Drafter:
    """The base of drafters: settings, and `start`. Pass one as `generate(…, lossy_policy=…, drafter=…)`."""

    needs_assistant: ClassVar[bool] = False  # drafts with the call's `assistant_model`
    asks_stop: ClassVar[bool] = False  # asks the call's stop after each token that it drafts
    gives_probs: ClassVar[bool] = False  # its drafts have distributions, which rules and filters may read
    gives_states: ClassVar[bool] = False  # it has hidden states, which heads may read (`Draft.hidden`)

    def start(self, context: DraftContext) -> "DrafterRun":
        """Return the drafter at work in one generate call."""
        raise NotImplementedError(f"{type(self).__name__} needs a method start(context)")


def as_drafter(given: object) -> Drafter | None:
    """Return the drafter that `generate(…, drafter=…)` is given: one, the name of one, or its JSON form, a dict with the name and parameters.

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
    found = find_entry("drafter", given["name"], "drafter: ")
    settings = {name: value for name, value in given.items() if name != "name"}
    unknown = [str(name) for name in settings if name not in found.parameters]
    if unknown:
        raise ValueError(f"drafter {found.name}: {nearest('parameter', unknown[0], found.parameters)}")
    missing = [name for name in found.required if name not in settings]
    if missing:
        raise ValueError(f"drafter {found.name}: the parameter {missing[0]} is missing: it has no default")
    made: Drafter = found.make(**settings)
    return made


def split_assistant_and_drafter(
    assistant: PreTrainedModel | Drafter | None, drafter: Given
) -> tuple[PreTrainedModel | None, Given | Drafter]:
    """Return the assistant and the drafter of a call, whose drafter may be passed as either. Raises: `ValueError` where there are two."""
    if not isinstance(assistant, Drafter):
        return assistant, drafter
    if drafter is not None:
        raise ValueError("assistant_model and drafter are two drafters: pass one of them")
    return None, assistant


class DrafterRun:
    """A drafter at work in one generate call. A subclass implements `propose`, the rest where it needs it."""

    gives_probs = False  # as in the settings
    reads_target = False  # it must see the target read each token: nothing that was read for another call may take a prompt's place
    # Its tokens cannot be other than the target's. False: the engine looks at each draft, which costs a device sync.
    skip_validation = False
    why_eager = "what drafts is no model that can be rolled back in place"  # why its rounds are not compiled, where they never are
    is_plain_model = False  # one draft model on a cache and nothing else: rounds can be compiled, and prompts join

    @property
    def cached_models(self) -> Sequence[CachedModel]:
        """Models that the engine gives each row's prompt before the first round."""
        return ()

    @property
    def taps(self) -> Sequence[HiddenStateHook]:
        """Hooks that must be active during the call."""
        return ()

    def prompts_are_read(self, rows: Rows) -> None:
        """Take note, inside `taps`, that the target has read the prompts but for their last tokens, before their rounds begin."""

    def propose(self, rows: Rows, limits: Sequence[int], randomness: Randomness) -> Draft:
        """Return up to `limits[b]` tokens for row b."""
        raise NotImplementedError(f"{type(self).__name__} needs a method propose(rows, limits, randomness)")

    def learn(self, rows: Rows, verified: Verified, accepted: Sequence[int]) -> None:
        """Take note after each round of how many drafted tokens of each row were accepted; `rows` have grown by them already."""

    def select(self, keep: Sequence[int]) -> None:
        """Keep these rows only."""

    def close(self) -> None:
        """Give back storage that outlives the call, of models that are not among `cached_models`."""

    def fresh(self, rows: int, limit: int, stop: StopRun, processing: Processing, clock: Clock) -> "DrafterRun":
        """Return this drafter for `rows` rows that hold nothing yet, of texts of up to `limit` tokens, in a call with these parts.

        Rows of another run, which has read their prompts, come by `insert`; a drafter that keeps something for each row overrides both.
        Raises: `NotJoined`, one line, for one that cannot.
        """
        raise NotJoined(f"{type(self).__name__} drafts for the rows that a call began with")

    def insert(self, places: Sequence[int], numbers: Sequence[int], other: "DrafterRun", rows: Sequence[int]) -> None:
        """Let the rows at `places` of the batch, numbers `numbers` of the call, be from now on what `other` has for its rows `rows`."""


def fit_vocabulary(logits: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return logits (…, V') over the target's `vocabulary`: missing ids get −inf, surplus is cut off."""
    missing = vocabulary - logits.shape[-1]
    if missing > 0:
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
    return logits[..., :vocabulary]


def certain_draft(drafts: Sequence[list[int]], rows: Rows, limits: Sequence[int], sampling: bool) -> Draft:
    """Return a draft of these tokens for each row, which count as certain (q = 1)."""
    gamma, device = max(map(len, drafts)), rows.ids.device
    padded = [[len(tokens), *tokens, *[0] * (gamma - len(tokens))] for tokens in drafts]
    table = torch.tensor(padded, dtype=torch.int64, device=device).view(len(drafts), 1 + gamma)
    counts = [len(tokens) for tokens in drafts]
    return Draft(table[:, 1:], table[:, 0], rows.row_ids, max(limits, default=0), sampling, counts=counts)


def cut_at_end(tokens: list[int], ends: Container[int], vocabulary: int) -> list[int]:
    """Return `tokens` up to the first end token, with it, and before the first that is no token of the target."""
    for i, token in enumerate(tokens):
        if token >= vocabulary or token in ends:
            return tokens[: i + (token < vocabulary)]
    return tokens


def validate_draft(draft: Draft, limits: Sequence[int], vocabulary: int, row_ids: torch.Tensor, name: str) -> Draft:
    """Return what somebody's drafter `name` proposed, with zeros for padding, which may be anything, and with the call's `row_ids` (B,).

    Raises: `ValueError` or `TypeError`, one line, before a forward stumbles over it or a wrong q makes another distribution.
    """
    if not isinstance(draft, Draft):
        raise TypeError(f"{name}.propose: expected a Draft, got {shown(draft)}")
    for field in ("tokens", "lengths", "probs", "validity"):
        value = getattr(draft, field)
        if not isinstance(value, torch.Tensor) and (value is not None or field in ("tokens", "lengths")):
            raise TypeError(f"{name}.propose: {field}: expected a tensor, got {shown(value)}")
    rows, gamma = len(limits), draft.gamma if draft.tokens.dim() == 2 else 0
    for field, shape, letters in (("tokens", (rows, gamma), "(B, γ)"), ("lengths", (rows,), "(B,)")):
        value = getattr(draft, field)
        if value.shape != shape or value.dtype != torch.int64:
            raise ValueError(
                f"{name}.propose: {field}: expected int64 {letters} with B = {rows}, got {value.dtype} {tuple(value.shape)}"
            )
        if value.device != row_ids.device:
            raise ValueError(
                f"{name}.propose: {field}: expected a tensor on {row_ids.device}, where the texts are, got {value.device}"
            )
    if draft.probs is not None and draft.probs.shape != (rows, gamma, vocabulary):
        raise ValueError(
            f"{name}.propose: probs: expected (B, γ, V) = {(rows, gamma, vocabulary)}, got {tuple(draft.probs.shape)}"
        )
    counts = draft.lengths.tolist()
    for row, (length, limit) in enumerate(zip(counts, limits, strict=True)):
        if not 0 <= length <= min(limit, gamma):
            raise ValueError(
                f"{name}.propose: row {row} was to draft at most {limit} tokens, and has {gamma} of which {length} count"
            )
    drafted = torch.arange(gamma, device=draft.tokens.device) < draft.lengths[:, None]
    foreign = draft.tokens[drafted & ((draft.tokens < 0) | (draft.tokens >= vocabulary))].tolist()
    if foreign:
        raise ValueError(f"{name}.propose: expected token ids from 0 to {vocabulary - 1}, got {foreign[0]}")
    return replace(draft, tokens=draft.tokens.masked_fill(~drafted, 0), row_ids=row_ids, counts=counts)


set_base("drafter", Drafter)
