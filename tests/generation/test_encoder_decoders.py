"""Encoder-decoders whose decoder is told positions, in batches: strict greedy decoding is `generate`'s own text of the batch, row by row; others
write one row at a time. What is refused. Whisper has a file of its own."""

import copy
from functools import cache

import pytest
import torch
from support import encoded
from support.tiny import cache_of, some_eos
from transformers import DynamicCache, EncoderDecoderCache

import hf_lossy_assist as hla
from hf_lossy_assist.models.encoder_decoder import CrossAttentionRowModel, map_tensors, why_not_encoded_rows
from hf_lossy_assist.models.facts import CACHE, facts_of


NEW, NEVER = 20, 102
ENDS = {"eos_token_id": NEVER, "pad_token_id": encoded.PAD}
SETTINGS = {"max_new_tokens": NEW, "do_sample": False, "num_beams": 1} | ENDS


@cache
def reference(name, rows, eos=NEVER):
    """Return what Transformers writes for a batch, (rows, NEW + 1); no choice in it is so close that rounding could turn it."""
    settings = SETTINGS | {"eos_token_id": eos, "output_scores": True, "return_dict_in_generate": True}
    out = encoded.shared(name).generate(**encoded.inputs(name, rows), **settings)
    top = torch.stack(out.scores).topk(2).values
    assert (top[..., 0] - top[..., 1]).min() > 1e-6
    return out.sequences


@cache
def draft_for(name, kind):
    return encoded.draft_of(encoded.shared(name), kind)


def assisted(model, inputs, draft, policy="strict", **settings):
    settings = SETTINGS | {"return_dict_in_generate": True} | settings
    try:
        return hla.enable(model).generate(**inputs, **settings, assistant_model=draft, lossy_policy=policy)
    finally:
        hla.disable(model)


@pytest.mark.parametrize("kind", ["often", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("rarely", "never"))])  # fmt: skip
def test_a_batch_is_generates_text_row_by_row(kind):
    model, inputs, draft = encoded.shared("moonshine"), encoded.inputs("moonshine", 4), draft_for("moonshine", kind)
    whole = reference("moonshine", 4)
    assert len(set(whole[:, 1:].flatten().tolist())) > 15, "texts this monotonous prove nothing"
    eos = some_eos(whole, 1)
    ended = reference("moonshine", 4, eos)
    assert len({int((row != encoded.PAD).sum()) for row in ended}) > 1, "no row ends before the others"
    stops = {"often": [hla.Constant(1), hla.SVIP(h=0.5)], "rarely": [hla.Constant(12)], "never": [hla.Constant(5)]}
    for policy in stops[kind]:
        out = assisted(model, inputs, draft, policy)
        assert torch.equal(out.sequences, whole), policy
        rate = out.speculation.draft_acceptance_rate
        assert rate == 0 if kind == "never" else 0 < rate < 1
    for policy in (hla.Constant(5), hla.SVIP(h=0.5)):
        assert torch.equal(assisted(model, inputs, draft, policy, eos_token_id=eos).sequences, ended), policy
    assert len(out.speculation.rows) == 4


@pytest.mark.full(every=3)
@pytest.mark.parametrize("name", ["moonshine", "bart", "speech_to_text"])
def test_one_row_and_a_prompt_of_the_decoders(name):
    model, inputs = encoded.shared(name), encoded.inputs(name, 1)
    for start in ({}, {"decoder_input_ids": torch.tensor([[encoded.START, 30, 41]])}):
        expected = model.generate(**inputs, **SETTINGS, **start)
        for new in (1, 2, NEW):
            out = assisted(model, inputs, draft_for(name, "often"), hla.Constant(5), max_new_tokens=new, **start)
            assert torch.equal(out.sequences, expected[:, : expected.shape[1] - NEW + new])


def test_the_cross_attention_is_computed_once(monkeypatch):
    """Rows that have ended leave it, too."""
    written, narrowed, select = [], [], CrossAttentionRowModel.select
    update = DynamicCache.update
    monkeypatch.setattr(CrossAttentionRowModel, "select", lambda self, rows: (narrowed.append(len(rows)), select(self, rows))[1])  # fmt: skip
    monkeypatch.setattr(DynamicCache, "update", lambda self, *a, **k: (written.append(a[2]), update(self, *a, **k))[1])
    model, inputs = encoded.shared("moonshine"), encoded.inputs("moonshine", 8)
    eos, draft = some_eos(reference("moonshine", 8), 1), draft_for("moonshine", "often")
    for _ in range(2):  # in the first call each model may be tried
        written.clear()
        out = assisted(model, inputs, draft, hla.Constant(5), eos_token_id=eos, return_dict_in_generate=False)
        assert torch.equal(out, reference("moonshine", 8, eos))
    assert narrowed and len(set(narrowed)) > 1, "this batch was meant to be narrowed more than once"
    assert written == [0, 1] * 2, "of target and draft each layer's, once: the rest is in caches of rows"


def test_processors_and_scores():
    model, inputs = encoded.shared("moonshine"), encoded.inputs("moonshine", 4)
    settings = {"output_scores": True, "output_logits": True, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2}
    expected = model.generate(**inputs, **SETTINGS, **settings, return_dict_in_generate=True)
    out = assisted(model, inputs, draft_for("moonshine", "often"), hla.Constant(4), **settings)
    assert torch.equal(out.sequences, expected.sequences)
    for name in ("scores", "logits"):
        assert torch.allclose(torch.stack(out[name]).double(), torch.stack(expected[name]).double(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["moonshine", "bart"])
def test_the_cache_of_one_row_goes_on_in_transformers(name):
    model, inputs = encoded.shared(name), encoded.inputs(name, 1)
    first = assisted(model, inputs, draft_for(name, "often"), max_new_tokens=9)
    cache = cache_of(first)
    assert isinstance(cache, EncoderDecoderCache) and cache.get_seq_length() == 9
    mask = torch.ones_like(first.sequences)  # from which `generate` tells what the cache holds
    start = {"decoder_input_ids": first.sequences, "decoder_attention_mask": mask}
    more = start | {CACHE: cache, "max_new_tokens": NEW - 9}
    assert torch.equal(model.generate(**inputs, **SETTINGS | more), reference(name, 1))


def hidden_prompts():
    """Padded on the left. The token that `generate` would put before them stands in the padding, too."""
    ids = torch.tensor([[encoded.START, 30, 41, 52], [encoded.START, 32, 33, 44], [encoded.START, 34, 45, 35]])
    return {"decoder_input_ids": ids, "decoder_attention_mask": (torch.arange(4) >= torch.arange(3)[:, None]).long()}


def test_padding_before_prompts_of_the_decoder():
    """It changes no distance; BART's positions count it, and one row goes as `generate` has it."""
    for name, rows in (("moonshine", slice(None)), ("bart", slice(1, 2))):
        model, start = encoded.shared(name), {key: value[rows] for key, value in hidden_prompts().items()}
        inputs = encoded.inputs(name, len(start["decoder_input_ids"])) | start
        out = assisted(model, inputs, draft_for(name, "often"), hla.Constant(4))
        assert torch.equal(out.sequences, model.generate(**inputs, **SETTINGS))


def test_rows_that_cannot_be_are_refused_by_their_reason():
    """Hidden tokens in the middle of a row, positions that a cache counts, and a decoder that looks at other rows."""
    inputs = encoded.inputs("moonshine", 3) | hidden_prompts()
    inputs["decoder_attention_mask"][:, 0] = 1
    looks = copy.deepcopy(encoded.shared("moonshine"))
    looks.model.decoder.norm.register_forward_hook(lambda module, args, out: out + out.mean(dim=0, keepdim=True))
    counted = "its positions count the tokens that decoder_attention_mask hides"
    for name, model, given, line in (
        ("moonshine", encoded.shared("moonshine"), inputs, counted),
        ("bart", encoded.shared("bart"), encoded.inputs("bart", 3), "its decoder takes no positions"),
        ("moonshine", looks, encoded.inputs("moonshine", 3), "a trial on rows of one length did not give"),
    ):
        with pytest.raises(ValueError, match=f"one row, this call has 3: .*{line}"):
            assisted(model, given, draft_for(name, "often"))


def test_an_encoder_decoder_of_two_models():
    """`EncoderDecoderModel` hands positions on to its decoder."""
    model = encoded.build("encoder-decoder")
    inputs = encoded.inputs("bart", 4)
    expected = model.generate(**inputs, **SETTINGS)
    assert len(set(expected.flatten().tolist())) > 8
    out = assisted(model, inputs, encoded.draft_of(model, "often"), hla.Constant(4))
    assert torch.equal(out.sequences, expected) and 0 < out.speculation.draft_acceptance_rate < 1


NAMES = ("whisper", "moonshine")


@torch.no_grad()
def encode(model, name, rows=3):
    """Return the encoder's states that the decoder of `name` attends to."""
    heard = encoded.inputs(name, rows)
    mask = {k: v for k, v in heard.items() if k == "attention_mask"}
    given = {"input_features": heard["input_features"]} if name == "whisper" else heard
    return {"encoder_outputs": model.get_encoder()(**given, return_dict=True)} | mask


@torch.no_grad()
def plain(model, inputs, text, row):
    """The logits of each place of `text` (n,), all at once and without a cache."""
    single = {name: map_tensors(value, lambda tensor: tensor[row : row + 1]) for name, value in inputs.items()}
    return model(**single, decoder_input_ids=text[None], use_cache=False).logits[0]


@pytest.mark.full(every=3)
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_rows_that_keep_different_numbers_of_tokens(name):
    """Twelve rounds of blocks that are rolled back at random, each row at a place of its own: a plain forward's logits."""
    model, generator = encoded.shared(name), torch.Generator().manual_seed(5)
    inputs = encode(model, name)
    assert why_not_encoded_rows(model, inputs) is None
    runner = CrossAttentionRowModel(model, 3, 60, inputs=inputs)
    texts = torch.randint(4, 90, (3, 60), generator=generator)
    rights = [plain(model, inputs, text[:50], row) for row, text in enumerate(texts)]
    runner.feed(texts[:, :4], [4, 3, 1], keep=0)
    for _ in range(12):
        held = list(runner.lengths)
        counts = torch.randint(1, 6, (3,), generator=generator).tolist()
        block = torch.stack([text[n : n + 6] for text, n in zip(texts, held, strict=True)])
        right = torch.randint(1, 7, (3,), generator=generator)
        block = torch.where(torch.arange(6) < right[:, None], block, 95)  # wrong behind so many
        got = runner.feed(block, [6] * 3)
        for row, (n, good) in enumerate(zip(held, right.tolist(), strict=True)):
            torch.testing.assert_close(got[row, :good], rights[row][n : n + good], atol=1e-6, rtol=1e-6)
        runner.rollback([min(n + min(c, r), 44) for n, c, r in zip(held, counts, right.tolist(), strict=True)])
    runner.select([2, 0])
    n = list(runner.lengths)
    got = runner.feed(torch.stack([texts[2, n[0] : n[0] + 2], texts[0, n[1] : n[1] + 2]]), [2, 2])
    for at, row in enumerate((2, 0)):
        torch.testing.assert_close(got[at], rights[row][n[at] : n[at] + 2], atol=1e-6, rtol=1e-6)


def test_the_argument_of_each_kind():
    for name in ("t5", "bart", "speech_to_text"):
        assert "takes no positions" in why_not_encoded_rows(encoded.shared(name), {}), name
    assert {facts_of(encoded.shared(name)).position_argument for name in NAMES} == {"decoder_position_ids"}
    distilled = encoded.distilled(encoded.shared("whisper"))
    assert facts_of(distilled).reads_encoder and facts_of(distilled).position_argument == "position_ids"
    assert not any(facts_of(encoded.shared(name)).reads_encoder for name in NAMES)
