"""A drafter of one's own can be slow, and never wrong in silence: the engine writes what it proposes and refuses what is no draft."""

from dataclasses import dataclass, replace

import pytest
import torch
from support import tiny

import hf_lossy_assist as hla


@dataclass(frozen=True)
class Says(hla.Drafter):
    """Proposes what `what` makes of (rows, limits, sampling)."""

    what: object

    def start(self, context):
        return SaysRun(self.what, context.sampling)


class SaysRun(hla.DrafterRun):
    def __init__(self, what, sampling):
        self.what, self.sampling = what, sampling

    def propose(self, rows, limits, randomness):
        return self.what(rows, limits, self.sampling)


def drafted(rows, limits, sampling, token=7, lengths=None, **changes):
    """`token` three times for each row, not written anywhere."""
    lengths = [min(3, limit) for limit in limits] if lengths is None else lengths
    tokens = torch.full((len(limits), max(3, *lengths)), token)
    return replace(hla.Draft(tokens, torch.tensor(lengths), rows.row_ids, max(limits), sampling), **changes)


def call(what, **settings):
    model = hla.enable(tiny.build("llama"))
    fixed = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": tiny.NEVER_EMITTED, "pad_token_id": 0}
    settings = fixed | settings
    return model.generate(**tiny.prompts((5, 3)), **{"lossy_policy": "strict", "drafter": Says(what)} | settings)


def test_what_is_proposed_need_not_be_written():
    """A drafter that knows the text: what is accepted is what it said, not what happened to stand behind the row."""
    text = tiny.greedy(tiny.shared("llama"), tiny.prompts((5, 3)), max_new_tokens=12)[:, 5:]

    def knows(rows, limits, sampling):
        done = [length - 5 for length in rows.lengths]
        counts = [min(3, limit) for limit in limits]
        padded = torch.nn.functional.pad(text, (0, 3))
        tokens = torch.stack([padded[row, n : n + 3] for row, n in zip(rows.row_id_list, done, strict=True)])
        return hla.Draft(tokens, torch.tensor(counts), rows.row_ids, max(limits), sampling)

    out = call(knows, return_dict_in_generate=True)
    assert torch.equal(out.sequences[:, 5:], text) and out.speculation.draft_acceptance_rate == 1


NO_DRAFTS = (
    (lambda *given: None, TypeError, "expected a Draft, got None"),
    (lambda *given: drafted(*given, token=10_000), ValueError, "expected token ids from 0 to .*, got 10000"),
    (lambda *given: drafted(*given, token=-1), ValueError, "got -1"),
    (lambda *given: drafted(*given, lengths=[60, 60]), ValueError, "row 0 was to draft at most 5 tokens"),
    (lambda *given: drafted(*given, lengths=[5, 5], tokens=torch.zeros(2, 3, dtype=torch.long)), ValueError, "has 3 of which 5 count"),
    (lambda *given: drafted(*given, lengths=[0, -1]), ValueError, "has 3 of which -1 count"),
    (lambda *given: drafted(*given, tokens=torch.zeros(1, 3, dtype=torch.long)), ValueError,
     r"tokens: expected int64 \(B, γ\) with B = 2, got torch.int64 \(1, 3\)"),
    (lambda *given: drafted(*given, tokens=torch.zeros(2, 3)), ValueError, "got torch.float32"),
    (lambda *given: replace(drafted(*given), lengths=torch.ones(1).long()), ValueError, "lengths: expected int64"),
    (lambda *given: replace(drafted(*given), lengths=[1, 1]), TypeError, r"lengths: expected a tensor, got \[1, 1\]"),
    (lambda *given: drafted(*given, probs=[1.0]), TypeError, r"probs: expected a tensor, got \[1.0\]"),
    (lambda *given: drafted(*given, tokens=torch.zeros(2, 3, dtype=torch.long, device="meta")), ValueError,
     "tokens: expected a tensor on cpu, where the texts are, got meta"),
    (lambda *given: replace(drafted(*given), probs=torch.rand(2, 3, tiny.VOCABULARY), sampling=True), ValueError,
     r"sampling: expected False, as this call decodes \(DraftContext.sampling\), got True"),
    (lambda *given: drafted(*given, probs=torch.rand(2, 3, 5)), ValueError, r"probs: expected \(B, γ, V\)"),
)  # fmt: skip


def test_what_is_no_draft_is_refused_in_one_line():
    for what, error, line in NO_DRAFTS:
        with pytest.raises(error, match=rf"^SaysRun.propose: [^\n]*{line}[^\n]*$"):
            call(what)


def test_padding_behind_a_draft_may_be_anything():
    text = tiny.greedy(tiny.shared("llama"), tiny.prompts((5, 3)), max_new_tokens=12)
    for padding in (0, -1, 10**9):

        def two_of_three(rows, limits, sampling, padding=padding):
            lengths = [min(2, limit) for limit in limits]
            tokens = torch.tensor([[7, 7, padding]] * len(limits))
            return drafted(rows, limits, sampling, lengths=lengths, tokens=tokens)

        composite = hla.CompositeDrafter(first=Says(two_of_three))
        assert torch.equal(call(two_of_three, drafter=composite, assistant_model=tiny.shared("llama")), text)
        assert torch.equal(call(two_of_three), text)


@pytest.mark.parametrize("sampling", [True, pytest.param(False, marks=pytest.mark.full)])
def test_the_call_says_whether_tokens_are_drawn(sampling):
    """A draft without distributions may say anything of the mode, and of the rows: the call knows."""

    def other_mode(rows, limits, mode):
        return drafted(rows, limits, not mode, row_ids=torch.tensor([99, -5]))

    settings = {"do_sample": sampling, "top_k": 0, "temperature": 100.0}
    texts, right = (
        {
            tuple(call(what, generator=torch.Generator().manual_seed(seed), **settings).flatten().tolist())
            for seed in range(5)
        }
        for what in (other_mode, drafted)
    )
    assert texts == right and len(texts) == (5 if sampling else 1)


def test_a_start_that_starts_nothing():
    @dataclass(frozen=True)
    class Nothing(hla.Drafter):
        def start(self, context):
            return None

    with pytest.raises(TypeError, match="^Nothing.start: expected a DrafterRun, got None$"):
        call(None, drafter=Nothing())


def test_tokens_that_a_stop_never_saw_are_not_taken_unchecked():
    """SPRINTER's rule trusts its stop, and a composite's first part drafts beside the stop."""
    target, draft, _, _ = hla.demo.load()
    settings = {"assistant_model": draft, "lossy_policy": hla.sprinter(hla.demo.head()), "drafter": "composite"}
    with pytest.raises(
        ValueError,
        match="^AllButLast accepts unchecked [^\n]*CompositeDrafter has none for it: pass an assistant_model[^\n]*$",
    ):
        hla.enable(target).generate(torch.tensor([[5, 6, 7]]), **settings)
