"""Every name in the registries that says `lossless` is so: the law of whole texts, enumerated through the real engine (`enumeration`).

V = 4, one of them an end token, laws that depend on every token before, texts of three tokens, one to three rows. A stop may
learn: what it knows in a round comes from rounds before, in which `observe` was told what these had drafted and accepted, so it is fixed
when the round's first token is drawn, and `enumeration` says why that can bias nothing. What it asks about a token of this round may look
at that token and at those before it alone. A name without an entry below fails.
"""

from typing import ClassVar

import numpy as np
import pytest
import torch
from support.enumeration import marginal, off
from support.rule_cases import CASES
from support.sv_models import END, SIZE, extreme, make_profile, models, prompts, shipped

import hf_lossy_assist as hla
from hf_lossy_assist.artifacts.features import FeatureSpec
from hf_lossy_assist.artifacts.head import HeadConfig, LinearHead
from hf_lossy_assist.artifacts.profile_tables import Bins, Latency
from hf_lossy_assist.filters import FILTERS
from hf_lossy_assist.registry import Names, find_entry
from hf_lossy_assist.rules import RULES
from hf_lossy_assist.stops import STOPS


pytestmark = pytest.mark.filterwarnings("ignore:.*policy is lossy")
CLOSE = 2e-6  # the engine's laws are float32
FAR = 1e-3  # a bias that these texts would show


def head(position: str = "predicting", polarity: str = "acceptable", bias: float = 0.6) -> LinearHead:
    """A random head on the draft's state."""
    torch.manual_seed(5)
    out = LinearHead(HeadConfig(32, features=FeatureSpec(position=position), polarity=polarity)).eval()
    with torch.no_grad():
        out.linear.weight.mul_(3.0)
        out.linear.bias.fill_(bias)
    return out


def verification(exact: str = "full", **settings) -> hla.SVFilter:
    return hla.SVFilter(extreme(**settings), models(settings.get("size", SIZE))[2], exact)


MADE = {
    **{name: (lambda case=case: case.ladder[-1]) for name, case in CASES.items() if name in RULES},
    "all_but_last": hla.AllButLast,
    "judge": lambda: hla.Judge(head("token", "important"), 0.5),
    "limited": lambda: hla.Limited(hla.Strict(), per_request=1),
    "union": lambda: hla.Union((hla.Strict(), hla.Limited(hla.Strict(), never=(2,)))),
    "constant": lambda: hla.Constant(2),
    "heuristic": lambda: hla.Heuristic(2, 3),
    "confidence": lambda: hla.Confidence(0.45, 3),
    "svip": lambda: hla.SVIP(0.4, max_draft=3),
    "head": lambda: hla.HeadStop(head(), 0.5, 2),
    "specdec": lambda: hla.SpecDecPP(head("token", bias=2.0), 0.3, 2),
    "batch_schedule": lambda: hla.BatchSchedule({1: 2, 2: 1}),
    "joint_goodput": lambda: hla.JointGoodput(h=0.4, step=0.1, max_draft=3),
    "at_least": lambda: hla.AtLeast(hla.Confidence(0.6, 3), 2),
    "any_of": lambda: hla.AnyOf((hla.Confidence(0.4, 3), hla.SVIP(0.4, max_draft=2))),
    "all_of": lambda: hla.AllOf((hla.Confidence(0.6, 3), hla.Constant(2))),
    "fallback": lambda: hla.Fallback(hla.Confidence(0.45, 3), first=1),
    "all": hla.VerifyAll,
    "sv": verification,
    "staged": lambda: hla.Staged(models()[2]),
    "method strict": lambda: hla.as_policy("strict"),
    "method svip": lambda: hla.svip(max_draft=2),
    "method specdec": lambda: hla.specdec(head("token", bias=2.0), 0.3, 2),
    "method sprinter": lambda: hla.sprinter(head()),
    "method autojudge": lambda: hla.autojudge(head("token", "important"), 0.5),
    "method sv": lambda: hla.SpeculativeVerification(extreme(), models()[2], 2),
}  # fmt: skip
NAMES = [*RULES, *STOPS, *FILTERS, *(f"method {name}" for name in Names("method"))]


def whole(part, gamma: int = 2) -> hla.LossyPolicy:
    """A policy with this part, and short drafts where it does not say itself."""
    policy = hla.as_policy(part)
    return policy if policy.stop is not None else hla.LossyPolicy(policy.rule, hla.Constant(gamma), policy.filter)


def made(name: str) -> hla.LossyPolicy:
    if name not in MADE:
        pytest.fail(f"{name!r} is new in a registry: say in MADE how it is made")
    return whole(MADE[name]())


def test_the_table_has_every_name_and_no_other():
    assert sorted(MADE) == sorted(NAMES)


def guarantee(name: str) -> str:
    kinds = {**dict.fromkeys(STOPS, "stop"), **dict.fromkeys(FILTERS, "filter")} | dict.fromkeys(RULES, "rule")
    return find_entry("method" if name.startswith("method ") else kinds[name], name.removeprefix("method ")).guarantee


def test_policies_are_as_lossless_as_the_registry_says():
    for name in NAMES:
        assert made(name).lossless == (guarantee(name) != "lossy"), name


LOSSLESS = [name for name in NAMES if guarantee(name) != "lossy"]
QUICK = ("strict", "confidence", "sv")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in LOSSLESS]
)
def test_what_says_lossless_has_the_targets_distribution(name):
    policy = made(name)
    target, draft, _ = models()
    with_filters = [policy]
    if name in STOPS and not policy.stop.joint:  # a filter looks at what a stop left, and a rule at what a filter left
        with_filters.append(hla.LossyPolicy(stop=policy.stop, filter=verification()))
        with_filters.append(hla.LossyPolicy(hla.BlockVerification(), policy.stop, verification("prefix")))
    widths = set()
    for each in with_filters:
        for rounds in (0, 3) if each is policy else (0,):
            distance, runner = off(target, draft, each, prompts(5), rounds=rounds, end=END)
            assert distance < CLOSE, (each, rounds)
            widths |= runner.widths
    assert max(widths) > 1 or name == "method svip"  # its h is too low for such laws


def grammar(ids, scores):
    """A token that may follow depends on all the text: not the token two places before, nor one that its sum forbids, unless that ends it."""
    scores = scores.clone()
    for text, row in zip(ids.tolist(), scores, strict=True):
        for token in {sum(text) % SIZE, text[-2]} - {END, text[-1]}:
            row[token] = -torch.inf
        row[END] += 0.5 * len(text)
    return scores


def test_a_callers_processor_has_the_distribution_of_generate():
    """Positions are decided one after another, by the coins of the round, while the text goes on."""
    target, draft, _ = models()
    for part, rounds in (
        (hla.Lenience(1.0), 0),
        (hla.SVIP(0.4, max_draft=3), 3),
        (hla.Limited(hla.Strict(), per_request=1), 0),
    ):
        distance, runner = off(target, draft, whole(part), prompts(5), rounds=rounds, end=END, processor=grammar)
        assert distance < CLOSE and max(runner.widths) > 1


@pytest.mark.full
@pytest.mark.parametrize("exact", ["full", "prefix"])
def test_sv_where_a_rounds_width_depends_on_what_was_drawn(exact):
    """An end token, or a stop, ends some rounds early; whether a token is verified must not depend on that."""
    target, draft, companion = models()
    for stop in (hla.Constant(3), hla.Confidence(0.45, 3), hla.SVIP(0.4, max_draft=3)):
        for profile in (extreme(), extreme(1.6, 0.6), extreme(1.0, 0.6), shipped()):
            policy = hla.LossyPolicy(stop=stop, filter=hla.SVFilter(profile, companion, exact, fallback=False))
            distance, runner = off(target, draft, policy, prompts(4), end=END)
            assert distance < CLOSE and len(runner.widths) > 1, stop
            assert runner.dropped > 0.01 or profile.latency.batches.size > 1


def weighing(exact: str, seed: int | None = None, rows: int = 2) -> hla.SVFilter:
    """A filter for `rows` rows of V = 3; with a seed, of random cells and costs."""
    if seed is None:
        return verification(exact, size=3, rows=rows)
    random, tokens = np.random.default_rng(seed), np.arange(8 * rows + 1)
    accept, edges = np.sort(random.random((2, 3)), axis=1), np.sort(random.uniform(0.2, 1, (2, 2)), axis=1)
    cells = Bins(random.uniform(0.5, 0.9, 1).astype(np.float32), edges.astype(np.float32), accept, accept.mean(axis=1),
                 np.ones((2, 3), dtype=np.int64))  # fmt: skip
    seconds = (1 + random.uniform(0.1, 0.8) * tokens / rows)[None]
    latency = Latency(np.array([rows]), tokens[None], seconds, random.uniform(0, 0.5, 1), *np.zeros((2, 1)))
    return hla.SVFilter(make_profile(cells, latency, 3), models(3)[2], exact, fallback=False)


@pytest.mark.full
@pytest.mark.parametrize(
    "filter_", ["full", "prefix", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("staged", "all"))]
)
def test_two_rows_together(filter_):
    """V = 3. The law of both texts is the product of the target's: each is right, and they know nothing of each other.

    With exact="full" they know a little of each other (docs/explanation/sv-exactness.md).
    """
    (target, draft, companion), widths = models(3), set()
    stops = [hla.Constant(2), hla.Confidence(0.3, 2)]
    if filter_ not in ("full", "prefix"):  # which would be biased, and refuse it
        stops.append(hla.JointGoodput(c=0.6, max_draft=2, step=0.1))
    for stop in stops:
        others = {"all": [hla.VerifyAll()], "staged": [hla.Staged(companion)]}
        for chosen in others.get(filter_) or [weighing(filter_, seed) for seed in (None, 17)]:
            if filter_ == "staged":
                stop = stop.with_longest(1)
            policy = hla.LossyPolicy(stop=stop, filter=chosen)
            distance, runner = off(target, draft, policy, prompts(5, 2, size=3), length=2, end=END)
            rows = [np.abs(marginal(runner.law, b) - marginal(runner.expected, b)).max() for b in (0, 1)]
            assert max(rows) < CLOSE and (distance < CLOSE or (filter_ == "full" and distance < FAR))
            widths |= runner.widths
    assert 2 in widths or filter_ == "staged"


class Practised(hla.JointGoodput):
    """A stop that has learned, before its first round, from three sure and two doubtful tokens. `outcomes`: (place, stop?) of all rows."""

    outcomes: ClassVar[set[tuple[int, bool]]] = set()

    def start(self, rows):
        run = super().start(rows)
        run.estimates.learn(np.array([[2, 2, 6], [2, 6, 6]]), np.array([3, 3]), np.array([3, 1]))
        decide = run.after_token

        def after_token(*args, **kwargs):
            found = decide(*args, **kwargs)
            if len(run.may) == rows:
                self.outcomes.add((len(run.bins), bool(found.all())))
            return found

        run.after_token = after_token
        return run


@pytest.mark.full
@pytest.mark.parametrize("rule", [hla.Strict(), hla.BlockVerification()], ids=str)
def test_two_rows_whose_drafts_end_together(rule):
    """V = 3. How much both draft depends on what both drew."""
    target, draft, _ = models(3)
    Practised.outcomes.clear()
    policy = hla.LossyPolicy(rule, Practised(c=0.3, exponent=1.0, max_draft=3, step=0.06))
    assert off(target, draft, policy, prompts(4, 4, size=3), length=2, end=END)[0] < CLOSE
    assert Practised.outcomes >= {(2, True), (2, False)}, "the stop says the same whatever the first tokens are"


class Hasty(hla.Confidence):
    """Ends the round for all rows where it ends one's draft."""

    patience = 0.0


def test_no_row_may_end_anothers_draft_where_rows_are_weighed_against_each_other():
    """Whether the other row's second token is there then depends on this row's first, and so does what is verified."""
    target, draft, _ = models(3)
    for stop in (Hasty(0.3, 2), hla.JointGoodput(), hla.Fallback(hla.JointGoodput())):
        with pytest.raises(ValueError, match=rf"^{type(stop).__name__} with [^\n]* or a stop that is not joint$"):
            hla.LossyPolicy(stop=stop, filter=weighing("full", 19))
    policy = hla.LossyPolicy(stop=Hasty(0.3, 2))
    _, runner = off(target, draft, policy, prompts(5, 2, size=3), length=2, end=END)
    assert max(np.abs(marginal(runner.law, b) - marginal(runner.expected, b)).max() for b in (0, 1)) < CLOSE


def test_a_row_with_little_room_left():
    target, draft, _ = models()
    for room in (1, 2, 3):
        policy = hla.LossyPolicy(stop=hla.Confidence(0.45, 3), filter=verification())
        distance, runner = off(target, draft, policy, prompts(4), length=room, end=END, room=room)
        assert distance < CLOSE and max(runner.widths) <= room - 1
