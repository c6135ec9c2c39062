"""The loop of lossy methods in greedy decoding on one prompt, slowly: plain forwards over the whole text, and no cache."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_lossy_assist import RowStats


CORRECTION, BONUS = 2, 3  # places in SOURCES; 1 is lossy, 0 a draft's token


def texts(out: Any, width: int) -> list[list[int]]:
    """The new tokens of each row, without the padding behind its end."""
    rows = zip(out.sequences, out.speculation.rows, strict=True)
    return [row[width : width + stats.num_new_tokens].tolist() for row, stats in rows]


def assert_same(rows: Sequence[RowStats], expected: Sequence[RowStats]) -> None:
    """Compare the statistics of rows: equal counts, and overshoots up to the rounding of the two ways to compute logits."""
    none = {"overshoot_sum": 0.0, "overshoot_max": 0.0}
    assert [replace(row, **none) for row in rows] == [replace(row, **none) for row in expected]
    for row, other in zip(rows, expected, strict=True):
        for name in none:
            assert getattr(row, name) == pytest.approx(getattr(other, name), rel=1e-3)


@torch.no_grad()
def write(
    target: Any, draft: Any, prompt: torch.Tensor, eos: int, cap: int, new: int,
    accept: Callable[[list[int], list[int], torch.Tensor], int], doubt: Callable[[torch.Tensor, int, int], bool] = lambda *_: False,
) -> tuple[list[int], RowStats]:  # fmt: skip
    """Return the new tokens behind a prompt (1, length), and their statistics.

    A draft ends at the cap, the room, an end token, or where `doubt(state, round, place)` says so. `accept(drafted, the target's
    choices, ids)` says how many of its tokens stay; the target's next token follows.
    """
    text, stats = prompt, RowStats()
    while stats.num_new_tokens < new:
        room, drafted = min(cap, new - stats.num_new_tokens - 1), []
        while len(drafted) < room:
            ids = torch.cat([text, torch.tensor([drafted]).long()], dim=1)
            out = draft(ids, output_hidden_states=True, use_cache=False)
            best = out.logits[0, -1].topk(2)
            assert best.values[0] - best.values[1] > 1e-5, "the draft is undecided"
            drafted.append(int(best.indices[0]))
            if doubt(out.hidden_states[-1][0, -1], stats.num_spec_steps, len(drafted) - 1) or drafted[-1] == eos:
                break
        ids = torch.cat([text, torch.tensor([drafted]).long()], dim=1)
        logits = target(ids, use_cache=False).logits[0, text.shape[1] - 1 :].float()
        best = logits.topk(2)
        assert (best.values[:, 0] - best.values[:, 1]).min() > 1e-5, "the target is undecided"
        choices = best.indices[:, 0].tolist()
        accepted = drafted[: accept(drafted, choices, ids)]
        lossy = [int(token != choice) for token, choice in zip(accepted, choices, strict=False)]
        stats.num_spec_steps += 1
        stats.num_plain_steps += not drafted
        stats.num_draft_tokens += len(drafted)
        stats.num_accepted_draft_tokens += len(accepted)
        stats.num_lossy_accepts += sum(lossy)
        ratios = [1 / float(logits[i].softmax(dim=-1)[accepted[i]]) for i, differs in enumerate(lossy) if differs]
        stats.overshoot_sum += sum(ratios)
        stats.overshoot_max = max([stats.overshoot_max, *ratios])
        stats.steps[len(drafted), len(accepted)] += 1
        stats.lossy_by_position.update(dict(enumerate(lossy)))
        stats.token_sources += lossy
        if not (accepted and accepted[-1] == eos):
            stats.token_sources.append(BONUS if len(accepted) == len(drafted) else CORRECTION)
            accepted = [*accepted, choices[len(accepted)]]
        stats.num_new_tokens += len(accepted)
        text = torch.cat([text, torch.tensor([accepted])], dim=1)
        if accepted[-1] == eos:
            break
    return text[0, prompt.shape[1] :].tolist(), stats
