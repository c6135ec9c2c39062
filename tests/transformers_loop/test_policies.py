"""Policies in Transformers' own assisted loop: texts, counts and laws are the engine's, and nothing is left behind."""

import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import cache, partial
from threading import Barrier

import numpy as np
import pytest
import torch
from support import enumeration, heads, judge_rounds, sv_models, tiny
from support.paper_rules import CSD, Cascade, RegretBudget
from support.refusals import refused
from support.tiny import cache_of
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import hf_lossy_assist as hla
from hf_lossy_assist.models.facts import CACHE
from hf_lossy_assist.transformers_loop import rounds


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*policy is lossy:UserWarning"),
    pytest.mark.filterwarnings("ignore:the profile's seconds were taken on another machine:UserWarning"),
    pytest.mark.filterwarnings("ignore:this profile was made with other sampling settings:UserWarning"),
    pytest.mark.filterwarnings("ignore:the head's .* may differ:UserWarning"),
]
MEASURED = ("seconds", "target_alone_seconds", "target_alone_estimate")


def counts(speculation):
    """All that a call reports but what a clock says."""
    found = speculation.to_dict(rows=True, sources=True)
    return {name: value for name, value in found.items() if name not in MEASURED}


def both(target, draft, inputs, policy, **settings):
    """The outputs of the engine and of Transformers' loop, once their texts, scores and counts were found equal."""
    known = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    settings = known | settings
    engine = hla.enable(target).generate(**inputs, assistant_model=draft, lossy_policy=policy, **settings)
    hla.disable(target)
    with hla.in_transformers_loop(target, policy) as loop:
        looped = target.generate(**inputs, assistant_model=draft, **settings)
    assert torch.equal(looped.sequences, engine.sequences)
    assert counts(loop.speculation) == counts(engine.speculation)
    assert torch.allclose(torch.stack(looped.scores), torch.stack(engine.scores), atol=1e-4)
    return looped, loop.speculation


def models(kind="rarely", name="llama"):
    target = tiny.build(name)
    return target, tiny.draft_of(target, kind)


# -- greedy: the engine's texts and counts ---------------------------------------------------------------------------------


@cache
def demo():
    return hla.demo.load()


def dropping(target, draft, companion, bins, cost):
    """SV with rounds so dear that tokens are dropped at one row, too."""
    profile = sv_models.steep(target, draft, companion, bins, cost)
    return hla.LossyPolicy(filter=hla.SVFilter(profile, companion), stop=hla.Constant(7))


METHODS = {
    "svip": lambda: hla.svip(),
    "sv": lambda: dropping(*demo()[:3], hla.demo.profile().bins, 0.1),
    "sprinter": lambda: hla.sprinter(hla.demo.head("sprinter")),
    "autojudge": lambda: hla.autojudge(hla.demo.head("autojudge")),
}


@pytest.mark.parametrize("problems", [2, pytest.param(200, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("method", METHODS)
def test_demo_texts_and_counts_are_the_engines(method, problems):
    target, draft, _, tokenizer = demo()
    policy, lossy, dropped = METHODS[method](), 0, 0
    for problem in hla.demo.problems(problems, seed=3):
        inputs = tokenizer([problem.prompt], return_tensors="pt")
        _, found = both(target, draft, inputs, policy, max_new_tokens=40 if problems == 200 else 24)
        lossy, dropped = lossy + found.num_lossy_accepts, dropped + found.num_dropped_tokens
        assert found.lossless == policy.lossless
    if problems > 2:
        assert (lossy > 0) == (method in ("sprinter", "autojudge")) and (dropped > 0) == (method == "sv")


JUDGES = {
    "autojudge": hla.FeatureSpec("target", "token"),
    "autojudge-both": hla.FeatureSpec("both", "token"),
    "autojudge-draft": hla.FeatureSpec("draft", "predicting"),
}


def tiny_policy(method, target, draft):
    """A policy of each method for two tiny models, that decides both ways."""
    if method == "svip":
        return hla.SVIP(form="entropy", h=1.76, max_draft=6)
    if method == "sv":
        bins = sv_models.bins(np.random.default_rng(0))
        return dropping(target, draft, tiny.noisy(target, 0.2, seed=4), bins, 0.1)
    if method == "sprinter":
        return hla.sprinter(heads.head_for(draft), max_draft=6)
    if method in JUDGES:
        return hla.AutoJudge(judge_rounds.judge_for(target, draft, JUDGES[method]), 0.5, 5)
    return {
        "block": hla.BlockVerification(), "stateful": CSD(0.1, seen=1), "budget of regret": RegretBudget(2.0), "heuristic": hla.Heuristic(2),
        "staged": hla.Staged(tiny.noisy(draft, 0.1, seed=4)), "cascade": Cascade(0.7, "token"),
    }[method]  # fmt: skip


PAIRS = (
    ("llama", "sv"), ("qwen2", "sprinter"), ("gemma3", "svip"), ("mistral", "autojudge"), ("gpt2", "autojudge-both"),
    ("phi", "autojudge-draft"), ("llama", "block"), ("qwen3", "stateful"), ("llama", "budget of regret"), ("llama", "heuristic"),
    ("llama", "staged"), ("llama", "cascade"),
)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("pair", [pytest.param(pair, marks=[pytest.mark.full] * (n > 1)) for n, pair in enumerate(PAIRS)], ids=" ".join)  # fmt: skip
def test_tiny_texts_and_counts_are_the_engines(pair):
    target, draft = models(name=pair[0])
    inputs, policy = tiny.prompts((9,)), tiny_policy(pair[1], target, draft)
    never, _ = both(target, draft, inputs, policy, eos_token_id=tiny.NEVER_EMITTED)
    both(target, draft, inputs, policy, eos_token_id=tiny.some_eos(never.sequences, 9))


# -- sampling: the law of a round, by every way in which it can go -----------------------------------------------------------


class Once(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.ones(len(input_ids), dtype=torch.bool)


class Scripted(enumeration.Choices):
    """Choices in the place of all random numbers of a call; coins from each interval in which the rule or strict acceptance differs."""

    rule = None

    def coins(self, verified):
        ends, out = enumeration._ends(self.rule, verified), torch.empty(verified.tokens.shape, dtype=torch.float64)
        for place in range(out.shape[1]):
            k = self.of(ends[0, place].diff().tolist())
            out[0, place] = ends[0, place, k : k + 2].mean()
        return out

    def multinomial(self, probs, num_samples):
        return torch.stack([self.draw(row[None], None) for row in probs])


def law_of_round(monkeypatch, target, draft, policy, prompt, length, end):
    """The law of texts of `length` tokens where one round of Transformers' loop is completed by the target."""
    choices = Scripted()
    choices.rule = hla.as_policy(policy).rule
    monkeypatch.setattr(rounds, "Randomness", lambda: choices)
    monkeypatch.setattr(torch, "multinomial", choices.multinomial)
    texts = enumeration.Texts(target, prompt["input_ids"][0], target.config.vocab_size, length, end)

    def run():
        out = target.generate(
            **prompt, assistant_model=draft, do_sample=True, top_k=0, max_new_tokens=9, eos_token_id=end, pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([Once()]),
        )  # fmt: skip
        return tuple(out[0, prompt["input_ids"].shape[1] :].tolist())

    with hla.in_transformers_loop(target, policy):
        law = sum(weight * texts.behind(text) for weight, text in choices.each(run))
    monkeypatch.undo()
    return law, texts.behind(())


def sampled(name, target, draft, companion):
    if name.startswith("sv-"):
        only = hla.SVFilter(sv_models.extreme(size=3), companion, exact=name[3:], fallback=False)
        return hla.LossyPolicy(filter=only, stop=hla.Constant(2))
    if name == "svip":
        return hla.SVIP(form="entropy", h=0.9, max_draft=2)
    torch.manual_seed(2)
    if name == "sprinter":
        changes = {"polarity": "acceptable", "method": "sprinter", "features": hla.FeatureSpec()}
        return hla.sprinter(heads.make_head(32, torch.randn(32) / 4, 1.0, **changes), max_draft=2)
    return hla.AutoJudge(heads.make_head(64, torch.randn(64), features=judge_rounds.BOTH), 0.5, 2)


@pytest.mark.nightly(every=3)
@pytest.mark.full(every=6)
@pytest.mark.parametrize("name", ["svip", "sv-full", "sv-prefix", "sv-off", "sprinter", "autojudge"])
def test_sampled_texts_have_the_engines_law(monkeypatch, name):
    """With an end token; the lossless ones have the target's, and the others are seen not to."""
    target, draft, companion = sv_models.models(3)
    prompt = sv_models.prompts(4, size=3)
    policy = sampled(name, target, draft, companion)
    found, strict = law_of_round(monkeypatch, target, draft, policy, prompt, 3, 1)
    _, engine = enumeration.off(target, draft, policy, prompt, end=1, real=True)
    assert abs(found.sum() - 1) < 1e-6
    assert np.abs(found - engine.law).max() < 1e-6
    assert (np.abs(found - strict).max() < 1e-6) == hla.as_policy(policy).lossless


# -- neutral settings, heads from the Hub, what is left behind ----------------------------------------------------------------


def test_neutral_settings_are_plain_generate():
    target, draft = models()
    inputs, settings = tiny.prompts((9,)), {"max_new_tokens": 20, "do_sample": False}
    plain = target.generate(**inputs, **settings)
    neutral = hla.AutoJudge(judge_rounds.judge_for(target, draft, judge_rounds.BOTH), 0.0, 5)
    for policy in (neutral, hla.TopK(0), hla.LossyPolicy(hla.AllButLast(), hla.Constant(1))):
        with hla.in_transformers_loop(target, policy) as loop:
            assert torch.equal(target.generate(**inputs, **settings, assistant_model=draft), plain)
        assert len(loop.speculation.rows) == 1 and loop.speculation.num_lossy_accepts == 0


class Failing(LogitsProcessor):
    """Fails when the target's scores come: the draft has asked about longer texts before."""

    longest = 0

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] < self.longest:
            raise ZeroDivisionError
        self.longest = input_ids.shape[1]
        return scores


def state(model):
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    return set(vars(model)), hooks, model.generation_config.to_dict()


def test_nothing_is_left_behind():
    target, draft = models()
    judge = hla.AutoJudge(judge_rounds.judge_for(target, draft, judge_rounds.BOTH)).rule
    policy, call = hla.LossyPolicy(judge, hla.HeadStop(heads.head_for(draft))), tiny.prompts((9,))
    call |= {"assistant_model": draft, "do_sample": False, "max_new_tokens": 9}
    for model in (target, draft):  # Transformers leaves attributes of its own at a first call
        model.generate(**tiny.prompts((9,)), max_new_tokens=1)
    before = [state(model) for model in (target, draft)]
    given = LogitsProcessorList([Failing()])
    for processor_list, error in ((given, ZeroDivisionError), (LogitsProcessorList(), KeyError)):
        with pytest.raises(error), hla.in_transformers_loop(target, policy):
            target.generate(**call, logits_processor=processor_list)
            raise KeyError
    assert len(given) == 1
    assert [state(model) for model in (target, draft)] == before

    def fail(*args):
        raise ZeroDivisionError

    with hla.in_transformers_loop(target, policy):
        handle = target.lm_head.register_forward_hook(fail)  # in the middle of a round
        with suppress(ZeroDivisionError):
            target.generate(**call)
        handle.remove()
        assert state(target)[1] == before[0][1]


def test_contexts_end_in_any_order():
    target, draft = models()
    inputs, settings = tiny.prompts((9,)), {"max_new_tokens": 9, "do_sample": False, "assistant_model": draft}
    first, second = (hla.in_transformers_loop(target, policy) for policy in ("strict", hla.Heuristic(2)))
    outer, inner = first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    target.generate(**inputs, **settings)
    second.__exit__(None, None, None)
    assert (len(outer._calls), len(inner._calls)) == (0, 1)
    assert "_get_candidate_generator" not in vars(target)


class Waiting(StoppingCriteria):
    """Waits twice after the call's first round."""

    def __init__(self):
        self.barrier, self.rounds = Barrier(2, timeout=60), 0

    def __call__(self, input_ids, scores, **kwargs):
        self.rounds += 1
        if self.rounds == 1:
            self.barrier.wait()
            self.barrier.wait()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@pytest.mark.full
@pytest.mark.parametrize("inherited", [False, True], ids=["plain thread", "asyncio.to_thread"])
def test_a_context_that_ends_during_another_threads_call(inherited):
    """A plain thread has no context and gets plain assisted generation; a call that inherits one runs its policy to the end."""
    target, draft = models()
    lossy = hla.AutoJudge(judge_rounds.judge_for(target, draft, judge_rounds.BOTH), 1.0, 3)
    settings = tiny.prompts((9,)) | {"max_new_tokens": 24, "do_sample": False, "assistant_model": draft}
    plain = target.generate(**settings)
    with hla.in_transformers_loop(target, lossy) as alone:
        changed = target.generate(**settings)
    assert not torch.equal(changed, plain)
    before, waiting = state(target), Waiting()
    call = partial(target.generate, **settings, stopping_criteria=StoppingCriteriaList([waiting]))
    with ThreadPoolExecutor(1) as pool:
        with hla.in_transformers_loop(target, lossy) as loop:
            running = pool.submit(copy_context().run, call) if inherited else pool.submit(call)
            waiting.barrier.wait()
            judged = target.generate(**settings)  # in the middle of the other thread's call
        target.generate(**settings)
        waiting.barrier.wait()
        text = running.result()
    assert torch.equal(judged, changed) and torch.equal(text, changed if inherited else plain)
    assert loop.speculation.num_draft_tokens == alone.speculation.num_draft_tokens * (1 + inherited)
    assert state(target) == before


def test_a_standing_policy_does_not_act_in_a_context():
    target, draft = models()
    settings = tiny.prompts((9,)) | {"max_new_tokens": 9, "do_sample": False}
    with hla.in_transformers_loop(target, "strict") as loop:
        hla.enable(target, draft, "svip")
        target.generate(**settings, assistant_model=draft)
        assert len(loop._calls) == 1 and hla.reports(target) == []
        target.generate(**settings)  # Transformers' own loop would not draft here
        target.generate(**settings, assistant_model=draft, lossy_policy="strict")
        assert len(loop._calls) == 1 and len(hla.reports(target)) == 2
    hla.disable(target)


def test_a_copy_of_the_target_is_in_no_context():
    target = tiny.build("llama")
    draft, inputs = tiny.draft_of(target, "often"), tiny.prompts((9,))
    settings = {"max_new_tokens": 24, "do_sample": False, "assistant_model": draft}
    alone = target.generate(**inputs, **settings)
    with hla.in_transformers_loop(target, "svip") as loop:
        copied = copy.deepcopy(target)
        for model, calls in ((copied, 0), (copy.deepcopy(copied), 0), (target, 1)):
            assert torch.equal(model.generate(**inputs, **settings), alone) and len(loop._calls) == calls
        # a copy that drafts keeps nothing of its forwards where the target's logits are looked for
        assert torch.equal(target.generate(**inputs, **settings | {"assistant_model": copied}), alone)
    assert torch.equal(copied.generate(**inputs, **settings), alone)
    with hla.in_transformers_loop(copied, "svip") as loop:
        copied.generate(**inputs, **settings)
    assert loop.speculation.num_draft_tokens > 0


def test_a_draft_ends_where_the_engines_does():
    """At the end of its table of positions, and not at an end token that the call has switched off."""
    target = tiny.build("gpt2")
    both(target, tiny.build("gpt2", n_positions=16), tiny.prompts((9,)), "strict")
    draft = tiny.draft_of(target, "often")
    inputs = tiny.prompts((9,))
    text = target.generate(**inputs, max_new_tokens=24, do_sample=False, eos_token_id=None)
    draft.generation_config.eos_token_id = int(text[0, 12])
    both(target, draft, inputs, hla.Constant(8), eos_token_id=None)


# -- what is refused ------------------------------------------------------------------------------------------------------


def in_loop(policy="strict", lengths=(9,), draft=True, name="llama", **settings):
    target = tiny.shared(name)
    draft = {"assistant_model": tiny.draft_of(target, "often")} if draft else {}
    with hla.in_transformers_loop(target, policy):
        return target.generate(**tiny.prompts(lengths), **draft, **{"max_new_tokens": 4} | settings)


def go_on():
    target = tiny.shared("llama")
    cache = cache_of(target.generate(**tiny.prompts((9,)), max_new_tokens=4, return_dict_in_generate=True))
    return in_loop(lengths=(20,), **{CACHE: cache})


REFUSED = (
    (lambda: in_loop(draft=False, prompt_lookup_num_tokens=2), "cannot draft by PromptLookupCandidateGenerator"),
    (lambda: in_loop(assistant_ensemble_weight=0.5), "assistant_ensemble_weight is a rule of its own"),
    (go_on, "cannot go on from a filled cache: leave (cache|past_key_values) out"),
    (lambda: in_loop(lengths=(255,), name="gpt2", eos_token_id=None), "256 positions, and the row needs more"),
    (lambda: in_loop(hla.RelaxedTopK(), do_sample=True), "RelaxedTopK is defined for greedy decoding alone"),
    (lambda: hla.TransformersLoop(hla.as_policy("strict")).speculation, "no assisted call has run yet"),
)


def test_what_the_loop_cannot_run_is_refused():
    with pytest.raises(TypeError, match="expected a Transformers model with generate"):
        hla.in_transformers_loop(torch.nn.Linear(2, 2), "strict").__enter__()
    for call, words in REFUSED:
        refused(call, words)
        assert "_get_candidate_generator" not in vars(tiny.shared("llama")), words
