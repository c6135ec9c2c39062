"""Proves that a head is given the very hidden state that a plain forward over the text so far has at the position that predicts
the drafted token: alone, inside the engine after every kind of rollback, and beside other calls on the same model."""

import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from support import tiny
from support.refusals import refused
from support.tiny import NEVER_EMITTED, assisted, lora, peft_warns, prompts
from transformers import BartConfig, BartForConditionalGeneration, DynamicCache, StoppingCriteriaList

import hf_lossy_assist as hla
from hf_lossy_assist import DraftStop, FeatureSpec, StopRun
from hf_lossy_assist.artifacts.features import FeatureTap
from hf_lossy_assist.drafters.model import AssistantRun
from hf_lossy_assist.models.facts import CACHE


RAGGED = (9, 1, 4, 14)
LAST, RAW, FIRST = FeatureSpec(), FeatureSpec(norm=False), FeatureSpec(layer=1, norm=False)
FINAL_NORMS = ("norm", "ln_f", "final_layernorm", "final_layer_norm", "embedding_norm")


def hooks(model: Any) -> int:
    """This package's; Transformers leaves some of its own behind after `output_hidden_states=True`."""
    every = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    return sum(isinstance(getattr(getattr(hook, "func", None), "__self__", None), FeatureTap) for hook in every)


def decoder_inputs(model: Any, seed: int = 0) -> dict[str, torch.Tensor]:
    """Arguments of a plain forward over three rows of random tokens, as long as no row has padding."""
    ids = prompts((11, 11, 11), seed)["input_ids"]
    return {"input_ids": ids} | ({"decoder_input_ids": ids.flip(1)} if model.config.is_encoder_decoder else {})


def states(out: Any) -> tuple[torch.Tensor, ...]:
    return out.decoder_hidden_states if "decoder_hidden_states" in out else out.hidden_states


def close(got: torch.Tensor, expected: torch.Tensor, atol: float) -> None:
    """Equal up to rounding at the scale of the tensor: a block forward and a one-token forward differ in the last bits."""
    scale = expected.abs().max().clamp(min=1.0)
    torch.testing.assert_close(got / scale, expected / scale, rtol=0, atol=atol)


# -- the tap alone --------------------------------------------------------------------------------------------------------
@torch.no_grad()
def test_the_tap_reads_transformers_hidden_states():
    """`hidden_states[-1]` is normed, `hidden_states[k]` is what block k gives, and the last block's output is normed by hand."""
    for name in tiny.ARCHITECTURES:
        model = tiny.shared(name)
        with FeatureTap(model, LAST) as last, FeatureTap(model, FIRST) as first, FeatureTap(model, RAW) as raw:
            same = FeatureTap(model, FeatureSpec(layer=2, norm=False))
            with same:
                out = model(**decoder_inputs(model), output_hidden_states=True)
            assert same.value is None
            expected = states(out)
            assert len(expected) == 3 and last.value.shape == (3, 11, 32), name
            assert torch.equal(last.value, expected[-1]) and torch.equal(first.value, expected[1]), name
            decoder = model.get_decoder()
            norm = next(getattr(decoder, n) for n in FINAL_NORMS if hasattr(decoder, n))
            close(norm(raw.value), expected[-1], atol=1e-6)
            assert not torch.allclose(raw.value, expected[-1], atol=1e-2), f"this norm changes nothing: {name}"
            assert not torch.allclose(raw.value, first.value, atol=1e-2), name
            if name != "t5" and name != "gemma2":  # T5 scales, Gemma 2 caps behind its head
                close(model.get_output_embeddings()(last.value), out.logits, atol=1e-6)
        assert hooks(model) == 0 and last.value is None, name
    model = tiny.shared("llama")
    with FeatureTap(model, LAST) as tap:
        refused(lambda: tap.at(0), "no forward", RuntimeError)
        out = model(**decoder_inputs(model), output_hidden_states=True).hidden_states[-1]
        assert torch.equal(tap.at(-1), out[:, -1])
        assert torch.equal(tap.at(4), out[:, 4])
        assert torch.equal(tap.at(torch.tensor([4, 0, 10])), torch.stack([out[0, 4], out[1, 0], out[2, 10]]))
        second = model(**decoder_inputs(model, seed=1), output_hidden_states=True).hidden_states[-1]
        assert torch.equal(tap.at(-1), second[:, -1]), "the latest forward counts"


@torch.no_grad()
@pytest.mark.parametrize("blocks", [pytest.param(1, marks=pytest.mark.full), 3])
def test_encoder_decoder_of_uneven_depth(blocks):
    """The spec speaks of the decoder, however deep the encoder is; so does the identity that a head records."""
    bart = BartForConditionalGeneration(
        BartConfig(vocab_size=97, d_model=32, encoder_layers=2, decoder_layers=blocks, encoder_attention_heads=4,
                   decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64)
    ).eval()  # fmt: skip
    for model in (tiny.build("t5", num_decoder_layers=blocks), bart):
        with FeatureTap(model, FIRST) as first, FeatureTap(model, RAW):
            expected = states(model(**decoder_inputs(model), output_hidden_states=True))
            assert len(expected) == blocks + 1
            if blocks > 1:
                assert torch.equal(first.value, expected[1])
        with pytest.raises(ValueError, match=f"{blocks} blocks"):
            FeatureTap(model, FeatureSpec(layer=blocks + 1, norm=False))
        assert hla.ModelIdentity.of(model).num_layers == blocks


def test_bad_specs_and_loops_that_hand_no_states_on_are_refused():
    model = tiny.shared("llama")
    for make, words, error in (
        (lambda: FeatureSpec("assistant"), "unknown FeatureSpec.model 'assistant'; there are both, companion, draft, target", ValueError),
        (lambda: FeatureSpec(position="next"), "unknown FeatureSpec.position 'next'; there are predicting, token", ValueError),
        (lambda: FeatureTap(model, FeatureSpec(layer=-2, norm=False)), "layer -2 ", ValueError),
        (lambda: FeatureSpec(layer=1.5, norm=False), "'layer' expected int, got float", TypeError),
        (lambda: FeatureSpec(layer=1), "norm=False", ValueError),
        (lambda: FeatureTap(model, FeatureSpec(layer=3, norm=False)), "layer 3 .* 2 blocks", ValueError),
    ):  # fmt: skip
        refused(make, words, error)
    target, draft = tiny.build("llama"), tiny.shared("llama")
    stop, one = hla.HeadStop(hla.LinearHead(hla.HeadConfig(32))), prompts((9,))
    with pytest.raises(ValueError, match="own loop"):
        draft.generate(
            **one, stopping_criteria=StoppingCriteriaList([stop.start(1)]), max_new_tokens=9, do_sample=False
        )
    with pytest.raises(ValueError, match="HeadStop reads what a draft model computes"):
        assisted(target, one, None, stop, prompt_lookup_num_tokens=2)
    refused(lambda: assisted(target, one, draft, stop, assistant_confidence_threshold=0.2), "is itself a draft stop")


# -- inside the engine ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Recorder(DraftStop):
    """Writes down what it is given, and doubts tokens by id and place, so that rows draft differently long."""

    features: FeatureSpec = LAST  # type: ignore[misc]
    max_draft: int = 6
    every: int = 3  # doubts one in so many

    adaptive: ClassVar[bool] = True

    @property
    def longest(self) -> int:
        return self.max_draft

    def start(self, rows):
        return RecorderRun(self)


class RecorderRun(StopRun):
    """`seen`: of each token of this round: (B,) tokens, (B, H) features."""

    def begin_round(self, rows):
        self.seen = []
        return super().begin_round(rows)

    def after_token(self, input_ids, scores, *, rows, features=None):
        self.seen.append((input_ids[:, -1].clone(), features.clone()))
        return (input_ids[:, -1] + len(self.seen)) % self.settings.every == 0


@dataclass
class Drafted:
    """A row's draft in one round: the text before, the tokens, and the features that came with them."""

    row: int
    text: torch.Tensor  # (length,)
    tokens: torch.Tensor  # (n,)
    features: torch.Tensor  # (n, H)


@pytest.fixture
def record(monkeypatch):
    """A list of `Drafted` that every call with a `Recorder` adds to; one of its own for each thread."""
    propose, out = AssistantRun.propose, defaultdict(list)

    def spy(self, rows, limits, randomness):
        texts = [rows.ids[b, rows.pads[b] : rows.lengths[b]].clone() for b in range(len(rows.row_id_list))]
        draft = propose(self, rows, limits, randomness)
        for b, n in enumerate(draft.lengths.tolist()):
            if n:
                tokens = torch.stack([tokens[b] for tokens, _ in self.stop.seen[:n]])
                assert torch.equal(tokens, draft.tokens[b, :n])
                features = torch.stack([features[b] for _, features in self.stop.seen[:n]])
                out[threading.get_ident()].append(Drafted(rows.row_id_list[b], texts[b], tokens, features))
        return draft

    monkeypatch.setattr(AssistantRun, "propose", spy)
    return out


@torch.no_grad()
def compare(model: Any, records: list[Drafted], layer: int = -1, atol: float = 2e-5) -> None:
    """Each recorded feature is that of a plain forward of `model` over the text before the token, at its last place."""
    for one in records:
        whole = torch.cat([one.text, one.tokens[:-1]])[None]
        inputs = {"input_ids": whole}
        expected = states(model(**inputs, output_hidden_states=True))[layer][0, len(one.text) - 1 :]
        close(one.features, expected, atol)


def varied(records: list[Drafted]) -> None:
    lengths = {len(one.tokens) for one in records}
    assert len(lengths) > 2 and len(records) > 4, "drafts of one length prove little"


SAMPLED = {"do_sample": True, "max_new_tokens": 40}
PROCESSED = {"do_sample": True, "temperature": 0.8, "repetition_penalty": 1.2}
CALLS = {  # model, how often its draft is right, lengths of the rows, settings
    "left padding": ("llama", "often", RAGGED, {}),
    "a window": ("mistral", "rarely", RAGGED, {}),
    "windows in some layers": ("gemma3", "always", RAGGED, {}),
    "learnt positions": ("gpt2", "rarely", RAGGED, {}),
    "norms around each block": ("gemma2", "often", RAGGED, {}),
    "no prefill": ("gpt2", "often", (1,), SAMPLED),  # the first draft forward brings the prompt along
    "rows of one length": ("gemma3", "often", (6, 6, 6), SAMPLED),
    "sampling and processors": ("llama", "rarely", RAGGED, PROCESSED),
    "a recurrent state": ("lfm2", "rarely", (9,), SAMPLED),
    "the target itself": ("llama", None, RAGGED, {}),  # whose own forwards must not be taken for the draft's
    "a PEFT draft": ("llama", "adapter", RAGGED, {}),
}
QUICK = ("left padding", "no prefill", "sampling and processors", "the target itself")


@pytest.mark.full
@peft_warns
@pytest.mark.parametrize(
    "call", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in CALLS]
)
def test_states_inside_the_engine(call, record):
    """Rollbacks of different depth, and rows that leave the batch at an end token."""
    name, kind, lengths, settings = CALLS[call]
    target, inputs = tiny.shared(name), prompts(lengths)
    if kind != "adapter":
        draft = target if kind is None else tiny.draft_of(target, kind)
    else:
        draft = lora(tiny.noisy(target, 0.05), 0)
        ids = prompts((9,))["input_ids"]
        with torch.no_grad():
            adapted = draft(ids, output_hidden_states=True).hidden_states[-1]
            with draft.disable_adapter():
                assert not torch.allclose(adapted, draft(ids, output_hidden_states=True).hidden_states[-1])
    plain = None if settings else tiny.greedy(target, inputs, eos_token_id=NEVER_EMITTED)
    for end in (NEVER_EMITTED,) if settings else (NEVER_EMITTED, int(plain[1, max(lengths) + 9])):
        record.clear()
        out = assisted(target, inputs, draft, Recorder(), eos_token_id=end, **settings)
        assert plain is None or end != NEVER_EMITTED or torch.equal(out.sequences, plain)
        if kind == "rarely":
            stats = out.speculation.total()
            assert stats.num_draft_tokens > stats.num_accepted_draft_tokens, "nothing was rolled back"
        records = record[threading.get_ident()]
        varied(records)
        assert {one.row for one in records} == set(range(len(lengths)))
        compare(draft, records, atol=1e-4 if name == "lfm2" else 2e-5)
        assert hooks(draft) == 0 and hooks(target) == 0


def test_an_inner_layer_and_a_cache_that_was_passed_in(record):
    """With the cache the target runs on Transformers' at batch 1, the draft on rows."""
    target = tiny.shared("llama")
    draft = tiny.draft_of(target, "often")
    for recorder, lengths, settings, layer in (
        (Recorder(FIRST), RAGGED, {}, 1),
        (Recorder(), (9,), {CACHE: DynamicCache(config=target.config)}, -1),
    ):
        record.clear()
        assisted(target, prompts(lengths), draft, recorder, eos_token_id=NEVER_EMITTED, **settings)
        compare(draft, record[threading.get_ident()], layer)


# -- hooks and threads ----------------------------------------------------------------------------------------------------
def counted(model: Any, counts: list[int]) -> Any:
    """A pre-hook that writes down how many taps there are at each forward of `model`."""
    return model.get_output_embeddings().register_forward_pre_hook(lambda *_: counts.append(hooks(model)))


@pytest.mark.full
def test_one_hook_with_a_head_and_none_without():
    target, counts = tiny.shared("llama"), []
    draft = tiny.noisy(target, 0.05)
    handle = counted(draft, counts)
    for policy in ("strict", "svip", hla.Confidence(0.1)):
        assisted(target, prompts(RAGGED), draft, policy)
    assert counts and set(counts) == {0}
    counts.clear()
    assisted(target, prompts(RAGGED), draft, Recorder())
    handle.remove()
    assert counts and set(counts) == {1} and hooks(draft) == 0


def test_hooks_are_gone_after_an_error(monkeypatch):
    """The stop, the draft or the target fails in the middle of a call."""
    target = tiny.build("llama")
    draft = tiny.noisy(target, 0.05)
    for broken in (draft.get_output_embeddings(), target.get_output_embeddings(), RecorderRun):
        calls = []

        def fail(*_, calls=calls, **__):
            calls.append(1)
            if len(calls) > 3:
                raise ZeroDivisionError

        handle = None if broken is RecorderRun else broken.register_forward_pre_hook(fail)
        if handle is None:
            monkeypatch.setattr(RecorderRun, "after_token", lambda *_, fail=fail, **__: fail() or torch.zeros(4) > 0)
        with pytest.raises(ZeroDivisionError):
            assisted(target, prompts(RAGGED), draft, Recorder())
        if handle is not None:
            handle.remove()
        assert hooks(draft) == 0 and hooks(target) == 0


def test_two_threads_on_one_draft_do_not_mix(record):
    """Both threads are held between the draft's hidden state and what reads it, so that each would see the other's."""
    target = tiny.build("llama")
    hla.enable(target)
    draft = tiny.noisy(target, 0.05)
    barrier, met, texts, errors = threading.Barrier(2), [], {}, []

    def meet(*_):
        try:
            barrier.wait(timeout=20)
            met.append(1)
        except threading.BrokenBarrierError:  # the other thread has finished
            pass

    def run(seed: int):
        try:
            out = assisted(target, prompts((8,), seed), draft, Recorder(every=4), eos_token_id=NEVER_EMITTED)
            texts[seed] = (out.sequences, record[threading.get_ident()])
        except BaseException as error:
            errors.append(error)
        finally:
            barrier.abort()

    handle = draft.get_output_embeddings().register_forward_pre_hook(meet)
    threads = [threading.Thread(target=run, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    handle.remove()
    assert not errors and len(met) > 20
    for seed in (1, 2):
        sequences, records = texts[seed]
        assert torch.equal(sequences, tiny.greedy(target, prompts((8,), seed), eos_token_id=NEVER_EMITTED))
        compare(draft, records)
    assert hooks(draft) == 0
