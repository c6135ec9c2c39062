"""Proves that texts beyond the length at which a model's rotary frequencies change are those that `generate` writes, row by row.

The reference is `generate` of a fresh copy at batch 1: Transformers' rotary modules remember the longest text that they have seen, and
in a batch all rows get the frequencies of the longest. Phi-3 and PhiMoE are compared with `use_cache=False`, which is what writing
the cache anew comes to: Transformers 5.17 loses the text there and goes on with one token.
"""

import copy
from functools import cache
from typing import Any

import pytest
import torch
from datasets import load_from_disk
from support import small, tiny
from support.many import NEW, ORIGINAL, alone_on_copy
from support.tiny import NEVER_EMITTED, assisted, prompts
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
)

from hf_lossy_assist.methods.sprinter.collect import collect
from hf_lossy_assist.methods.sprinter.collect_runner import CollectSettings
from hf_lossy_assist.models.compat import CACHE, cache_of
from hf_lossy_assist.models.quirks.rope import ChangingRope
from hf_lossy_assist.tasks.prompts import PromptText
from hf_lossy_assist.training.verifier_dataset import KINDS


RAGGED = (20, 30, 24, 5)
BOTH, EDGES = [(9,), RAGGED], [(ORIGINAL,), (ORIGINAL + 1,)]
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 3.0, 4.0, 6.0],
}


def config(**changes: Any) -> dict[str, Any]:
    return tiny.DECODER | {"max_position_embeddings": 4 * ORIGINAL} | changes


def dynamic() -> Any:
    return LlamaForCausalLM(LlamaConfig(**config(rope_parameters=DYNAMIC, max_position_embeddings=ORIGINAL)))


def longrope() -> Any:
    """Keys in the cache keep their short frequencies; and a window of 8 tokens."""
    return MistralForCausalLM(MistralConfig(**config(rope_parameters=LONG, sliding_window=tiny.WINDOW)))


def phi3() -> Any:
    """It writes its cache anew behind the original length."""
    return Phi3ForCausalLM(
        Phi3Config(**config(rope_parameters=LONG, original_max_position_embeddings=ORIGINAL, sliding_window=None))
    )


def phimoe() -> Any:
    """The same, and what changes is a factor of its own beside the frequencies."""
    long = LONG | {"short_mscale": 1.0, "long_mscale": 1.5}
    experts = {"num_local_experts": 2, "original_max_position_embeddings": ORIGINAL}
    return PhimoeForCausalLM(PhimoeConfig(**config(rope_parameters=long, **experts)))


MODELS = {make.__name__: make for make in (dynamic, longrope, phi3, phimoe)}


@cache
def build(name: str) -> Any:
    """In float64, but for the experts of PhiMoE, whose product exists in float32 at most."""
    torch.manual_seed(0)
    model = MODELS[name]().to(torch.float32 if name == "phimoe" else torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight * 6.0)
    return model


@cache
def draft_for(name: str, kind: str) -> Any:
    return tiny.draft_of(build(name), kind)


RENEWING: dict[str, Any] = {"phi3": {"use_cache": False}, "phimoe": {"use_cache": False}}


@cache
def expected(name: str, lengths: tuple[int, ...]) -> list[list[int]]:
    inputs = prompts(lengths)
    return [
        alone_on_copy(build(name), ids[mask.bool()], **RENEWING.get(name, {}))
        for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    ]


def ours(model: Any, lengths: tuple[int, ...], draft: Any, gamma: int) -> list[list[int]]:
    policy = {"stop": {"name": "constant", "gamma": gamma}}
    out = assisted(model, prompts(lengths), draft, policy, max_new_tokens=NEW, eos_token_id=NEVER_EMITTED)
    return out.sequences[:, max(lengths) :].tolist()


@pytest.mark.full(every=36)
@pytest.mark.nightly(every=9)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind, gamma, cases", [("often", 1, BOTH), ("often", 7, EDGES + BOTH), ("never", 3, BOTH)])
def test_texts_that_cross_the_original_length(name, kind, gamma, cases):
    if name == "phimoe":  # its experts are slow
        cases = [RAGGED]
    assert len(set(sum(expected(name, RAGGED), []))) > 15, "texts this monotonous prove nothing"
    for lengths in cases:
        wanted = expected(name, lengths)
        assert ours(build(name), lengths, draft_for(name, kind), gamma) == wanted, lengths


def test_the_frequencies_matter():
    """A model that keeps the short frequencies for ever writes other texts, so the test above can tell right from wrong."""
    for name in ("dynamic", "longrope", "phi3"):
        model = copy.deepcopy(build(name))
        for module in model.modules():
            if hasattr(module, "rope_type"):
                module.rope_type = "default"
        assert alone_on_copy(model, prompts((9,))["input_ids"][0], **RENEWING.get(name, {})) != expected(name, (9,))[0]


def test_a_model_that_has_seen_longer_texts_writes_the_same_and_keeps_its_state():
    model = copy.deepcopy(build("dynamic"))
    longer = prompts((70,))
    model.generate(**longer, max_new_tokens=5, do_sample=False, eos_token_id=NEVER_EMITTED)
    rotary = model.model.rotary_emb
    before, seen = rotary.inv_freq.clone(), rotary.max_seq_len_cached
    assert seen > 70
    assert ours(model, (30,), draft_for("dynamic", "often"), 5) == expected("dynamic", (30,))
    assert torch.equal(rotary.inv_freq, before) and rotary.max_seq_len_cached == seen
    assert "forward" not in vars(rotary)


@pytest.mark.full(every=3)
@pytest.mark.parametrize("name", ["dynamic", "longrope", "phi3"])
@pytest.mark.parametrize(
    "first", [6, 40]
)  # tokens of the first call; with the prompt of 9 it ends before or behind the change
def test_going_on_from_a_cache(name, first):
    """The cache of a call goes on here and in Transformers as Transformers' own does."""
    model, start, renewing = build(name), prompts((9,)), RENEWING.get(name, {})
    settings = {"max_new_tokens": first, "eos_token_id": NEVER_EMITTED}
    stock = copy.deepcopy(model)
    whole = stock.generate(**start, **settings, **renewing, do_sample=False, return_dict_in_generate=True)
    more = torch.cat([whole.sequences, torch.tensor([[5, 6, 7]])], dim=1)
    inputs = {"input_ids": more, "attention_mask": torch.ones_like(more)}
    settings |= {"max_new_tokens": 20, "do_sample": False}
    wanted = stock.generate(**inputs, **settings, **renewing or {CACHE: cache_of(whole)})
    for ours_goes_on in (True, False) if first == 40 or not renewing else (True,):
        turn = copy.deepcopy(model)
        out = assisted(turn, start, draft_for(name, "often"), max_new_tokens=first, eos_token_id=NEVER_EMITTED)
        assert torch.equal(out.sequences, whole.sequences)
        settings[CACHE] = cache_of(out)
        if ours_goes_on:
            got = assisted(turn, inputs, draft_for(name, "often"), **settings).sequences
        else:
            got = copy.deepcopy(model).generate(**inputs, **settings)
        assert torch.equal(got, wanted), ours_goes_on


def test_collecting_for_sprinter_crosses_it_too(tmp_path):
    """Its loop is one of its own, of one drafted token a round; a draft with the target's weights writes the target's text."""
    model = copy.deepcopy(build("phi3"))
    model.generation_config.eos_token_id = None
    text = PromptText(" ".join(f"w{n}" for n in range(5, 25)))
    tokenizer, settings = small.tokenizer(), CollectSettings(do_sample=False, new_tokens=12)
    folder = collect(model, copy.deepcopy(model), tokenizer, [text], tmp_path / "data", settings)
    records = [record for record in load_from_disk(str(folder)) if record["kind"] == KINDS.index("target")]
    prompt = torch.tensor(tokenizer(text.prompt)["input_ids"])
    assert [record["token"] for record in records] == alone_on_copy(model, prompt, max_new_tokens=12, use_cache=False)
    assert all(record["p"] == 1.0 for record in records)


def test_each_token_has_the_frequencies_of_its_text():
    """By hand: of a prompt of 30 all tokens those of 30, then each its own; a row of 5 tokens the original ones."""
    model = build("dynamic")
    rope, rotary = ChangingRope.of(model, 2), copy.deepcopy(model.model.rotary_emb)
    x = torch.zeros(1, dtype=torch.float64)
    rope.begin([30, 5])
    with rope.at(torch.tensor([[28, 29, 30, 31], [4, 5, 6, 7]])):
        cos, sin = model.model.rotary_emb(x, torch.tensor([[28, 29, 30, 31], [4, 5, 6, 7]]))
    for row, place, position, length in [(0, 0, 28, 30), (0, 1, 29, 30), (0, 2, 30, 31), (0, 3, 31, 32), (1, 2, 6, 7)]:
        both = copy.deepcopy(rotary)(x, torch.tensor([[position, length - 1]]))  # the second one makes the length
        assert torch.equal(cos[row, place], both[0][0, 0]) and torch.equal(sin[row, place], both[1][0, 0])


def test_a_rope_of_unknown_code_is_refused():
    """Code from the Hub with its own way to change: the config says so, no module of Transformers' kind does."""
    model = copy.deepcopy(build("dynamic"))
    del model.model.rotary_emb.rope_type
    with pytest.raises(ValueError, match="LlamaForCausalLM computes 'dynamic' RoPE.*leave lossy_policy out$"):
        ours(model, (9,), draft_for("dynamic", "often"), 3)
