"""Shared by several tests."""

from collections.abc import Sequence

import torch

import hf_lossy_assist as hla
from support import tiny


def logits(*laws: list[float]) -> tuple[torch.Tensor]:
    """Return the `scores` that a stop gets: a tuple whose last entry has the logits of these laws. Probability 0 is logit −inf."""
    return (torch.tensor(laws).log(),)


def answers(stop, *laws: list[float], tokens: list[int] | None = None) -> list[bool]:
    """Return the answers of `stop`, or a run of it, for tokens drawn from these laws, one for each row."""
    run = stop.start(len(laws)) if isinstance(stop, hla.DraftStop) else stop
    ids = torch.tensor(tokens or [0] * len(laws))[:, None]
    return run.after_token(ids, logits(*laws), rows=range(len(laws))).tolist()


def stock_lengths(stop, kind: str) -> tuple[bool, list[int]]:
    """Transformers' own loop with `stop`: is the text the plain greedy one, and how many tokens each round drafted."""
    model, inputs = tiny.shared("llama"), tiny.prompts((9,))
    plain = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": tiny.NEVER_EMITTED}
    expected, draft, sent = model.generate(**inputs, **plain), tiny.noisy(model, 0.0), []
    if kind != "always":
        draft = tiny.draft_of(model, kind)
    hook = model.register_forward_hook(
        lambda module, args, kwargs, out: sent.append(out.logits.shape[1] - 1), with_kwargs=True
    )
    try:
        with hla.in_transformers_loop(model, stop):
            out = model.generate(**inputs, **plain, assistant_model=draft)
    finally:
        hook.remove()
    return torch.equal(out, expected), sent


ROUNDS, LEAVES = 12, (12, 5, 12, 8)  # rounds of a walk, and how many of them each row drafts in


def walk(stop, numbers: Sequence[int] = (0, 1, 2, 3), order: Sequence[int] = (0, 1, 2, 3)) -> list[list[int]]:
    """Rounds of a call of four rows without models: how much each row drafted in each round, (rows, rounds).

    Row b always sees the same tokens, logits and states, and the same share of its draft is accepted. Its number in the call is
    `numbers[b]`, and the rows stand in the batch in this `order`. A finished row leaves the batch two rounds later.
    """
    torch.manual_seed(1)
    most = stop.longest
    sharpness = torch.rand(4, ROUNDS, most, 1) * 4
    logits, states = torch.randn(4, ROUNDS, most, 12) * sharpness, torch.randn(4, ROUNDS, most, 32)
    tokens = logits.argmax(dim=-1, keepdim=True)
    share = torch.rand(4, ROUNDS) ** torch.tensor([[0.2], [0.5], [1.0], [3.0]])
    run, drafted = stop.start(4), [[0] * ROUNDS for _ in range(4)]
    for i in range(ROUNDS):
        unfinished, present = ([b for b in order if i < LEAVES[b] + later] for later in (0, 2))
        limits = run.begin_round([numbers[b] for b in unfinished])
        assert len(limits) == len(unfinished) and all(0 <= limit <= most for limit in limits), limits
        room = dict.fromkeys(present, 0) | dict(zip(unfinished, limits, strict=True))
        for t in range(max(limits)):
            stops = torch.zeros(len(present), dtype=torch.bool)
            if stop.adaptive:
                rows = [numbers[b] for b in present]
                scores, features = (logits[present, i, t],), states[present, i, t]
                stops = run.after_token(tokens[present, i, t], scores, rows=rows, features=features)
                assert stops.shape == (len(present),) and stops.dtype == torch.bool
            for b, stopped in zip(present, stops.tolist(), strict=True):
                if t < room[b]:
                    drafted[b][i] = t + 1
                    room[b] = t + 1 if stopped else room[b]
            if all(t + 1 >= limit for limit in room.values()):
                break
        sent = [drafted[b][i] for b in unfinished]
        accepted = [int(share[b, i] * (n + 1)) for b, n in zip(unfinished, sent, strict=True)]
        run.observe([numbers[b] for b in unfinished], sent, accepted)
    return drafted


RAGGED = (9, 1, 4, 14)


def greedy_equals(policy, lengths=(9,), kind="often", name="llama", **settings):
    """The output, once its greedy text is the target's own."""
    model = tiny.shared(name)
    out = tiny.assisted(model, tiny.prompts(lengths), tiny.draft_of(model, kind), policy, **settings)
    assert torch.equal(out.sequences, tiny.greedy(model, tiny.prompts(lengths), **settings)), policy
    return out.speculation
