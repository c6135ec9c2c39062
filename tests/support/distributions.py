"""Shared by several tests."""

import itertools
from functools import cache

import torch
from scipy.stats import chisquare
from transformers import LogitsProcessorList

import hf_lossy_assist as hla
from support import tiny


REJECT = 1e-4  # the seeds are fixed, so a test that passes goes on passing

V = 5


class Tables:
    """A random target p and a random draft q over V tokens, each with its own law behind every prefix; some entries are 0."""

    def __init__(self, seed: int, depth: int):
        generator = torch.Generator().manual_seed(seed)

        def table() -> dict[tuple[int, ...], torch.Tensor]:
            out = {}
            for length in range(depth + 1):
                for prefix in itertools.product(range(V), repeat=length):
                    law = torch.rand(V, generator=generator, dtype=torch.float64)
                    law *= torch.rand(V, generator=generator) > 0.25  # as after top-p
                    law[len(out) % V] += 0.1  # and never all zeros
                    out[prefix] = law / law.sum()
            return out

        self.p, self.q = table(), table()


SIZE, NEW = 6, 3  # every text of three tokens is counted: 216 of them

ROWS, CALLS = 4000, 5


def goodness(counts: torch.Tensor, law: torch.Tensor) -> float:
    """The p-value of `counts` under `law`. Texts expected fewer than 5 times are counted together, impossible ones refused."""
    law, total = law / law.sum(), int(counts.sum())
    if counts[law == 0].sum() > 0:
        return 0.0
    rare = law * total < 5
    observed = torch.cat([counts[~rare], counts[rare].sum()[None]]).double()
    expected = torch.cat([law[~rare], law[rare].sum()[None]]) * total
    some = expected > 0
    return float(chisquare(observed[some].numpy(), expected[some].numpy()).pvalue)


@cache
def pair():
    """A target over six tokens, none of which ends a text, and a draft that differs by as much as drafts do.

    In float32, in half the time: how a last bit is rounded turns no test of a law.
    """
    model = tiny.build("llama", vocab_size=SIZE, eos_token_id=None, pad_token_id=0, bos_token_id=None).float()
    return hla.enable(model), tiny.noisy(model, 0.4)


# Short, as every sample pays for its own copy; behind it target and draft are far apart, so that a wrong rule is found soon.
PROMPT = torch.tensor([[3, 4]])


@cache
def target_law(warpers: tuple, target=None) -> torch.Tensor:
    """The law (SIZE³,) of three tokens behind the prompt, from the target's own logits."""
    target = target or pair()[0]
    law, texts = torch.ones(1, dtype=torch.float64), PROMPT
    for _ in range(NEW):
        with torch.no_grad():
            scores = LogitsProcessorList(warpers)(texts, target(texts).logits[:, -1])
        law = (law[:, None] * scores.double().softmax(-1)).flatten()
        texts = torch.cat([texts.repeat_interleave(SIZE, 0), torch.arange(SIZE).repeat(len(texts))[:, None]], dim=1)
    return law


def sample(policy: hla.LossyPolicy, settings: dict, calls: int = CALLS) -> torch.Tensor:
    """How often each of the SIZE³ texts was drawn."""
    target, draft = pair()
    counts = torch.zeros(SIZE**NEW, dtype=torch.long)
    for _ in range(calls):
        texts = target.generate(
            PROMPT, attention_mask=torch.ones_like(PROMPT), do_sample=True, num_return_sequences=ROWS, max_new_tokens=NEW,
            lossy_policy=policy, **{"assistant_model": draft} | settings,
        )[:, -NEW:]  # fmt: skip
        counts += torch.bincount((texts * torch.tensor([SIZE**2, SIZE, 1])).sum(dim=1), minlength=SIZE**NEW)
    return counts
