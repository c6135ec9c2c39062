"""Acceptance in Transformers' assisted generation: a policy's rule over a whole round, and rules without a head as logits processors."""

import threading
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from ..artifacts.features import FeatureTap
from ..batch.randomness import Randomness
from ..round import Draft, Selection, Verified
from ..rules import AcceptanceRule, RuleRun, Strict, accept
from ..rules.base import accepted_by, refuse_unfit
from ..rules.pointwise import Pointwise
from ..stats.clock import Clock
from ..stats.speculation import Record, RowStats
from ..validation import shown


def process(processors: LogitsProcessorList, text: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Run `processors` at the last positions of `text` (1, length) and the next, (1, Q, V) → (1, Q, V); they may change `logits`."""
    if not len(processors):
        return logits
    first = text.shape[1] - logits.shape[1] + 1
    places = enumerate(logits.unbind(dim=1), first)
    return torch.stack([processors(text[:, :end], scores) for end, scores in places], dim=1)


class AcceptanceProcessor(LogitsProcessor):
    """A processor that applies a rule to a whole round, in place of the call's processors.

    The loop processes a round's positions one by one. At the first, this runs `processors` at all positions, and the rule on the round. It
    then gives the token that each position commits all probability, so that the loop commits the rule's decision.

    Args:
        rule: the run of the call's rule.
        processors: the call's.
        target: hooked while it reads a round; only forwards of the call's thread count.
        tap: records the target's hidden states for the rule's head, or None.
        clock: shared with the generator.
        stats: of the call's only row.
    """

    def __init__(
        self,
        rule: RuleRun,
        processors: LogitsProcessorList,
        target: PreTrainedModel,
        tap: FeatureTap | None,
        clock: Clock,
        stats: RowStats,
    ):
        self.rule, self.processors, self.target, self.tap = rule, processors, target, tap
        self.clock, self.stats, self.randomness = clock, stats, Randomness()
        self.reading = ExitStack()  # open while the target reads a round

    def begin(self, candidates: torch.Tensor, selection: Selection, sent: int) -> None:
        """Begin a round with the text and `sent` candidates, (1, length + sent), before the target reads it."""
        self.candidates, self.selection, self.sent = candidates, selection, sent
        self.chosen: list[int] = []
        fed = sent + 1 if self.stats.num_spec_steps else candidates.shape[1]
        if self.tap is not None:
            self.reading.enter_context(self.tap)
        self.reading.enter_context(self.clock.time("target", (1, fed)))
        self.reading.callback(self.target.register_forward_hook(partial(self._take, threading.get_ident())).remove)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.Tensor:
        """Return scores (1, V) in which one token is certain."""
        place = input_ids.shape[1] - self.candidates.shape[1] + self.sent
        if place == 0:
            self._decide(scores.device)
        token = self.chosen[min(place, len(self.chosen) - 1)]  # after a rejected token the answer has no effect
        out = torch.full_like(scores, float("-inf"))
        out[:, token] = 0.0
        return out

    def end(self, scores: torch.Tensor, taken: int) -> int:
        """Record the `taken` tokens of the round, write the target's processed logits into `scores` (1, Q, V), and return n."""
        scores.copy_(self.processed)
        planned = self.accepted + 1
        self.stats.record(*self.record._replace(taken=min(taken, planned)))
        for _ in range(taken - planned):
            self.stats.record(0, 0, 0, (), 1)
        return self.accepted

    def _take(self, thread: int, module: torch.nn.Module, args: object, output: Any) -> None:
        """Take the raw logits (1, Q, V) and the states of the target's forward, and end the hooks."""
        if threading.get_ident() == thread:
            self.raw, self.states = output.logits, None if self.tap is None else self.tap.latest
            self.reading.close()

    def _decide(self, device: torch.device) -> None:
        selection, sent, draft = self.selection, self.sent, self.selection.draft
        # A copy, since the loop overwrites the logits with the answers.
        raw = self.raw[:, -sent - 1 :].to(device, torch.float32, copy=True)
        accepts = self._judge(draft, self.states)
        del self.raw, self.states
        self.processed = process(self.processors, self.candidates, raw)
        logits = torch.nn.functional.pad(self.processed, (0, 0, 0, draft.gamma - sent))
        self.verified = verified = Verified(selection, logits, accepts)
        verdict = accept(self.rule, verified, self.randomness)
        n, token = int(verdict.accepted), int(verdict.token)
        drafted, lossy = draft.tokens[0].tolist(), verdict.lossy[0].long().tolist()
        unchecked = [] if verdict.unchecked is None else verdict.unchecked[0].long().tolist()
        overshoot = () if verdict.overshoot is None else verdict.overshoot[0].tolist()
        self.accepted, self.record = n, Record(int(draft.lengths), sent, n, lossy, n + 1, unchecked, overshoot)
        self.chosen = [*drafted[:n], token]
        # If the correction equals the rejected token, the loop takes it for accepted and goes on: append the target's tokens.
        while len(self.chosen) <= sent and self.chosen[-1] == drafted[len(self.chosen) - 1]:
            place = len(self.chosen)
            alone = Selection(
                Draft(self.candidates[:, :0], draft.lengths * 0, draft.row_ids, 0, draft.sampling), draft.lengths * 0
            )
            behind = Verified(alone, self.processed[:, place : place + 1])
            self.chosen.append(int(accept(RuleRun(Strict()), behind, self.randomness).token))
        places = self.processed[0, : len(self.chosen)].amax(dim=-1)
        if not bool(places.isfinite().all()):
            raise ValueError(
                f"the target model or a logits processor gave NaN or infinite logits, after {self.stats.num_new_tokens} new tokens"
            )

    def _judge(self, draft: Draft, states: torch.Tensor | None) -> torch.Tensor | None:
        """Return which drafted tokens the rule's head accepts, (1, γ) bool; None: the rule has no head."""
        spec = self.rule.rule.features
        if spec is None or draft.gamma == 0:
            return None
        parts = []
        if spec.reads("draft"):
            assert draft.hidden is not None, "the generator has the draft keep them"
            parts.append(draft.hidden)
        if spec.reads("target"):
            assert states is not None, "the tap has kept them"
            states = states[:, -self.sent - 1 :].to(draft.tokens.device)
            first = 0 if spec.position == "predicting" else 1
            states = states[:, first : first + self.sent]
            parts.append(torch.nn.functional.pad(states, (0, 0, 0, draft.gamma - self.sent)))
        with self.clock.time("head"):
            judged = self.rule.rule.judge(torch.cat(parts, dim=-1))
        return refuse_unfit(judged, draft.tokens.shape, torch.bool, self.rule.rule, "judge")


class StockRule(LogitsProcessor):
    """A rule without a head as a logits processor for Transformers' unmodified loop:
    `model.generate(**inputs, assistant_model=draft, logits_processor=LogitsProcessorList([StockRule(Typical())]))`.

    That loop runs the processors on the draft's scores and then, with the same prefixes, on the target's, when both distributions are known.
    In greedy decoding, the target's scores are changed so that the drafted token is their argmax where the rule accepts it. In sampling, they
    become log λ, with λ = q·a + (1 − Σ q·a)·r the rule's output distribution: the loop's strict acceptance of λ is equivalent to the rule
    (`Pointwise.output_distribution`). The loop returns these scores.

    Sampling is exact at temperature 1 without top-k, top-p and other warpers, which Transformers applies after the caller's processors:
    pass `temperature=1.0, top_k=0, top_p=1.0`. Neutral: the rule's neutral value.

    Args:
        rule (`Pointwise`): a rule that judges each drafted token independently of the others.
        do_sample: as in the call.

    Raises: `ValueError` without a draft model that has the target's vocabulary. Use an object for one call at a time.
    """

    def __init__(self, rule: AcceptanceRule, do_sample: bool = False):
        if not isinstance(rule, Pointwise):
            name = type(rule).__name__
            raise TypeError(
                f"StockRule: expected a rule that judges each token by itself, such as Typical(), got {name}: use lossy_policy={name}(…)"
            )
        if not isinstance(do_sample, bool):
            raise TypeError(f"StockRule.do_sample: expected True or False, got {shown(do_sample)}")
        rule.check_mode(do_sample)
        self.rule, self.do_sample = rule, do_sample
        self._drafts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # prefix and scores of the draft, by length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.Tensor:
        """Return the draft's scores unchanged and the target's changed; (1, length), (1, V) → (1, V)."""
        if input_ids.shape[0] != 1:
            raise ValueError(f"StockRule: the stock assisted loop has one row, this call has {input_ids.shape[0]}")
        prefix, drafted = self._drafts.pop(input_ids.shape[1], (None, None))
        if prefix is None or drafted is None or not torch.equal(prefix, input_ids.to(prefix.device)):
            finite = scores[scores.isfinite()]
            if bool((finite == finite[:1]).all()):
                raise ValueError(
                    "StockRule: these drafts have no distribution (prompt lookup): use lossy_policy=…, or a draft model"
                )
            self._drafts[input_ids.shape[1]] = (input_ids.clone(), scores.clone())
            return scores
        if drafted.shape != scores.shape:
            raise ValueError(
                f"StockRule: the draft has {drafted.shape[1]} token ids, the target {scores.shape[1]}: it needs a draft model with "
                "the target's vocabulary"
            )
        logits, drafted = scores.float(), drafted.to(scores.device, torch.float32)
        if self.do_sample:
            return self.rule.output_distribution(logits, drafted.softmax(dim=-1)).log()
        return logits.scatter(1, self._choice(logits, drafted)[:, None], logits.amax(dim=1, keepdim=True) + 1.0)

    def _choice(self, scores: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
        """Return the token that this position emits in greedy decoding, (1,)."""
        token = drafted.argmax(dim=-1)
        probs, one = drafted.softmax(dim=-1)[:, None], torch.ones_like(token)
        draft = Draft(token[:, None], one, torch.zeros_like(token), planned=1, sampling=False, probs=probs)
        verified = Verified(Selection(draft, one), scores[:, None].expand(-1, 2, -1))
        accepts = accepted_by(RuleRun(self.rule), verified, None)[:, 0]
        return torch.where(accepts, token, self.rule.choice(verified, torch.zeros_like(token)))
