"""Drafts from the text itself: what is proposed, by hand; the greedy text and the distribution are the target's, in batches too; and a
composite drafts with the model only where nothing matches."""

import pytest
import torch
from support import small, tiny
from support.paper_rules import Ensemble

import hf_lossy_assist as hla
from hf_lossy_assist.batch.suffix_memory import IndexedText
from hf_lossy_assist.drafters.base import as_drafter
from hf_lossy_assist.drafters.suffix import SuffixRun
from hf_lossy_assist.rules.pointwise import Pointwise


PROMPTS = (9, 1, 4, 14)


def drafted(tokens, limit=9, eos=(), **settings):
    run = SuffixRun(hla.SuffixDrafter(**settings), False, set(eos), 100)
    text = IndexedText(run.settings.min_match, run.settings.max_match)
    text.extend(tokens)
    return run.draft(text, limit)


def test_drafts_by_hand():
    assert drafted([1, 2, 3, 4, 1, 2]) == [3, 4, 1, 2], "twice as many as match"
    assert drafted([1, 2, 3, 4, 1, 2], limit=1) == [3]
    assert drafted([1, 2, 3, 4, 1, 2], factor=0.5) == [3]
    assert drafted([1, 2, 3, 4]) == [] and drafted([]) == [] and drafted([5]) == []
    assert drafted([1, 2, 3, 9, 2, 3, 4, 1, 2, 3], factor=1.0) == [9, 2, 3], "three that match are better than two"
    assert drafted([2, 3, 9, 2, 3, 4, 5, 2, 3], factor=1.0) == [4, 5], "of equals the latest"
    assert drafted([7, 8, 7, 8], factor=3.0) == [7, 8, 7, 8, 7, 8], "what repeats goes on repeating"
    assert drafted([7, 7, 7], factor=2.0) == [7, 7, 7, 7]
    assert drafted([1, 2, 3, 4, 1, 2], eos=[4]) == [3, 4], "nothing behind an end token"
    assert drafted([1, 2, 3, 100, 1, 2]) == [3], "a memory of another model's texts may have ids that this one has not"


def test_a_second_call_finds_the_text_of_the_first():
    target, inputs = tiny.build("llama"), tiny.prompts(PROMPTS)
    wanted = tiny.greedy(target, inputs)
    drafter, accepted = hla.SuffixDrafter(min_match=1, memory=hla.SuffixMemory()), []
    for _ in range(2):
        out = tiny.assisted(target, inputs, None, "strict", drafter=drafter)
        assert torch.equal(out.sequences, wanted)
        accepted.append(out.speculation.total().num_accepted_draft_tokens)
    assert accepted[1] > max(accepted[0], 5 * len(PROMPTS))


UNFIT = (
    ("svip", False, "suffix", "^SVIP reads what a draft model computes"),
    (hla.LossyPolicy(stop=hla.Fallback(hla.SVIP())), False, "suffix", "^SVIP reads what a draft model computes"),
    ("strict", True, "suffix", "needs no draft model"),
    ("strict", False, "composite", "drafts with a draft model"),
    (
        Ensemble(0.5), False, "suffix",
        "compares the target.s distribution with the draft.s, and SuffixDrafter has none",
    ),
)  # fmt: skip


def test_what_does_not_go_together_is_refused():
    target = tiny.shared("llama")
    for policy, model, drafter, says in UNFIT:
        assistant = tiny.draft_of(target, "often") if model else None
        with pytest.raises(ValueError, match=says):
            tiny.assisted(target, tiny.prompts((5,)), assistant, policy, drafter=drafter)


def test_what_is_no_drafter_is_refused():
    for drafter, says in (
        (3, "expected a drafter such as SuffixDrafter.., its name, or a dict with its name, got 3"),
        ({"min_match": 3}, "its name, or a dict with its name"),
        ("sufix", "suffix"),
        ({"name": "model", "x": 1}, "drafter model: unknown parameter 'x': it takes none, so leave it out"),
        ({"name": "suffix", "min_mach": 3}, "suffix: unknown parameter .*min_match"),
    ):
        with pytest.raises((TypeError, ValueError), match=rf"^(?=drafter)[^\n]*{says}[^\n]*$"):
            tiny.assisted(tiny.shared("llama"), tiny.prompts((5,)), None, "strict", drafter=drafter)


def test_parts_of_a_composite_by_name():
    made = as_drafter({"name": "composite", "first": {"name": "suffix", "min_match": 3}, "then": "model"})
    assert made == hla.CompositeDrafter(hla.SuffixDrafter(min_match=3), hla.AssistantDrafter())
    for first, says in (("sufix", "suffix"), ({"min_match": 3}, "its name"), (3, "expected a drafter such as")):
        with pytest.raises((TypeError, ValueError), match=rf"^[^\n]*{says}[^\n]*$"):
            hla.CompositeDrafter(first=first)
    with pytest.raises(ValueError, match="max_match"):
        hla.SuffixDrafter(min_match=3, max_match=2)
    with pytest.raises(TypeError, match=r"^CompositeDrafter.then: expected [^\n]* no composite, got [^\n]*$"):
        hla.CompositeDrafter(then="composite")


class KeepAll(Pointwise):
    """Keeps whatever is drafted."""

    def keeps(self, dists):
        return dists.px >= 0


@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
@pytest.mark.parametrize("inputs", [small.one(), small.ragged()], ids=["one", "ragged"])
def test_a_lossy_rule_keeps_no_token_that_a_processor_forbids(inputs):
    """The text … 5 6 7 5 6 has 7 drafted after it."""
    target = small.llama()
    inputs["input_ids"][:, -5:] = torch.tensor([5, 6, 7, 5, 6])
    settings = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 12, "lossy_policy": hla.LossyPolicy(KeepAll())}
    settings |= {"do_sample": False, "eos_token_id": tiny.NEVER_EMITTED}
    assert (hla.enable(target).generate(**inputs, **settings) == 7)[:, 9:].any()
    assert not (target.generate(**inputs, **settings, bad_words_ids=[[7]]) == 7)[:, 9:].any()
