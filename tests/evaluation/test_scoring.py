"""p, q and what heads say of finished texts are those that the models, and the rounds that wrote the texts, had."""

import pytest
import torch
from support import tiny

import hf_lossy_assist as hla
from hf_lossy_assist import FeatureSpec, HeadConfig, LinearHead, demo
from hf_lossy_assist.engine import loop
from hf_lossy_assist.evaluation.measuring import Answer
from hf_lossy_assist.evaluation.scoring import FIRST, Scores, score, score_answers, shown


pytestmark = pytest.mark.filterwarnings("ignore:.*policy is lossy:UserWarning")
EXACT = 1e-5
SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


@pytest.fixture(scope="module")
def models():
    its = demo.load()
    hla.enable(its.target)
    return its


def written(models, policy, **settings):
    """A text that `policy` wrote: the prompt's tokens, the new ones, their sources."""
    inputs = models.tokenizer(demo.problems(1, 7)[0].prompt, return_tensors="pt")
    out = models.target.generate(
        **inputs, assistant_model=models.draft, lossy_policy=policy, max_new_tokens=48, return_dict_in_generate=True, **settings
    )  # fmt: skip
    prompt, row = inputs["input_ids"][0].tolist(), out.speculation.rows[0]
    return prompt, out.sequences[0, len(prompt) :].tolist()[: row.num_new_tokens], row.token_sources


def in_order(wanted, seen):
    """Whether all of `wanted` are among `seen`, one behind the other."""
    rest = iter(seen)
    return all(any(one == pytest.approx(other, abs=EXACT) for other in rest) for one in wanted)


def test_p_and_q_are_the_models_own(models):
    """Beside `generate`, which decodes token by token on a cache, and the draft on each beginning of the text alone."""
    inputs = models.tokenizer(demo.problems(1, 7)[0].prompt, return_tensors="pt")
    how = {"output_logits": True, "return_dict_in_generate": True, "do_sample": False, "max_new_tokens": 40}
    out = models.target.generate(**inputs, **how)
    prompt = inputs["input_ids"][0].tolist()
    new = out.sequences[0, len(prompt) :].tolist()
    found = score(models.target, models.draft, {}, prompt, new, [])
    assert len(found.p) == len(found.q) == len(new) and found.heads == {}
    with torch.no_grad():
        for i, token in enumerate(new):
            assert found.p[i] == pytest.approx(float(out.logits[i][0].double().softmax(-1)[token]), abs=EXACT)
            alone = models.draft(torch.tensor([prompt + new[:i]])).logits[0, -1].double().softmax(-1)
            assert found.q[i] == pytest.approx(float(alone[token]), abs=EXACT)
    assert max(found.q) - min(found.q) > 0.5  # else the draft's would be anybody's


def test_p_and_q_are_those_of_the_rounds(models, monkeypatch):
    own, rounds = loop.accept, []

    def watched(run, verified, randomness):
        rounds.extend(
            (float(verified.p[0, i, token]), float(verified.q[0, i, token]))
            for i, token in enumerate(verified.tokens[0].tolist())
        )
        return own(run, verified, randomness)

    monkeypatch.setattr(loop, "accept", watched)
    prompt, new, sources = written(models, hla.as_policy("svip"), **SAMPLED)
    found = score(models.target, models.draft, {}, prompt, new, sources)
    wanted = [pair for pair, source in zip(zip(found.p, found.q, strict=True), sources, strict=True) if source < 2]
    assert len(wanted) > 10 and in_order(wanted, rounds)
    assert not in_order([wanted[0], (wanted[1][0], wanted[1][1] + 0.01), *wanted[2:]], rounds)


def test_sprinters_head_says_what_it_said_in_the_rounds(models):
    policy, said = hla.Sprinter(demo.head("sprinter")), []
    hook = policy.stop.head.register_forward_hook(lambda head, inputs, output: said.append(float(output[0])))
    prompt, new, sources = written(models, policy, **SAMPLED)
    hook.remove()
    found = score(models.target, models.draft, policy.heads(), prompt, new, sources)
    assert list(found.heads) == ["P(acceptable)"]
    scores = found.heads["P(acceptable)"]
    assert [its is not None for its in scores] == [source < 2 for source in sources]
    wanted = [its for its in scores if its is not None]
    assert len(wanted) > 10 and in_order(wanted, said)


def test_the_judge_says_what_it_said_in_the_rounds(models, monkeypatch):
    own, said = LinearHead.logit, []

    def watched(head, features):
        logit = own(head, features)
        said.extend(logit.flatten().sigmoid().tolist())
        return logit

    policy = hla.AutoJudge(demo.head("autojudge"))
    with monkeypatch.context() as patch:
        patch.setattr(LinearHead, "logit", watched)
        prompt, new, sources = written(models, policy, do_sample=False)
    scores = score(models.target, models.draft, policy.heads(), prompt, new, sources).heads["P(important)"]
    assert [its is not None for its in scores] == [source < 2 for source in sources]
    wanted = [its for its in scores if its is not None]
    assert len(wanted) > 10 and max(wanted) - min(wanted) > 0.1 and in_order(wanted, said)


@pytest.mark.parametrize("model", ["draft", "target", "both"])
@pytest.mark.parametrize("position", ["predicting", "token"])
def test_heads_read_what_their_spec_names(models, model, position):
    """Beside the last state of each beginning of the text alone."""
    prompt, new = models.tokenizer("How many")["input_ids"], [5, 9, 20, 7]
    read = [models.draft] * (model != "target") + [models.target] * (model != "draft")
    torch.manual_seed(1)
    size = sum(its.config.hidden_size for its in read)
    head = LinearHead(HeadConfig(size, polarity="important", features=FeatureSpec(model, position))).eval()
    found = score(models.target, models.draft, {"rule_head": head}, prompt, new, [0, 1, 2, 0]).heads["P(important)"]
    with torch.no_grad():
        for i in (0, 1, 3):
            text = torch.tensor([prompt + new[: i + (position == "token")]])
            states = [its(text, output_hidden_states=True).hidden_states[-1][0, -1] for its in read]
            assert found[i] == pytest.approx(float(head(torch.cat(states))), abs=EXACT)
    assert found[2] is None  # a correction: nobody asked


def test_each_head_has_a_name_and_one_without_its_model_says_nothing(models):
    size = models.draft.config.hidden_size
    of = {place: LinearHead(HeadConfig(size)).eval() for place in ("stop_0_head", "stop_1_head")}
    companion = LinearHead(HeadConfig(size, polarity="important", features=FeatureSpec("companion"))).eval()
    found = score(models.target, models.draft, of | {"rule_head": companion}, [1, 5], [6, 7], [0, 0])
    assert list(found.heads) == ["P(acceptable)", "P(acceptable) of stop_1_head"]
    alone = score(models.target, None, of, [1, 5], [6, 7], [0, 0])
    assert alone.q == [] and alone.heads == {} and alone.p == found.p
    assert score(models.target, models.draft, of, [1, 5], [6, 7], []).heads == {}
    for prompt, new in (([], [6]), ([5], [])):
        with pytest.raises(ValueError, match="scores are of new tokens behind a prompt"):
            score(models.target, None, {}, prompt, new, [])


def test_a_draft_of_fewer_token_ids_knows_nothing_of_the_others():
    torch.manual_seed(0)
    target, small = tiny.build("llama"), tiny.llama(vocab_size=90).eval()
    text = [5, 95, 7]
    found = score(target, small, {}, [4], text, [0, 0, 0])
    with torch.no_grad():
        seen = small(torch.tensor([[4, 5, 89, 7]])).logits[0].double().softmax(-1)
    assert found.q == pytest.approx([float(seen[0, 5]), 0.0, float(seen[2, 7])], abs=EXACT)


def test_a_draft_of_more_token_ids_is_cut_as_in_decoding():
    torch.manual_seed(0)
    target, large = tiny.build("llama"), tiny.llama(vocab_size=98).eval()
    with torch.no_grad():
        seen = large(torch.tensor([[4]])).logits[0, :, :97].double().softmax(-1)
    assert score(target, large, {}, [4], [5], [0]).q == pytest.approx([float(seen[0, 5])], abs=EXACT)


def test_files_keep_six_digits():
    given = Scores([1 / 3, 1e-9 / 3], [1.0], {"P(important)": [None, 2 / 3]})
    assert given.rounded() == Scores([0.333333, 3.33333e-10], [1.0], {"P(important)": [None, 0.666667]})


def test_which_answers_are_shown():
    def answer(arm, prompt, size, sources):
        return Answer(arm, prompt, size, 0, "", [5], 1.0, sources=sources)

    given = [
        answer("target", 0, 1, []),
        answer("svip", 0, 1, [0]),
        answer("svip", FIRST, 1, [0]),
        answer("svip", 0, 4, [0]),
    ]
    assert shown(given) == [given[1]] and shown(given[:1]) == []


def test_a_model_that_fails_is_a_line_and_no_loss(models):
    """Behind hours of measuring."""

    class Broken:
        @staticmethod
        def tokenizer(text):
            raise RuntimeError("no way\nno how")

    given = Answer("svip", 0, 1, 0, "", [5], 1.0, sources=[0])
    with pytest.warns(UserWarning, match="were not worked out: RuntimeError: no way no how"):
        score_answers(Broken(), models.draft, {"svip": hla.as_policy("svip")}, [given], ["How many"])
    assert given.p == []
