"""Rules in Transformers' own assisted loop: equal to this package's in greedy decoding, and by their law in sampling."""

import pytest
import torch
from support import formulas, tiny
from support.distributions import REJECT, Tables, goodness
from transformers import LogitsProcessorList

import hf_lossy_assist as hla
from hf_lossy_assist import StockRule


pytestmark = pytest.mark.filterwarnings("ignore:.*policy is lossy:UserWarning")

GREEDY = [
    hla.TopK(0), hla.TopK(3), hla.RelaxedTopK(4, 0.5), hla.TopKTolerance(3, 2.0), hla.Typical(0.2, 0.5), hla.Lenience(0.3),
    hla.KLJudge(1.0), hla.Ensemble(0.5), hla.Cascade(0.2), hla.Cascade(0.7, "token"),
]  # fmt: skip
SETTINGS = {"max_new_tokens": tiny.NEW, "eos_token_id": tiny.NEVER_EMITTED}


def models(kind: str):
    model = tiny.build("llama")
    draft = tiny.draft_of(tiny.build("llama"), kind)
    draft.generation_config.update(
        num_assistant_tokens=5, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    return model, draft


@pytest.mark.full(every=18)
@pytest.mark.nightly(every=3)
@pytest.mark.parametrize("rule", GREEDY, ids=str)
def test_greedy_texts_are_those_of_this_package(rule):
    """With drafts that are often and rarely right; one processor serves all calls."""
    processor, lossy = StockRule(rule), 0
    for kind in ("often", "rarely"):
        model, draft = models(kind)
        for length in (9, 4):
            inputs = tiny.prompts((length,))
            drafted = tiny.assisted(model, inputs, draft, rule, **SETTINGS, num_assistant_tokens=5)
            hla.disable(model)
            stock = model.generate(
                **inputs, **SETTINGS, do_sample=False, assistant_model=draft,
                logits_processor=LogitsProcessorList([processor]),
            )  # fmt: skip
            assert torch.equal(stock, drafted.sequences)
            lossy += drafted.speculation.num_lossy_accepts
    assert (lossy > 0) == (rule != hla.TopK(0))


def test_greedy_ensemble_is_that_of_transformers():
    model, draft = models("rarely")
    inputs = tiny.prompts((9,))
    settings = SETTINGS | {"do_sample": False, "assistant_model": draft}
    expected = model.generate(**inputs, **settings, assistant_ensemble_weight=0.4)
    found = model.generate(**inputs, **settings, logits_processor=LogitsProcessorList([StockRule(hla.Ensemble(0.4))]))
    assert torch.equal(found, expected)


SAMPLING = [
    (hla.TopK(2), formulas.top_k(2)), (hla.Typical(0.3, 0.8), formulas.typical(0.3, 0.8)),
    (hla.EntropyVerify(1.0), formulas.entropy_verify(1.0, 0.95)), (hla.Thresholds(0.4, 0.6), formulas.thresholds(0.4, 0.6)),
    (hla.Lenience(0.4), formulas.lenience(0.4)), (hla.Ensemble(0.3), formulas.ensemble(0.3)),
    (hla.Cascade(0.4), formulas.cascade(0.4, "opt")), (hla.Cascade(0.4, "token"), formulas.cascade(0.4, "token")),
    (hla.KLJudge(2.0), formulas.kl_judge(2.0, 0.9)),
]  # fmt: skip


@pytest.mark.full(every=5)
@pytest.mark.parametrize(
    ("rule", "formula"), SAMPLING, ids=lambda x: str(x) if isinstance(x, hla.AcceptanceRule) else ""
)
def test_sampling_gives_the_stock_loop_the_rules_law(rule, formula):
    """Strict acceptance of what the processor returns: a and r of the formula, token by token."""
    for seed in range(6):
        tables = Tables(seed, 0)
        p, q = tables.p[()], tables.q[()]
        processor, prefix = StockRule(rule, do_sample=True), torch.tensor([[1, 2, 3]])
        assert torch.equal(processor(prefix, q.log()[None].float()), q.log()[None].float()), (
            "the draft's stay as they are"
        )
        law = processor(prefix, p.log()[None].float())[0].softmax(dim=-1).double()
        a, r = formula(p.numpy(), q.numpy())
        drafted = q > 0
        acceptance = (law / q).clamp(max=1.0)
        assert torch.allclose(acceptance[drafted], torch.from_numpy(a)[drafted], atol=1e-5)
        rest = (law - q).clamp(min=0.0)
        if rest.sum() > 1e-4:
            assert torch.allclose(rest / rest.sum(), torch.from_numpy(r), atol=1e-3)


@pytest.mark.nightly
def test_sampling_through_the_stock_loop():
    """A token of a model over six, drawn 500 times by `generate` itself."""
    model = tiny.build("llama", vocab_size=6, eos_token_id=None, pad_token_id=0, bos_token_id=None)
    draft = tiny.noisy(model, 0.4)
    draft.generation_config.update(
        num_assistant_tokens=2, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    rule, prompt = hla.Ensemble(0.5), torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        p, q = model(prompt).logits[0, -1].double(), draft(prompt).logits[0, -1].double().softmax(-1)
    law, processor = rule.output_distribution(p, q), StockRule(rule, do_sample=True)
    torch.manual_seed(0)
    counts = torch.zeros(6, dtype=torch.long)
    for _ in range(500):
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=True, top_k=0, max_new_tokens=2, assistant_model=draft,
            logits_processor=LogitsProcessorList([processor]),
        )  # fmt: skip
        counts[out[0, 5]] += 1
    assert goodness(counts, law) > REJECT and goodness(counts, p.softmax(-1)) < REJECT


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: StockRule(hla.FLy()), TypeError, "judges each token by itself, such as Typical.., got FLy: use lossy_policy=FLy"),
        (lambda: StockRule(hla.BlockVerification()), TypeError, "got BlockVerification"),
        (lambda: StockRule(hla.Strict()), TypeError, "got Strict"),
        (lambda: StockRule("typical"), TypeError, "got str"),
        (lambda: StockRule(hla.Thresholds()), ValueError, "Thresholds is defined for sampling decoding alone"),
        (lambda: StockRule(hla.RelaxedTopK(), do_sample=True), ValueError, "RelaxedTopK is defined for greedy decoding alone"),
        (lambda: StockRule(hla.TopK(2))(torch.ones(2, 3, dtype=torch.long), torch.rand(2, 5)), ValueError, "this call has 2"),
    ],
)  # fmt: skip
def test_refused(make, error, words):
    with pytest.raises(error, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_other_vocabularies_and_prompt_lookup_are_refused():
    processor, prefix = StockRule(hla.TopK(2)), torch.tensor([[1, 2]])
    processor(prefix, torch.rand(1, 7))
    with pytest.raises(ValueError, match="the draft has 7 token ids, the target 5"):
        processor(prefix, torch.rand(1, 5))
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
    with pytest.raises(ValueError, match="these drafts have no distribution .prompt lookup."):
        tiny.build("llama").generate(
            ids, attention_mask=torch.ones_like(ids), prompt_lookup_num_tokens=3, max_new_tokens=8, do_sample=False,
            logits_processor=LogitsProcessorList([StockRule(hla.TopK(2))]),
        )  # fmt: skip
