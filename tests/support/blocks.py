"""Rounds that wait for their verdict, made by hand or at random, and the verdict as the engine comes to it."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from hf_lossy_assist import AcceptanceRule, Draft, RuleRun, Selection, Verdict, Verified
from hf_lossy_assist.batch.randomness import Randomness
from hf_lossy_assist.rules import accept, draw


@dataclass(frozen=True)
class Everything(AcceptanceRule):
    """Accepts whatever was drafted."""

    lossless: ClassVar[bool] = False

    def matches(self, verified):
        return torch.ones_like(verified.tokens, dtype=torch.bool)

    def probability(self, verified):
        return torch.ones(verified.tokens.shape, dtype=verified.logits.dtype)


def draft_of(
    tokens: torch.Tensor, drafted: torch.Tensor, q: torch.Tensor | None = None, sampling: bool = False,
    row_ids: torch.Tensor | None = None, planned: int | None = None,
) -> Draft:  # fmt: skip
    rows = torch.arange(len(tokens)) if row_ids is None else row_ids
    return Draft(tokens, drafted, rows, tokens.shape[1] if planned is None else planned, sampling, q)


def make_round(
    tokens: torch.Tensor, drafted: torch.Tensor, q: torch.Tensor | None, sampling: bool, sent: torch.Tensor | None = None,
    logits: torch.Tensor | None = None, row_ids: torch.Tensor | None = None,
) -> Verified:  # fmt: skip
    """Verify a draft by the target's `logits` (B, γ + 1, V); `sent` of its tokens were sent, by default all."""
    assert logits is not None
    draft = draft_of(tokens, drafted, q, sampling, row_ids)
    return Verified(Selection(draft, drafted if sent is None else sent), logits)


def changed(verified: Verified, **changes: Any) -> Verified:
    """The same round with other tensors: fields of `Verified`, `Selection` or `Draft`, by their names."""
    draft = {name: changes.pop(name) for name in list(changes) if name in Draft.__dataclass_fields__}
    selection = {name: changes.pop(name) for name in list(changes) if name in Selection.__dataclass_fields__}
    if draft:
        selection["draft"] = replace(verified.draft, **draft)
    if selection:
        changes["selection"] = replace(verified.selection, **selection)
    return replace(verified, **changes)


def started(rule: AcceptanceRule, verified: Verified) -> RuleRun:
    """`rule` in a call with empty prompts."""
    rows = int(verified.row_ids.max()) + 1 if len(verified.row_ids) else 0
    return rule.start([torch.zeros(0, dtype=torch.int64)] * rows)


def decide(rule: AcceptanceRule | RuleRun, verified: Verified) -> Verdict:
    """The verdict, with numbers from torch's global generator."""
    return accept(rule if isinstance(rule, RuleRun) else started(rule, verified), verified, Randomness())


def outcome(rule: AcceptanceRule | RuleRun, verified: Verified, seed: int = 7) -> Verdict:
    """The same with coins of a seed."""
    torch.manual_seed(seed)
    return decide(rule, verified)


def same(one: Verdict, other: Verdict) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("accepted", "token", "lossy"))


def greedy_block(tokens: list[list[int]], best: list[list[int]], drafted: list[int], sent: list[int] | None = None):
    """Drafted tokens and the target's choices, one more for each row than tokens."""
    logits = torch.nn.functional.one_hot(torch.tensor(best), 10).float()
    rows = torch.tensor(tokens, dtype=torch.long).reshape(len(best), -1)
    return make_round(
        rows, torch.tensor(drafted), None, False, torch.tensor(drafted if sent is None else sent), logits
    )


def sampling_block(p: torch.Tensor, q: torch.Tensor | None, tokens: torch.Tensor, drafted: torch.Tensor | None = None):
    drafted = torch.full((tokens.shape[0],), tokens.shape[1]) if drafted is None else drafted
    return make_round(tokens, drafted, q, True, drafted, p.log())


def random_block(seed: int, rows: int = 200, gamma: int = 4, size: int = 6) -> Verified:
    torch.manual_seed(seed)
    p, q = torch.randn(rows, gamma + 1, size).mul(2).softmax(-1), torch.randn(rows, gamma, size).mul(2).softmax(-1)
    return sampling_block(p, q, draw(q), torch.randint(0, gamma + 1, (rows,)))
