"""Hybrids under what users of `generate` do: sampling by the target's law, judges, statistics, streaming, stop strings."""

import copy

import pytest
import torch
from support import hybrids, small
from support.distributions import REJECT, goodness
from support.enumeration import Texts, off
from support.judge_rounds import judge_for, slow
from transformers.generation.streamers import BaseStreamer

import hf_lossy_assist as hla


pytestmark = pytest.mark.filterwarnings("ignore:.*policy is lossy:UserWarning")


PAIR = ["qwen3_5_text", "nemotron_h"]
PLAIN = ["qwen3_5_text", "bamba"]  # a plain forward has no least time behind a prompt, as Nemotron-H's has
SIZE = 4
END = 1


def few(kind):
    """Target and draft over four tokens, which differ."""
    target = hybrids.of_few_tokens(kind, SIZE)
    return hla.enable(copy.deepcopy(target)), small.near(target, 0.5)


# -- sampling -------------------------------------------------------------------------------------------------------------


@pytest.mark.nightly(every=3)
@pytest.mark.parametrize("stop", [hla.Constant(2), hla.SVIP(0.45)], ids=["constant", "svip"])
@pytest.mark.parametrize("pads", [(0,), (0, 2)], ids=["one", "ragged"])
@pytest.mark.parametrize("kind", PLAIN)
def test_a_round_on_its_own_states_leaves_the_targets_law(kind, pads, stop):
    """Exactly: every draft, coin and correction of a round, from the states that real rounds and rollbacks have left."""
    target, draft = few(kind)
    prompts = {
        name: value % SIZE if name == "input_ids" else value
        for name, value in small.ragged(pads, 4 + len(pads)).items()
    }
    torch.manual_seed(0)
    wrong, runner = off(target, draft, hla.LossyPolicy(stop=stop), prompts, rounds=2, room=3, real=True)
    assert wrong < 1e-5 and runner.verified > 0.5


@pytest.mark.full
@pytest.mark.parametrize("gamma", [1, 3])
@pytest.mark.parametrize("kind", PLAIN)
def test_sampled_texts_have_the_targets_law(kind, gamma):
    """By χ², over all rounds of texts of four tokens, 2000 rows that end where an end token falls."""
    target, draft = few(kind)
    prompt = torch.tensor([[2, 0, 3, 1, 2]])
    texts = Texts(target, prompt[0], SIZE, 4, END)
    torch.manual_seed(5)
    out = target.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=True, top_k=0, max_new_tokens=4, num_return_sequences=2000, eos_token_id=END,
        pad_token_id=0, assistant_model=draft, lossy_policy="strict", num_assistant_tokens=gamma, return_dict_in_generate=True,
    )  # fmt: skip
    assert 0.2 < out.speculation.draft_acceptance_rate < 0.95, "the draft must differ for this to say anything"
    found = torch.zeros(len(texts.index), dtype=torch.long)
    for new in out.sequences[:, 5:].tolist():
        found[texts.index[tuple(new[: new.index(END) + 1] if END in new else new)]] += 1
    assert goodness(found, torch.from_numpy(texts.behind(()))) > REJECT


# -- judges and statistics --------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.nightly(every=3)
@pytest.mark.parametrize("spec", [hla.FeatureSpec("target", "predicting"), hla.FeatureSpec("both", "token")], ids=str)
@pytest.mark.parametrize("kind", PLAIN)
def test_a_judges_texts_and_statistics_are_the_papers_loops(kind, spec):
    """Of each row of a ragged batch and of a row alone, by plain forwards; at threshold 0 they are the target's own."""
    target = hla.enable(copy.deepcopy(hybrids.model(kind)))
    draft, inputs, window, new = hybrids.drafts(target)["rarely"], small.ragged((0, 8, 5)), 4, 11
    head = judge_for(target, draft, spec)
    ones = [row[mask.bool()][None] for row, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
    for threshold in (0.5, 0.0):
        wanted = [slow(target, draft, head, threshold, one, None, window, new) for one in ones]
        settings = {
            "max_new_tokens": new, "do_sample": False, "assistant_model": draft, "return_dict_in_generate": True,
            "lossy_policy": hla.AutoJudge(head, threshold, window),
        }  # fmt: skip
        out = target.generate(**inputs, **settings)
        assert out.sequences[:, 9:].tolist() == [text for text, _ in wanted]
        assert out.speculation.rows == [stats for _, stats in wanted]
        assert (out.speculation.num_lossy_accepts > 1) == (threshold > 0)
        alone = target.generate(ones[2], attention_mask=torch.ones_like(ones[2]), **settings)
        assert alone.sequences[0, 4:].tolist() == wanted[2][0] and alone.speculation.rows == [wanted[2][1]]
    assert torch.equal(out.sequences, target.generate(**inputs, max_new_tokens=new, do_sample=False))


@pytest.mark.full(every=2)
@pytest.mark.parametrize("kind", PAIR)
def test_methods_at_their_neutral_settings(kind):
    """SPRINTER that asks about every token, SpecDec++'s head as a stop: heads that read a hybrid draft's states."""
    target = hla.enable(copy.deepcopy(hybrids.model(kind)))
    draft, inputs = hybrids.drafts(target)["often"], small.ragged((0, 8, 5))
    head = hla.LinearHead(hla.HeadConfig(32)).eval()
    token = hla.LinearHead(hla.HeadConfig(32, features=hla.FeatureSpec(position="token"))).eval()
    own = target.generate(**inputs, max_new_tokens=16, do_sample=False)
    for policy in (hla.Sprinter(head, threshold=1.0), hla.LossyPolicy(stop=hla.SpecDecPP(token, threshold=0.6))):
        out = target.generate(
            **inputs, max_new_tokens=16, do_sample=False, assistant_model=draft, lossy_policy=policy, return_dict_in_generate=True
        )  # fmt: skip
        assert torch.equal(out.sequences, own) and out.speculation.total().num_accepted_draft_tokens > 0


# -- streaming and stop strings ---------------------------------------------------------------------------------------------


class Pieces(BaseStreamer):
    """What a streamer is told, and when."""

    def __init__(self):
        self.told, self.ended = [], 0

    def put(self, value):
        self.told.append(value.flatten().tolist())

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("kind", PAIR)
def test_a_streamer_is_told_the_text_as_rounds_write_it(kind):
    target, prompt = hla.enable(copy.deepcopy(hybrids.model(kind))), small.one(7)
    pieces = Pieces()
    settings = {"max_new_tokens": 20, "do_sample": False}
    draft = hybrids.drafts(target)["often"]
    out = target.generate(**prompt, **settings, assistant_model=draft, lossy_policy="svip", streamer=pieces)
    own = target.generate(**prompt, **settings)
    assert torch.equal(out, own) and pieces.ended == 1
    assert sum(pieces.told, []) == own[0].tolist() and len(pieces.told) > 3


@pytest.mark.full(every=2)
@pytest.mark.parametrize("kind", PAIR)
def test_a_stop_string_ends_each_row_where_it_falls(kind):
    """In the middle of a round's tokens, of rows of one batch at different places."""
    target, inputs = hla.enable(copy.deepcopy(hybrids.model(kind))), small.ragged((0, 3, 6))
    settings = {
        "max_new_tokens": 24,
        "do_sample": False,
        "tokenizer": small.tokenizer(),
        "pad_token_id": small.PAD,
        "eos_token_id": 3,
    }
    new = target.generate(**inputs, max_new_tokens=24, do_sample=False)[:, 9:]
    words = [small.tokenizer().decode([int(token)]) for token in (new[0, 5], new[1, 11], new[2, 8])]
    draft, ends = hybrids.drafts(target)["often"], []
    for gamma in (1, 4, 9):
        draft.generation_config.num_assistant_tokens = gamma
        calls = [
            target.generate(**inputs, **settings, stop_strings=words, **own)
            for own in ({}, {"assistant_model": draft, "lossy_policy": "strict"})
        ]
        assert torch.equal(*calls), gamma
        ends = [int((row != small.PAD).nonzero().max()) for row in calls[1]]
    assert len(set(ends)) > 1 and max(ends) < 32


# -- other kinds of numbers -------------------------------------------------------------------------------------------------


@pytest.mark.full(every=4)
@pytest.mark.parametrize(
    "kind, dtype",
    [("qwen3_5_text", torch.float64), ("mamba2", torch.float64), *((its, torch.bfloat16) for its in PAIR)],
)
def test_other_dtypes_run(kind, dtype):
    """float64 token for token; in bfloat16 texts may part at a near-tie, and each is what its model writes in blocks."""
    target = hla.enable(copy.deepcopy(hybrids.model(kind)).to(dtype))
    draft, inputs = hybrids.drafts(target)["often"], small.ragged((0, 3, 5))
    settings = {"max_new_tokens": 18, "do_sample": False}
    own = target.generate(**inputs, **settings)
    out = target.generate(
        **inputs, **settings, assistant_model=draft, lossy_policy="svip", return_dict_in_generate=True
    )
    if dtype == torch.float64:
        assert torch.equal(out.sequences, own)
    else:
        assert (out.sequences == own).float().mean() > 0.5
    assert out.speculation.total().num_accepted_draft_tokens > 0
