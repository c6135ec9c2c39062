"""Targets and drafts that keep recurrent states: strict greedy decoding is `generate`, token for token, and what cannot be is refused."""

import copy

import pytest
import torch
from support import hybrids, small, tiny
from support.enumeration import off
from support.judge_rounds import judge_for
from support.refusals import refused
from support.tiny import cache_of
from transformers import DynamicCache

import hf_lossy_assist as hla
from hf_lossy_assist.models.facts import CACHE


pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore:.*policy is lossy:UserWarning")]


NEW = {"max_new_tokens": 18, "do_sample": False}
PAIR = ["qwen3_5_text", "nemotron_h"]  # the two kinds of recurrence


def enabled(kind):
    return hla.enable(copy.deepcopy(hybrids.model(kind)))


@pytest.mark.nightly(every=12)
@pytest.mark.parametrize("kind", hybrids.KINDS)
def test_ragged_rows_have_generates_text(kind):
    """Drafts that are right often, rarely and never, of 1 to 12 tokens, and of a stop that ends rows apart; one begins with a single token."""
    target, inputs = enabled(kind), small.ragged((0, 3, 11, 5), 12, seed=1)
    expected = target.generate(**inputs, **NEW)
    ends = {"eos_token_id": expected[:, 16:19].flatten().tolist()[::2]}
    ended = target.generate(**inputs, **NEW, **ends)
    assert (ended == 0).any()
    assert len(set(expected[:, 12:].flatten().tolist())) > 8, "a text that varies"
    for right, draft in hybrids.drafts(target).items():
        for gamma in {"often": (4,), "rarely": (1, 12), "never": (4,)}[right]:
            draft.generation_config.num_assistant_tokens = gamma
            ours = target.generate(**inputs, **NEW, assistant_model=draft, lossy_policy="strict")
            assert torch.equal(expected, ours), (right, gamma)
        ours = {"assistant_model": draft, "lossy_policy": "svip"}
        assert torch.equal(ended, target.generate(**inputs, **NEW, **ours, **ends)), right


@pytest.mark.parametrize("kind", PAIR)
def test_heads_on_hybrids_states(kind):
    """SPRINTER that asks about every token, SpecDec++'s head as a stop, a judge that keeps nothing: all leave the target's text."""
    target = enabled(kind)
    token, drafts = hla.FeatureSpec(position="token"), hybrids.drafts(target)
    judge = hla.AutoJudge(judge_for(target, drafts["rarely"], hla.FeatureSpec("target")), 0.0, 5)
    inputs = small.ragged((0, 8, 5))
    expected = target.generate(**inputs, **NEW)
    for right, policy in (
        ("often", hla.Sprinter(hla.LinearHead(hla.HeadConfig(32)).eval(), threshold=1.0)),
        ("often", hla.SpecDecPP(hla.LinearHead(hla.HeadConfig(32, features=token)).eval(), 0.6)), ("rarely", judge),
    ):  # fmt: skip
        ours = {"assistant_model": drafts[right], "lossy_policy": policy, "return_dict_in_generate": True}
        out = target.generate(**inputs, **NEW, **ours)
        assert torch.equal(out.sequences, expected), policy
        assert right == "rarely" or out.speculation.total().num_accepted_draft_tokens > 0


@pytest.mark.parametrize("target, draft", [("llama", "qwen3_next"), ("bamba", "llama"), ("lfm2", "mamba2")])
def test_either_of_a_pair_may_keep_states(target, draft):
    def of(kind):
        return small.llama().float() if kind == "llama" else copy.deepcopy(hybrids.model(kind))

    target, ours = hla.enable(of(target)), {"assistant_model": of(draft), "lossy_policy": "svip"}
    for inputs in (small.ragged((0, 3, 5)), small.one(11, seed=3)):
        assert torch.equal(target.generate(**inputs, **NEW), target.generate(**inputs, **NEW, **ours))


@pytest.mark.nightly(every=2)
@pytest.mark.parametrize("kind", [*PAIR, "falcon_h1", "lfm3"])
def test_a_chat_goes_on_here_and_there(kind):
    """Three turns on the output's cache, each by Transformers and by us: texts do not depend on who wrote the turns before."""
    target = enabled(kind)
    draft = hybrids.drafts(target)["often"]
    ours = {"assistant_model": draft, "lossy_policy": "strict"}
    for who in (({}, ours, {}), (ours, ours, ours)):
        text, texts, caches = small.one(7)["input_ids"], [], [None, None]
        for settings in who:
            outs = [
                target.generate(
                    text, attention_mask=torch.ones_like(text), **NEW, **more, return_dict_in_generate=True,
                    **({} if held is None else {CACHE: held}),
                )
                for more, held in zip(({}, settings), caches, strict=True)
            ]  # fmt: skip
            assert torch.equal(outs[0].sequences, outs[1].sequences)
            caches = [cache_of(out) for out in outs]
            text = torch.cat([outs[0].sequences, small.one(4, seed=len(texts))["input_ids"]], dim=1)
            texts.append(text)


@pytest.mark.parametrize("kind", PAIR)
def test_many_texts(kind):
    target = enabled(kind)
    draft, prompts = hybrids.drafts(target)["often"], [small.one(n, seed=n)["input_ids"][0] for n in (9, 4, 40, 1, 12)]
    wanted = [target.generate(prompt[None], **NEW)[0, len(prompt) :].tolist() for prompt in prompts]
    ours = NEW | {"assistant_model": draft, "lossy_policy": "svip", "max_rows": 2}
    found = hla.generate_many(target, [prompt.tolist() for prompt in prompts], **ours)
    assert {result.index: result.token_ids for result in found} == dict(enumerate(wanted))


def test_what_states_cannot_do_is_refused():
    """An exit within the layers, tokens hidden in the middle, which states count, and a cache of another kind."""
    target, text, other = enabled("qwen3_next"), small.one()["input_ids"], tiny.build("llama")
    given = {"assistant_model": hybrids.drafts(target)["often"], "lossy_policy": "strict"}
    exits, inputs = {"assistant_early_exit": 1, "lossy_policy": "strict"}, small.ragged((0, 3))
    refused(lambda: target.generate(text, **NEW, **exits), "^early_exit: .* keeps a recurrent state")
    compiled = {"cache_implementation": "static", "return_dict_in_generate": True}  # goes on eagerly, and says why
    out = target.generate(**inputs, **NEW, **given, **compiled)
    assert "none of the architectures that are tested compiled" in str(out.speculation.eager_because)
    assert torch.equal(out.sequences, target.generate(**inputs, **NEW))
    inputs["attention_mask"][:, 4] = 0
    refused(lambda: target.generate(**inputs, **NEW, **given), "attention_mask hides tokens between others")
    held = DynamicCache(config=other.config)
    with torch.no_grad():
        other(text[:, :4], **{CACHE: held})
    refused(lambda: target.generate(text, **NEW, **given, **{CACHE: held}), "it has other layers than the target")


PLAIN = ["qwen3_5_text", "bamba"]  # a plain forward has no least time behind a prompt, as Nemotron-H's has


@pytest.mark.nightly(every=3)
@pytest.mark.parametrize("stop", [hla.Constant(2), hla.SVIP(0.45)], ids=["constant", "svip"])
@pytest.mark.parametrize("pads", [(0,), (0, 2)], ids=["one", "ragged"])
@pytest.mark.parametrize("kind", PLAIN)
def test_a_round_on_drafted_states_has_the_targets_law(kind, pads, stop):
    """Exactly, over four tokens: every draft, coin and correction of a round, from the states that real rounds and rollbacks have left."""
    target = hla.enable(copy.deepcopy(hybrids.few_token_model(kind, 4)))
    prompts = small.ragged(pads, 4 + len(pads))
    prompts["input_ids"] %= 4
    torch.manual_seed(0)
    policy = hla.LossyPolicy(stop=stop)
    wrong, runner = off(target, small.near(target, 0.5), policy, prompts, rounds=2, room=3, real=True)
    assert wrong < 1e-5 and runner.verified > 0.5


@pytest.mark.parametrize("kind, dtype", [("mamba2", torch.float64), *((name, torch.bfloat16) for name in PAIR)])
def test_other_dtypes_run(kind, dtype):
    """float64 token for token; in bfloat16 texts may part at a near-tie, and each is what its model writes in blocks."""
    target = hla.enable(copy.deepcopy(hybrids.model(kind)).to(dtype))
    draft, inputs = hybrids.drafts(target)["often"], small.ragged((0, 3, 5))
    ours = {"assistant_model": draft, "lossy_policy": "svip", "return_dict_in_generate": True}
    out = target.generate(**inputs, **NEW, **ours)
    same = (out.sequences == target.generate(**inputs, **NEW)).float().mean()
    assert same == 1 if dtype == torch.float64 else same > 0.5
    assert out.speculation.total().num_accepted_draft_tokens > 0
