"""One generate call, round by round: draft → stop → filter → verify → accept → commit.

p = target, q = draft, γ = drafted tokens of a round, n = accepted (Leviathan et al., huggingface.co/papers/2211.17192).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..artifacts.features import FeatureTap
from ..batch.positions import Positions
from ..batch.processing import Processing
from ..batch.rows import Rows
from ..batch.soundness import refuse_unsound, sound
from ..drafters.base import Drafter, fitted
from ..models.cached import CachedModel
from ..models.cropping import CroppingModel
from ..models.rope import renew, renewing
from ..models.row_model import RowModel
from ..policy.policy import LossyPolicy
from ..round import Block, Verdict
from ..rules import AcceptanceRule, decide
from ..stats.clock import Clock
from ..stats.report import RowStats, SpeculationStats
from ..stops import Fallback, StopRun


FEW = 8  # tokens that a companion may catch up with and logits of all of which are affordable


@dataclass
class Call:
    """Everything one generate call works with; `integration` builds it."""

    rows: Rows
    target: CachedModel
    drafter: Drafter
    stop: StopRun
    rule: AcceptanceRule  # started as well
    policy: LossyPolicy
    processing: Processing
    clock: Clock
    sampling: bool
    positions: Positions
    companion: RowModel | None = None  # that the filter reads
    tap: FeatureTap | None = None  # on the target, where the rule's head reads its hidden states
    streamer: Any = None
    watch: Callable[[Block], None] | None = None  # is shown each round's block after its verdict; for measuring
    fixed_rows: bool = False  # every forward must have all rows of the call, finished ones too
    keep_scores: bool = False
    keep_logits: bool = False
    scores: list[list[torch.Tensor]] = field(default_factory=list)  # of each row: (tokens of a round, V) processed
    logits: list[list[torch.Tensor]] = field(default_factory=list)  # the same, raw

    def __post_init__(self) -> None:
        self.renewing = renewing(self.target, getattr(self.drafter, "model", None), self.companion)


def decode(call: Call) -> SpeculationStats:
    """Write every row to its end. Both models have had their `prefill`."""
    rows, target, drafter = call.rows, call.target, call.drafter
    batch = len(rows.index)
    stats = SpeculationStats([RowStats() for _ in range(batch)], call.stop.settings.longest, call.policy.lossless)
    stats.falls_back = isinstance(call.stop.settings, Fallback)
    call.scores, call.logits = [[] for _ in range(batch)], [[] for _ in range(batch)]

    while rows.unfinished:
        block, raw = opened(call)
        verdict = decide(call.rule, block)
        call.rule.observe(block, verdict)
        accepted = commit(call, block, verdict, raw, stats)
        if call.watch is not None:
            call.watch(block)

        target.rollback(rows.held())
        if call.companion is not None:
            known = block.known(rows.held(), accepted)
            call.companion.rollback([min(*pair) for pair in zip(call.companion.lengths, known, strict=True)])
        drafter.learn(rows, block, accepted)
        rows.check_time()
        drop_finished(call)

    stats.close(call.clock)
    return stats


def opened(call: Call) -> tuple[Block, torch.Tensor]:
    """The first half of a round, draft → stop → filter → verify: a block that waits for its verdict, and the target's raw logits."""
    rows, policy = call.rows, call.policy
    renew(call.renewing, rows, call.clock)
    planned = limits(call)
    block = call.drafter.propose(rows, planned)  # each row until its stop says enough
    block.index, block.planned = rows.order, max(planned)
    if call.companion is not None and block.tokens.shape[1] and policy.filter.observes(len(rows.index)):
        block.companion = observe(call, block)
    block.kept = policy.filter(block)  # how many drafted tokens of each row the target reads
    if block.replaced is not None:  # and not all of them are the draft's
        rows.write(block.tokens)
    return block, verify(call, block)  # (B, γ + 1, V)


def limits(call: Call) -> list[int]:
    """How much each row may draft in the coming round: what its stop plans and its text has room for; finished rows nothing."""
    rows = call.rows
    going = [row for row, finished in zip(rows.index, rows.finished, strict=True) if not finished]
    planned = dict(zip(going, call.stop.begin_round(going), strict=True))
    call.positions.check(rows)
    rooms = call.positions.room(rows, rows.budgets())
    for _, rope in call.renewing:
        rooms = rope.room(rows.held(), rooms)
    return [min(planned.get(row, 0), room) for row, room in zip(rows.index, rooms, strict=True)]


def prefill(model: CachedModel, rows: Rows, clock: Clock) -> None:
    """Run each row's prompt up to its last token, which starts the first round. No logits are needed of it.

    Prompts of one length need no forward of their own: their first block brings them along.
    """
    if model.rope is not None:
        model.rope.begin([length - pad for length, pad in zip(rows.lengths, rows.pads, strict=True)])
    tokens, counts = rows.after(model.lengths)
    if tokens.shape[1] > 1 and (len(set(counts)) > 1 or isinstance(model, CroppingModel)):
        with clock.time("prefill"):
            model.feed(tokens[:, :-1], [c - 1 for c in counts], keep=0)


def observe(call: Call, block: Block) -> torch.Tensor:
    """One companion forward over the drafted block: its laws at each drafted position and the one after, (B, γ + 1, V)."""
    rows, gamma, companion = call.rows, block.tokens.shape[1], call.companion
    assert companion is not None
    with call.clock.time("companion"):
        tokens, counts = rows.after(companion.lengths, gamma)
        if len(set(counts)) > 1 and max(counts) > gamma + FEW:  # it was not asked for a while
            companion.feed(tokens[:, : -gamma - 1], [count - gamma - 1 for count in counts], keep=0)
            tokens, counts = rows.after(companion.lengths, gamma)
        even = len(set(counts)) == 1
        raw = companion.feed(tokens, counts, keep=gamma + 1 if even else None)
        if not even:
            places = (
                torch.tensor(counts, device=raw.device)[:, None]
                - gamma
                - 1
                + torch.arange(gamma + 1, device=raw.device)
            )
            raw = raw.gather(1, places[..., None].expand(-1, -1, raw.shape[-1]))
    assert block.laws is not None
    raw = fitted(raw.to(device=rows.ids.device, dtype=torch.float32), block.laws.shape[-1])
    open_places = rows.open_places(block.tokens, block.drafted.tolist()) if call.processing.runs_callers_code else None
    return call.processing(rows.ids, rows.lengths, raw, rows.index, open_places).softmax(dim=-1)


def verify(call: Call, block: Block) -> torch.Tensor:
    """One target forward over each row's last token and its drafted tokens; fills `block.scores`, returns the raw logits."""
    rows, gamma = call.rows, block.tokens.shape[1]
    last, counts = rows.after(call.target.lengths)  # (B, 1); in the first round perhaps the whole prompt
    assert block.kept is not None
    sent = [gamma] * len(counts) if block.kept is block.drafted else block.kept.tolist()  # `VerifyAll` needs no look
    fed = [count + n for count, n in zip(counts, sent, strict=True)]
    with call.clock.time("target", (len(fed), sum(fed))):
        logits = call.target.feed(torch.cat([last, block.tokens], dim=1), fed, keep=1 + gamma)
    raw = logits.to(device=rows.ids.device, dtype=torch.float32)
    open_places = rows.open_places(block.tokens, block.kept.tolist()) if call.processing.runs_callers_code else None
    block.scores = call.processing(rows.ids, rows.lengths, raw, rows.index, open_places)
    if gamma and call.rule.features is not None:
        with call.clock.time("head"):
            block.judged = call.rule.judge(_states(call, block))
    return raw


def _states(call: Call, block: Block) -> torch.Tensor:
    """What the rule's head reads of each drafted token, (B, γ, H).

    It comes with forwards that run anyway, but for the draft's own state of the last token, which costs one draft forward.
    """
    spec, gamma, parts = call.rule.features, block.tokens.shape[1], []
    assert spec is not None
    if spec.reads("draft"):
        assert block.states is not None
        parts.append(block.states)
    if spec.reads("target"):
        assert call.tap is not None and call.tap.value is not None
        seen = call.tap.value
        if seen.shape[1] <= gamma:  # the forward left out columns that no row needs
            seen = torch.nn.functional.pad(seen, (0, 0, 0, gamma + 1 - seen.shape[1]))
        first = seen.shape[1] - gamma - (spec.position == "predicting")
        parts.append(seen[:, first : first + gamma])
    return torch.cat([part.to(block.tokens.device) for part in parts], dim=-1)


def commit(call: Call, block: Block, verdict: Verdict, raw: torch.Tensor, stats: SpeculationStats) -> list[int]:
    """Append what was accepted, stop each row at the first token that ends it, stream, count; returns n of each row."""
    rows, gamma = call.rows, block.tokens.shape[1]
    rows.write(verdict.token[:, None], verdict.accepted)
    assert block.kept is not None and block.scores is not None
    good = sound(block, getattr(call.drafter, "peaks", None))
    head = [verdict.accepted, verdict.token, block.drafted, block.kept, *good.values()]
    # The one look at the device of a round.
    unseen = [] if verdict.unseen is None else [verdict.unseen.long()]
    table = torch.cat([torch.stack(head, dim=1), block.tokens, verdict.lossy.long(), *unseen], dim=1).tolist()

    before, accepted = list(rows.lengths), []
    active = [b for b, finished in enumerate(rows.finished) if not finished]
    for b, (n, token, drafted, kept, *rest) in enumerate(table):
        accepted.append(n)
        if rows.finished[b]:
            continue
        row, sound_places, rest = rows.index[b], rest[: len(good)], rest[len(good) :]
        new, scores = rest[:n] + [token], block.scores[b]
        taken = rows.commit(b, new, scores)
        refuse_unsound(dict(zip(good, sound_places, strict=True)), taken, gamma, row, before[b] - rows.width)
        stats.rows[row].record(drafted, kept, n, rest[gamma : 2 * gamma], taken, rest[2 * gamma :])
        if call.keep_scores:
            call.scores[row].append(scores[:taken].clone())
        if call.keep_logits:
            call.logits[row].append(raw[b, :taken].clone())
        if call.streamer is not None:
            for t in new[:taken]:
                call.streamer.put(torch.tensor([t]))

    sent = [table[b][3] for b in active]
    call.stop.observe([rows.index[b] for b in active], sent, [accepted[b] for b in active])
    return accepted


def drop_finished(call: Call) -> None:
    """Take finished rows out of the batch once they are a quarter of it: the copy of the caches then pays."""
    rows = call.rows
    keep = [b for b, finished in enumerate(rows.finished) if not finished]
    if call.fixed_rows:
        return
    if keep and 4 * (len(rows.finished) - len(keep)) >= len(rows.finished):
        rows.select(keep)
        call.target.select(keep)
        call.drafter.select(keep)
        if call.companion is not None:
            call.companion.select(keep)


def new_tokens_first(kept: Sequence[Sequence[torch.Tensor]], length: int) -> tuple[torch.Tensor, ...]:
    """Each row's scores as `generate` returns them: one (B, V) for each new token, zeros where a row had ended."""
    rows = [torch.cat(list(parts)) for parts in kept]
    full = torch.stack([torch.nn.functional.pad(r, (0, 0, 0, length - r.shape[0])) for r in rows])  # (B, length, V)
    return tuple(full.unbind(dim=1))
