"""Texts on one side of the length at which a model's rotary frequencies change are those of `generate`; what crosses it is refused by name.

The reference is `generate` of a fresh copy at batch 1: Transformers' rotary modules remember the longest text that they have seen, and
in a batch all rows get the frequencies of the longest.
"""

import copy
from functools import cache
from typing import Any

import pytest
import torch
from support import small, tiny
from support.many import alone_on_copy
from support.tiny import NEVER_EMITTED, assisted, cache_of, prompts
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Phi3Config, Phi3ForCausalLM

import hf_lossy_assist as hla
from hf_lossy_assist.models.facts import CACHE


ORIGINAL = 24
RAGGED, FAR = (9, 12, 5, 11), (30, 26, 33)
NEAR_NEW, FAR_NEW = 12, 20  # new tokens: the longest text of RAGGED ends at ORIGINAL
CROSSES = rf"^the target's RoPE changes beyond {ORIGINAL} tokens, and row {{}} has more[^\n]*leave lossy_policy out$"
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
LONG = {
    "rope_type": "longrope", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": ORIGINAL,
    "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 3.0, 4.0, 6.0],
}  # fmt: skip


def config(**changes: Any) -> dict[str, Any]:
    return tiny.DECODER | {"max_position_embeddings": 4 * ORIGINAL} | changes


def dynamic() -> Any:
    return LlamaForCausalLM(LlamaConfig(**config(rope_parameters=DYNAMIC, max_position_embeddings=ORIGINAL)))


def longrope() -> Any:
    """With a window of 8 tokens."""
    return MistralForCausalLM(MistralConfig(**config(rope_parameters=LONG, sliding_window=tiny.WINDOW)))


def phi3() -> Any:
    """`generate` writes its cache anew beyond the original length."""
    return Phi3ForCausalLM(
        Phi3Config(**config(rope_parameters=LONG, original_max_position_embeddings=ORIGINAL, sliding_window=None))
    )


MODELS = {make.__name__: make for make in (dynamic, longrope, phi3)}


@cache
def build(name: str) -> Any:
    torch.manual_seed(0)
    model = MODELS[name]().to(torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight * 6.0)
    return model


@cache
def expected(name: str, lengths: tuple[int, ...], new: int) -> list[list[int]]:
    pairs = zip(*prompts(lengths).values(), strict=True)
    return [alone_on_copy(build(name), ids[mask.bool()], max_new_tokens=new) for ids, mask in pairs]


def ours(model: Any, lengths: tuple[int, ...], draft: Any, gamma: int, new: int) -> list[list[int]]:
    policy = {"stop": {"name": "constant", "gamma": gamma}}
    out = assisted(model, prompts(lengths), draft, policy, max_new_tokens=new, eos_token_id=NEVER_EMITTED)
    return out.sequences[:, max(lengths) :].tolist()


SIDES = {
    "short": (RAGGED, NEAR_NEW, ("dynamic", "longrope", "phi3")),
    "to the edge": ((ORIGINAL - NEAR_NEW + 1,), NEAR_NEW, ("dynamic", "longrope", "phi3")),
    "beyond": (FAR, FAR_NEW, ("longrope", "phi3")),
    "just beyond": ((ORIGINAL + 1,), FAR_NEW, ("longrope", "phi3")),
}


@pytest.mark.parametrize(
    "name", ["dynamic", *(pytest.param(name, marks=pytest.mark.full) for name in ("longrope", "phi3"))]
)
def test_texts_on_one_side_are_those_of_generate(name):
    """Long drafts in ragged rows: the padding of a row near the edge lies beyond it."""
    for side, (lengths, new, names) in SIDES.items():
        if name in names:
            wanted = expected(name, lengths, new)
            for kind, gamma in (("often", 7), ("never", 1)):
                got = ours(build(name), lengths, tiny.draft_of(build(name), kind), gamma, new)
                assert got == wanted, (side, kind)


def test_what_crosses_the_edge_is_refused_by_name():
    for name, lengths, new, row in (
        ("dynamic", (9, 12), 20, 1),  # two texts come to cross it
        ("longrope", (9,), 20, 0),  # one text
        ("phi3", (ORIGINAL,), 4, 0),  # at the edge
        ("longrope", (30, 9), 4, 0),  # a batch crosses it
        ("dynamic", (30,), 4, 0),  # no text beyond has one set
    ):
        with pytest.raises(ValueError, match=CROSSES.format(row)):
            ours(build(name), lengths, tiny.draft_of(build(name), "often"), 5, new)


def test_a_draft_whose_frequencies_change_drafts_no_more_beyond():
    target, draft = hla.enable(small.llama()), small.llama(rope_parameters=DYNAMIC, max_position_embeddings=ORIGINAL)
    draft.load_state_dict(target.state_dict())
    settings = {"max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True}
    plain = target.generate(**small.ragged(), **settings)
    out = target.generate(**small.ragged(), **settings, assistant_model=draft, lossy_policy="strict")
    assert out.sequences.equal(plain.sequences)
    assert any(row.num_plain_steps for row in out.speculation.rows) and out.speculation.num_accepted_draft_tokens


def test_a_model_that_has_seen_longer_texts_writes_the_same():
    model = copy.deepcopy(build("dynamic"))
    model.generate(**prompts((70,)), max_new_tokens=5, do_sample=False, eos_token_id=NEVER_EMITTED)
    assert model.model.rotary_emb.max_seq_len_cached > 70
    draft = tiny.draft_of(build("dynamic"), "often")
    assert ours(model, (9,), draft, 5, NEAR_NEW) == expected("dynamic", (9,), NEAR_NEW)


@pytest.mark.full
def test_generate_many_writes_each_text_on_its_side():
    target, draft = hla.enable(copy.deepcopy(build("longrope"))), tiny.draft_of(build("longrope"), "often")
    lengths = (30, 9, 26, 5)
    texts = [ids[mask.bool()].tolist() for ids, mask in zip(*prompts(lengths).values(), strict=True)]
    wanted = expected("longrope", lengths, NEAR_NEW)
    settings = {"max_new_tokens": NEAR_NEW, "do_sample": False, "eos_token_id": NEVER_EMITTED}
    with pytest.warns(UserWarning, match="one text at a time"):
        found = list(hla.generate_many(target, texts, assistant_model=draft, lossy_policy="strict", **settings))
    assert {result.index: result.token_ids for result in found} == dict(enumerate(wanted))


@pytest.mark.full
@pytest.mark.parametrize("name", ["dynamic", "longrope", "phi3"])
def test_going_on_from_a_cache(name):
    """The cache of a call goes on here and in Transformers as Transformers' own does."""
    start = prompts((9,))
    settings = {"max_new_tokens": 4, "eos_token_id": NEVER_EMITTED}
    stock = copy.deepcopy(build(name))
    whole = stock.generate(**start, **settings, do_sample=False, return_dict_in_generate=True)
    more = torch.cat([whole.sequences, torch.tensor([[5, 6, 7]])], dim=1)
    inputs, settings = {"input_ids": more, "attention_mask": torch.ones_like(more)}, settings | {"max_new_tokens": 8}
    wanted = stock.generate(**inputs, **settings, **{CACHE: cache_of(whole)}, do_sample=False)
    for ours_goes_on in (True, False):
        turn, draft = copy.deepcopy(build(name)), tiny.draft_of(build(name), "often")
        out = assisted(turn, start, draft, max_new_tokens=4, eos_token_id=NEVER_EMITTED)
        given = settings | {CACHE: cache_of(out)}
        if ours_goes_on:
            got = assisted(turn, inputs, draft, **given).sequences
        else:
            got = turn.generate(**inputs, **given, do_sample=False)
        assert torch.equal(got, wanted), ours_goes_on


def test_a_rope_of_unknown_code_is_refused():
    """Code from the Hub with its own way to change: the config says so, no module of Transformers' kind does."""
    model = copy.deepcopy(build("dynamic"))
    del model.model.rotary_emb.rope_type
    with pytest.raises(
        ValueError,
        match="^LlamaForCausalLM cannot be decoded in blocks .it computes 'dynamic' RoPE.*leave lossy_policy out$",
    ):
        ours(model, (9,), tiny.draft_of(build("dynamic"), "often"), 3, 4)
