"""Drafts with another tokenizer or other padding, and early exits by name, in ragged batches: the target's text and its distribution."""

import copy

import pytest
import torch
from support import small, tiny
from support.enumeration import off
from support.sv_models import SIZE, models, prompts
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as kinds
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import hf_lossy_assist as hla
from hf_lossy_assist.drafters import retokenized


NEVER = {"eos_token_id": tiny.NEVER_EMITTED}
ENDS = {"eos_token_id": list(range(4, 24)), "pad_token_id": 0}


def foreign():
    """A draft whose ids are the target's words in reverse order, with the target's weights moved to match."""
    moved = small.near(small.llama(), 0.02)
    order = torch.cat([torch.arange(4), torch.arange(4, small.VOCAB).flip(0)])
    with torch.no_grad():
        for weight in (moved.get_input_embeddings().weight, moved.get_output_embeddings().weight):
            weight.copy_(weight[order])
    return moved


def tokenizers():
    return {"tokenizer": small.tokenizer(), "assistant_tokenizer": small.tokenizer(small.words()[::-1])}


def ours(target, inputs, draft, **settings):
    given = {"max_new_tokens": 20, "do_sample": False, "lossy_policy": "strict", "return_dict_in_generate": True}
    return hla.enable(target).generate(**inputs, assistant_model=draft, **tokenizers() | given | settings)


@pytest.mark.full
def test_ragged_batches_write_the_targets_text(monkeypatch):
    """A window of each text is retokenized; whole texts are in generation/test_lossless.py."""
    monkeypatch.setattr(retokenized, "WHOLE", 6)
    monkeypatch.setattr(retokenized, "WINDOW", 4)
    target, draft, inputs = small.llama(), foreign(), small.ragged((0, 3, 5, 8))
    wanted = [tiny.greedy(target, inputs, max_new_tokens=20, **end) for end in (NEVER, ENDS)]
    assert len({int((row == 0).sum()) for row in wanted[1][:, 9:]}) > 2, "rows end together"
    for gamma in (1, 5, 12):
        for end, text in zip((NEVER, ENDS), wanted, strict=True):
            out = ours(target, inputs, draft, num_assistant_tokens=gamma, **end)
            assert torch.equal(out.sequences, text), gamma
            assert gamma > 1 or out.speculation.draft_acceptance_rate > 0.5


def test_the_draft_reads_a_text_once():
    """Behind the prompt it reads what is new alone."""
    target, draft, inputs = small.llama(), foreign(), small.ragged((0, 3, 5))
    widths = []
    hook = draft.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    ours(target, inputs, draft, num_assistant_tokens=4, **NEVER)
    hook.remove()
    assert widths[0] == 8 and widths.count(8) == 1 and max(widths[1:]) <= 5


def test_tokens_that_are_no_text_and_tables_that_end():
    """Special tokens of the target's are not handed on; GPT-2's 16 positions are of its own tokens."""
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 16, "vocab_size": small.VOCAB}
    draft, target = GPT2LMHeadModel(GPT2Config(**sizes)).eval(), small.llama()
    inputs = small.ragged((0, 3, 8))
    inputs["input_ids"][2, -1] = inputs["input_ids"][0, 4] = 2
    wanted = tiny.greedy(target, inputs, max_new_tokens=20, **NEVER)
    out = ours(target, inputs, draft, num_assistant_tokens=5, **NEVER)
    assert torch.equal(out.sequences, wanted)
    first = out.speculation.rows[0]
    assert first.num_draft_tokens > 0 and first.num_plain_steps > 5, "behind its table the draft guesses no more"


def letters():
    """Words of the target's in letters, so that one of its tokens is several of the draft's, and word ends are merged."""
    vocab = {letter: n for n, letter in enumerate("abcdefw0123456789 ")}
    inner = Tokenizer(kinds.BPE(vocab | {"w1": 18, "w2": 19, " w": 20}, [("w", "1"), ("w", "2"), (" ", "w")]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Split(" w", "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@pytest.mark.full
def test_tokens_of_other_sizes():
    target, inputs = small.llama(), small.ragged((0, 3, 5))
    draft = small.llama(seed=3, vocab=21)
    wanted = tiny.greedy(target, inputs, max_new_tokens=20, **NEVER)
    for gamma in (1, 6, 12):
        out = ours(target, inputs, draft, num_assistant_tokens=gamma, assistant_tokenizer=letters(), **NEVER)
        assert torch.equal(out.sequences, wanted)
        assert out.speculation.total().num_draft_tokens > 0


def test_a_draft_stays_as_it_was():
    """Transformers' generator for sampling cuts the draft's head to the common words, for good."""
    draft = foreign()
    heads, weights = (draft.get_output_embeddings(), draft.get_input_embeddings()), copy.deepcopy(draft.state_dict())
    ours(small.llama(), small.ragged(), draft, do_sample=True)
    assert (draft.get_output_embeddings(), draft.get_input_embeddings()) == heads
    assert draft.state_dict().keys() == weights.keys()
    assert all(torch.equal(weight, weights[name]) for name, weight in draft.state_dict().items())


def test_drafts_that_cannot_be_retokenized_are_refused():
    for inputs in (small.one(), small.ragged()):
        with pytest.raises(ValueError, match=r"^Lfm2ForCausalLM cannot draft [^\n]* recurrent state[^\n]*$"):
            ours(small.llama(), inputs, tiny.shared("lfm2"))
    with pytest.raises(ValueError, match=r"^SVIP needs a draft model with the target's tokenizer[^\n]*$"):
        ours(small.llama(), small.ragged(), foreign(), lossy_policy="svip")


@pytest.mark.full
@pytest.mark.parametrize(("sizes", "rows"), [((120, 97), (0,)), ((97, 120), (0, 3, 5)), ((97, 160), (0, 3, 5))])
def test_one_tokenizer_passed_twice_goes_with_any_padding(sizes, rows):
    """No padding of a vocabulary is drafted, and the target's may be read: both models answer with random logits there."""
    target, draft = (small.llama(seed, vocab=size) for seed, size in enumerate(sizes))
    twice = {"tokenizer": small.tokenizer(), "assistant_tokenizer": small.tokenizer()}
    inputs, wanted = small.ragged(rows), tiny.greedy(target, small.ragged(rows), max_new_tokens=20, **NEVER)
    assert torch.equal(ours(target, inputs, draft, **twice, **NEVER).sequences, wanted)
    assert ours(target, inputs, draft, do_sample=True, temperature=3.0, **twice, **NEVER).sequences.max() < sizes[0]
    with pytest.raises(ValueError, match="more than padding. Pass tokenizer=… and assistant_tokenizer=…"):
        ours(target, inputs, draft, **twice | {"tokenizer": None})


def test_one_tokenizer_passed_twice_that_a_model_cannot_read_is_refused():
    twice = {"tokenizer": small.tokenizer(), "assistant_tokenizer": small.tokenizer()}
    for sizes, name in (((97, 60), "assistant"), ((60, 97), "target")):
        target, draft = (small.llama(seed, vocab=size) for seed, size in enumerate(sizes))
        found = f"the target has {sizes[0]} token ids, the assistant {sizes[1]}: "
        with pytest.raises(ValueError, match=rf"^{found}[^\n]* 97 tokens are not the {name}'s: pass"):
            ours(target, small.one(vocab=60), draft, **twice)


def keep_four(order):
    inner = Tokenizer(kinds.WordLevel({word: n for n, word in enumerate(order)}, unk_token="a"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def test_samples_have_the_targets_distribution():
    """Exactly, of all rows' texts together."""
    target, draft, _ = models()
    others = {"tokenizer": keep_four("abcd"), "assistant_tokenizer": keep_four("dbca")}
    distance, runner = off(target, draft, hla.Constant(2), prompts(4, 2), real=True, others=others)
    assert distance < 1e-6 and max(runner.widths) == 2 and SIZE == 4
