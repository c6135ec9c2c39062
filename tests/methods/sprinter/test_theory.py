"""Proves SPRINTER's formulas: by enumeration of every draft, verdict and coin, by simulation, and against the engine's rules.

Each check is also given a formula or a procedure that is wrong, and must reject it. Simulations are seeded, of 200 000
samples, and must come within 3 standard errors.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.blocks import decide, round_of
from support.distributions import EXACT, SAMPLES, near
from support.ideal_verifier import IIDVerifier, simulate_round

from hf_lossy_assist import AcceptanceRule, Strict, Verified
from hf_lossy_assist.methods.sprinter.theory import (
    accepted_probability,
    expected_accepted,
    expected_stop_time,
    expected_strict_tokens,
    sprinter_acceptance_rate,
    sprinter_distance,
    sprinter_law,
    strict_acceptance_rate,
    total_variation,
)


def law(*weights: float) -> torch.Tensor:
    out = torch.tensor(weights, dtype=torch.float64)
    return out / out.sum()


PAIRS = {
    "mixed": (law(5, 3, 2, 0), law(2, 6, 0, 2)),
    "ties": (law(4, 2, 2, 1, 1), law(4, 1, 3, 1, 1)),
    "disjoint": (law(1, 1, 0, 0), law(0, 0, 3, 1)),
    "equal": (law(1, 2, 3), law(1, 2, 3)),
    "certain draft": (law(1, 2, 7), law(0, 1, 0)),
    "certain target": (law(0, 0, 1), law(4, 3, 3)),
}
RATES = [(0.0, 0.0), (1.0, 0.0), (0.8, 0.3), (0.3, 0.8), (0.5, 0.5), (1.0, 1.0), (0.0, 1.0)]  # η_TP, η_FP
each_pair = pytest.mark.parametrize("name", PAIRS)


# -- exact enumeration of one token ----------------------------------------------------------------------------------------


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    out = (p - q).clamp(min=0)
    return out / out.sum() if out.sum() > 0 else out  # never drawn from where p = q


def enumerate_step(
    p, q, yes: Callable[[int], float], after_yes=None, after_refusal=None
) -> tuple[torch.Tensor, float]:
    """The law (V,) of one token and the chance that the drafted one stays, from `yes`(x), the verifier's rate for each token.

    `after_yes`, `after_refusal`: laws in place of "x itself" where the target's test passes, and of norm((p − q)⁺).
    """
    out, kept = torch.zeros_like(p), 0.0
    other = residual(p, q) if after_refusal is None else after_refusal
    for x in range(len(p)):
        for verdict, chance in ((True, yes(x)), (False, 1 - yes(x))):
            weight = float(q[x]) * chance
            if weight == 0:
                continue
            if verdict:
                out[x] += weight
                kept += weight
                continue
            stays = min(1.0, float(p[x] / q[x]))
            kept += weight * stays
            if after_yes is None:
                out[x] += weight * stays
            else:
                out += weight * stays * after_yes
            for y in range(len(p)):
                out[y] += weight * (1 - stays) * other[y]
    return out, kept


def iid(p, q, eta_tp, eta_fp) -> Callable[[int], float]:
    return lambda x: eta_tp if q[x] <= p[x] else eta_fp


def same(a, b) -> bool:
    return bool(
        (torch.as_tensor(a, dtype=torch.float64) - torch.as_tensor(b, dtype=torch.float64)).abs().max() < EXACT
    )


@each_pair
@pytest.mark.parametrize("eta_tp, eta_fp", RATES)
def test_theorems_3_1_and_a_4_by_enumeration(name, eta_tp, eta_fp):
    p, q = PAIRS[name]
    found, kept = enumerate_step(p, q, iid(p, q, eta_tp, eta_fp))
    assert same(found.sum(), 1)
    assert same(found, sprinter_law(p, q, eta_fp))
    assert same(total_variation(p, found), sprinter_distance(p, q, eta_fp))
    assert same(kept, sprinter_acceptance_rate(p, q, eta_fp))


def test_values_worked_out_by_hand():
    """p = (.5 .3 .2 0), q = (.2 .6 0 .2): d_TV = ½ (.3 + .3 + .2 + .2) = .5, and with η_FP = .4 the law is .6 p + .4 q."""
    p, q = PAIRS["mixed"]
    assert same(total_variation(p, q), 0.5) and same(strict_acceptance_rate(p, q), 0.5)
    assert same(sprinter_law(p, q, 0.4), torch.tensor([0.38, 0.42, 0.12, 0.08], dtype=torch.float64))
    assert same(sprinter_distance(p, q, 0.4), 0.2) and same(sprinter_acceptance_rate(p, q, 0.4), 0.7)


def test_the_enumeration_rejects_what_is_wrong():
    p, q = PAIRS["mixed"]
    eta_tp, eta_fp = 0.8, 0.3
    right, kept = enumerate_step(p, q, iid(p, q, eta_tp, eta_fp))
    assert not same(right, sprinter_law(p, q, eta_tp)), "η_TP and η_FP confused"
    assert not same(right, sprinter_law(q, p, eta_fp)), "p and q confused"
    assert not same(kept, sprinter_acceptance_rate(p, q, eta_tp))
    assert not same(kept, strict_acceptance_rate(p, q))
    assert not same(total_variation(p, right), sprinter_distance(p, q, eta_tp))
    swapped, _ = enumerate_step(p, q, iid(p, q, eta_fp, eta_tp))
    assert not same(swapped, sprinter_law(p, q, eta_fp)), "a verifier that confuses its rates"
    redrawn, _ = enumerate_step(p, q, iid(p, q, eta_tp, eta_fp), after_refusal=p)
    assert not same(redrawn, sprinter_law(p, q, eta_fp)), "a correction from p in place of norm((p − q)⁺)"


def test_algorithm_2_as_printed_does_not_have_the_law_of_theorem_3_1():
    """It draws a new token from p where the target's test passes, in place of keeping the drafted one (§A.5)."""
    p, q = PAIRS["mixed"]
    printed, _ = enumerate_step(p, q, iid(p, q, 0.8, 0.3), after_yes=p)
    assert same(printed.sum(), 1) and not same(printed, sprinter_law(p, q, 0.3))
    # Not even with a verifier that always calls the target, which is plain strict decoding by Theorem 3.1.
    never, _ = enumerate_step(p, q, lambda x: 0.0, after_yes=p)
    assert not same(never, p)


@each_pair
def test_a_verifier_whose_rate_depends_on_the_token(name):
    """The distance and A.4 then hold with the mean rate over norm((q − p)⁺); the mean over the drafted tokens is another."""
    p, q = PAIRS[name]
    rates = torch.linspace(0.1, 0.9, len(p), dtype=torch.float64)
    found, kept = enumerate_step(p, q, lambda x: float(rates[x]))
    mean = float((rates * residual(q, p)).sum())
    assert same(total_variation(p, found), sprinter_distance(p, q, mean))
    assert same(kept, sprinter_acceptance_rate(p, q, mean))
    if name == "mixed":
        unacceptable = q * (q > p)
        assert not same(
            total_variation(p, found),
            sprinter_distance(p, q, float((rates * unacceptable).sum() / unacceptable.sum())),
        )
        assert not same(found, sprinter_law(p, q, mean))


def test_laws_of_many_positions_at_once():
    p, q = (torch.stack([PAIRS["mixed"][i], PAIRS["disjoint"][i]]).reshape(2, 1, 4) for i in (0, 1))
    assert sprinter_law(p, q, 0.3).shape == (2, 1, 4)
    for measure in (total_variation, strict_acceptance_rate):
        assert measure(p, q).shape == (2, 1)
    assert same(sprinter_distance(p, q, 0.3)[1, 0], sprinter_distance(*PAIRS["disjoint"], 0.3))
    assert same(sprinter_acceptance_rate(p, q, 0.3)[1, 0], 0.3)


# -- simulation of one token -----------------------------------------------------------------------------------------------


def shares_near(tokens: torch.Tensor, expected: torch.Tensor) -> bool:
    shares = torch.bincount(tokens, minlength=len(expected)) / len(tokens)
    return all(near(float(s), float(e), len(tokens)) for s, e in zip(shares, expected, strict=True))


def distance_near(tokens: torch.Tensor, p: torch.Tensor, q: torch.Tensor, expected: float) -> bool:
    """d_TV(p, law) is P(x unacceptable) under the law less that under p: one share, so one standard error."""
    bad = q > p
    share = float(bad[tokens].double().mean())
    return near(share, min(max(expected + float(p[bad].sum()), 0.0), 1.0), len(tokens))


@each_pair
@pytest.mark.parametrize("eta_tp, eta_fp", RATES)
def test_simulated_tokens_have_the_law(name, eta_tp, eta_fp):
    p, q = PAIRS[name]
    generator = torch.Generator().manual_seed(2)
    tokens, kept = simulate_round(p, q, IIDVerifier(eta_tp, eta_fp, generator), SAMPLES, generator)
    assert tokens.shape == kept.shape == (SAMPLES,) and kept.dtype == torch.bool
    assert shares_near(tokens, sprinter_law(p, q, eta_fp))
    assert distance_near(tokens, p, q, float(sprinter_distance(p, q, eta_fp)))
    assert near(float(kept.double().mean()), float(sprinter_acceptance_rate(p, q, eta_fp)))


def test_the_simulation_rejects_what_is_wrong():
    p, q = PAIRS["mixed"]
    eta_tp, eta_fp = 0.8, 0.3
    generator = torch.Generator().manual_seed(1)
    for rates in ((eta_fp, eta_tp), (eta_tp, eta_fp + 0.02)):  # swapped, and nearly right
        tokens, kept = simulate_round(p, q, IIDVerifier(*rates, generator), SAMPLES, generator)
        assert not shares_near(tokens, sprinter_law(p, q, eta_fp))
        assert not distance_near(tokens, p, q, float(sprinter_distance(p, q, eta_fp)))
        assert not near(float(kept.double().mean()), float(sprinter_acceptance_rate(p, q, eta_fp)))


@each_pair
def test_the_verifier_is_asked_whether_q_is_at_most_p(name):
    """A tie is acceptable. Only here does it show: the target's own test accepts a tie too, so the law is the same."""
    p, q = PAIRS[name]
    asked = []

    def yes(acceptable):
        asked.append(acceptable)
        return torch.ones_like(acceptable)

    tokens, kept = simulate_round(p, q, yes, 1000)
    assert kept.all() and asked[0].tolist() == [bool(q[x] <= p[x]) for x in tokens.tolist()]


def test_simulations_repeat_and_need_no_generator():
    p, q = (x.float() for x in PAIRS["mixed"])

    def run(seed):
        generator = torch.Generator().manual_seed(seed)
        return simulate_round(p, q, IIDVerifier(0.8, 0.3, generator), 1000, generator)[0].tolist()

    assert run(5) == run(5) != run(6)
    assert simulate_round(p, q, IIDVerifier(0.8, 0.3), 10)[0].shape == (10,)


def test_verdicts():
    acceptable = torch.arange(SAMPLES).reshape(2, -1) % 2 == 0
    generator = torch.Generator()
    verdicts = {}
    for rates in ((0.7, 0.2), (0.9, 0.2), (0.7, 0.4), (1.0, 0.0)):
        verdicts[rates] = IIDVerifier(*rates, generator.manual_seed(0))(acceptable)
        for kind, rate in zip((acceptable, ~acceptable), rates, strict=True):
            assert near(float(verdicts[rates][kind].double().mean()), rate, SAMPLES // 2)
    assert torch.equal(verdicts[1.0, 0.0], acceptable)
    for looser in ((0.9, 0.2), (0.7, 0.4)):  # with equal seeds a superset
        assert not (verdicts[0.7, 0.2] & ~verdicts[looser]).any()
    assert IIDVerifier(0.7, 0.2) == IIDVerifier(0.7, 0.2, generator) != IIDVerifier(0.7, 0.3)


# -- the engine ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ByVerdict(AcceptanceRule):
    """Accepts where the verifier says yes; the union with strict acceptance is the engine's."""

    verifier: IIDVerifier = IIDVerifier(1.0, 0.0)
    lossless: ClassVar[bool] = False

    def probability(self, block):
        return self.verifier(block.at_tokens(block.q) <= block.at_tokens(block.p)).float()


@dataclass(frozen=True)
class OnAverage(AcceptanceRule):
    """The same with the mean over the verdicts: a(x) = η + (1 − η) · min(1, p/q)."""

    eta_tp: float = 1.0
    eta_fp: float = 0.0
    lossless: ClassVar[bool] = False

    def probability(self, block):
        acceptable = block.at_tokens(block.q) <= block.at_tokens(block.p)
        eta = torch.where(acceptable, self.eta_tp, self.eta_fp)
        return eta + (1 - eta) * Strict().probability(block)


def one_token_block(p: torch.Tensor, q: torch.Tensor, tokens: torch.Tensor) -> Verified:
    """A row for each of `tokens` (B,), one drafted token in each. p is put in place: log and softmax would break its ties."""
    rows = len(tokens)
    p = p.expand(rows, 2, -1)
    block = round_of(tokens[:, None], torch.ones(rows, dtype=torch.long), q.expand(rows, 1, -1), True, logits=p.log())
    vars(block)["p"] = p
    return block


@each_pair
@pytest.mark.parametrize("eta_tp, eta_fp", RATES)
def test_the_engines_formalism_gives_the_same_law(name, eta_tp, eta_fp):
    """Output law q·a + (1 − Σ q·a)·r, with a and r from the package's rule object over all V drafted tokens."""
    p, q = PAIRS[name]
    block, rule = one_token_block(p, q, torch.arange(len(p))), OnAverage(eta_tp, eta_fp)
    a = rule.probability(block)[:, 0].nan_to_num()  # 0/0 where neither law has the token
    r = rule.correction(block, torch.zeros(len(p), dtype=torch.long))[0]
    stays = q * a
    found = stays + (1 - stays.sum()) * r / r.sum().clamp(min=1e-300)
    atol = 1e-6  # torch.where makes float32 of the rates
    torch.testing.assert_close(found, sprinter_law(p, q, eta_fp), atol=atol, rtol=0)
    torch.testing.assert_close(stays.sum(), sprinter_acceptance_rate(p, q, eta_fp), atol=atol, rtol=0)


@pytest.mark.parametrize("name", ["mixed", "ties", "disjoint"])
def test_decide_gives_the_same_law(name):
    """The same with the engine's coins and an i.i.d. verifier; a verifier with swapped rates is found out."""
    p, q = PAIRS[name]
    drafted = q.multinomial(SAMPLES, replacement=True)
    block = one_token_block(p, q, drafted)

    def emitted(eta_tp: float, eta_fp: float):
        verdict = decide(ByVerdict(IIDVerifier(eta_tp, eta_fp)), block)
        return torch.where(verdict.accepted > 0, drafted, verdict.token), verdict

    tokens, verdict = emitted(0.8, 0.3)
    assert shares_near(tokens, sprinter_law(p, q, 0.3))
    assert near(float(verdict.accepted.double().mean()), float(sprinter_acceptance_rate(p, q, 0.3)))
    # What only the verifier let through is the gain over strict: η_FP · d_TV.
    assert near(float(verdict.lossy.double().mean()), float(sprinter_distance(p, q, 0.3)))
    assert not shares_near(emitted(0.3, 0.8)[0], sprinter_law(p, q, 0.3))


# -- wrong arguments -------------------------------------------------------------------------------------------------------

P, Q = PAIRS["mixed"]


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: sprinter_law(P, Q[:3], 0.1), ValueError, "one shape"),
        (lambda: total_variation(torch.tensor(1.0), torch.tensor(1.0)), ValueError, "one shape"),
        (lambda: total_variation(P[:0], Q[:0]), ValueError, "one shape"),
        (lambda: sprinter_law(P.log_softmax(0), Q, 0.1), ValueError, "p: .*sum to 1"),
        (lambda: sprinter_law(P, Q * math.nan, 0.1), ValueError, "q: .*sum to 1"),
        (lambda: total_variation(P, torch.tensor([1.5, -0.5, 0, 0])), ValueError, "q: .*from -0.5 to 1.5"),
        (lambda: total_variation(torch.tensor([1, 0]), torch.tensor([1, 0])), TypeError, "p: .*floating point"),
        (lambda: total_variation([0.5, 0.5], [0.5, 0.5]), TypeError, r"p: expected a tensor .*got \[0.5, 0.5\]"),
        (lambda: total_variation(P, Q.numpy()), TypeError, "q: expected a tensor"),
        (lambda: total_variation(P.to(torch.float8_e4m3fn), Q), TypeError, "p: .*floating point .*got torch.float8"),
        (lambda: sprinter_law(P, Q, 1.1), ValueError, "eta_fp: .*0 to 1, got 1.1"),
        (lambda: sprinter_distance(P, Q, math.nan), ValueError, "eta_fp"),
        (lambda: sprinter_acceptance_rate(P, Q, "0.1"), TypeError, "eta_fp"),
        (lambda: accepted_probability(-1, 5, 0.9, 0.5), ValueError, "i: "),
        (lambda: accepted_probability(1, 5.0, 0.9, 0.5), TypeError, "r: "),
        (lambda: expected_accepted(5, -0.1, 0.5), ValueError, "eta_tp"),
        (lambda: expected_accepted(5, 0.9, 0.5, -1), ValueError, "cap: .*at least 0"),
        (lambda: expected_stop_time(5, 0.9, 0.5, 0.1, 0), ValueError, "cap: .*at least 1"),
        (lambda: expected_stop_time(5, 0.9, 0.5, -0.1), ValueError, "t_d"),
        (lambda: expected_strict_tokens(1.5, 5), ValueError, "alpha"),
        (lambda: expected_strict_tokens(0.5, -1), ValueError, "gamma"),
        (lambda: IIDVerifier(1.1, 0.0), ValueError, "eta_tp"),
        (lambda: IIDVerifier(1.0, -0.1), ValueError, "eta_fp"),
        (lambda: IIDVerifier(1.0, 0.0)(torch.ones(3)), TypeError, "bool tensor, got torch.float32"),
        (lambda: simulate_round(P[None], Q[None], IIDVerifier(1.0, 0.0), 5), ValueError, r"\(V,\), got \(1, 4\)"),
        (lambda: simulate_round(P, Q, IIDVerifier(1.0, 0.0), 0), ValueError, "n: "),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_in_one_line(call, error, words):
    with pytest.raises(error, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


# -- properties ------------------------------------------------------------------------------------------------------------

rates = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1))
weights = st.integers(0, 5)


@st.composite
def two_laws(draw) -> tuple[torch.Tensor, torch.Tensor]:
    """Small whole weights, so that zeros and ties are common."""
    size = draw(st.integers(1, 6))
    pair = [draw(st.lists(weights, min_size=size, max_size=size).filter(any)) for _ in range(2)]
    return law(*pair[0]), law(*pair[1])


@pytest.mark.full
@given(two_laws(), rates, rates)
def test_any_laws_by_enumeration(laws, eta_tp, eta_fp):
    p, q = laws
    found, kept = enumerate_step(p, q, iid(p, q, eta_tp, eta_fp))
    assert same(sprinter_law(p, q, eta_fp).sum(), 1)
    assert same(found, sprinter_law(p, q, eta_fp))
    assert same(kept, sprinter_acceptance_rate(p, q, eta_fp))
    assert same(total_variation(p, found), sprinter_distance(p, q, eta_fp))


@given(two_laws(), rates, rates, rates)
def test_distance_is_linear_in_eta_fp(laws, a, b, w):
    def at(eta: float) -> torch.Tensor:
        return sprinter_distance(*laws, eta)

    assert same(at(w * a + (1 - w) * b), w * at(a) + (1 - w) * at(b))
    assert same(at(1.0), total_variation(*laws)) and same(at(0.0), 0)
    assert same(total_variation(*laws), total_variation(*laws[::-1]))


@given(st.integers(0, 12), rates, rates, rates, st.one_of(st.none(), st.integers(1, 30)))
def test_better_and_looser_verifiers_accept_more(r, a, b, eta, cap):
    low, high = sorted((a, b))

    def rises(below: float, above: float) -> bool:
        return below <= above * (1 + 1e-12)

    assert rises(expected_accepted(r, low, eta, cap), expected_accepted(r, high, eta, cap))
    assert rises(expected_accepted(r, eta, low, cap), expected_accepted(r, eta, high, cap))
    assert rises(expected_stop_time(r, eta, low, 0.1, cap), expected_stop_time(r, eta, high, 0.1, cap))


@given(st.integers(0, 12), rates, rates, st.integers(0, 30))
def test_a_higher_cap_lets_more_through(r, eta_tp, eta_fp, cap):
    values = [expected_accepted(r, eta_tp, eta_fp, c) for c in (cap, cap + 1, None)]
    assert all(a <= b * (1 + 1e-12) for a, b in zip(values, values[1:], strict=False))
    assert values[0] <= cap + 1e-9 and values[1] - values[0] <= 1 + 1e-9
