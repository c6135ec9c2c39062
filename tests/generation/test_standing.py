"""A standing policy: calls that name none speculate, a call's own settings count first, and what cannot be served is Transformers' own."""

import copy
import gc
import pickle
import warnings
import weakref

import numpy as np
import pytest
import torch
import transformers
from support.refusals import refused
from support.small import PAD, Listener, llama, near, one, ragged, t5, tokenizer, words
from support.stateful import Counting
from transformers import DynamicCache, GenerationConfig, GenerationMixin, MistralConfig, pipeline

import hf_lossy_assist as hla
from hf_lossy_assist import enabling
from hf_lossy_assist.generation import model_checks
from hf_lossy_assist.models.facts import CACHE


NEW = 16
ENDS = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD}
LOSSY = hla.TopK(k=4)


@pytest.fixture
def target():
    return llama()


@pytest.fixture
def draft(target):
    return near(target)


def stock(model, prompts=None, **settings):
    """Transformers' own text, whatever `generate` the object carries."""
    return GenerationMixin.generate(model, **(prompts or ragged()), **ENDS | settings)


@pytest.fixture
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# -- calls that are served ---------------------------------------------------------------------------------------------


def test_plain_calls_speculate_without_a_word_and_are_reported(target, draft, quiet):
    expected = stock(target)
    assert hla.enable(target, assistant_model=draft) is target and hla.reports(target) == []
    assert torch.equal(target.generate(**ragged(), **ENDS), expected)
    assert torch.equal(target.generate(ragged()["input_ids"], GenerationConfig(**ENDS), attention_mask=ragged()["attention_mask"]), expected)  # fmt: skip
    out = target.generate(**ragged(), **ENDS, return_dict_in_generate=True)
    found = hla.reports(target)
    assert found[2] is out.speculation and len(found) == 3
    assert all(len(report.rows) == 3 and report.num_accepted_draft_tokens for report in found)


def test_a_lossy_policy_says_so_once(target, draft):
    model_checks._warned.discard(str(hla.as_policy(LOSSY)))
    hla.enable(target, draft, LOSSY)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            target.generate(**ragged(), **ENDS)
    [line] = [each for each in found if "lossy" in str(each.message)]
    assert line.filename == __file__ and not hla.reports(target)[0].lossless


def test_what_a_call_names_counts_before_the_standing_policy(target, draft):
    other, calls = near(target, 0.1), []
    other.register_forward_pre_hook(lambda *_: calls.append(1))
    hla.enable(target, draft, "svip")
    settings = ENDS | {"return_dict_in_generate": True}
    assert target.generate(**one(), **settings, lossy_policy="strict").speculation.num_spec_tokens == 5
    assert target.generate(**one(), **settings).speculation.num_spec_tokens == 40 and not calls
    assert target.generate(**one(), **settings, assistant_model=other).speculation.num_spec_tokens == 40 and calls
    with hla.using(target, draft):
        lookup = target.generate(**one(), **settings, prompt_lookup_num_tokens=3).speculation
    assert lookup.num_spec_tokens == 3 and not lookup.forwards.get("draft")
    calls.clear()
    runner = hla.Runner("strict", other)
    assert target.generate(**one(), **settings, custom_generate=runner).speculation.num_spec_tokens == 5 and calls
    with pytest.raises(ValueError, match=r"^lossy_policy does not run beam search"):  # it was asked for here
        target.generate(**one(), **ENDS, num_beams=2, lossy_policy="strict")
    with pytest.raises(ValueError, match="beam search"):  # nobody else would read the generator
        target.generate(**one(), **ENDS, num_beams=2, generator=torch.Generator())


def test_a_draft_in_the_call_brings_its_tokenizer(target, draft, quiet):
    """The standing one's is of the standing draft alone."""
    other = tokenizer([*reversed(words())])
    hla.enable(target, near(target), tokenizer=tokenizer(), assistant_tokenizer=other)
    settings = ENDS | {"return_dict_in_generate": True}
    with hla.using(target, draft):
        accepted = target.generate(**one(), **settings).speculation.draft_acceptance_rate
    for drafting in ({"assistant_model": draft}, {"prompt_lookup_num_tokens": 3}):
        out = target.generate(**one(), **settings, **drafting)
        assert torch.equal(out.sequences, stock(target, one()))
        assert "assistant_model" not in drafting or out.speculation.draft_acceptance_rate == accepted


def test_a_target_that_drafts_for_another_model_does_not_speculate(target, draft):
    hla.enable(target, draft)
    other = llama(1)
    assert torch.equal(other.generate(**one(), **ENDS, assistant_model=target), stock(other, one()))
    assert hla.reports(target) == []


@pytest.mark.full
def test_reports_are_bounded_and_hold_no_model(monkeypatch):
    assert enabling.REPORTS == 100
    monkeypatch.setattr(enabling, "REPORTS", 3)
    target = llama()
    hla.enable(target, near(target))
    for _ in range(4):
        target.generate(**one(3), max_new_tokens=1, do_sample=False)
    found, alive = hla.reports(target), weakref.ref(target)
    assert len(found) == 3 and found[0] is not found[-1]
    del target
    gc.collect()
    assert alive() is None and found[0].rows


# -- calls that are not ------------------------------------------------------------------------------------------------


REFUSED = {
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "attentions": {"output_attentions": True, "return_dict_in_generate": True},
    "return sequences": {"num_return_sequences": 3, "num_beams": 3},
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_that_cannot_be_served_is_left_to_transformers_with_one_warning(target, draft, name):
    settings = ragged() | ENDS | REFUSED[name]
    torch.manual_seed(5)
    expected = GenerationMixin.generate(target, **settings)
    hla.enable(target, draft, "svip", strict=True)
    refused(lambda: target.generate(**settings), r"^lossy_policy [^\n]*$")
    hla.enable(target, draft, "svip")
    torch.manual_seed(5)
    with pytest.warns(UserWarning, match=r"^Transformers' own generate wrote this text[^\n]*$") as found:
        got = target.generate(**settings)
    assert [line.filename for line in found if "own generate" in str(line.message)] == [__file__]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Transformers' own generate")
        target.generate(**settings)
    same = (got, expected) if torch.is_tensor(got) else (got.sequences, expected.sequences)
    assert torch.equal(*same) and hla.reports(target) == []
    assert torch.equal(target.generate(**ragged(), **ENDS), stock(target)) and len(hla.reports(target)) == 1


def test_processors_that_may_remember_something_are_as_new_for_transformers(target, draft):
    """One object for several texts, of which nobody knows before what it keeps."""
    settings = ENDS | {"return_dict_in_generate": True}
    expected = stock(target, ragged(), **settings, logits_processor=[Counting()]).sequences
    hla.enable(target, draft)
    processor = Counting()
    with pytest.warns(UserWarning, match="own generate wrote this text.*Counting may remember something"):
        out = target.generate(**ragged(), **settings, logits_processor=[processor])
    assert torch.equal(out.sequences, expected) and processor.calls == NEW
    with pytest.raises(ValueError, match="remembers something"):
        target.generate(**ragged(), **settings, logits_processor=[Counting()], lossy_policy="strict")
    alone = stock(target, one(), **ENDS, logits_processor=[Counting()])
    assert torch.equal(target.generate(**one(), **ENDS, logits_processor=[Counting()]), alone)
    assert len(hla.reports(target)) == 1


def test_errors_that_generate_raises_too_are_those_of_generate(target, draft, quiet):
    hla.enable(target, draft)
    for settings in (
        {"max_new_tokens": -1}, {"nonsense": 1}, {"temperature": -1.0, "do_sample": True}, {"input_ids": "text"},
        {"max_length": "x", "max_new_tokens": None},
    ):  # fmt: skip
        given = ragged() | ENDS | settings
        with pytest.raises(Exception) as expected:
            GenerationMixin.generate(llama(), **given)
        with pytest.raises(type(expected.value)) as found:
            target.generate(**given)
        assert str(found.value) == str(expected.value), settings
        assert found.value.__context__ is expected.value.__context__


def test_a_streamer_hears_the_prompt_once(target, draft):
    """Also where a call is refused behind it: for a cache whose layers have a window."""
    ids, heard = one()["input_ids"], [Listener(), Listener()]

    def cache():
        return {CACHE: DynamicCache(config=MistralConfig(num_hidden_layers=2, sliding_window=40))}

    stock(target, {"input_ids": ids}, streamer=heard[0], **cache())
    hla.enable(target, draft)
    with pytest.warns(UserWarning, match="keeps 40 tokens in layer 0"):
        target.generate(ids, **ENDS, streamer=heard[1], **cache())
    assert heard[0].heard == heard[1].heard and len(heard[0].heard) == ids.shape[1] + NEW + 1


def test_an_error_behind_the_first_round_comes_out(target, draft):
    def ends(ids, scores, **kwargs):
        if ids.shape[1] > 12:
            raise ValueError("the caller's own")
        return torch.zeros(len(ids), dtype=torch.bool)

    hla.enable(target, draft)
    refused(lambda: target.generate(**one(), **ENDS, stopping_criteria=[ends]), "the caller's own")
    assert hla.reports(target) == []


# -- what stands, and for how long -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*policy is lossy:UserWarning")
def test_disable_undoes_all(target, draft):
    before = dict(vars(target)), vars(target.generation_config).copy()
    hla.enable(target, draft, LOSSY)
    target.generate(**one(), **ENDS)
    assert torch.equal(hla.disable(target).generate(**one(), **ENDS), stock(llama(), one()))
    assert (vars(target).keys(), vars(target.generation_config)) == (before[0].keys(), before[1])
    assert hla.reports(target) == [] and not hla.is_enabled(target)


def test_using_restores_what_was_before(target, draft):
    def limit():
        out = target.generate(**one(), **ENDS, return_dict_in_generate=True)
        return out.speculation.num_spec_tokens if "speculation" in out else None

    with hla.using(target, draft, "svip") as same:
        assert same is target and limit() == 40
        with hla.using(target, assistant_model=draft, num_assistant_tokens=2):
            assert limit() == 2
            hla.disable(target)
        assert limit() == 40
    assert not hla.is_enabled(target) and limit() is None and len(hla.reports(target)) == 1
    hla.enable(target)
    with pytest.raises(KeyError), hla.using(target, draft):
        assert limit() == 5
        raise KeyError
    assert hla.is_enabled(target) and limit() is None and len(hla.reports(target)) == 2
    hla.enable(target, draft, "svip")
    hla.enable(target)
    assert limit() == 40


def test_copies_are_enabled_without_the_standing_policy(target, draft):
    hla.enable(target, draft)
    for again in (copy.deepcopy(target), pickle.loads(pickle.dumps(target))):
        assert hla.is_enabled(again) and torch.equal(again.generate(**one(), **ENDS), stock(target, one()))
        assert hla.reports(again) == []
    assert target.generate(**one(), **ENDS) is not None and hla.reports(target)


WRONG = (
    ({"lossy_policy": "svip"}, "needs something to draft with"),
    ({"assistant_model": "distilgpt2"}, "assistant_model: expected a loaded"),
    ({"assistant_model": llama(vocab=40)}, "97 token ids, the assistant 40"),
    ({"prompt_lookup_num_tokens": 3, "num_beams": 2}, "unknown setting 'num_beams'"),
    ({"prompt_lookup_num_tokens": 3, "strict": "yes"}, "strict: expected True or False"),
    ({"prompt_lookup_num_tokens": 3, "head": "x"}, "strict takes no parameters: got an unexpected .* 'head'"),
)


def test_what_no_call_could_use_is_refused_at_once(target):
    for enter in (hla.enable, hla.using):
        for settings, line in WRONG:
            with pytest.raises((TypeError, ValueError), match=rf"^[^\n]*{line}[^\n]*$"):
                enter(target, **settings)
    refused(lambda: hla.enable(target, strict=True), "^strict=True is for a standing policy")
    assert not hla.is_enabled(target)
    refused(lambda: hla.reports("target"), r"^reports\(target\)", TypeError)


# -- None, configs, and callers that nobody can change ------------------------------------------------------------------


ALL = hla.TopK(k=96)  # another text than the target's


@pytest.mark.filterwarnings("ignore:.*policy is lossy:UserWarning")
def test_none_means_none_for_this_call():
    """The call with None writes Transformers' text; the next one has the policy again."""
    model, none = llama(), {"lossy_policy": None}
    expected, draft = model.generate(**one(), **ENDS), near(model, 0.6)
    with hla.using(model, draft, ALL):
        assert torch.equal(model.generate(**one(), **ENDS, **none), expected) and not hla.reports(model)
        with hla.using(model, lossy_policy=None):
            assert torch.equal(model.generate(**one(), **ENDS), expected) and not hla.reports(model)
        pipe = pipeline("text-generation", model=model, tokenizer=tokenizer(), device="cpu")
        pipe("w5 w6 w7", **ENDS, lossy_policy=None)
        assert not hla.reports(model)
        assert not torch.equal(model.generate(**one(), **ENDS), expected)
    (many,) = hla.generate_many(model, one()["input_ids"].tolist(), assistant_model=draft, **ENDS | none)
    assert many.token_ids == expected[0, one()["input_ids"].shape[1] :].tolist()


def test_none_is_refused_where_it_cannot_act():
    """Transformers refuses other arguments, and an open context of Transformers' has a policy."""
    model = hla.enable(llama(), near(llama()))
    with pytest.raises(ValueError, match="not used by the model: ..drafter"):
        model.generate(**one(), **ENDS, lossy_policy=None, drafter="suffix")
    with hla.in_transformers_loop(model, "strict"), pytest.raises(ValueError, match="^lossy_policy=None: the open in"):
        model.generate(**one(), **ENDS, lossy_policy=None, assistant_model=near(llama()))
    hla.enable(model, lossy_policy=None)
    model.generate(**one(), **ENDS)
    assert not hla.reports(model)


def test_a_policy_in_a_config_does_not_act_and_says_so(monkeypatch):
    monkeypatch.setattr(model_checks, "_warned", set())
    model, draft = hla.enable(llama()), near(llama())
    config = GenerationConfig(**ENDS, lossy_policy={"rule": "top_k"}, return_dict_in_generate=True)
    with pytest.warns(UserWarning, match="^lossy_policy in a generation config does not act: pass it to generate or "):
        out = model.generate(**one(), generation_config=config, assistant_model=draft)
    assert not hasattr(out, "speculation") and hla.reports(model) == []


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*in training mode:UserWarning")
def test_rollouts_are_of_the_weights_of_the_moment():
    """As TRL's trainers call it: in training mode, with gradient checkpointing, before and behind steps."""
    target, prompts, texts = llama(), ragged(), []
    config = GenerationConfig(max_new_tokens=12, do_sample=True, top_k=1, pad_token_id=PAD)
    hla.enable(target, assistant_model=near(target), lossy_policy="svip", strict=True)
    target.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(target.train().parameters(), lr=0.01)
    for _ in range(3):
        with torch.no_grad():
            texts.append(target.generate(**prompts, generation_config=config).tolist())
        alone = llama()
        alone.load_state_dict(target.state_dict())
        assert texts[-1] == alone.generate(**prompts, generation_config=config).tolist()
        assert target.training and all(module.gradient_checkpointing for module in target.model.layers)
        target(**prompts, labels=prompts["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert texts[0] != texts[1] != texts[2]
    assert hla.reports(target)[0].num_accepted_draft_tokens and len(hla.reports(target)) == 3


@pytest.mark.full
def test_the_trainer_of_encoder_decoders_predicts_with_it(tmp_path):
    target = t5()
    row = {"attention_mask": torch.ones(6), "labels": torch.tensor([5, 6, 7])}
    data = [row | {"input_ids": one(6, seed=n)["input_ids"][0]} for n in range(2)]
    settings = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "per_device_eval_batch_size": 1}
    arguments = transformers.Seq2SeqTrainingArguments(tmp_path, predict_with_generate=True, **settings)
    trainer = transformers.Seq2SeqTrainer(target, arguments, eval_dataset=data)
    settings = {"max_new_tokens": 12, "do_sample": False}
    expected = trainer.predict(data, **settings).predictions
    with hla.using(target, assistant_model=near(target), strict=True):
        got = trainer.predict(data, **settings).predictions
    assert np.array_equal(got, expected) and [len(report.rows) for report in hla.reports(target)] == [1] * 2
    with hla.using(target, assistant_model=near(target)), pytest.warns(UserWarning, match="beam search"):
        trainer.predict(data, **settings, num_beams=2)
