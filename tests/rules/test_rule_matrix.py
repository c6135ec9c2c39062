"""Every acceptance rule by every property: neutral is strict bit by bit, its law is its formula, looser accepts a superset, it
never accepts less than strict acceptance under the same coins (or says so), and its JSON form comes back.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import formulas, paper_rules, tiny
from support.blocks import changed, decide, make_round, random_block, sampling_block
from support.distributions import Tables, V
from support.rule_cases import CASES as PACKAGE_CASES
from support.rule_cases import GREEDY, SAMPLING

import hf_lossy_assist as hla
from hf_lossy_assist import LossyPolicy, Strict, Verified
from hf_lossy_assist.registry import list_entries
from hf_lossy_assist.rules import RULES, AcceptanceRule


pytestmark = pytest.mark.filterwarnings("ignore:.*policy is lossy:UserWarning")


ELSEWHERE = {"all_but_last": "test_sprinter.py", "judge": "test_judge.py"}  # they need a stop and a head

CASES = PACKAGE_CASES | paper_rules.CASES
LADDERS = {entry.name: entry for entry in (*list_entries("rule"), *paper_rules.ENTRIES) if entry.ladder is not None}
RULE_MODES = [(name, mode) for name, case in CASES.items() for mode in case.modes]


@pytest.fixture(autouse=True, scope="module")
def names():
    with paper_rules.registered():
        yield


def test_no_rule_is_forgotten():
    covered = {rule: name for name, case in CASES.items() for rule in {type(r) for r in case.ladder}}
    assert set(covered) == {cls for name, cls in RULES.items() if name not in ELSEWHERE}
    for name in ELSEWHERE.values():
        assert list(Path(__file__).parent.parent.rglob(name))


def make(seed: int, mode: str, rows: int = 200, gamma: int = 4, size: int = 7) -> Verified:
    """A random block as a draft model gives it: in greedy decoding its tokens are the draft's argmax."""
    block = random_block(seed, rows, gamma, size)
    if mode == GREEDY:
        laws = block.q
        assert laws is not None
        close = torch.rand(rows, 1, 1) < 0.5  # where draft and target nearly agree, or nothing would ever be accepted
        noise = torch.rand(rows, gamma, size) * 0.3
        laws = torch.where(close, (block.p[:, :gamma] + noise) / (1 + noise.sum(-1, keepdim=True)), laws)
        block = make_round(laws.argmax(-1), block.drafted, laws, False, block.drafted, block.logits)
    return block


def run(rule: AcceptanceRule, block: Verified, seed: int):
    torch.manual_seed(seed)
    return decide(rule, block)


# -- neutral --------------------------------------------------------------------------------------------------------------


@pytest.mark.full(every=3)
@pytest.mark.parametrize(("name", "mode"), [x for x in RULE_MODES if CASES[x[0]].neutral is not None])
def test_neutral_is_strict_on_blocks(name, mode):
    neutral = CASES[name].neutral
    assert neutral is not None
    accepted = 0
    for seed in range(5):
        block = make(seed, mode)
        verdict, strict = run(neutral, block, seed), run(Strict(), block, seed)
        assert torch.equal(verdict.accepted, strict.accepted) and torch.equal(verdict.token, strict.token)
        assert not verdict.lossy.any()
        accepted += int(verdict.accepted.sum())
    assert accepted > 100


PROMPTS = (9, 1, 4, 14)


def write(policy: Any, mode: str, seed: int = 0, draft: str = "often", **settings: Any):
    """A batch of a tiny target and a draft that is often right; the temperature lets samples of both kinds through."""
    model = tiny.shared("llama")
    settings = {"eos_token_id": tiny.NEVER_EMITTED} | settings
    if mode == SAMPLING:
        settings |= {"do_sample": True, "temperature": 1.5, "top_k": 0}
    torch.manual_seed(seed)
    return tiny.assisted(model, tiny.prompts(PROMPTS), tiny.draft_of(model, draft), policy, **settings)


@pytest.mark.full(every=18)
@pytest.mark.nightly(every=3)
@pytest.mark.parametrize(("name", "mode"), RULE_MODES)
def test_the_loosest_setting_works_end_to_end(name, mode):
    """And accepts what strict acceptance would not, where the rule is lossy at all."""
    case = CASES[name]
    out = write(case.ladder[-1], mode, draft="rarely")
    assert out.sequences.shape == (4, 14 + tiny.NEW)
    assert out.speculation.lossless == case.ladder[-1].lossless
    if not case.rare:
        assert (out.speculation.num_lossy_accepts > 0) == (not case.ladder[-1].lossless)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.by_hand])
def test_rounds_by_hand(name):
    for rule, rounds in CASES[name].by_hand:
        run_ = rule.start([torch.zeros(0, dtype=torch.int64)])
        for number, (logits, tokens, passing) in enumerate(rounds):
            count = torch.tensor([len(tokens)])
            verdict = decide(
                run_, make_round(torch.tensor([tokens]), count, None, False, count, torch.tensor([logits]))
            )
            assert verdict.accepted.tolist() == [passing], (rule, number)


# -- laws -----------------------------------------------------------------------------------------------------------------

LAWS = [
    (name, i)
    for name, case in CASES.items()
    if SAMPLING in case.modes and case.formulas
    for i in range(len(case.formulas))
]


def find_edges(formula) -> Callable[[Verified], torch.Tensor]:
    """Where a coin may change what a rule with this formula decides: a(x)."""

    def edges(block: Verified) -> torch.Tensor:
        gamma = block.tokens.shape[1]
        q = torch.nn.functional.one_hot(block.tokens, V).double() if block.q is None else block.q
        rows = [
            [formula(p, d)[0][x] for p, d, x in zip(ps, ds, xs, strict=True)]
            for ps, ds, xs in zip(block.p[:, :gamma].numpy(), q.numpy(), block.tokens.tolist(), strict=True)
        ]
        return torch.tensor(np.array(rows, dtype=float))[..., None]

    return edges


@pytest.mark.full(every=12)
@pytest.mark.nightly(every=2)
@pytest.mark.parametrize("gamma", [1, 2])
@pytest.mark.parametrize(("name", "i"), LAWS)
def test_its_law_is_its_formula(name, i, gamma):
    rule, formula = CASES[name].ladder[i], CASES[name].formulas[i]
    for seed in range(2):
        tables = Tables(seed, gamma)
        found = formulas.outcomes(rule, tables, gamma, find_edges(formula))
        assert sum(found.values()) == pytest.approx(1.0, abs=1e-12)
        assert formulas.distance(found, formulas.expected(formula, tables, gamma)) < 1e-9


@pytest.mark.parametrize(("name", "i"), [x for x in LAWS if not CASES[x[0]].ladder[0].needs_draft_probs])
def test_its_law_is_its_formula_for_certain_tokens(name, i):
    """q = None: prompt lookup and the like. q is then 1 on the drafted token."""
    rule, formula, tables = CASES[name].ladder[i], CASES[name].formulas[i], Tables(3, 2)
    found = formulas.outcomes(rule, tables, 2, find_edges(formula), certain=True)
    assert formulas.distance(found, formulas.expected(formula, tables, 2, certain=True)) < 1e-9


def test_a_wrong_formula_is_found():
    for rule, wrong in ((hla.TopK(1), formulas.top_k(2)), (paper_rules.Ensemble(0.5), formulas.ensemble(0.51))):
        far = [
            formulas.distance(
                formulas.outcomes(rule, tables, 1, find_edges(wrong)), formulas.expected(wrong, tables, 1)
            )
            for tables in (Tables(seed, 1) for seed in range(4))
        ]
        assert max(far) > 1e-4


@pytest.mark.parametrize(("name", "i"), [(name, i) for name in ("relaxed_top_k", "top_k_tolerance") for i in range(4)])
def test_greedy_rules_accept_by_their_formula(name, i):
    """Every token of some laws, one place each; whatever is rejected, the target's argmax takes its place."""
    rule, formula = CASES[name].ladder[i], CASES[name].formulas[i]
    seen = set()
    for seed in range(6):
        p = Tables(seed, 0).p[()]
        block = changed(sampling_block(p.expand(V, 2, V), None, torch.arange(V)[:, None]), sampling=False)
        verdict, expected = decide(rule, block), formula(p.numpy(), None)[0]
        assert verdict.accepted.tolist() == [int(x) for x in expected]
        assert verdict.token.tolist() == [int(p.argmax())] * V
        seen |= set(verdict.accepted.tolist())
    assert seen == {0, 1}


KEPT_IN_GREEDY_TOO = ("top_k", "typical", "kl_judge", "cascade", "cascade chow", "cascade diff")


@pytest.mark.parametrize("name", KEPT_IN_GREEDY_TOO)
def test_greedy_keeps_what_needs_no_coin_in_sampling(name):
    """a = 1 though p < q: the same tokens pass in greedy decoding."""
    for rule, formula in zip(CASES[name].ladder, CASES[name].formulas, strict=True):
        for seed in range(4):
            tables = Tables(seed, 0)
            p, q = tables.p[()], tables.q[()]
            block = sampling_block(p.expand(V, 2, V), q.expand(V, 1, V), torch.arange(V)[:, None])
            block = changed(block, sampling=False)
            sure = torch.from_numpy(formula(p.numpy(), q.numpy())[0]) == 1
            accepted = decide(rule, block).accepted.bool()
            less = q > p
            assert torch.equal(accepted & less, (sure | (torch.arange(V) == p.argmax())) & less)


def test_lenience_when_greedy():
    """max p = .5: with l = .5 a token passes above .25, with .5 · (1 + ε) no other."""
    p = torch.tensor([0.5, 0.3, 0.2, 0.0, 0.0], dtype=torch.float64)
    block = changed(sampling_block(p.expand(5, 2, 5), None, torch.arange(5)[:, None]), sampling=False)
    for factor, passed in ((1.0, [1, 0, 0, 0, 0]), (0.5, [1, 1, 0, 0, 0]), (0.3, [1, 1, 1, 0, 0])):
        assert decide(hla.Lenience(factor), block).accepted.tolist() == passed


# -- looser, and never less than strict -----------------------------------------------------------------------------------


@pytest.mark.full(every=12)
@pytest.mark.nightly(every=2)
@settings(max_examples=10)
@given(st.integers(0, 2**31))
@pytest.mark.parametrize(("name", "mode"), [x for x in RULE_MODES if CASES[x[0]].monotone])
def test_looser_accepts_a_superset(name, mode, seed):
    block = make(seed, mode)
    lengths = torch.stack([run(rule, block, seed).accepted for rule in CASES[name].ladder])
    assert (lengths.diff(dim=0) >= 0).all()


@pytest.mark.full(every=6)
@settings(max_examples=5)
@given(st.integers(0, 2**31))
@pytest.mark.parametrize(
    ("name", "mode"),
    [x for x in RULE_MODES if CASES[x[0]].monotone and x[0] in LADDERS],
)
def test_a_ladder_climbs_from_strict_to_lax(name, mode, seed):
    entry, block = LADDERS[name], make(seed, mode)
    parameter, values = entry.ladder
    rules = [entry.make(**{**entry.example, parameter: value}) for value in values]
    lengths = torch.stack([run(rule, block, seed).accepted for rule in (Strict(), *rules)])
    assert (lengths.diff(dim=0) >= 0).all() and not any(rule.lossless for rule in rules)


def test_every_rule_with_a_threshold_has_a_ladder():
    without = {entry.name for entry in list_entries("rule") if entry.guarantee == "lossy" and entry.ladder is None}
    assert without == {"all_but_last", "synthetic_for_benchmarks"}


@pytest.mark.full(every=12)
@pytest.mark.nightly(every=6)
@settings(max_examples=10)
@given(st.integers(0, 2**31))
@pytest.mark.parametrize(("name", "mode"), [x for x in RULE_MODES if CASES[x[0]].above_strict])
def test_never_fewer_than_strict(name, mode, seed):
    block = make(seed, mode)
    strict = run(Strict(), block, seed).accepted
    for rule in CASES[name].ladder:
        assert rule.accepts_all_strict or isinstance(rule, hla.Limited)
        verdict = run(rule, block, seed)
        assert (verdict.accepted >= strict).all()
        more = verdict.accepted > strict
        assert torch.equal(more, verdict.lossy.any(dim=1)), "the first token beyond strict acceptance is a lossy one"


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.above_strict])
def test_rules_that_may_accept_less_say_so(name):
    """They are not joined with strict acceptance, and do accept less for some coins; `test_rule_joint.py` has what holds instead."""
    fewer = 0
    for rule in CASES[name].ladder:
        assert not rule.accepts_all_strict
        block = make(1, SAMPLING)
        fewer += int((run(rule, block, 1).accepted < run(Strict(), block, 1).accepted).sum())
    assert fewer > 0


@pytest.mark.full(every=3)
@pytest.mark.parametrize(("name", "mode"), RULE_MODES)
def test_nothing_outside_the_draft(name, mode):
    """Padding is not accepted, what a filter dropped is not, and a round without a draft is a step of the target."""
    for rule in CASES[name].ladder:
        block = make(5, mode)
        block = changed(block, sent=torch.minimum(block.drafted, torch.randint(0, 5, block.drafted.shape)))
        verdict = run(rule, block, 5)
        assert (verdict.accepted <= block.sent).all()
        inside = torch.arange(4) < verdict.accepted[:, None]
        assert not (verdict.lossy & ~inside).any()
        nothing = make(5, mode, gamma=4)
        none = nothing.drafted * 0
        empty = changed(
            nothing, tokens=nothing.tokens[:, :0], lengths=none, sent=none, probs=None, logits=nothing.logits[:, :1]
        )
        assert run(rule, empty, 5).accepted.sum() == 0


# -- JSON -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(CASES))
def test_json_round_trip(name):
    case = CASES[name]
    for rule in (*case.ladder, *([case.neutral] if case.neutral else [])):
        policy = LossyPolicy(rule)
        spec = json.loads(json.dumps(policy.to_dict()))
        assert spec == policy.to_dict(), "the JSON form is plain JSON"
        assert LossyPolicy.from_dict(spec) == policy and hla.as_policy(json.dumps(spec)) == policy
        assert hash(LossyPolicy.from_dict(spec)) == hash(policy)
