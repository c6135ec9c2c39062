"""A draft with a window sees the first and the last tokens of a text: its distributions are those of attention written out, its cost is bounded, and the
text stays the target's.
"""

import numpy as np
import pytest
import torch
from support import eagle, small, sv_models, tiny
from support.enumeration import off
from support.many import SETTINGS, alone, enabled_pair, prompts, together
from support.tiny import NEVER_EMITTED, some_eos

import hf_lossy_assist as hla
from hf_lossy_assist.drafters.model import AssistantRun
from hf_lossy_assist.models import windowed_model
from hf_lossy_assist.models.row_cache import RowLayer
from hf_lossy_assist.models.windowed_model import DraftWindow, WindowedRowModel


WINDOW = DraftWindow(6, sinks=2)
RAGGED = (9, 1, 4, 14)


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """A ring that short texts go round several times."""
    monkeypatch.setattr(windowed_model, "CHUNK", 5)


@torch.no_grad()
def written_out(model, text, window=WINDOW):
    """The logits (V,) behind `text` (n,): one forward without a cache, whose masks are made key by key."""
    count, config = len(text), model.config
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    widths = {kind: config.sliding_window if kind == "sliding_attention" else count for kind in kinds}
    if getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None):
        widths = dict.fromkeys(widths, config.sliding_window)
    masks = {}
    for kind, width in widths.items():
        mask = torch.full((count, count), torch.finfo(model.dtype).min, dtype=model.dtype)
        for query in range(count):
            for key in range(query + 1):
                if query - key < width and (query - key < window.last or key < window.sinks):
                    mask[query, key] = 0
        masks[kind] = mask[None, None]
    mask = masks if len(masks) > 1 else next(iter(masks.values()))
    return model(text[None], attention_mask=mask, position_ids=torch.arange(count)[None], use_cache=False).logits[
        0, -1
    ]


@torch.no_grad()
@pytest.mark.full(every=2)
@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "gemma3"])
def test_logits_are_those_of_attention_written_out(name):
    """In rows of different length, behind rollbacks, and behind one that goes further back than the ring, so that a row is read again."""
    model, fed = tiny.shared(name), list[int]()
    run = WindowedRowModel(model, 3, 80, window=WINDOW)
    texts = [tiny.prompts((length,), seed=length)["input_ids"][0] for length in (70, 40, 33)]
    lengths = [40, 11, 3]
    pad = torch.nn.utils.rnn.pad_sequence
    run.feed(pad([text[:n] for text, n in zip(texts, lengths, strict=True)], batch_first=True), lengths, keep=0)
    for back, counts in (
        (0, [1, 1, 1]),
        (0, [1, 1, 1]),
        (2, [3, 1, 2]),
        (1, [1, 4, 1]),
        (0, [1, 0, 1]),
        (9, [12, 2, 9]),
    ):
        lengths = [length - min(back, length) for length in lengths]
        run.rollback(lengths)
        again = [n if held else 0 for n, held in zip(lengths, run.lengths, strict=True)]
        counts = [count + length - had for count, length, had in zip(counts, lengths, again, strict=True)]
        fed.append(max(counts))
        new = [text[had : had + count] for text, had, count in zip(texts, again, counts, strict=True)]
        logits = run.feed(pad(new, batch_first=True), counts)
        for row, (had, count) in enumerate(zip(again, counts, strict=True)):
            if count:
                expected = written_out(model, texts[row][: had + count])
                torch.testing.assert_close(logits[row, count - 1], expected, rtol=1e-8, atol=1e-8)
        lengths = run.lengths
    assert max(fed) > 20, "a row was read again"


@pytest.mark.full(every=6)
@pytest.mark.nightly(every=3)
@pytest.mark.parametrize("policy", ["strict", hla.SVIP(h=0.9), hla.Constant(9)], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "gemma2", "gpt_neox", "phi"])
def test_greedy_is_generate(name, policy):
    """Drafts of nine tokens are longer than a chunk."""
    model, width = tiny.shared(name), max(RAGGED)
    draft = tiny.draft_of(model, "often")
    whole = tiny.greedy(model, tiny.prompts(RAGGED), eos_token_id=NEVER_EMITTED)
    for end in (NEVER_EMITTED, some_eos(whole, width)):
        expected = tiny.greedy(model, tiny.prompts(RAGGED), eos_token_id=end)
        out = tiny.assisted(model, tiny.prompts(RAGGED), draft, policy, eos_token_id=end, draft_window=(4, 1))
        assert out.sequences.equal(expected)
        assert out.speculation.draft_acceptance_rate > 0


@pytest.mark.parametrize("lengths", [(20,), (20, 13, 2)])
def test_q_is_the_windowed_models(monkeypatch, lengths):
    """The distributions of which tokens are drawn, and which the acceptance rule gets, are those of the model with its window."""
    model, seen, original = tiny.shared("llama"), [], AssistantRun.propose
    draft = tiny.draft_of(model, "often")

    def propose(self, rows, limits, randomness):
        texts = [text.clone() for text in rows.token_ids()]
        seen.append((texts, original(self, rows, limits, randomness)))
        return seen[-1][1]

    monkeypatch.setattr(AssistantRun, "propose", propose)
    torch.manual_seed(3)
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": 16, "draft_window": tuple(WINDOW)}
    tiny.assisted(model, tiny.prompts(lengths), draft, hla.Constant(3), eos_token_id=NEVER_EMITTED, **settings)
    compared = 0
    for texts, drafted in seen[1::3]:
        for row, text in enumerate(texts):
            for place in range(int(drafted.lengths[row])):
                expected = written_out(draft, torch.cat([text, drafted.tokens[row, :place]])).float().softmax(dim=-1)
                torch.testing.assert_close(drafted.probs[row, place], expected, rtol=1e-5, atol=1e-6)
                compared += 1
    assert compared > 5
    with torch.no_grad():
        full = draft(texts[0][None]).logits[0, -1].float().softmax(dim=-1)
    assert (full - drafted.probs[0, 0]).abs().max() > 1e-3, "the window matters"


@pytest.mark.full
def test_sampling_has_the_targets_law():
    """Exactly, of two rows' texts together, on the caches of a real call whose ring goes round."""
    target, draft, _ = sv_models.models()
    how = {"real": True, "others": {"settings": {"draft_window": (1, 0)}}}
    distance, runner = off(target, draft, hla.Constant(2), sv_models.prompts(4, 2), **how)
    assert distance < 1e-6 and max(runner.widths) == 2


def test_the_keys_that_a_draft_attends_to_are_bounded(monkeypatch):
    """However long the text is; without a window they grow with it."""
    target = hla.enable(tiny.build("llama", max_position_embeddings=1024))
    draft, widest, original = small.near(target), {}, RowLayer.update

    def update(self, *given, **more):
        keys, values = original(self, *given, **more)
        kind = type(self.owner).__name__
        widest[kind] = max(widest.get(kind, 0), keys.shape[2])
        return keys, values

    monkeypatch.setattr(RowLayer, "update", update)
    given = {"lossy_policy": "strict", "max_new_tokens": 12, "do_sample": False, "eos_token_id": NEVER_EMITTED}
    for length in (60, 300):
        inputs = tiny.prompts((length, length - 7))
        expected = target.generate(**inputs, **given | {"lossy_policy": None})
        assert target.generate(**inputs, assistant_model=draft, draft_window=tuple(WINDOW), **given).equal(expected)
        assert widest.pop("RingCache") == 2 + 6 + windowed_model.CHUNK
        assert widest.pop("RowCache") >= length
    assert not widest


def test_rows_join_a_batch():
    pair = enabled_pair()
    expected = [alone(pair[0], prompt, **SETTINGS) for prompt in prompts()]
    assert together(pair, prompts(), max_rows=3, draft_window=(np.int64(3), np.int32(1))) == expected


def test_standing_and_early_exits():
    """The window of a standing policy; an early exit has a cache of its own."""
    target = hla.enable(small.llama(layers=3))
    settings = {"max_new_tokens": 16, "do_sample": False}
    expected = target.generate(**small.ragged(), **settings)
    for draft in (small.near(target), hla.early_exit(target, 2)):
        with hla.using(target, draft, "strict", strict=True, draft_window=4):
            assert target.generate(**small.ragged(), **settings).equal(expected)
    assert hla.reports(target)[-1].rows[0].steps


WRONG = {
    "no number": ({"draft_window": "4"}, TypeError, r"draft_window: expected a number of tokens, or \(last, sinks\), got '4'"),
    "nothing": ({"draft_window": 0}, ValueError, "draft_window: expected a whole number of at least 1"),
    "sinks below none": ({"draft_window": (4, -1)}, ValueError, "draft_window: sinks: expected"),
    "three": ({"draft_window": (4, 1, 2)}, TypeError, "draft_window: expected"),
    "no draft model": ({"draft_window": 4, "assistant_model": None, "drafter": hla.SuffixDrafter()}, ValueError, "SuffixDrafter drafts here"),
    "no policy": ({"draft_window": 4, "lossy_policy": None}, ValueError, "draft_window=… is for this package's loop"),
}  # fmt: skip


@pytest.mark.parametrize(("given", "kind", "message"), WRONG.values(), ids=WRONG)
def test_wrong_uses(given, kind, message):
    target = tiny.shared("llama")
    settings = {"assistant_model": target, "lossy_policy": "strict", "max_new_tokens": 2, "do_sample": False} | given
    with pytest.raises(kind, match=message) as error:
        hla.enable(target).generate(**tiny.prompts((5,)), **settings)
    assert "\n" not in str(error.value)


def test_drafts_that_cannot_have_one():
    target = hla.enable(tiny.shared("llama"))
    for draft, why in (
        (tiny.shared("lfm2"), "keeps a recurrent state"),
        (eagle.drafter(target), "Eagle3Drafter drafts here"),
    ):
        with pytest.raises(ValueError, match=rf"^draft_window.*{why}.*leave .* out$"):
            target.generate(**tiny.prompts((5,)), assistant_model=draft, draft_window=4, lossy_policy="strict", max_new_tokens=2, do_sample=False)  # fmt: skip
