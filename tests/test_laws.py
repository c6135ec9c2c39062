"""Proves that lossless sampling has exactly the target's law: by enumeration of every draft and coin, and by χ² over real calls.

Enumeration runs in float64 through the package's own rule objects. The χ² tests draw through `generate` and compare with the
law that the target's own warped probabilities give; the same counts must reject a rule that is wrong, or they prove nothing.
"""

import itertools
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import pytest
import tiny
import torch
from scipy.stats import chisquare
from test_rules import Everything, sampling_block
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

import hf_lossy_assist as hla
from hf_lossy_assist import AcceptanceRule, Strict
from hf_lossy_assist.rules import decide, draw


REJECT = 1e-4  # the seeds are fixed, so a test that passes goes on passing
V = 5


# -- exact enumeration ----------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("certain", [False, True], ids=["drawn", "certain"])
def test_two_tokens_have_the_targets_law(gamma, certain):
    """`certain`: q = None. Which tokens then are proposed, and how often, must not matter."""
    for seed in range(3):
        tables = Tables(seed, gamma + 1)
        expected = torch.stack([tables.p[()][x] * tables.p[x,] for x in range(V)])
        law = first_two(Strict(), tables, gamma, certain)
        torch.testing.assert_close(law, expected, atol=1e-12, rtol=0)
        wrong = first_two(Everything(), tables, gamma, certain)
        assert (wrong - expected).abs().max() > 1e-3, "the enumeration cannot tell a wrong rule"


@pytest.mark.parametrize("certain", [False, True], ids=["drawn", "certain"])
def test_decide_draws_by_that_law(certain):
    """The same with real coins: 100 000 rows of one block through `decide`."""
    rows, tables = 100_000, Tables(5, 2)
    p, q = tables.p[()].float(), tables.q[()].float()
    tokens = draw(q.expand(rows, 1, V)) if not certain else torch.arange(rows)[:, None] % V
    block = sampling_block(p.expand(rows, 2, V), None if certain else q.expand(rows, 1, V), tokens)

    def p_value(rule: AcceptanceRule) -> float:
        verdict = decide(rule, block)
        emitted = torch.where(verdict.accepted > 0, tokens[:, 0], verdict.token)
        return goodness(torch.bincount(emitted, minlength=V), p.double())

    assert p_value(Strict()) > REJECT
    assert p_value(Everything()) < REJECT


# -- χ² through generate --------------------------------------------------------------------------------------------------

SIZE, NEW = 6, 3  # every text of three tokens is counted: 216 of them
ROWS, CALLS = 4000, 5


@dataclass(frozen=True)
class Doubtful(AcceptanceRule):
    """Nearly right: it accepts a tenth too often."""

    lossless: ClassVar[bool] = False

    def probability(self, block):
        return (Strict().probability(block) + 0.1).clamp(max=1.0)


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
    """A target over six tokens, none of which ends a text, and a draft that differs by as much as drafts do."""
    model = tiny.build("llama", vocab_size=SIZE, eos_token_id=None, pad_token_id=0, bos_token_id=None)
    return hla.enable(model), tiny.noisy(model, 0.4)


PROMPT = torch.tensor([[3, 1, 4, 1, 5]])


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
            assistant_model=draft, lossy_policy=policy, **settings,
        )[:, -NEW:]  # fmt: skip
        counts += torch.bincount((texts * torch.tensor([SIZE**2, SIZE, 1])).sum(dim=1), minlength=SIZE**NEW)
    return counts


SETTINGS = {
    "temperature 0.7": ({"temperature": 0.7}, (TemperatureLogitsWarper(0.7),)),
    "temperature 1.3": ({"temperature": 1.3}, (TemperatureLogitsWarper(1.3),)),
    "top_p 0.8": ({"top_p": 0.8}, (TopPLogitsWarper(0.8),)),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(
    "stop",
    [None, hla.SVIP(h=0.45), hla.Confidence(0.3)],
    ids=["constant", "svip", "confidence"],
)
def test_samples_have_the_targets_law(name, stop, monkeypatch):
    settings, warpers = SETTINGS[name]
    law = target_law(warpers)
    torch.manual_seed(0)
    assert goodness(sample(hla.LossyPolicy(stop=stop), settings), law) > REJECT
    # What a lossy policy says of itself is not the matter here.
    monkeypatch.setattr("hf_lossy_assist.generation.enable.announce", lambda policy: None)
    counts = sample(hla.LossyPolicy(rule=Everything(), stop=stop), settings, calls=1)
    assert goodness(counts, law) < REJECT, "the samples cannot tell a wrong rule from the target"


def test_the_samples_find_a_rule_that_is_nearly_right(monkeypatch):
    monkeypatch.setattr("hf_lossy_assist.generation.enable.announce", lambda policy: None)
    for name, (settings, warpers) in SETTINGS.items():
        assert goodness(sample(hla.LossyPolicy(rule=Doubtful()), settings), target_law(warpers)) < REJECT, name


def test_stops_do_stop_in_that_test():
    """The draft stops above end some drafts after one token and let others run, or they would have proved nothing."""
    target, draft = pair()
    for stop in (hla.SVIP(h=0.45), hla.Confidence(0.3)):
        out = target.generate(
            PROMPT, attention_mask=torch.ones_like(PROMPT), do_sample=True, num_return_sequences=200, max_new_tokens=NEW,
            assistant_model=draft, lossy_policy=stop, return_dict_in_generate=True,
        )  # fmt: skip
        sent = {length for length, _ in out.speculation.total().steps}
        assert {1, 2} <= sent, stop


def test_prompt_lookup_has_the_targets_law():
    """q = None through the engine, at batch 1: a prompt that repeats itself, so that there is something to look up."""
    target, _ = pair()
    torch.manual_seed(0)
    prompt, counts, accepted = torch.tensor([[3, 1, 4, 3, 1, 4, 3, 1]]), torch.zeros(SIZE, dtype=torch.long), 0
    for _ in range(800):
        out = target.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=True, max_new_tokens=2,
            prompt_lookup_num_tokens=2, lossy_policy="strict", return_dict_in_generate=True,
        )  # fmt: skip
        counts[out.sequences[0, -2]] += 1
        accepted += out.speculation.total().num_accepted_draft_tokens
    assert 0 < accepted < 800
    with torch.no_grad():
        assert goodness(counts, target(prompt).logits[0, -1].double().softmax(-1)) > REJECT
