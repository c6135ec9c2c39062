"""An early exit is the model cut off behind some of its blocks, and shares every weight with it."""

import pytest
import torch
from support import tiny
from transformers import OPTConfig, OPTForCausalLM

import hf_lossy_assist as hla
from hf_lossy_assist.models.early_exit import leaves_early
from hf_lossy_assist.models.row_model import RowModel


@pytest.mark.parametrize("name", tiny.BATCHED)
def test_it_is_the_model_without_its_last_blocks(name):
    model = tiny.shared(name)
    own, ids = hla.early_exit(model, 1), tiny.prompts((12,))["input_ids"]
    cut = tiny.build(name, num_hidden_layers=1, **({"layer_types": ["sliding_attention"]} if name == "gemma3" else {}))
    missing = cut.load_state_dict(model.state_dict(), strict=False).missing_keys
    assert not missing
    with torch.no_grad():
        assert torch.equal(own(ids).logits, cut(ids).logits)
        assert not torch.equal(own(ids).logits, model(ids).logits)
    assert not any(parameter.is_meta for parameter in own.parameters())
    theirs = {parameter.data_ptr() for parameter in model.parameters()}
    assert {parameter.data_ptr() for parameter in own.parameters()} <= theirs
    assert model.config.num_hidden_layers == 2


@pytest.mark.full(every=4)
@pytest.mark.parametrize("name", tiny.BATCHED)
def test_it_drafts_for_the_model_in_batches(name):
    model = tiny.shared(name)
    for lengths in ((7,), (3, 9, 5)):
        inputs = tiny.prompts(lengths)
        out = tiny.assisted(model, inputs, hla.early_exit(model, 1), hla.Confidence(0.3))
        assert torch.equal(out.sequences, tiny.greedy(model, inputs))
        assert out.speculation.total().num_draft_tokens > 0


def test_it_is_fed_padded():
    """Its attention looks at the whole model's config, so packing by its own would go unnoticed."""
    model = tiny.shared("llama")
    assert RowModel(model, 2, 16).packs and not RowModel(hla.early_exit(model, 1), 2, 16).packs


def test_what_cannot_be_cut_is_refused_in_one_line():
    model = tiny.shared("llama")
    for layers, message in ((2, "fewer than the 2 blocks"), (0, "layers"), (1.5, "layers")):
        with pytest.raises((ValueError, TypeError), match=message):
            hla.early_exit(model, layers)
    with pytest.raises(ValueError, match="no decoder that runs in batches"):
        hla.early_exit(tiny.shared("t5"), 1)


def test_a_decoder_inside_another_module_is_cut():
    """OPT's blocks are the decoder's of a model of a model."""
    sizes = {"vocab_size": 97, "hidden_size": 32, "ffn_dim": 64, "num_attention_heads": 4, "word_embed_proj_dim": 32}
    torch.manual_seed(0)
    model = OPTForCausalLM(OPTConfig(**sizes, num_hidden_layers=3, max_position_embeddings=64)).eval()
    own, ids = hla.early_exit(model, 1), tiny.prompts((12,))["input_ids"]
    cut = OPTForCausalLM(OPTConfig(**sizes, num_hidden_layers=1, max_position_embeddings=64)).eval()
    assert not cut.load_state_dict(model.state_dict(), strict=False).missing_keys
    with torch.no_grad():
        assert torch.equal(own(ids).logits, cut(ids).logits)
    assert leaves_early(own, model) and len(model.model.decoder.layers) == 3


def test_a_model_in_training_stays_in_training():
    model = tiny.build("llama").train()
    assert not hla.early_exit(model, 1).training
    assert all(module.training for module in model.modules())
