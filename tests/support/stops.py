"""Shared by several tests."""

import torch

import hf_lossy_assist as hla
from support import tiny


def logits(*laws: list[float]) -> tuple[torch.Tensor]:
    """What a stop gets as `scores`: a tuple whose last entry has the logits of these laws. Probability 0 is logit −inf."""
    return (torch.tensor(laws).log(),)


def answers(stop, *laws: list[float], tokens: list[int] | None = None) -> list[bool]:
    """What `stop`, or a run of it, answers for tokens drawn from these laws, one for each row."""
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
        with hla.stock_stop(model, stop):
            out = model.generate(**inputs, **plain, assistant_model=draft)
    finally:
        hook.remove()
    return torch.equal(out, expected), sent
