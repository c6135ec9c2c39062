"""Decoders of encoder-decoders that are told the positions of their tokens, in rows of different length; others have no rows."""

import pytest
import torch
from support import encoded

from hf_lossy_assist.models.encoder_decoder import (
    CrossAttentionRowModel,
    map_tensors,
    why_not_encoded_rows,
)
from hf_lossy_assist.models.facts import facts_of


NAMES = ("whisper", "moonshine")
COUNTING = ("t5", "umt5", "bart", "marian", "m2m_100", "speech_to_text")


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


@pytest.mark.parametrize("name", COUNTING)
def test_a_decoder_that_counts_positions_by_its_cache_has_no_rows(name):
    assert "takes no positions" in why_not_encoded_rows(encoded.shared(name), {})


def test_the_argument_of_each_kind():
    assert {facts_of(encoded.shared(name)).position_argument for name in NAMES} == {"decoder_position_ids"}
    distilled = encoded.distilled(encoded.shared("whisper"))
    assert facts_of(distilled).reads_encoder and facts_of(distilled).position_argument == "position_ids"
    assert not any(facts_of(encoded.shared(name)).reads_encoder for name in NAMES)
