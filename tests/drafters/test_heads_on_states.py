"""Heads read the own states of a drafter on the target's states: in ragged batches, behind partial acceptances, beside rows that leave."""

import pytest
import torch
from support import eagle, small, tiny
from support.heads import linear
from support.tiny import NEVER_EMITTED, some_eos

import hf_lossy_assist as hla
from hf_lossy_assist.artifacts.features import FeatureTap
from hf_lossy_assist.drafters.trained import DFlashDrafter


pytestmark = pytest.mark.filterwarnings("ignore:.*policy is lossy")


@pytest.fixture(scope="module")
def target():
    return hla.enable(small.llama(layers=3))


def head(spec, polarity="acceptable", size=32, **more):
    method = {"acceptable": "sprinter", "important": "autojudge"}[polarity]
    return linear(hla.HeadConfig(size, features=spec, polarity=polarity, method=method, **more))


def judge(spec):
    """A rule that has the drafter keep its states."""
    return hla.LossyPolicy(hla.Judge(head(spec, "important"), 0.5), hla.Constant(4))


def drafted_rows(seen):
    """Yield the text, the limit, the count and the states of each row's draft in each round, where there may be one."""
    for round_ in seen:
        for b, count in enumerate(round_.draft.lengths.tolist()):
            if round_.limits[b]:
                hidden = None if round_.draft.hidden is None else round_.draft.hidden[b, :count]
                yield round_.texts[b], round_.limits[b], count, hidden


def drafter_states(target, net, text, gamma, spec):
    """(γ, H): what a head of `spec` reads of each token that is drafted behind `text`, without caches."""
    read, before = eagle.chain_with_states(target, net, text, gamma + 1)[2:]
    states = read if spec.norm else before
    return states[1:] if spec.position == "token" else states[:-1]


@pytest.mark.full
@pytest.mark.parametrize(
    ("spec", "inputs"),
    [
        (hla.FeatureSpec(), small.ragged((0, 3, 5, 1))),
        (hla.FeatureSpec(position="token"), small.one()),
        pytest.param(hla.FeatureSpec(norm=False), small.one(), marks=pytest.mark.full),
        pytest.param(hla.FeatureSpec(layer=1, norm=False), small.ragged((0, 3, 5, 1)), marks=pytest.mark.full),
    ],
)
def test_a_rule_reads_the_drafters_states(target, monkeypatch, spec, inputs):
    drafter, seen = eagle.drafter(target), eagle.watched(monkeypatch)
    whole = tiny.greedy(target, inputs, eos_token_id=NEVER_EMITTED)
    eos = NEVER_EMITTED if len(whole) == 1 else some_eos(whole, 9)
    out = tiny.assisted(target, inputs, drafter, judge(spec), eos_token_id=eos)
    assert len({accepted for row in out.speculation.rows for _, accepted in row.steps}) > 1, "some accept a part"
    if len(inputs["input_ids"]) > 1:
        assert len({len(round_.texts) for round_ in seen}) > 1, "rows left"
    read = 0
    for text, _, count, hidden in drafted_rows(seen):
        if count:
            expected = drafter_states(target, drafter.network, text, count, spec)
            torch.testing.assert_close(hidden, expected, rtol=1e-6, atol=1e-6)
            read += count
    assert read > 12


@pytest.mark.full
def test_a_stop_reads_the_drafters_states(monkeypatch):
    """A draft ends where the head doubts the state that the network has there, and the text is the target's."""
    model, inputs = hla.enable(tiny.shared("gpt_neox")), tiny.prompts((9, 1, 4, 14))
    drafter, seen = eagle.drafter(model, target_layers=(0, 1)), eagle.watched(monkeypatch)
    doubts = head(hla.FeatureSpec())
    with torch.no_grad():
        doubts.linear.bias.fill_(0.2)
    expected = tiny.greedy(model, inputs, eos_token_id=NEVER_EMITTED)
    out = tiny.assisted(model, inputs, drafter, hla.HeadStop(doubts, 0.5, 6), eos_token_id=NEVER_EMITTED)
    assert out.sequences.equal(expected)
    lengths = []
    for text, limit, count, _ in drafted_rows(seen):
        if len(text) > 1:  # of one token the target has told nothing yet
            probabilities = doubts(drafter_states(model, drafter.network, text, limit, hla.FeatureSpec()))
            doubted = (probabilities < 0.5).nonzero()[:, 0].tolist()
            lengths.append(min([place + 1 for place in doubted] + [limit]))
            assert count == lengths[-1]
    assert len(set(lengths)) > 2


@pytest.mark.full
def test_specdec_reads_the_state_that_encodes_a_token(target, monkeypatch):
    drafter, seen = eagle.drafter(target), eagle.watched(monkeypatch)
    spec = hla.FeatureSpec(position="token")
    accepted = linear(hla.HeadConfig(32, features=spec, method="specdec"))
    inputs, stop = small.ragged((0, 3, 5)), hla.SpecDecPP(accepted, 0.6, 6)
    tiny.assisted(target, inputs, drafter, stop, eos_token_id=NEVER_EMITTED)
    lengths = set()
    for text, limit, count, _ in drafted_rows(seen):
        if limit > 1:
            probabilities = accepted(drafter_states(target, drafter.network, text, limit, spec))
            # Token k is judged with the draft step for token k + 1, which stays in the draft.
            ends = [k + 2 for k, alive in enumerate(probabilities.cumprod(dim=0).tolist()) if not alive >= 0.4]
            assert count == min([*ends, limit])
            lengths.add(count)
    assert len(lengths) > 1


@pytest.mark.full
@torch.no_grad()
def test_a_block_has_a_state_for_each_place(target, monkeypatch):
    net = eagle.dflash_network(target)
    drafter, seen, spec = DFlashDrafter(net), eagle.watched(monkeypatch), hla.FeatureSpec()
    tiny.assisted(target, small.ragged(), drafter, judge(spec), eos_token_id=NEVER_EMITTED)
    read = 0
    for text, _, count, hidden in drafted_rows(seen):
        if count:
            states = torch.cat(target(text[None, :-1], output_hidden_states=True).hidden_states[:3], dim=-1)
            model = drafter.make_model(target, 1, 256, small.VOCAB)
            model.take(states, [len(text) - 1])
            with FeatureTap(net, spec) as tap:
                model.read(text[None])
                whole = tap.latest[0]  # (block, H)
            torch.testing.assert_close(hidden, whole[1 : 1 + count], rtol=1e-6, atol=1e-6)
            read += count
    assert read > 12


def test_other_heads_are_refused_in_one_line(target):
    block, predicting = DFlashDrafter(eagle.dflash_network(target)), hla.FeatureSpec()
    of_token = linear(hla.HeadConfig(32, features=hla.FeatureSpec(position="token"), method="specdec"))
    for drafter, reads, says in (
        (eagle.drafter(target), head(hla.FeatureSpec(layer=2, norm=False)), "layer 2 is asked for"),
        (eagle.drafter(target), head(predicting, draft=hla.ModelIdentity.of(small.llama())), "made for the draft"),
        (eagle.drafter(target), head(predicting, draft=block.identity), "model_type 'dflash' there, 'eagle3' here"),
        (block, of_token, "before its tokens are drawn"),
    ):
        stop = hla.SpecDecPP(reads) if reads is of_token else hla.HeadStop(reads)
        with pytest.raises(ValueError, match=rf"^[^\n]*{says}[^\n]*$"):
            tiny.assisted(target, small.one(), drafter, stop)
