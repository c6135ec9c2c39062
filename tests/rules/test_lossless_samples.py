"""The same by χ² over real calls of `generate`: an end token, laws that depend on every token before, one to three rows, SV by a steep
profile and by the demo's, with a constant draft and with stops that look at it.

The seeds are fixed, so what passes goes on passing. Few samples: `test_lossless_registry` has the exact law, this has all rounds of a text.
"""

import pytest
import torch
from support.distributions import REJECT, goodness
from support.enumeration import Texts
from support.sv_models import END, SIZE, extreme, models, prompts, shipped

import hf_lossy_assist as hla


NEW = 3


def counts(policy: hla.LossyPolicy, lengths: tuple[int, ...], texts: list[Texts], calls: int) -> list[torch.Tensor]:
    """How often each text was written in each row."""
    target, draft, _ = models()
    found = [torch.zeros(len(t.index), dtype=torch.long) for t in texts]
    inputs = prompts(*lengths)
    for _ in range(calls):
        out = target.generate(
            **inputs, do_sample=True, top_k=0, max_new_tokens=NEW, eos_token_id=END, pad_token_id=0, assistant_model=draft,
            lossy_policy=policy,
        )[:, inputs["input_ids"].shape[1] :].tolist()  # fmt: skip
        for b, new in enumerate(out):
            text = tuple(new[: new.index(END) + 1] if END in new else new)
            found[b][texts[b].index[text]] += 1
    return found


def laws(lengths: tuple[int, ...]) -> list[Texts]:
    inputs = prompts(*lengths)
    rows = [ids[mask.bool()] for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
    return [Texts(models()[0], row, SIZE, NEW, END) for row in rows]


def worst(policy: hla.LossyPolicy, lengths: tuple[int, ...], calls: int) -> float:
    """The smallest p-value of all rows."""
    torch.manual_seed(0)
    texts = laws(lengths)
    found = counts(policy, lengths, texts, calls)
    return min(goodness(n, torch.from_numpy(t.behind(()))) for n, t in zip(found, texts, strict=True))


STOPPING = {"constant": hla.Constant(2), "confidence": hla.Confidence(0.45, 2)}


@pytest.mark.full
@pytest.mark.nightly(every=3)
@pytest.mark.parametrize(("lengths", "exact", "stop", "profile"), [
    ((4,), "full", "constant", "steep"),
    ((4, 2, 5), "full", "confidence", "steep"),
    ((4, 3), "prefix", "confidence", "shipped"),
])  # fmt: skip
def test_samples_have_the_targets_law(lengths, exact, stop, profile):
    made = extreme(1.6, 0.6, rows=len(lengths)) if profile == "steep" else shipped()
    sv = hla.SVFilter(made, models()[2], exact, fallback=False)
    assert worst(hla.LossyPolicy(stop=STOPPING[stop], filter=sv), lengths, 100 // len(lengths)) > REJECT
