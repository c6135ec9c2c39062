"""Acceptance in Transformers' assisted generation: a logits processor that applies a policy's rule to a whole round."""

import threading
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from ..artifacts.features import FeatureTap
from ..batch.randomness import Randomness
from ..round import Draft, Selection, Verified
from ..rules import RuleRun, Strict, accept
from ..stats.clock import Clock
from ..stats.speculation import Record, RowStats
from ..tensors import refuse_unfit


def process(processors: LogitsProcessorList, text: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Run `processors` at the last positions of `text` (1, length) and the next, (1, Q, V) → (1, Q, V); they may change `logits`."""
    if not len(processors):
        return logits
    first = text.shape[1] - logits.shape[1] + 1
    ends = enumerate(logits.unbind(dim=1), first)
    return torch.stack([processors(text[:, :end], scores) for end, scores in ends], dim=1)


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
        slot = input_ids.shape[1] - self.candidates.shape[1] + self.sent
        if slot == 0:
            self._decide(scores.device)
        token = self.chosen[min(slot, len(self.chosen) - 1)]  # after a rejected token the answer has no effect
        out = torch.full_like(scores, float("-inf"))
        out[:, token] = 0.0
        return out

    def end(self, scores: torch.Tensor, taken: int) -> int:
        """Record the `taken` tokens of the round, write the target's processed logits into `scores` (1, Q, V), and return n."""
        scores.copy_(self.processed)
        planned = self.accepted + 1
        self.stats.record(self.record._replace(taken=min(taken, planned)))
        for _ in range(taken - planned):
            self.stats.record(Record(0, 0, 0, (), 1))
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
            slot = len(self.chosen)
            alone = Selection(
                Draft(self.candidates[:, :0], draft.lengths * 0, draft.row_ids, 0, draft.sampling), draft.lengths * 0
            )
            rest = Verified(alone, self.processed[:, slot : slot + 1])
            self.chosen.append(int(accept(RuleRun(Strict()), rest, self.randomness).token))
        highest = self.processed[0, : len(self.chosen)].amax(dim=-1)
        if not bool(highest.isfinite().all()):
            raise ValueError(
                f"the target model or a logits processor gave NaN or infinite logits, after {self.stats.num_new_tokens} new tokens"
            )

    def _judge(self, draft: Draft, states: torch.Tensor | None) -> torch.Tensor | None:
        """Return which drafted tokens the rule's head accepts, (1, γ) bool; None: the rule has no head."""
        spec = self.rule.rule.features
        if spec is None or draft.gamma == 0:
            return None
        inputs = []
        if spec.reads("draft"):
            assert draft.hidden is not None, "the generator has the draft keep them"
            inputs.append(draft.hidden)
        if spec.reads("target"):
            assert states is not None, "the tap has kept them"
            states = states[:, -self.sent - 1 :].to(draft.tokens.device)
            first = 0 if spec.position == "predicting" else 1
            states = states[:, first : first + self.sent]
            inputs.append(torch.nn.functional.pad(states, (0, 0, 0, draft.gamma - self.sent)))
        with self.clock.time("head"):
            judged = self.rule.rule.judge(torch.cat(inputs, dim=-1))
        return refuse_unfit(judged, draft.tokens.shape, torch.bool, self.rule.rule, "judge")
