"""Every acceptance rule by every property: neutral is strict bit by bit, its distribution is its formula, looser accepts a superset, it
never accepts less than strict acceptance under the same coins (or says so), and its JSON form comes back.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support import formulas, paper_rules
from support.blocks import changed, decide, make_round, random_block, same, sampling_block
from support.distributions import Tables, V
from support.rule_cases import CASES as PACKAGE_CASES
from support.rule_cases import GREEDY, SAMPLING

import hf_lossy_assist as hla
from hf_lossy_assist import LossyPolicy, Strict, Verified, as_policy
from hf_lossy_assist.registry import list_entries
from hf_lossy_assist.rules import RULES, AcceptanceRule


pytestmark = pytest.mark.filterwarnings("ignore:.*policy is lossy:UserWarning")


ELSEWHERE = {"all_but_last": "test_sprinter.py", "judge": "test_judge.py"}  # they need a stop and a head

CASES = PACKAGE_CASES | paper_rules.CASES
LADDERS = {entry.name: entry for entry in (*list_entries("rule"), *paper_rules.ENTRIES) if entry.ladder is not None}
RULE_MODES = [(name, mode) for name, case in CASES.items() for mode in case.modes]
ENUMERATED = [name for name, case in CASES.items() if SAMPLING in case.modes and case.formulas]


@pytest.fixture(autouse=True, scope="module")
def names():
    with paper_rules.registered():
        yield


def test_no_rule_is_forgotten():
    covered = {rule: name for name, case in CASES.items() for rule in {type(r) for r in case.ladder}}
    assert set(covered) == {cls for name, cls in RULES.items() if name not in ELSEWHERE}
    for name in ELSEWHERE.values():
        assert list(Path(__file__).parent.parent.rglob(name))
    without = {entry.name for entry in list_entries("rule") if entry.guarantee == "lossy" and entry.ladder is None}
    assert without == {"all_but_last", "synthetic_for_benchmarks"}, "a rule with a threshold has a ladder"


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


def neutrals():
    """(rule, mode, γ): the neutral settings of the cases, and those of the registry with what `example` says beside them."""
    for name, mode in RULE_MODES:
        if (rule := CASES[name].neutral) is not None:
            yield rule, mode, 4
    for entry in (*list_entries("rule"), *paper_rules.ENTRIES):
        if entry.neutral is not None and entry.name != "judge":  # test_judge.py: with threshold 0 it is strict
            rule = as_policy({"rule": {"name": entry.name, **entry.example, **entry.neutral}}).rule
            for mode in rule.modes:
                yield rule, mode, entry.beside["stop"]["gamma"] if entry.beside else 4


def test_neutral_is_strict_on_blocks():
    for rule, mode, gamma in neutrals():
        accepted = 0
        for seed in range(3):
            block = make(seed, mode, gamma=gamma)
            verdict, strict = run(rule, block, seed), run(Strict(), block, seed)
            assert same(verdict, strict) and not verdict.lossy.any(), (rule, mode)
            accepted += int(verdict.accepted.sum())
        assert accepted > 50, (rule, mode)


@pytest.mark.full
def test_looser_accepts_a_superset_and_never_fewer_than_strict():
    """With the same coins; in the tests' settings, and in those that `tune` climbs, from strict acceptance on."""
    for name, mode in RULE_MODES:
        case, entry = CASES[name], LADDERS.get(name)
        for seed in range(2):
            block = make(seed, mode)
            strict, verdicts = run(Strict(), block, seed), [run(rule, block, seed) for rule in case.ladder]
            if case.monotone:
                lengths = [verdict.accepted for verdict in verdicts]
                assert (torch.stack(lengths).diff(dim=0) >= 0).all(), (name, mode, seed)
            if case.monotone and entry is not None:
                rules = [entry.make(**entry.example | {entry.ladder[0]: value}) for value in entry.ladder[1]]
                lengths = [strict.accepted, *(run(rule, block, seed).accepted for rule in rules)]
                assert (torch.stack(lengths).diff(dim=0) >= 0).all(), (name, mode, seed)
                assert not any(rule.lossless for rule in rules), name
            if case.above_strict:
                for rule, verdict in zip(case.ladder, verdicts, strict=True):
                    assert rule.accepts_all_strict or isinstance(rule, hla.Limited), rule
                    more = verdict.accepted > strict.accepted
                    assert (verdict.accepted >= strict.accepted).all(), (rule, mode, seed)
                    assert torch.equal(more, verdict.lossy.any(dim=1)), "the first token beyond strict is a lossy one"


def test_rules_that_may_accept_less_say_so():
    """They are not joined with strict acceptance, and do accept less for some coins; `test_laws.py` has what holds instead."""
    for name, case in CASES.items():
        if case.above_strict:
            continue
        block = make(1, SAMPLING)
        strict = run(Strict(), block, 1).accepted
        assert not any(rule.accepts_all_strict for rule in case.ladder), name
        assert any((run(rule, block, 1).accepted < strict).any() for rule in case.ladder), name


@pytest.mark.full
def test_nothing_outside_the_draft():
    """Padding is not accepted, what a filter dropped is not, and a round without a draft is a step of the target."""
    for name, mode in RULE_MODES:
        for rule in CASES[name].ladder:
            whole = make(5, mode)
            block = changed(whole, sent=torch.minimum(whole.drafted, torch.randint(0, 5, whole.drafted.shape)))
            verdict = run(rule, block, 5)
            inside = torch.arange(4) < verdict.accepted[:, None]
            assert (verdict.accepted <= block.sent).all() and not (verdict.lossy & ~inside).any(), (rule, mode)
            none = whole.drafted * 0
            parts = {"tokens": whole.tokens[:, :0], "probs": None, "logits": whole.logits[:, :1]}
            empty = changed(whole, lengths=none, sent=none, **parts)
            assert run(rule, empty, 5).accepted.sum() == 0, (rule, mode)


def test_rounds_by_hand():
    for rule, rounds in (by_hand for case in CASES.values() for by_hand in case.by_hand):
        run_ = rule.start([torch.zeros(0, dtype=torch.int64)])
        for number, (logits, tokens, passing) in enumerate(rounds):
            count = torch.tensor([len(tokens)])
            block = make_round(torch.tensor([tokens]), count, None, False, count, torch.tensor([logits]))
            assert decide(run_, block).accepted.tolist() == [passing], (rule, number)


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


def far_from_formula(rule, formula, seed: int, gamma: int, certain: bool = False) -> float:
    """How far the enumerated outcomes of a round are from the formula's, at most."""
    tables = Tables(seed, gamma)
    found = formulas.outcomes(rule, tables, gamma, find_edges(formula), certain)
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-12)
    return formulas.distance(found, formulas.expected(formula, tables, gamma, certain))


def test_its_distribution_is_its_formula():
    """For drawn tokens and certain ones: q = None is 1 on the drafted token (prompt lookup and the like)."""
    for name in ENUMERATED:
        for rule, formula in zip(CASES[name].ladder, CASES[name].formulas, strict=True):
            assert far_from_formula(rule, formula, 0, 1) < 1e-9, rule
            if not rule.needs_draft_probs:
                assert far_from_formula(rule, formula, 3, 2, certain=True) < 1e-9, rule


@pytest.mark.full
@pytest.mark.parametrize("name", ENUMERATED)
def test_the_distribution_of_longer_drafts_is_its_formula(name):
    for rule, formula in zip(CASES[name].ladder, CASES[name].formulas, strict=True):
        for seed in range(2):
            assert far_from_formula(rule, formula, seed, 2) < 1e-9, rule


def test_greedy_rules_accept_by_their_formula():
    """Every token of some distributions, one place each; whatever is rejected, the target's argmax takes its place."""
    for case in (CASES["relaxed_top_k"], CASES["top_k_tolerance"]):
        for rule, formula in zip(case.ladder, case.formulas, strict=True):
            seen = set()
            for seed in range(6):
                p = Tables(seed, 0).p[()]
                block = changed(sampling_block(p.expand(V, 2, V), None, torch.arange(V)[:, None]), sampling=False)
                verdict, expected = decide(rule, block), formula(p.numpy(), None)[0]
                assert verdict.accepted.tolist() == [int(x) for x in expected], rule
                assert verdict.token.tolist() == [int(p.argmax())] * V
                seen |= set(verdict.accepted.tolist())
            assert seen == {0, 1}, rule


# Whose coin in sampling depends on p and q, or that know one kind of decoding alone.
OTHERS_IN_GREEDY = {
    "entropy_verify", "thresholds", "lenience", "limited overshoot", "union", "ensemble", "synthetic_for_benchmarks", "limited ensemble", "union ensemble",
}  # fmt: skip


def test_greedy_keeps_what_needs_no_coin_in_sampling():
    """a = 1 though p < q: the same tokens pass in greedy decoding."""
    cases = [case for name, case in CASES.items() if case.formulas and name not in OTHERS_IN_GREEDY]
    for rule, formula in (pair for case in cases for pair in zip(case.ladder, case.formulas, strict=True)):
        for seed in range(4):
            tables = Tables(seed, 0)
            p, q = tables.p[()], tables.q[()]
            block = sampling_block(p.expand(V, 2, V), q.expand(V, 1, V), torch.arange(V)[:, None])
            block = changed(block, sampling=False)
            sure = torch.from_numpy(formula(p.numpy(), q.numpy())[0]) == 1
            accepted = decide(rule, block).accepted.bool()
            less = q > p
            assert torch.equal(accepted & less, (sure | (torch.arange(V) == p.argmax())) & less), rule


def test_lenience_when_greedy():
    """max p = .5: with l = .5 a token passes above .25, with .5 · (1 + ε) no other."""
    p = torch.tensor([0.5, 0.3, 0.2, 0.0, 0.0], dtype=torch.float64)
    block = changed(sampling_block(p.expand(5, 2, 5), None, torch.arange(5)[:, None]), sampling=False)
    for factor, passed in ((1.0, [1, 0, 0, 0, 0]), (0.5, [1, 1, 0, 0, 0]), (0.3, [1, 1, 1, 0, 0])):
        assert decide(hla.Lenience(factor), block).accepted.tolist() == passed


def test_json_round_trip():
    for rule in (rule for case in CASES.values() for rule in (*case.ladder, case.neutral) if rule is not None):
        policy = LossyPolicy(rule)
        spec = json.loads(json.dumps(policy.to_dict()))
        assert spec == policy.to_dict(), "the JSON form is plain JSON"
        assert LossyPolicy.from_dict(spec) == policy == as_policy(json.dumps(spec)), rule
        assert hash(LossyPolicy.from_dict(spec)) == hash(policy)
