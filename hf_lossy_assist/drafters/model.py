"""Drafting with a model: one token at a time for all rows, until each row's limit, its stop, or an end token."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from typing_extensions import Self

from ..artifacts.features import FeatureTap
from ..batch.logits_processing import Processing
from ..batch.randomness import Randomness
from ..batch.rows import Rows
from ..models.cached_model import CachedModel, NotJoined
from ..models.hidden_state_hook import HiddenStateHook
from ..models.row_model import RowModel
from ..registry import register_drafter
from ..round import Draft, Verified
from ..stats.clock import Clock
from ..stops import StopRun
from ..tensors import keep_one_token, on_device, refuse_unfit
from .base import DraftContext, Drafter, DrafterRun, certain_draft, fit_vocabulary


AHEAD = 4  # tokens drafted between two checks of the stop's results, where a check waits for the device
MANY = 8  # tokens that a row lags behind; logits for fewer are cheaper than another forward


@dataclass(frozen=True)
class AssistantDrafter(Drafter):
    """Draft with the call's `assistant_model`; the default drafter, and a part of composites."""

    needs_assistant: ClassVar[bool] = True
    asks_stop: ClassVar[bool] = True
    gives_probs: ClassVar[bool] = True

    def start(self, context: DraftContext) -> DrafterRun:
        if context.assistant_run is None:
            raise ValueError("AssistantDrafter: this call has no assistant_model: pass assistant_model=…")
        return context.assistant_run()


@dataclass
class Steps:
    """Results of one round's draft steps, one list entry per step."""

    going: list[bool]  # which rows are still drafting
    counted: list[int]  # how many tokens each row has drafted, if the stop is adaptive
    tokens: list[torch.Tensor] = field(default_factory=list)  # (B,) each
    validity: list[torch.Tensor] = field(default_factory=list)  # (B,) each
    probs: list[torch.Tensor] = field(default_factory=list)  # (B, V) each
    hidden: list[torch.Tensor] = field(default_factory=list)  # (B, H) each
    stops: list[torch.Tensor] = field(default_factory=list)  # (B,) bool each, not yet read by the host

    def is_over(self, limits: Sequence[int], may_wait: int, stop: StopRun) -> bool:
        """Read which rows have stopped; return whether at most `may_wait` are still drafting."""
        first = len(self.tokens) - len(self.stops)
        for i, stops in enumerate(stop.read(self.stops), first + 1):
            for b, stopped in enumerate(stops):
                if self.going[b]:
                    self.counted[b], self.going[b] = i, not stopped and i < limits[b]
            if sum(self.going) <= may_wait:
                return True
        self.stops.clear()
        return False

    def cut(self) -> None:
        """Drop tokens drafted beyond the longest draft."""
        for results in (self.tokens, self.validity, self.probs):
            del results[max(self.counted) :]


class TokenwiseRun(DrafterRun):
    """Drafting token by token during one call. A subclass implements `_first_input`, `_logits` and `_last`.

    A row that stops early is masked, not dropped, while the others continue. Tokens are drawn from q, the draft's
    distribution after the call's logits processors (applied once; the caller's are not), and q is stored for the
    acceptance rule.
    """

    gives_probs = skip_validation = True

    def __init__(self, context: DraftContext, network: torch.nn.Module):
        """`network`: the module whose hidden states the heads of the call's stop and rule may read.

        For a draft with a smaller vocabulary than `context.vocabulary`, q = 0 for the missing ids; the surplus of a
        larger one is cut off.
        Raises: `ValueError`, one line, for a layer that a head reads and the draft does not have.
        """
        stop, rule = context.stop.settings.features, context.features
        self.network = network
        self.tap = None if stop is None else FeatureTap(network, stop)
        self.states = FeatureTap(network, rule) if rule is not None and rule.reads("draft") else None
        self.stop, self.processing, self.clock = context.stop, context.processing, context.clock
        self.vocabulary, self.sampling = context.vocabulary, context.sampling
        self.reads_probs = context.sampling or context.reads_probs

    @property
    def taps(self) -> Sequence[HiddenStateHook]:
        return [tap for tap in (self.tap, self.states) if tap is not None]

    def propose(self, rows: Rows, limits: Sequence[int], randomness: Randomness) -> Draft:
        batch, device = rows.ids.shape[0], rows.ids.device
        going = [limit > 0 for limit in limits]
        if not any(going):
            return certain_draft([[]] * batch, rows, limits, self.sampling)
        steps = Steps(going, [0] * batch)
        # Number of rows that may still be drafting when the round ends.
        may_wait = sum(steps.going) - max(1, math.ceil(self.stop.settings.patience * sum(steps.going) - 1e-9))
        free, adaptive = device.type == "cpu", self.stop.settings.adaptive  # free: reading a value never waits
        ended = torch.tensor([not going for going in steps.going])  # (B,) for stops that are not adaptive
        ahead = AHEAD if self.stop.may_run_ahead and not free else 1
        feed, counts = self._first_input(rows)
        for i in range(max(limits)):
            raw, token = self._step(rows, steps, feed, counts, randomness)
            if self.processing.needs_prefix:
                rows.write(token[:, None], i)
            if adaptive:
                self.stop.drafting(
                    [row for b, row in enumerate(rows.row_id_list) if steps.going[b] and i + 1 < limits[b]]
                )
                stops = self._stops(token, raw, counts, rows.row_id_list)
                refuse_unfit(stops, token.shape, torch.bool, self.stop, "after_token")
                stops = stops.to(device) | rows.is_end_token(token)
                steps.stops.append(stops)
                self.stop.stopped(stops)
                if (len(steps.stops) == ahead or i + 1 == max(limits)) and steps.is_over(limits, may_wait, self.stop):
                    break
            elif free:  # all rows have drafted an end token
                ended |= rows.is_end_token(token)
                if bool(ended.all()):
                    break
            feed, counts = token[:, None], [1] * batch
        if adaptive:
            steps.cut()
        return self._draft(rows, limits, steps)

    def _step(
        self, rows: Rows, steps: Steps, feed: torch.Tensor, counts: list[int], randomness: Randomness
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft one token of each row; return the raw logits (B, V) and the token (B,)."""
        i = len(steps.tokens)
        raw = self._logits(feed, counts, rows.ids.device)
        if self.states is not None:
            steps.hidden.append(self._last(self.states, counts))
        lengths = [n + i for n in rows.lengths]
        process = self.processing
        processed = raw if process.is_empty else process(rows.shown_ids, lengths, raw[:, None], rows.row_id_list)[:, 0]
        logits = keep_one_token(processed, raw) if self.processing.may_forbid else processed
        if self.reads_probs:
            steps.probs.append(logits.softmax(dim=-1))
        if self.sampling:
            token, peak = randomness.draw(steps.probs[-1], rows.row_ids, i), steps.probs[-1][:, 0]
        else:
            peak, token = logits.max(dim=-1)
        steps.tokens.append(token)
        steps.validity.append(peak)
        return raw, token

    def _draft(self, rows: Rows, limits: Sequence[int], steps: Steps) -> Draft:
        device, hidden, gamma = rows.ids.device, steps.hidden, len(steps.tokens)
        if self.states is not None and self.states.spec.position == "token":
            # A token's state is computed by the next forward: the first state belongs to no drafted token, the last may
            # be missing.
            if len(hidden) == gamma:
                alone = [1] * len(limits)
                self._logits(steps.tokens[-1][:, None], alone, device)
                hidden.append(self._last(self.states, alone))
            hidden = hidden[1:]
        tokens = torch.stack(steps.tokens, dim=1)  # (B, γ)
        lengths = on_device(steps.counted if self.stop.settings.adaptive else limits, device)
        if not self.stop.settings.adaptive:  # up to and including the first end token
            lengths = torch.minimum(1 + (rows.is_end_token(tokens).long().cumsum(dim=1) == 0).sum(dim=1), lengths)
        return Draft(
            tokens,
            lengths,
            rows.row_ids,
            max(limits),
            self.sampling,
            probs=torch.stack(steps.probs, dim=1) if steps.probs else None,
            hidden=torch.stack(hidden[:gamma], dim=1) if hidden else None,
            validity=torch.stack(steps.validity, dim=1),
        )

    def _stops(self, token: torch.Tensor, raw: torch.Tensor, counts: list[int], rows: list[int]) -> torch.Tensor:
        """Return which rows stop after `token` (B,), drawn from `raw` (B, V), the last of `counts[b]` positions of the
        forward."""
        if self.tap is None:
            return self.stop.after_token(token[:, None], (raw,), rows=rows)
        with self.clock.time("head"):
            return self.stop.after_token(token[:, None], (raw,), rows=rows, features=self._last(self.tap, counts))

    def _first_input(self, rows: Rows) -> tuple[torch.Tensor, list[int]]:
        """Return the input of each row's first step (B, Q), padded on the right, and how many tokens count."""
        raise NotImplementedError(f"{type(self).__name__} needs a method _first_input(rows)")

    def _logits(self, feed: torch.Tensor, counts: list[int], device: torch.device) -> torch.Tensor:
        """Read tokens `feed` (B, Q), of which the first `counts[b]` count;
        return the logits after the last of each row, (B, V) float32."""
        raise NotImplementedError(f"{type(self).__name__} needs a method _logits(feed, counts, device)")

    def _last(self, tap: FeatureTap, counts: list[int]) -> torch.Tensor:
        """Return the state in `tap` of each row's last real position, (B, H)."""
        raise NotImplementedError(f"{type(self).__name__} needs a method _last(tap, counts)")

    def fresh(self, rows: int, limit: int, stop: StopRun, processing: Processing, clock: Clock) -> Self:
        out = copy.copy(self)
        out.stop, out.processing, out.clock = stop, processing, clock
        return out


class AssistantRun(TokenwiseRun):
    """A draft model during one call."""

    is_plain_model = True
    many = MANY

    def __init__(self, model: CachedModel, context: DraftContext, network: torch.nn.Module):
        """Take the `model` on its cache; the others as `TokenwiseRun`."""
        super().__init__(context, network)
        self.model = model
        self.why_eager = getattr(model, "why_eager", self.why_eager)

    @property
    def cached_models(self) -> Sequence[CachedModel]:
        return (self.model,)

    def _first_input(self, rows: Rows) -> tuple[torch.Tensor, list[int]]:
        """Return the input of each row's first step. If it is long, and of several lengths, all but the last token are
        fed here; otherwise the step would compute logits for each of them.
        """
        feed, counts = rows.uncached_tokens(self.model.lengths)
        if feed.shape[1] <= self.many or len(set(counts)) == 1:
            return feed, counts
        with self.clock.time("draft"):
            self.model.feed(feed[:, :-1], [max(count - 1, 0) for count in counts], keep=0)
        return rows.uncached_tokens(self.model.lengths)

    def _last(self, tap: FeatureTap, counts: list[int]) -> torch.Tensor:
        """Return the state in `tap` of each row's last real position, (B, H)."""
        return tap.at(-1 if len(set(counts)) == 1 else on_device(counts, self.model.device) - 1)

    def _logits(self, feed: torch.Tensor, counts: list[int], device: torch.device) -> torch.Tensor:
        with self.clock.time("draft"):
            even = len(set(counts)) == 1
            logits = self.model.feed(feed, counts, keep=1 if even else None)
        if even:
            last = logits[:, -1]
        else:  # a row without a token may use any column, such as −1
            rows = torch.arange(len(counts), device=logits.device)
            last = logits[rows, on_device(counts, logits.device) - 1]
        return fit_vocabulary(last.to(device=device, dtype=torch.float32), self.vocabulary)

    def learn(self, rows: Rows, verified: Verified, accepted: Sequence[int]) -> None:
        valid = verified.selection.valid_prefix_lengths(rows.cached_lengths(), accepted)
        self.model.rollback([min(a, b) for a, b in zip(self.model.lengths, valid, strict=True)])

    def select(self, keep: Sequence[int]) -> None:
        self.model.select(keep)

    def fresh(self, rows: int, limit: int, stop: StopRun, processing: Processing, clock: Clock) -> Self:
        if not isinstance(self.model, RowModel):
            raise NotJoined("a draft on Transformers' cache keeps the row that a call began with")
        out = super().fresh(rows, limit, stop, processing, clock)
        out.model = self.model.fresh(rows, limit)
        return out

    def insert(self, slots: Sequence[int], row_ids: Sequence[int], other: DrafterRun, rows: Sequence[int]) -> None:
        assert (
            isinstance(other, AssistantRun) and isinstance(self.model, RowModel) and isinstance(other.model, RowModel)
        )
        self.model.insert(slots, other.model, rows)


register_drafter(
    "model",
    AssistantDrafter,
    paper="2211.17192",
    summary="A draft model writes one token after the other, for all rows of a batch.",
)
