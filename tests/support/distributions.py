"""Shared by several tests."""

import itertools
from functools import cache

import torch
from scipy.stats import chisquare
from transformers import LogitsProcessorList

import hf_lossy_assist as hla
from hf_lossy_assist import AcceptanceRule
from support import tiny
from support.blocks import sampling_block


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


def first_two(
    rule: AcceptanceRule, tables: Tables, gamma: int, certain: bool = False, before: tuple = ()
) -> torch.Tensor:
    """The law (V, V) of the first two tokens that rounds of γ drafted tokens emit behind `before`.

    Every draft is enumerated; each coin is taken both ways by its probability. A round that emits one token only leaves the
    second one to the next round, which is enumerated in the same way (`first`).
    """
    law = torch.zeros(V, V, dtype=torch.float64)
    drafts, weights, accept, emit = one_round(rule, tables, gamma, certain, before)
    seconds = torch.stack([first(rule, tables, gamma, certain, (*before, token)) for token in range(V)])
    for x, weight, a, after in zip(drafts, weights, accept, emit, strict=True):
        reached = weight
        for n in range(gamma + 1):
            ends = reached * (1 - a[n]) if n < gamma else reached  # the n-th position is where this round stops
            if n == 0:
                law += ends * after[0][:, None] * seconds
            elif n == 1:
                law[x[0]] += ends * after[1]
            else:
                law[x[0], x[1]] += ends
            reached = reached * a[n] if n < gamma else reached
    return law


def first(rule: AcceptanceRule, tables: Tables, gamma: int, certain: bool, before: tuple) -> torch.Tensor:
    """The law (V,) of the first token that a round emits behind `before`."""
    law = torch.zeros(V, dtype=torch.float64)
    for x, weight, a, after in zip(*one_round(rule, tables, gamma, certain, before), strict=True):
        law[x[0]] += weight * a[0]
        law += weight * (1 - a[0]) * after[0]
    return law


def one_round(rule: AcceptanceRule, tables: Tables, gamma: int, certain: bool, before: tuple):
    """Every draft x, its probability, a of each position, and r of each position with the bonus law behind them."""
    drafts = list(itertools.product(range(V), repeat=gamma))
    q = torch.stack([torch.stack([tables.q[before + x[:i]] for i in range(gamma)]) for x in drafts])
    p = torch.stack([torch.stack([tables.p[before + x[:i]] for i in range(gamma + 1)]) for x in drafts])
    tokens = torch.tensor(drafts)
    block = sampling_block(p, None if certain else q, tokens)
    weights = q.gather(-1, tokens[..., None]).squeeze(-1).prod(dim=1)
    a = rule.probability(block).nan_to_num()  # 0/0 where q gives 0: such a draft has weight 0
    corrections = []
    for i in range(gamma):
        r = rule.correction(block, torch.full((len(drafts),), i))
        corrections.append(r / r.sum(dim=1, keepdim=True).clamp(min=1e-300))
    return drafts, weights, a, torch.stack([*corrections, p[:, gamma]], dim=1)


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
def target_law(warpers: tuple) -> torch.Tensor:
    """The law (SIZE³,) of three tokens behind the prompt, from the target's own logits."""
    law, texts = torch.ones(1, dtype=torch.float64), PROMPT
    for _ in range(NEW):
        with torch.no_grad():
            scores = LogitsProcessorList(warpers)(texts, pair()[0](texts).logits[:, -1])
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
