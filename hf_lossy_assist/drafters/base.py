"""Interface of drafters: a `Drafter` holds settings, a `DrafterRun` drafts during one call.

Drafters never change the output distribution: whatever they propose is verified.
"""

from collections.abc import Callable, Container, Hashable, Mapping, Sequence
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
    """The parts of a generate call that a drafter is started with.

    Args:
        target: the Transformers model.
        rows (`Rows`): the texts of the call.
        stop (`StopRun`): decides how much each row may draft; its limits are passed to `propose`.
        processing: the call's logits processors.
        vocabulary: number of token ids of the target.
        sampling: False: greedy.
        clock: counts seconds.
        cached: tokens of each row that the target held before the call, in a cache passed to it.
        features (`FeatureSpec`): the hidden states that the rule's head reads; None: it reads none.
        reads_probs: a rule or filter reads `Draft.probs` even in greedy decoding.
        assistant_run: creates the drafter for `assistant_model=`; None: the call has none.
        compiled_target: the target on its cache, if its forwards are to be compiled.
        cost_key: what costs and acceptance depend on apart from models; calls with the same one share estimates.
    """

    target: PreTrainedModel
    rows: Rows
    stop: StopRun
    processing: Processing
    vocabulary: int
    sampling: bool
    clock: Clock
    cached: Sequence[int] = ()
    features: FeatureSpec | None = None
    reads_probs: bool = False
    assistant_run: Callable[[], "DrafterRun"] | None = None
    compiled_target: StaticRowModel | None = None
    cost_key: Hashable = None


@dataclass(frozen=True)
class Drafter:
    """Base class of drafters: settings, and `start`. Passed as `generate(…, lossy_policy=…, drafter=…)`."""

    needs_assistant: ClassVar[bool] = False  # drafts with the call's `assistant_model`
    asks_stop: ClassVar[bool] = False  # asks the call's stop after each drafted token
    gives_probs: ClassVar[bool] = False  # its drafts have distributions, which rules and filters may read
    takes_assistant: ClassVar[bool] = False  # drafts with an `assistant_model`, if there is one
    gives_states: ClassVar[bool] = False  # it has hidden states, which heads may read (`Draft.hidden`)

    @property
    def main(self) -> "Drafter":
        """The part with a model, which stops ask and heads are checked against: the drafter itself unless it has
        parts."""
        return self

    def over(self, other: "Drafter") -> "Drafter | None":
        """Return this drafter with `other` in place of the draft model; None: it uses no other drafter."""
        return None

    def start(self, context: DraftContext) -> "DrafterRun":
        """Return the run of this drafter for one generate call."""
        raise NotImplementedError(f"{type(self).__name__} needs a method start(context)")


@dataclass(frozen=True)
class Proposal:
    """Settings that a drafter's files suggest: tokens per round, and what to accept. `accept_k` above 1 is lossy;
    no suggestion is ever a default."""

    tokens: int = 5
    accept_k: int = 1
    accept_tolerance: float = 0.0

    @property
    def policy(self) -> dict[str, object]:
        """Policy for `lossy_policy=`: `verifier_accept_k` and `accept_tolerance` of `speculators` are the rule
        `top_k_tolerance`; k = 1 is strict."""
        rule: object = "strict"
        if self.accept_k > 1:
            rule = {"name": "top_k_tolerance", "k": self.accept_k, "tolerance": self.accept_tolerance}
        return {"rule": rule, "stop": {"name": "constant", "gamma": self.tokens}}


def as_drafter(choice: object) -> Drafter | None:
    """Return the drafter for `generate(…, drafter=…)`: a drafter, the name of one, or its JSON form, a dict with name
    and parameters.

    Raises: `TypeError` or `ValueError`, one line with the nearest match.
    """
    if choice is None or isinstance(choice, Drafter):
        return choice
    if isinstance(choice, str):
        choice = {"name": choice}
    if not isinstance(choice, Mapping) or not isinstance(choice.get("name"), str):
        raise TypeError(
            "drafter: expected a drafter such as SuffixDrafter(), its name, or a dict with its name, got "
            f"{shown(choice)}"
        )
    entry = find_entry("drafter", choice["name"], "drafter: ")
    settings = {name: value for name, value in choice.items() if name != "name"}
    unknown = [str(name) for name in settings if name not in entry.parameters]
    if unknown:
        raise ValueError(f"drafter {entry.name}: {nearest('parameter', unknown[0], entry.parameters)}")
    missing = [name for name in entry.required if name not in settings]
    if missing:
        raise ValueError(f"drafter {entry.name}: the parameter {missing[0]} is missing: it has no default")
    drafter: Drafter = entry.make(**settings)
    return drafter


def split_assistant_and_drafter(
    assistant: PreTrainedModel | Drafter | None, drafter: Given
) -> tuple[PreTrainedModel | None, Given | Drafter]:
    """Return the assistant and the drafter of a call; a drafter may be passed as either.

    Raises: `ValueError` if there are two, unless `drafter` is one that drafts with another.
    """
    if not isinstance(assistant, Drafter):
        return assistant, drafter
    checked = as_drafter(drafter)
    both = assistant if checked is None else checked.over(assistant)
    if both is None:
        raise ValueError(
            'assistant_model and drafter are two drafters: pass one of them, or drafter="composite" or "auto"'
        )
    return None, both


class DrafterRun:
    """A drafter during one generate call. A subclass implements `propose`, and the other methods as needed."""

    gives_probs = False  # as in the settings
    reads_target = False  # it needs the target's forward on each token, so cached prefixes cannot be used
    drafts_at_once = False  # in the first round, whatever stands beside: prompts are read before it
    # Its tokens are always valid for the target. False: the engine validates each draft, which costs a device sync.
    skip_validation = False
    # why its rounds are not compiled, if they never are
    why_eager = "what drafts is no model that can be rolled back in place"
    is_plain_model = False  # just one draft model on a cache: rounds can be compiled, and prompts can join
    may_forbid = False  # some of its tokens have not passed the call's logits processors, although it gives probs
    begins_alone = False  # its first rounds draft without its model, which need not read the prompts yet

    @property
    def cached_models(self) -> Sequence[CachedModel]:
        """Models that the engine feeds each row's prompt before the first round."""
        return ()

    @property
    def taps(self) -> Sequence[HiddenStateHook]:
        """Hooks that must be active during the call."""
        return ()

    def prompts_are_read(self, rows: Rows) -> None:
        """Note, with `taps` active, that the target has read the prompts except their last tokens.

        The scheduler of `generate_many` calls it; otherwise the first `propose` finds them read.
        """

    def propose(self, rows: Rows, limits: Sequence[int], randomness: Randomness) -> Draft:
        """Return up to `limits[b]` tokens for row b."""
        raise NotImplementedError(f"{type(self).__name__} needs a method propose(rows, limits, randomness)")

    def learn(self, rows: Rows, verified: Verified, accepted: Sequence[int]) -> None:
        """Note, after each round, how many drafted tokens of each row were accepted; `rows` already include them."""

    def select(self, keep: Sequence[int]) -> None:
        """Keep only these rows."""

    def close(self) -> None:
        """Return storage that outlives the call, for models that are not among `cached_models`."""

    def fresh(self, rows: int, limit: int, stop: StopRun, processing: Processing, clock: Clock) -> "DrafterRun":
        """Return this drafter for `rows` empty rows, for texts of up to `limit` tokens, in a call with these parts.

        Rows of another run, which has read their prompts, are added by `insert`; a drafter with data for each row
        overrides both.
        Raises: `NotJoined`, one line, if the drafter does not support it.
        """
        raise NotJoined(f"{type(self).__name__} drafts for the rows that a call began with")

    def insert(self, slots: Sequence[int], row_ids: Sequence[int], other: "DrafterRun", rows: Sequence[int]) -> None:
        """Set the rows at `slots` of the batch, numbers `row_ids` of the call, to the rows `rows` of `other`."""


def fit_vocabulary(logits: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return logits (…, V') over the target's `vocabulary`: missing ids get −inf, surplus ones are cut off."""
    missing = vocabulary - logits.shape[-1]
    if missing > 0:
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
    return logits[..., :vocabulary]


def certain_draft(drafts: Sequence[list[int]], rows: Rows, limits: Sequence[int], sampling: bool) -> Draft:
    """Return a draft of these tokens for each row, with q = 1."""
    gamma, device = max(map(len, drafts)), rows.ids.device
    padded = [[len(tokens), *tokens, *[0] * (gamma - len(tokens))] for tokens in drafts]
    table = torch.tensor(padded, dtype=torch.int64, device=device).view(len(drafts), 1 + gamma)
    counts = [len(tokens) for tokens in drafts]
    return Draft(table[:, 1:], table[:, 0], rows.row_ids, max(limits, default=0), sampling, counts=counts)


def cut_at_end(tokens: list[int], ends: Container[int], vocabulary: int) -> list[int]:
    """Return `tokens` up to and including the first end token, and before the first that is outside the target's
    vocabulary."""
    for i, token in enumerate(tokens):
        if token >= vocabulary or token in ends:
            return tokens[: i + (token < vocabulary)]
    return tokens


def validate_draft(draft: Draft, limits: Sequence[int], vocabulary: int, row_ids: torch.Tensor, name: str) -> Draft:
    """Check the proposal of a user's drafter `name`; return it with zeros for padding, whose values are arbitrary, and
    the call's `row_ids` (B,).

    Raises: `ValueError` or `TypeError`, one line, before a forward fails on it or a wrong q changes the distribution.
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
                f"{name}.propose: {field}: expected int64 {letters} with B = {rows}, got {value.dtype} "
                f"{tuple(value.shape)}"
            )
        if value.device != row_ids.device:
            raise ValueError(
                f"{name}.propose: {field}: expected a tensor on {row_ids.device}, where the texts are, got "
                f"{value.device}"
            )
    if draft.probs is not None and draft.probs.shape != (rows, gamma, vocabulary):
        raise ValueError(
            f"{name}.propose: probs: expected (B, γ, V) = {(rows, gamma, vocabulary)}, got {tuple(draft.probs.shape)}"
        )
    counts = draft.lengths.tolist()
    for row, (length, limit) in enumerate(zip(counts, limits, strict=True)):
        if not 0 <= length <= min(limit, gamma):
            raise ValueError(
                f"{name}.propose: row {row} was to draft at most {limit} tokens, and has {gamma} of which {length} "
                "count"
            )
    drafted = torch.arange(gamma, device=draft.tokens.device) < draft.lengths[:, None]
    foreign = draft.tokens[drafted & ((draft.tokens < 0) | (draft.tokens >= vocabulary))].tolist()
    if foreign:
        raise ValueError(f"{name}.propose: expected token ids from 0 to {vocabulary - 1}, got {foreign[0]}")
    return replace(draft, tokens=draft.tokens.masked_fill(~drafted, 0), row_ids=row_ids, counts=counts)


set_base("drafter", Drafter)
