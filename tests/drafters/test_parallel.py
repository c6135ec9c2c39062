"""A draft model with a mask token drafts a round's tokens in one forward: its distributions are those of the text with the masks behind it, without caches,
and the text stays the target's.
"""

import copy

import pytest
import torch
from support import small, sv_models, tiny
from support.enumeration import off
from support.heads import draft_of, head_for
from support.tiny import NEVER_EMITTED
from transformers import AutoModelForCausalLM, CompileConfig

import hf_lossy_assist as hla
from hf_lossy_assist.drafters.parallel import LONGEST, ParallelRun


RAGGED, MASK = (9, 1, 4, 14), 2


def parallel(draft, mask=MASK):
    out = copy.deepcopy(draft)
    out.config.pard_token = mask
    return out


@pytest.fixture
def rounds(monkeypatch):
    """The rounds of all such drafts: each row's text, the limits, and the draft."""
    seen, original = [], ParallelRun.propose

    def propose(self, rows, limits, randomness):
        texts = [text.clone() for text in rows.token_ids()]
        seen.append((texts, list(limits), original(self, rows, limits, randomness)))
        return seen[-1][2]

    monkeypatch.setattr(ParallelRun, "propose", propose)
    return seen


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("llama", RAGGED),
        ("lfm2", (9,)),
        *(pytest.param(*case, marks=pytest.mark.full) for case in (("gemma3", (14, 4, 14)), ("gpt2", RAGGED))),
    ],
)
def test_drafts_are_those_of_the_text_and_masks(rounds, name, lengths):
    """In one forward a round, whatever was accepted before and however long the others' drafts are; no longer than a block."""
    model, forwards = tiny.shared(name), []
    draft = parallel(tiny.draft_of(model, "often"))
    draft.register_forward_hook(lambda *_: forwards.append(len(rounds)))
    policy, settings = hla.LossyPolicy(hla.TopK(40), hla.Constant(20)), {"do_sample": True, "top_k": 0}
    out = tiny.assisted(model, tiny.prompts(lengths), draft, policy, eos_token_id=NEVER_EMITTED, max_new_tokens=40, **settings)  # fmt: skip
    assert len({accepted for row in out.speculation.rows for _, accepted in row.steps}) > 2
    drafting = [number for number, (_, limits, _) in enumerate(rounds) if any(limits)]
    assert [number for number in forwards if number] == drafting[1:], "the first may follow a prefill, and a probe"
    reference, longest = tiny.draft_of(model, "often"), 0
    for texts, limits, drafted in rounds[::3]:
        for row, text in enumerate(texts):
            count = int(drafted.lengths[row])
            assert count <= min(limits[row], LONGEST)
            if count:
                whole = torch.cat([text, torch.full((count - 1,), MASK)])
                law = reference(whole[None]).logits[0, len(text) - 1 :].float().softmax(dim=-1)
                torch.testing.assert_close(drafted.probs[row, :count], law, rtol=1e-5, atol=1e-6)
                longest = max(longest, count)
    assert longest == LONGEST


@pytest.mark.parametrize(
    ("rule", "stop"),
    [
        (hla.Strict(), hla.Confidence(0.3, 2)),
        pytest.param(hla.BlockVerification(), hla.Constant(2), marks=pytest.mark.full),
    ],
    ids=["adaptive", "blocks"],
)
def test_the_distribution_of_texts(rounds, rule, stop):
    """Exactly, of two rows together, with an end token, on the caches of a real call."""
    target, draft, _ = sv_models.models()
    distance, runner = off(target, parallel(draft), hla.LossyPolicy(rule, stop), sv_models.prompts(4, 2), real=True)
    assert distance < 1e-6 and rounds and runner.widths == {1, 2}


@pytest.mark.nightly
def test_blocks_are_compiled_and_rounds_are_not():
    target, settings = hla.enable(small.llama()), {"do_sample": False, "max_new_tokens": 12}
    expected = target.generate(**small.ragged(), **settings)
    settings |= {"compile_config": CompileConfig(backend="eager"), "return_dict_in_generate": True}
    out = target.generate(**small.ragged(), assistant_model=parallel(small.near(target)), lossy_policy="strict", **settings)  # fmt: skip
    assert out.sequences.equal(expected) and out.speculation.num_compiled_rounds == 0
    assert out.speculation.eager_because == ParallelRun.why_eager and out.speculation.num_compiled_forwards


def test_the_token_is_read_from_a_file(rounds, tmp_path):
    target = hla.enable(tiny.shared("llama"))
    parallel(tiny.draft_of(target, "often"), mask=5).save_pretrained(tmp_path)
    draft = AutoModelForCausalLM.from_pretrained(tmp_path)
    tiny.assisted(target, tiny.prompts((5,)), draft, max_new_tokens=4)
    assert rounds


def test_tokens_that_are_none():
    target = tiny.shared("llama")
    for mask in (-1, 97, True, "5"):
        with pytest.raises(ValueError, match=r"^pard_token [^\n]*below 97, got [^\n]*: delete it[^\n]*$"):
            tiny.assisted(target, tiny.prompts((5,)), parallel(target, mask), max_new_tokens=4)


def test_heads_on_its_states():
    draft = draft_of("llama")
    with pytest.raises(ValueError, match=r"^[^\n]*hidden state of the draft[^\n]*delete pard_token[^\n]*$"):
        tiny.assisted(tiny.shared("llama"), tiny.prompts((5,)), parallel(draft), hla.HeadStop(head_for(draft)))
