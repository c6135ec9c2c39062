"""Biases by places (ALiBi) in ragged batches: always the text of `generate` for the same batch. A table by the cache's length has no rows."""

from functools import cache

import pytest
import tiny_models
import torch
from support import tiny
from support.tiny import some_eos

from hf_lossy_assist.models.probe import why_not_rows


RAGGED = (9, 1, 4, 14)
NEVER = {"eos_token_id": tiny.NEVER_EMITTED, "use_cache": True}
COUNTING = ["bart", "roformer", "gpt_neo", "inkling_text"]  # places by the cache's length
ALIBI = ["bloom", "mpt", "falcon+alibi"]
SEEDS = {"mpt": 1}  # whose texts vary and decide by more than rounding


@cache
def model_of(name, **changes):
    attention = "sdpa" if name == "falcon+alibi" else "eager"
    model = tiny_models.tiny_model(name, "causal", attention, SEEDS.get(name, 0), **changes)
    # Their softmax in float32 makes −inf of a mask in float64, and NaN of a padding token's row.
    return model if name in ("bloom", "mpt") else model.double()


@cache
def draft_of(name, kind):
    return tiny.draft_of(model_of(name), kind)


@cache
def reference(name, eos):
    return tiny.greedy(model_of(name), tiny.prompts(RAGGED), **NEVER | {"eos_token_id": eos})


def constant(gamma):
    return {"stop": {"name": "constant", "gamma": gamma}}


@pytest.mark.full
@pytest.mark.parametrize("name", ALIBI)
def test_ragged_batches_write_the_text_of_generate(name):
    model, inputs, whole = model_of(name), tiny.prompts(RAGGED), reference(name, tiny.NEVER_EMITTED)
    assert why_not_rows(model) is None
    assert len(set(whole[:, max(RAGGED) :].flatten().tolist())) > 8, "texts this monotonous prove nothing"
    end = some_eos(whole, max(RAGGED))
    ended = reference(name, end)
    assert len({int((row != tiny.PAD).sum()) for row in ended[:, max(RAGGED) :]}) > 1, "no row ends before the others"
    rates = []
    for kind, gammas in (("often", (1, 4, 9, 12)), ("rarely", (6,)), ("never", (2, 5))):
        for gamma in gammas:
            eos, wanted = ((tiny.NEVER_EMITTED, whole), (end, ended))[gamma % 2]
            given = NEVER | {"eos_token_id": eos}
            out = tiny.assisted(model, inputs, draft_of(name, kind), constant(gamma), **given)
            assert torch.equal(out.sequences, wanted), (kind, gamma)
            rates.append(out.speculation.draft_acceptance_rate)
    assert 0.1 < rates[1] < 1.0 and rates[-1] == 0.0


def test_places_by_the_length_of_the_cache_have_no_rows():
    for name in COUNTING:
        assert why_not_rows(tiny_models.tiny_model(name, "causal", "eager")) is not None


def masked(*rows):
    mask = torch.tensor([[int(c == "x") for c in row] for row in rows])
    ids = torch.randint(4, 90, mask.shape, generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("name", ["bloom", pytest.param("falcon+alibi", marks=pytest.mark.full)])
def test_holes(name):
    """Biases by the cache's length count hidden tokens between others."""
    model, draft = model_of(name), draft_of(name, "often")
    one, several = masked("xx.x..xxxx"), masked("xxx.xx.xxx", "...xxxxxxx", "..x.x...xx")
    for inputs in (one, several):
        if name == "bloom" and inputs is several:
            with pytest.raises(ValueError, match="attention_mask hides tokens between others"):
                tiny.assisted(model, inputs, draft, **NEVER)
            continue
        wanted = tiny.greedy(model, inputs, **NEVER)
        assert torch.equal(tiny.assisted(model, inputs, draft, constant(4), **NEVER).sequences, wanted)
