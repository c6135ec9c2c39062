"""`inputs_embeds`: prompts that are embeddings are written on as `generate` writes them, in batches and with any draft."""

import pytest
import tiny_vision
import torch
from support import hybrids, seeing, small, tiny
from transformers import DynamicCache

import hf_lossy_assist as hla
from hf_lossy_assist.generation.prompt_layout import find_ids
from hf_lossy_assist.models.facts import CACHE


SOFT = 3  # embeddings of no token
LENGTHS = (9, 2, 5)
GREEDY = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": tiny.NEVER_EMITTED}
STRICT = GREEDY | {"lossy_policy": "strict", "return_dict_in_generate": True}


def embedded(model, lengths=LENGTHS, soft_first=False, seed=0):
    """Padded prompts, soft places between the padding and the text or in front of both, and their ids without the soft places."""
    inputs = tiny.prompts(lengths, seed)
    table = model.get_input_embeddings()
    with torch.no_grad():
        texts = table(inputs["input_ids"])
    noise = torch.randn(len(lengths), SOFT, texts.shape[-1], generator=torch.Generator().manual_seed(seed))
    embeds, mask = torch.cat([noise.to(texts.dtype) * texts.std(), texts], 1), inputs["attention_mask"]
    mask = torch.cat([torch.ones(len(lengths), SOFT, dtype=torch.int64), mask], 1)
    if not soft_first:
        pads = max(lengths) - torch.tensor(lengths)[:, None]
        order = torch.arange(SOFT + max(lengths)).expand(len(mask), -1)
        order = torch.where(order < pads, order + SOFT, torch.where(order < pads + SOFT, order - pads, order))
        embeds, mask = embeds[torch.arange(len(mask))[:, None], order], mask.gather(1, order)
    return {"inputs_embeds": embeds, "attention_mask": mask}, inputs["input_ids"]


def written(model, given, **settings):
    return model.generate(**given, **GREEDY | settings)


def assisted(model, given, draft, **settings):
    settings |= {} if draft is None else {"assistant_model": draft}
    return hla.enable(model).generate(**STRICT | settings | given)


@pytest.mark.parametrize("name", ["llama", *(pytest.param(n, marks=pytest.mark.full) for n in ("gpt2", "gemma3"))])
def test_soft_prompts_in_batches(name):
    model = tiny.shared(name)
    draft = tiny.draft_of(model, "often")
    for soft_first in (False, True):
        given, ids = embedded(model, soft_first=soft_first)
        if soft_first and name == "gemma3":
            with pytest.raises(ValueError, match="attention_mask hides tokens between others"):
                assisted(model, given, draft)
            continue
        alone = written(model, given)
        assert alone.shape == (3, 20) and len(set(alone.flatten().tolist())) > 3
        assert torch.equal(assisted(model, given, draft).sequences, alone)
        if not soft_first:
            beside = given | {"input_ids": ids}
            assert torch.equal(assisted(model, beside, draft).sequences, torch.cat([ids, alone], 1))


@pytest.mark.full
@pytest.mark.parametrize("kind", ["lfm2", pytest.param("granitemoehybrid", marks=pytest.mark.nightly)])
def test_models_with_recurrent_states(kind):
    model = hybrids.model(kind)
    (rows, ids), (one, _) = embedded(model), embedded(model, (9,), soft_first=True)
    for inputs in (rows, rows | {"input_ids": ids}, one):
        alone = written(model, inputs)
        assert torch.equal(assisted(model, inputs, hybrids.drafts(model)["often"]).sequences, alone)


@pytest.mark.full
def test_models_that_see_are_given_what_their_encoder_made():
    """As pipelines do that merge pictures by themselves."""
    name = "internvl"
    model = seeing.model_of(name)
    inputs = tiny_vision.prompts(tiny_vision.SEEN[name], [0, 0], 3)
    inputs = {each: inputs[each] for each in ("input_ids", "attention_mask")}
    with torch.no_grad():
        table = model.get_input_embeddings()(inputs["input_ids"])
    given = {"inputs_embeds": table + 0.1 * table.std() * torch.randn(table.shape, generator=torch.Generator().manual_seed(1)),
             "attention_mask": inputs["attention_mask"]}  # fmt: skip
    for beside in ({}, {"input_ids": inputs["input_ids"]}):
        alone = written(model, given | beside)
        assert torch.equal(assisted(model, given | beside, seeing.draft_of(name)).sequences, alone)


@pytest.mark.filterwarnings("ignore:Passing `:UserWarning")
def test_one_embedding_and_scores_and_processors():
    """Processors and criteria see what `generate` shows them: new tokens alone, or behind the ids that were given."""
    model = tiny.shared("gpt2")
    shapes = {True: [], False: []}

    def note(ours):
        def seen(ids, scores, **kwargs):
            shapes[ours].append(ids[0].tolist())
            return torch.zeros(len(ids), dtype=torch.bool)

        return [seen]

    given, ids = embedded(model, (1,))
    first = {name: value[:, -1:] for name, value in given.items()}
    settings = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "min_new_tokens": 4, "output_scores": True}
    for inputs in (given, given | {"input_ids": ids}, first):
        shapes = {True: [], False: []}
        stock = written(model, inputs, **settings, return_dict_in_generate=True, stopping_criteria=note(False))
        ours = assisted(model, inputs, tiny.draft_of(model, "often"), **settings, stopping_criteria=note(True))
        assert torch.equal(ours.sequences, stock.sequences) and shapes[True] == shapes[False]
        assert all(torch.allclose(a, b) for a, b in zip(ours.scores, stock.scores, strict=True))


def test_lengths_and_several_texts_of_a_prompt():
    model = tiny.shared("llama")
    given, ids = embedded(model)
    for inputs in (given, given | {"input_ids": ids}):
        for limits in ({"max_new_tokens": 7}, {"max_new_tokens": None, "max_length": 30}):
            alone = written(model, inputs, **limits)
            assert torch.equal(assisted(model, inputs, model, **limits).sequences, alone), limits
    sampled = {"do_sample": True, "num_return_sequences": 2, "top_k": 1}
    twice = written(model, given).repeat_interleave(2, 0)
    assert torch.equal(assisted(model, given, model, **sampled).sequences, twice)


def test_tokens_are_known_by_their_embeddings():
    """So that a draft reads the text of a prompt, whose ids nobody gave."""
    model = tiny.shared("gemma3")  # whose table scales
    draft = tiny.draft_of(model, "often")
    given, _ = embedded(model, (9,))
    found = find_ids(model, given["inputs_embeds"])
    assert found[0, :SOFT].tolist() == [-1] * SOFT and torch.equal(found[:, SOFT:], tiny.prompts((9,))["input_ids"])
    ids = tiny.prompts((9,))
    with torch.no_grad():
        text = {"inputs_embeds": model.get_input_embeddings()(ids["input_ids"])}
    by_ids, by_embeddings = assisted(model, ids, draft).speculation, assisted(model, text, draft).speculation
    assert by_ids.mean_acceptance_length == by_embeddings.mean_acceptance_length > 1.3


def test_a_cache_goes_on_behind_embeddings():
    """With the embeddings of the new tokens, as Transformers' own tests do; embeddings of no token behind a cache are refused."""
    model = hla.enable(tiny.build("llama"))
    given, _ = embedded(model, (9,))
    first = assisted(model, given, model, max_new_tokens=6)
    with torch.no_grad():
        new = model.get_input_embeddings()(first.sequences)
    embeds = torch.cat([given["inputs_embeds"], new], 1)
    longer = {"inputs_embeds": embeds, "attention_mask": torch.ones(1, SOFT + 15).long()}
    out = assisted(model, longer | {CACHE: first[CACHE]}, model, max_new_tokens=14)
    assert torch.equal(torch.cat([first.sequences, out.sequences], 1), written(model, given))
    empty = DynamicCache()
    assert torch.equal(assisted(model, given | {CACHE: empty}, model).sequences, written(model, given))
    assert empty.get_seq_length()


def test_what_does_not_belong_together_is_refused():
    model, embeds = small.llama(), torch.ones(2, 4, 32).double()
    with pytest.raises(ValueError, match="inputs_embeds=… is for rows: leave it out"):  # an encoder's
        assisted(tiny.shared("t5"), {"inputs_embeds": torch.ones(1, 9, 32)}, tiny.shared("t5"))
    for given, line in (
        ({"input_ids": torch.ones(2, 5).long()}, "input_ids have 5 columns, inputs_embeds 4"),
        ({"attention_mask": torch.ones(2, 5)}, r"attention_mask has shape \(2, 5\), input_ids \(2, 4\)"),
        ({"max_new_tokens": None, "max_length": 4}, "[^\n]*`max_length`"),
    ):
        with pytest.raises(ValueError, match=rf"^{line}[^\n]*$"):
            assisted(model, {"inputs_embeds": embeds} | given, model)
