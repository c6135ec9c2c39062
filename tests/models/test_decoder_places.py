"""Where tokens of rows stand, where a decoder's forward is not told: tables and biases have each row's own, and other threads' forwards nothing."""

import types
from functools import partial

import pytest
import torch
from support import encoded
from transformers import DynamicCache, EncoderDecoderCache
from transformers.models.bigbird_pegasus.modeling_bigbird_pegasus import BigBirdPegasusLearnedPositionalEmbedding
from transformers.models.pegasus_x.modeling_pegasus_x import PegasusXSinusoidalPositionalEmbedding

from hf_lossy_assist.models.compat import CACHE
from hf_lossy_assist.models.encoder_decoder import (
    CrossAttentionRowModel,
    map_tensors,
    reads_encoder,
    why_not_encoded_rows,
)
from hf_lossy_assist.models.patching import Forward
from hf_lossy_assist.models.quirks import cache_positions
from hf_lossy_assist.models.quirks.cache_positions import PositionSources


NAMES = (*encoded.TEXT, *encoded.SOUND)


def test_tables_that_want_positions_in_another_shape():
    """Pegasus-X's sinusoids take a column of them, BigBird-Pegasus's table a row; each with what its decoder hands it."""
    sines, table = PegasusXSinusoidalPositionalEmbedding(8), BigBirdPegasusLearnedPositionalEmbedding(30, 8)
    positions = torch.tensor([[4, 5, 6], [9, 10, 11]])
    wholes = {sines: sines(torch.zeros(1, 20, 8))[0], table: table.weight}
    for place, by, given, counted in (
        (sines, partial(cache_positions._look_up, sines, None), torch.zeros(2, 3, 8), torch.arange(2, 5)[:, None]),
        (table, cache_positions._ask_by_position, torch.zeros(2, 3, dtype=torch.int64), torch.arange(2, 5)),
    ):
        for width in (3, 1):
            forward = Forward(types.SimpleNamespace(visible=12), positions[:, :width])
            found = by(forward, place.forward, given[:, :width], 2, counted[:width])
            torch.testing.assert_close(found, wholes[place][positions[:, :width]])


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


@pytest.mark.parametrize("name", ["m2m_100", "speech_to_text", "bart", "t5"])
@torch.no_grad()
def test_padding_that_is_drafted_moves_no_token_behind_it(name):
    """M2M100 and Speech2Text give padding no position, and count a block without it: one token at a time, they do not."""
    model, text = encoded.shared(name), torch.tensor([[2, 30, 41, encoded.PAD, 52, 63, 74]]).expand(2, -1)
    inputs = encode(model, name, 2)
    runner, single = (CrossAttentionRowModel(model, 2, 20, inputs=inputs) for _ in range(2))
    one = torch.cat([single.feed(token, [1, 1]) for token in text.split(1, dim=1)], dim=1)
    torch.testing.assert_close(runner.feed(text, [7, 7]), one)
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    steps = [model(**inputs, decoder_input_ids=token, **{CACHE: cache}).logits for token in text.split(1, dim=1)]
    torch.testing.assert_close(one, torch.cat(steps, dim=1))


def test_what_is_found_of_each_kind():
    found = {name: PositionSources.of(encoded.shared(name)) for name in NAMES}
    assert {name: sources.argument for name, sources in found.items() if sources.argument} == {
        "whisper": "decoder_position_ids", "moonshine": "decoder_position_ids",
    }  # fmt: skip
    assert {name for name, sources in found.items() if sources.reads_tokens} == {"m2m_100", "speech_to_text"}
    assert {name: len(sources.biases) for name, sources in found.items() if sources.biases} == {"t5": 1, "umt5": 2}
    assert all(sources.known for sources in found.values()) and not PositionSources(None).known
    distilled = encoded.distilled(encoded.shared("whisper"))
    assert reads_encoder(distilled) and len(PositionSources.of(distilled).tables) == 1
    assert not any(reads_encoder(encoded.shared(name)) for name in NAMES)
