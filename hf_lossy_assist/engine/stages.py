"""The stages of a round but for acceptance: the drafter proposes, the policy's filter selects, the target verifies;
the accepted tokens are committed."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ..artifacts.features import FeatureSpec
from ..drafters.base import fit_vocabulary, validate_draft
from ..round import Decisions, Draft, Selection, Verdict, Verified
from ..rules.acceptance import draw_coins, prefix
from ..stats.speculation import Record, SpeculationStats
from ..tensors import refuse_unfit
from ..validation import shown
from .call import Call, TokenLogprobs


MAX_CATCH_UP = 8  # a companion that lags further behind is prefilled first, without logits
MODELS = ("target", "draft", "companion")  # models whose logits are checked for NaN and infinity
COUNTS = 4 + len(MODELS)  # columns of `pack_round` before the drafted tokens


def propose(call: Call, limits: Sequence[int]) -> Draft:
    """Draft up to `limits[b]` tokens for row b, and write them after its text.

    Raises: `ValueError` or `TypeError`, one line, for a draft that does not fit the rows or the target.
    """
    draft = call.drafter.propose(call.rows, limits, call.randomness)
    if not call.drafter.skip_validation:
        name = type(call.drafter).__name__
        draft = validate_draft(draft, limits, call.vocabulary, call.rows.row_ids, name)
        # Tokens without probs count as certain in both modes; with probs, an argmax must not pass for a sample, nor a
        # sample for an argmax.
        if draft.probs is not None and draft.sampling != call.sampling:
            raise ValueError(
                f"{name}.propose: sampling: expected {call.sampling}, as this call decodes (DraftContext.sampling), "
                f"got {shown(draft.sampling)}"
            )
        draft = replace(draft, sampling=call.sampling)
    call.rows.write(draft.tokens)
    unprocessed = call.drafter.may_forbid or not call.drafter.gives_probs
    if draft.gamma and not call.rule.rule.lossless and unprocessed and call.processing.may_forbid:
        return _cut_forbidden(call, draft)
    return draft


def _cut_forbidden(call: Call, draft: Draft) -> Draft:
    """Cut each draft before the first token that a logits processor forbids, since a lossy rule might accept it."""
    rows = call.rows
    flat = torch.zeros(*draft.tokens.shape, call.vocabulary, device=rows.ids.device)
    scores = call.processing(rows.shown_ids, rows.lengths, flat, rows.row_id_list)
    allowed = scores.gather(2, draft.tokens[..., None])[..., 0] > float("-inf")
    lengths = torch.minimum(draft.lengths, allowed.long().cumprod(dim=1).sum(dim=1))
    return replace(draft, lengths=lengths, counts=None)


def select(call: Call, draft: Draft) -> Selection:
    """Return the tokens that the policy's filter sends to the target."""
    companion, rows = None, len(call.rows.row_id_list)
    if call.companion is not None and draft.gamma and call.policy.filter.reads_companion(rows):
        companion = companion_probs(call, draft)
    selection = call.policy.filter.select(draft, companion, call.randomness.for_filters())
    sent = getattr(selection, "sent", selection)
    refuse_unfit(sent, draft.lengths.shape, torch.int64, call.policy.filter, "select: Selection.sent")
    if selection.replaced is not None:  # the filter replaced some tokens
        call.rows.write(selection.draft.tokens)
    return selection


def companion_probs(call: Call, draft: Draft) -> torch.Tensor:
    """Run the companion over the draft; return its distributions at each drafted position and the next, (B, γ + 1, V)
    float32."""
    rows, gamma, companion = call.rows, draft.gamma, call.companion
    assert companion is not None, "the filter has one"
    with call.clock.time("companion"):
        tokens, counts = rows.uncached_tokens(companion.lengths, gamma)
        if len(set(counts)) > 1 and max(counts) > gamma + MAX_CATCH_UP:  # it has skipped some rounds
            companion.feed(tokens[:, : -gamma - 1], [count - gamma - 1 for count in counts], keep=0)
            tokens, counts = rows.uncached_tokens(companion.lengths, gamma)
        even = len(set(counts)) == 1
        raw = companion.feed(tokens, counts, keep=gamma + 1 if even else None)
        if not even:
            ends = torch.tensor(counts, device=raw.device)[:, None]
            positions = ends - gamma - 1 + torch.arange(gamma + 1, device=raw.device)
            raw = raw.gather(1, positions[..., None].expand(-1, -1, raw.shape[-1]))
    vocabulary = raw.shape[-1] if draft.probs is None else draft.probs.shape[-1]
    raw = fit_vocabulary(raw.to(device=rows.ids.device, dtype=torch.float32), vocabulary)
    return call.processing(rows.shown_ids, rows.lengths, raw, rows.row_id_list).softmax(dim=-1)


def verify(call: Call, selection: Selection) -> tuple[Verified, torch.Tensor]:
    """Run the target over each row's last token and the sent tokens;
    also return its raw logits (B, γ + 1, V) float32."""
    rows, draft = call.rows, selection.draft
    last, counts = rows.uncached_tokens(call.target.lengths)  # (B, 1); in the first round possibly the whole prompt
    sent = _sent(selection)
    fed = [count + n for count, n in zip(counts, sent, strict=True)]
    with call.clock.time("target", (len(fed), sum(fed))):
        logits = call.target.feed(torch.cat([last, draft.tokens], dim=1), fed, keep=1 + draft.gamma)
    raw = logits.to(device=rows.ids.device, dtype=torch.float32)
    accepts, spec = None, call.rule.rule.features
    if draft.gamma and spec is not None:  # before the processors, which may run the target again
        with call.clock.time("head"):
            judged = call.rule.rule.judge(_head_inputs(call, draft, spec))
            accepts = refuse_unfit(judged, draft.tokens.shape, torch.bool, call.rule.rule, "judge")
    for tap in call.drafter.taps:  # a guidance processor runs the target again
        tap.listening = False
    if call.processing.runs_callers_code:
        verified = _decide_in_order(call, Verified(selection, raw, accepts))
    else:
        process = call.processing
        processed = raw if process.is_empty else process(rows.shown_ids, rows.lengths, raw, rows.row_id_list)
        verified = Verified(selection, processed, accepts)
    for tap in call.drafter.taps:
        tap.listening = True
    return verified, raw


def _sent(selection: Selection) -> list[int]:
    """Return how many drafted tokens of each row the target reads.
    Off the CPU all of them: unequal lengths would need an upload."""
    draft = selection.draft
    if not selection.sends_all or selection.sent.device.type == "cpu":
        return selection.sent.tolist()
    return [draft.gamma] * len(draft.row_ids)


def _decide_in_order(call: Call, verified: Verified) -> Verified:
    """Process `verified.logits`, and decide, one position of a text after another, while the text goes on.

    The caller's processors and criteria thus see, for each text, the calls of `generate`: none after a rejection or the
    end of the text.
    """
    rows, run, sent = call.rows, call.rule, verified.sent.tolist()
    coins = draw_coins(run, verified, call.randomness)
    verified = replace(verified, logits=verified.logits.clone())
    accepted, lossy = (torch.zeros_like(verified.tokens, dtype=torch.bool) for _ in range(2))
    going = [b for b, finished in enumerate(rows.finished) if not finished]
    length = 0
    while going:
        length = max(length, min(rows.lengths[b] for b in going))
        here = [b for b in going if rows.lengths[b] <= length]
        offsets = [length - rows.lengths[b] for b in here]
        scores, forbidden = call.processing.step(
            rows.shown_ids, rows.lengths, rows.row_id_list, length, here, verified.logits[here, offsets]
        )
        verified.logits[here, offsets] = scores
        length += 1
        for b, i, never in zip(here, offsets, forbidden.tolist(), strict=True):
            if i < sent[b] and not never:
                first = i if run.rule.scope == "position" else 0
                row_coins = None if coins is None else coins[b : b + 1, first : i + 1]
                takes, differs = prefix(run, verified.part(b, first, i + 1), row_coins)
                accepted[b, i], lossy[b, i] = takes[0, -1], differs[0, -1]
            if i == sent[b] or not accepted[b, i] or rows.ends_at(b, length, verified.logits[b]):
                going.remove(b)
    return replace(verified, decisions=Decisions(coins, accepted, lossy))


def _head_inputs(call: Call, draft: Draft, spec: FeatureSpec) -> torch.Tensor:
    """Collect the hidden states that the rule's head reads at each drafted token, (B, γ, H).

    They come from forwards that run anyway, except the draft's state of the last token, which costs one draft forward.
    """
    gamma, inputs = draft.gamma, []
    if spec.reads("draft"):
        assert draft.hidden is not None, "the runner has the drafter keep them"
        inputs.append(draft.hidden)
    if spec.reads("target"):
        assert call.rule_tap is not None, "the runner puts it on the target"
        states = call.rule_tap.latest
        if states.shape[1] <= gamma:  # the forward omitted columns that no row needs
            states = torch.nn.functional.pad(states, (0, 0, 0, gamma + 1 - states.shape[1]))
        first = states.shape[1] - gamma - (spec.position == "predicting")
        inputs.append(states[:, first : first + gamma])
    return torch.cat([piece.to(draft.tokens.device) for piece in inputs], dim=-1)


def commit(call: Call, verified: Verified, verdict: Verdict, raw: torch.Tensor, stats: SpeculationStats) -> list[int]:
    """Append the accepted tokens, truncate each row at its end, stream, count; return n of each row."""
    call.rows.write(verdict.token[:, None], verdict.accepted)
    table = pack_round(verified, verdict).tolist()  # the only device sync, unless the filter or the stop needs one
    return apply_round(call, table, stats, verified.logits, raw)


def pack_round(verified: Verified, verdict: Verdict) -> torch.Tensor:
    """Pack everything that the host needs from a round into one tensor, (B, 7 + 3γ) int64, or (B, 7 + 4γ) for lossy
    rules.

    Columns: n; the token after the accepted ones; number of drafted tokens; number of sent tokens; for each of
    `MODELS`, the number of leading positions with valid logits; then γ drafted tokens, γ lossy flags, γ unchecked flags
    and, for lossy rules, the bits of γ overshoots (float32).
    """
    draft, companion = verified.draft, verified.selection.companion
    slots = torch.arange(draft.gamma + 1, device=verified.logits.device)
    beyond = slots[: draft.gamma] >= draft.lengths[:, None]
    everywhere = torch.full_like(verdict.accepted, draft.gamma + 1)
    finite = [
        _finite_places(verified.logits.amax(dim=-1), slots > verified.sent[:, None]),
        everywhere if draft.validity is None else _finite_places(draft.validity, beyond),
        everywhere if companion is None else _finite_places(companion[:, : draft.gamma, 0], beyond),
    ]
    counts = torch.stack([verdict.accepted, verdict.token, verified.drafted, verified.sent, *finite], dim=1)
    unchecked = torch.zeros_like(verdict.lossy) if verdict.unchecked is None else verdict.unchecked
    columns = [counts, verified.tokens, verdict.lossy.long(), unchecked.long()]
    if verdict.overshoot is not None:
        columns.append(verdict.overshoot.contiguous().view(torch.int32).long())
    return torch.cat(columns, dim=1)


def _floats(bits: Sequence[int]) -> tuple[float, ...]:
    """Return the float32 numbers of which these are the bits."""
    return struct.unpack(f"{len(bits)}f", struct.pack(f"{len(bits)}i", *bits))


def _finite_places(x: torch.Tensor, unread: torch.Tensor) -> torch.Tensor:
    """Count each row's leading positions that are finite or unread, (B,) int64."""
    # x − x is NaN for NaN and ±inf: the test of `isfinite` in half as many operations.
    return (((x - x) == 0) | unread).long().cumprod(dim=1).sum(dim=1)


def apply_round(
    call: Call,
    table: Sequence[Sequence[int]],
    stats: SpeculationStats,
    scores: torch.Tensor | None = None,
    raw: torch.Tensor | None = None,
) -> list[int]:
    """Append a round to the text, given the rows of `pack_round` as lists; return n of each row.

    `scores` and `raw` (B, γ + 1, V): the target's processed and raw logits, if the call keeps them or a criterion reads
    them.
    Raises: `ValueError` if a committed token was taken from invalid logits.
    """
    rows, num_columns = call.rows, 3 if call.rule.rule.lossless else 4
    gamma = (len(table[0]) - COUNTS) // num_columns
    before = list(rows.lengths)
    active, committed = [b for b, finished in enumerate(rows.finished) if not finished], dict[int, list[int]]()
    for b in active:
        n, token, drafted, sent, *finite = table[b][:COUNTS]
        tokens, lossy, unchecked, *bits = (table[b][COUNTS + i * gamma :][:gamma] for i in range(num_columns))
        row, new = rows.row_id_list[b], [*tokens[:n], token]
        taken = rows.commit(b, new, None if scores is None else scores[b])
        for model, slot in zip(MODELS, finite, strict=True):
            # Invalid logits beyond the committed tokens are no error: after a rejected token, a grammar may forbid
            # every token.
            if slot < min(taken, gamma + (model == "target")):
                source = f"the {model} model gave NaN or infinite logits"
                if model == "target" and raw is not None and bool(raw[b, slot].amax().isfinite()):
                    source = "logits_processor: no token is left, or scores are NaN or infinite,"
                raise ValueError(
                    f"{source} in {call.name_row(row)}, after {before[b] - rows.prompt_lengths[b] + slot} new tokens"
                )
        committed[b] = new[:taken]
        record = Record(drafted, sent, n, lossy, taken, unchecked, _floats(bits[0]) if any(lossy) else ())
        stats.record(row, record, before[b] if rows.continues else None)
        if call.keep_scores and scores is not None:
            call.scores[row].append(scores[b, :taken].clone())
        if call.keep_logits and raw is not None:
            call.logits[row].append(raw[b, :taken].clone())
        if call.streamer is not None:
            for t in new[:taken]:
                call.streamer.put(torch.tensor([t]))

    if call.logprobs and raw is not None:
        _add_logprobs(call, committed, raw)
    accepted = [line[0] for line in table]
    call.stop.observe(
        [rows.row_id_list[b] for b in active], [table[b][3] for b in active], [accepted[b] for b in active]
    )
    return accepted


def _add_logprobs(call: Call, committed: Mapping[int, Sequence[int]], raw: torch.Tensor) -> None:
    """Append the log-probabilities of a round's tokens for rows that request them.

    `committed`: the tokens of each row that was not finished. `raw` (B, γ + 1, V): the target's logits.
    """
    ids = call.rows.row_id_list
    wanted = {b: call.logprobs[ids[b]] for b in committed if ids[b] in call.logprobs}
    if not wanted:
        return
    committed_slots = [(b, slot, token) for b in wanted for slot, token in enumerate(committed[b])]
    index = torch.tensor(committed_slots, device=raw.device)
    logp = raw[index[:, 0], index[:, 1]].float().log_softmax(dim=-1)  # (tokens, V)
    most = min(max(row.alternatives for row in wanted.values()), logp.shape[-1])
    values, tokens = logp.topk(most, dim=-1)
    chosen = logp.gather(1, index[:, 2:])[:, 0].tolist()
    for (b, _, _), p, likely, logps in zip(committed_slots, chosen, tokens.tolist(), values.tolist(), strict=True):
        few = wanted[b].alternatives
        wanted[b].tokens.append(TokenLogprobs(p, list(zip(likely[:few], logps[:few], strict=True))))


def new_tokens_first(
    rounds: Sequence[Sequence[torch.Tensor]], length: int, ends: Sequence[int]
) -> tuple[torch.Tensor, ...]:
    """Return scores in the format of `generate`: one (B, V) for each new token, zeros after a row's end, its number of
    new tokens."""
    rows = [torch.cat(list(pieces))[:end] for pieces, end in zip(rounds, ends, strict=True)]
    full = torch.stack([torch.nn.functional.pad(r, (0, 0, 0, length - r.shape[0])) for r in rows])  # (B, length, V)
    return tuple(full.unbind(dim=1))
