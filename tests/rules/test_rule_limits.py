"""Limits and unions: followed token by token over many rounds beside a plain simulation, end to end in batches whose rows leave
at different times, and what they refuse.
"""

import pytest
import torch
from support import tiny
from support.blocks import Everything, changed, decide, make_round, outcome, random_block, same
from support.paper_rules import Ensemble, FLy
from support.rule_cases import Unregistered

import hf_lossy_assist as hla
from hf_lossy_assist import AllButLast, Limited, LossyPolicy, Strict, TopK, Union
from hf_lossy_assist.rules.limits import at_end, within


pytestmark = pytest.mark.filterwarnings("ignore:.*policy is lossy:UserWarning")


def test_spans_by_hand():
    """< opens, > closes:  a < b c > d < e  → inside are b, c, the > itself, and everything from e on."""
    text = torch.tensor([[1, 8, 2, 3, 9, 4, 8, 5]])
    assert within(text, (8, 9), torch.tensor([False])).long().tolist() == [[0, 0, 1, 1, 1, 0, 0, 1, 1]]
    assert within(text[:, :1], (8, 9), torch.tensor([True])).tolist() == [[True, True]]
    assert within(text[:, :0], (8, 9), torch.tensor([True])).tolist() == [[True]]
    prompts = [torch.tensor(x) for x in ([1, 8], [8, 9, 1], [], [8, 8, 1])]
    assert at_end(prompts, (8, 9)).tolist() == [True, False, False, True]


class Simulation:
    """One row's limits, token by token, as their docstring says it."""

    def __init__(self, limits: Limited, prompt: list[int]):
        self.limits, self.text, self.lossy = limits, list(prompt), []

    def round(self, draft: list[int], strict: list[bool], rule: list[bool], over: list[float]) -> int:
        """How many drafted tokens are accepted; they join the text."""
        for n, (token, by_strict, by_rule, overshoot) in enumerate(zip(draft, strict, rule, over, strict=True)):
            if not by_strict and not (by_rule and self.allows(token, overshoot)):
                return n
            self.add(token, not by_strict)
        return len(draft)

    def add(self, token: int, lossy: bool) -> None:
        self.text.append(token)
        self.lossy.append(lossy)

    def allows(self, token: int, overshoot: float) -> bool:
        limits = self.limits
        if limits.inside is not None:
            marks = [x for x in self.text if x in limits.inside]
            if not marks or marks[-1] != limits.inside[0]:
                return False
        return (
            (limits.per_request is None or sum(self.lossy) < limits.per_request)
            and token not in limits.never
            and (limits.max_overshoot is None or overshoot <= limits.max_overshoot)
        )


LIMITS = [
    {"per_request": 7}, {"inside": (0, 1)}, {"never": (2, 3)}, {"max_overshoot": 3.0}, {},
    {"per_request": 30, "inside": (0, 1), "never": (4,), "max_overshoot": 9.0}, {"per_request": 0},
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(
    ("limits", "gamma"), [*((limits, 4) for limits in LIMITS), (LIMITS[0], 130), (LIMITS[5], 130)]
)
def test_limits_over_many_rounds(limits, gamma):
    """Rows come and go: a round takes some of the five, in any order. Blocks are random, and half the mismatches pass the rule."""
    generator, rule = torch.Generator().manual_seed(0), Limited(TopK(3), **limits)
    prompts = [[5, 0, 6], [5], [0, 1], [1, 0], []]
    for _ in range(2):  # the second call starts afresh
        run = rule.start([torch.tensor(prompt, dtype=torch.long) for prompt in prompts])
        simulations = [Simulation(rule, prompt) for prompt in prompts]
        accepted = 0
        for number in range(50 if gamma < 100 else 24):
            index = torch.randperm(5, generator=generator)[: 1 + number % 5]
            block = changed(random_block(number, len(index), gamma, 6), sampling=number % 2 == 0, row_ids=index)
            if not block.sampling:  # right, but for a few that the rule takes: long enough that windows fill and empty
                second = block.logits[:, :gamma].topk(2).indices[..., 1]
                few = torch.rand(second.shape, generator=generator) < 4 / (gamma + 6)
                block = changed(block, tokens=torch.where(few, second, block.argmax[:, :gamma]))
            torch.manual_seed(number)
            verdict = decide(run, block)
            strict, loose = Strict().accepts(block, verdict.coins), TopK(3).accepts(block, verdict.coins)
            for b, row in enumerate(index.tolist()):
                n, simulation = int(block.drafted[b]), simulations[row]
                draft = block.tokens[b, :n].tolist()
                before = len(simulation.lossy)
                q = block.at_tokens(block.q)[b, :n] if block.sampling else torch.ones(n)
                over = (q / block.at_tokens(block.p)[b, :n]).tolist()
                got = simulation.round(draft, strict[b, :n].tolist(), loose[b, :n].tolist(), over)
                assert int(verdict.accepted[b]) == got, (number, row)
                assert verdict.lossy[b, :got].tolist() == simulation.lossy[before:]
                simulation.add(int(verdict.token[b]), False)
                accepted += got
        assert accepted > 10  # of any length at all
        counts = [sum(simulation.lossy) for simulation in simulations]
        assert (max(counts) > 0) == (limits != {"per_request": 0})


def test_limits_in_the_first_round_of_empty_prompts():
    block, lengths = random_block(0, 50, 3), []
    nothing = make_round(block.tokens[:, :0], block.drafted * 0, None, True, None, block.logits[:, :1])
    assert not decide(Limited(Everything(), per_request=1), nothing).accepted.any()
    for budget in range(5):
        verdict = outcome(Limited(Everything(), per_request=budget), block)
        assert (verdict.lossy.sum(dim=1) <= budget).all() and verdict.lossy.any() == (budget > 0)
        lengths.append(verdict.accepted)
    assert (torch.stack(lengths).diff(dim=0) >= 0).all(), "larger budgets accept more"


PROMPTS = (9, 1, 4, 14)


def summarize_rows(out) -> list[dict]:
    return [out.speculation.summary(row, sources=True) for row in out.speculation.rows]


@pytest.mark.full
def test_lossy_tokens_stay_where_they_may_be():
    """With a draft that is never right every accepted token is a lossy one, or the target means the same by chance."""
    model = tiny.shared("llama")
    draft, inputs = tiny.draft_of(model, "never"), tiny.prompts(PROMPTS)
    settings_ = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 40, "eos_token_id": tiny.NEVER_EMITTED}

    def lossy_places(rule):
        torch.manual_seed(0)
        out = tiny.assisted(model, inputs, draft, rule, **settings_)
        texts = out.sequences[:, max(PROMPTS) :].tolist()
        sources = [row["token_sources"] for row in summarize_rows(out)]
        return texts, [[i for i, s in enumerate(row) if s == "draft-lossy"] for row in sources]

    texts, places = lossy_places(Unregistered())
    seen = {text[i] for text, row in zip(texts, places, strict=True) for i in row}
    assert len(seen) > 5
    texts, places = lossy_places(Limited(TopK(97), never=sorted(seen)[:4]))
    placed = {text[i] for text, row in zip(texts, places, strict=True) for i in row}
    assert placed and not placed & set(sorted(seen)[:4])
    marks = (texts[0][3], texts[0][10]) if texts[0][3] != texts[0][10] else (texts[0][3], texts[0][11])
    texts, places = lossy_places(Limited(TopK(97), inside=marks))
    for row, (text, lossy) in enumerate(zip(texts, places, strict=True)):
        whole = [x for x in inputs["input_ids"][row].tolist() if x != tiny.PAD] + text
        start = len(whole) - len(text)
        for i in lossy:
            before = [x for x in whole[: start + i] if x in marks]
            assert before and before[-1] == marks[0]


@pytest.mark.full
def test_the_unchecked_tokens_of_sprinter_can_be_limited():
    model = tiny.shared("llama")
    out = {
        name: tiny.assisted(model, tiny.prompts(PROMPTS), tiny.draft_of(model, "rarely"), rule, eos_token_id=tiny.NEVER_EMITTED)
        for name, rule in (
            ("all", AllButLast()), ("few", Limited(AllButLast(), per_request=3)),
            ("both", Union((AllButLast(), TopK(0)))), ("none", Limited(AllButLast(), per_request=0)),
        )
    }  # fmt: skip
    assert torch.equal(out["both"].sequences, out["all"].sequences)
    unchecked = {name: one.speculation.num_unchecked_tokens for name, one in out.items()}
    assert unchecked["both"] == unchecked["all"] > unchecked["few"] > unchecked["none"] == 0
    assert max(row["num_lossy_accepts"] for row in summarize_rows(out["few"])) == 3


@torch.no_grad()
@pytest.mark.parametrize("sampling", [pytest.param(False, marks=pytest.mark.full), True])
def test_the_report_has_the_overshoot_of_lossy_tokens(sampling):
    """Counted anew from the target's distributions over the finished text; what is limited stays within its limit."""
    model = tiny.shared("llama")
    draft, inputs = tiny.draft_of(model, "rarely"), tiny.prompts((9, 4))
    settings_ = {"max_new_tokens": 30, "eos_token_id": tiny.NEVER_EMITTED, "do_sample": sampling, "top_k": 0}
    free = tiny.assisted(model, inputs, draft, TopK(97), **settings_)
    found = []
    for row, width in enumerate((9, 4)):
        text = free.sequences[row, 9 - width :]
        p, q = (each(text[None]).logits[0].softmax(-1) for each in (model, draft))
        for place, source in enumerate(summarize_rows(free)[row]["token_sources"]):
            if source == "draft-lossy":
                at, token = width + place - 1, text[width + place]
                found.append(float((q[at, token] if sampling else 1.0) / p[at, token]))
    report = free.speculation
    assert len(found) == report.num_lossy_accepts > 5
    assert report.max_overshoot == pytest.approx(max(found), rel=2e-3)
    assert report.mean_overshoot == pytest.approx(sum(found) / len(found), rel=2e-3)
    assert f"max overshoot q/p of lossy tokens │ {report.max_overshoot:g}" in " ".join(str(report).split())
    most = sorted(found)[len(found) // 2]
    bounded = tiny.assisted(model, inputs, draft, Limited(TopK(97), max_overshoot=most), **settings_).speculation
    assert 1 <= bounded.max_overshoot <= most * 1.001 and bounded.num_lossy_accepts > 0
    strict = tiny.assisted(model, inputs, draft, Strict(), **settings_).speculation
    assert strict.max_overshoot is None and strict.to_dict(rows=True)["rows"][0]["mean_overshoot"] is None


def test_a_union_of_one_is_the_rule():
    block = random_block(0)
    for rule in (TopK(2), Ensemble(0.3), FLy(1, 0.2)):
        assert same(outcome(rule, block), outcome(Union((rule,)), block)), rule


def test_what_a_union_is():
    assert Union((Strict(), Strict())).lossless and not Union((Strict(), TopK(0))).lossless
    assert Limited(Strict()).lossless and not Limited(TopK(0)).lossless
    assert Union((TopK(1), hla.Thresholds())).modes == ("sampling",) and len(Union((TopK(1),)).modes) == 2
    assert Union((TopK(1), Ensemble(0.5))).needs_draft_probs and not Union((TopK(1),)).needs_draft_probs
    assert Union([TopK(1)]) == Union((TopK(1),)) and hash(Union([TopK(1)])) == hash(Union((TopK(1),)))


def test_the_json_form_of_rules_inside_rules():
    """Files that users keep: changing this form breaks them."""
    rule = Limited(Union((TopK(2), hla.Lenience(0.5))), per_request=5, inside=(7, 8), never=(1, 2))
    spec = LossyPolicy(rule).to_dict()
    assert spec == {
        "rule": {
            "name": "limited",
            "rule": {"name": "union", "rules": [{"name": "top_k", "k": 2}, {"name": "lenience", "lenience": 0.5}]},
            "per_request": 5, "inside": [7, 8], "never": [1, 2], "max_overshoot": None,
        }
    }  # fmt: skip
    earlier = {"rule": spec["rule"] | {"per_100": None, "max_top1": None}}
    assert LossyPolicy.from_dict(spec) == LossyPolicy(rule) == LossyPolicy.from_dict(earlier)
    names_alone = {"name": "limited", "rule": {"name": "union", "rules": ["typical", {"name": "top_k", "k": 2}]}}
    assert hla.as_policy({"rule": names_alone}).rule == Limited(Union((hla.Typical(), TopK(2))))


def test_refused_in_one_line():
    for make, words in (
        (
            lambda: hla.as_policy({"rule": {"name": "union", "rules": ["typicl"]}}),
            "rule 'typicl'.*Did you mean 'typical'",
        ),
        (lambda: hla.as_policy({"rule": {"name": "limited", "rule": "topk"}}), "rule 'topk'.*Did you mean 'top_k'"),
        (lambda: Union((TopK(1), "strict")), "Union: expected a rule such as"),
        (lambda: Limited(TopK(1), inside=(3, 3)), "Limited.inside: expected two different token ids, got .3, 3."),
        (lambda: Limited(TopK(1), inside=(3,)), "Limited.inside: expected two different token ids"),
    ):
        with pytest.raises((ValueError, TypeError), match=words) as caught:
            make()
        assert "\n" not in str(caught.value)


OF_ONE_KIND = [  # and whether a call samples that is of the other
    (hla.RelaxedTopK(), True), (hla.TopKTolerance(2, 1.0), True), (hla.EntropyVerify(), False), (hla.Thresholds(), False),
    (Limited(hla.Thresholds(), per_request=3), False), (Union((hla.RelaxedTopK(), TopK(2))), True),
    (Union((hla.Thresholds(), hla.RelaxedTopK())), True),
]  # fmt: skip


def test_the_other_kind_of_decoding_is_refused_before_any_model_runs():
    model = tiny.build("llama")

    def run(*args, **kwargs):
        raise AssertionError("a model ran")

    draft = tiny.draft_of(model, "often")
    model.forward = draft.forward = run
    for rule, sampling in OF_ONE_KIND:
        kind = ("greedy", "sampling")[not sampling]
        words = rf"^\w+ is defined for {kind} decoding alone, and this call has do_sample={sampling}: pass do_sample="
        with pytest.raises(ValueError, match=words):
            tiny.assisted(model, tiny.prompts((4,)), draft, rule, do_sample=sampling)
        runner = hla.Runner(rule, draft)
        with pytest.raises(ValueError, match=words):
            model.generate(**tiny.prompts((4,)), custom_generate=runner, do_sample=sampling, max_new_tokens=3)


def test_rules_that_need_the_drafts_distribution_refuse_prompt_lookup_and_others_work():
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]]), "attention_mask": torch.ones(1, 10).long()}
    settings_ = {"prompt_lookup_num_tokens": 3, "do_sample": True, "temperature": 1.5, "max_new_tokens": 20}
    settings_["eos_token_id"] = tiny.NEVER_EMITTED
    words = "compares the target's distribution with the draft's, and PromptLookup has none.*assistant_model"
    for rule in (Ensemble(0.5), Limited(Ensemble(0.1))):
        with pytest.raises(ValueError, match=words):
            tiny.assisted(tiny.shared("llama"), inputs, None, rule, **settings_)
    for rule in (TopK(4), hla.Typical(), hla.Thresholds(0.3, 0.5), hla.Lenience(0.3), hla.BlockVerification()):
        out = tiny.assisted(tiny.shared("llama"), inputs, None, rule, **settings_)
        assert out.sequences.shape == (1, 30), rule
