"""The target reads a selection: one forward over each row's last token and the drafted tokens that the filter sends."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ..artifacts.features import FeatureSpec
from ..models.hidden_state_hook import HiddenStateHook
from ..round import Draft, Selection, Verified
from .call import Call


def verify(call: Call, selection: Selection) -> tuple[Verified, torch.Tensor]:
    """The target's distributions over the selection, and its raw logits (B, γ + 1, V) float32."""
    rows, draft = call.rows, selection.draft
    last, counts = rows.uncached_tokens(call.target.lengths)  # (B, 1); in the first round perhaps the whole prompt
    sent = [draft.gamma] * len(counts) if selection.sends_all else selection.sent.tolist()
    fed = [count + n for count, n in zip(counts, sent, strict=True)]
    with call.clock.time("target", (len(fed), sum(fed))):
        logits = call.target.feed(torch.cat([last, draft.tokens], dim=1), fed, keep=1 + draft.gamma)
    raw = logits.to(device=rows.ids.device, dtype=torch.float32)
    accepts, spec = None, call.rule.rule.features
    if draft.gamma and spec is not None:  # before processors, which may run the target, too
        with call.clock.time("head"):
            accepts = call.rule.rule.judge(_hidden(call, draft, spec))
    active_positions = None  # all
    if call.processing.runs_callers_code:
        active_positions = rows.active_positions(draft.tokens, selection.sent.tolist())
    with _unheard(call.drafter.taps):
        processed = call.processing(rows.ids, rows.lengths, raw, rows.row_id_list, active_positions)
    return Verified(selection, processed, accepts), raw


@contextmanager
def _unheard(taps: Sequence[HiddenStateHook]) -> Iterator[None]:
    """Within, a logits processor may run a model that the drafter listens to: guidance runs the target."""
    for tap in taps:
        tap.listening = False
    yield
    for tap in taps:
        tap.listening = True


def _hidden(call: Call, draft: Draft, spec: FeatureSpec) -> torch.Tensor:
    """What the rule's head reads of each drafted token, (B, γ, H).

    It comes with forwards that run anyway, but for the draft's own state of the last token, which costs one draft forward.
    """
    gamma, parts = draft.gamma, []
    if spec.reads("draft"):
        assert draft.hidden is not None, "the runner has the drafter keep them"
        parts.append(draft.hidden)
    if spec.reads("target"):
        assert call.rule_tap is not None, "the runner puts it on the target"
        seen = call.rule_tap.latest
        if seen.shape[1] <= gamma:  # the forward left out columns that no row needs
            seen = torch.nn.functional.pad(seen, (0, 0, 0, gamma + 1 - seen.shape[1]))
        first = seen.shape[1] - gamma - (spec.position == "predicting")
        parts.append(seen[:, first : first + gamma])
    return torch.cat([part.to(draft.tokens.device) for part in parts], dim=-1)
