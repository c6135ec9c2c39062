"""What `generate` returns can be used like any tensor, although the loop runs in inference mode."""

import pytest
from support import tiny

import hf_lossy_assist as hla
from hf_lossy_assist.models.compat import cache_of


@pytest.mark.parametrize("lengths", [(9,), (9, 5, 7)])
def test_outputs_are_ordinary_tensors(lengths):
    model, inputs = hla.enable(tiny.shared("llama")), tiny.prompts(lengths)
    out = model.generate(
        **inputs, assistant_model=tiny.draft_of(model, "often"), lossy_policy="strict", max_new_tokens=12,
        return_dict_in_generate=True, output_scores=True, output_logits=True,
    )  # fmt: skip
    tensors = [out.sequences, *out.scores, *out.logits]
    if cache_of(out) is not None:
        tensors += [t for layer in cache_of(out).layers for t in (layer.keys, layer.values)]
    assert not any(t.is_inference() for t in tensors)
    out.sequences += 0  # in place, as a caller may
    model.train()
    model(**inputs).logits.sum().backward()  # nothing that the loop made stays behind in the model
    model.zero_grad()
    model.eval()
