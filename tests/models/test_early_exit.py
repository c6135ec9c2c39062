"""An early exit is the model without its last blocks, shares every weight with it, and drafts for it under either name; on the target's own cache it
writes what it would write on one of its own.
"""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, get_ident

import pytest
import tiny_models
import torch
from support import small, tiny
from support.paper_rules import Ensemble
from support.tiny import some_eos
from transformers import OPTConfig, OPTForCausalLM

import hf_lossy_assist as hla
from hf_lossy_assist.models import probe
from hf_lossy_assist.models.early_exit import ExitModel
from hf_lossy_assist.models.introspection import leaves_early
from hf_lossy_assist.models.row_cache import RowCache
from hf_lossy_assist.models.row_model import RowModel


@torch.no_grad()
def test_it_is_the_model_without_its_last_blocks():
    for name in tiny.BATCHED:
        model, ids = tiny.shared(name), tiny.prompts((12,))["input_ids"]
        early, kinds = hla.early_exit(model, 1), {"layer_types": ["sliding_attention"]} if name == "gemma3" else {}
        cut = tiny.build(name, num_hidden_layers=1, **kinds)
        assert not cut.load_state_dict(model.state_dict(), strict=False).missing_keys
        assert torch.equal(early(ids).logits, cut(ids).logits), name
        assert not torch.equal(early(ids).logits, model(ids).logits), name
        assert not any(parameter.is_meta for parameter in early.parameters())
        whole = {parameter.data_ptr() for parameter in model.parameters()}
        assert {parameter.data_ptr() for parameter in early.parameters()} <= whole
        assert model.config.num_hidden_layers == 2


def test_a_decoder_inside_another_module_is_cut():
    """OPT's blocks are the decoder's of a model of a model."""
    sizes = {"vocab_size": 97, "hidden_size": 32, "ffn_dim": 64, "num_attention_heads": 4, "word_embed_proj_dim": 32}
    torch.manual_seed(0)
    model = OPTForCausalLM(OPTConfig(**sizes, num_hidden_layers=3, max_position_embeddings=64)).eval()
    early, ids = hla.early_exit(model, 1), tiny.prompts((12,))["input_ids"]
    cut = OPTForCausalLM(OPTConfig(**sizes, num_hidden_layers=1, max_position_embeddings=64)).eval()
    assert not cut.load_state_dict(model.state_dict(), strict=False).missing_keys
    with torch.no_grad():
        assert torch.equal(early(ids).logits, cut(ids).logits)
    assert leaves_early(early, model) and len(model.model.decoder.layers) == 3


def test_what_it_leaves_as_it_was():
    """Its attention looks at the whole model's config, so packing by its own would go unnoticed; a model in training stays in training."""
    model = tiny.shared("llama")
    assert RowModel(model, 2, 16).packs and not RowModel(hla.early_exit(model, 1), 2, 16).packs
    model = tiny.build("llama").train()
    assert not hla.early_exit(model, 1).training
    assert all(module.training for module in model.modules())


def test_what_cannot_be_cut_is_refused_in_one_line():
    model = tiny.shared("llama")
    for layers, message in ((2, "fewer than the 2 blocks"), (0, "layers"), (1.5, "layers")):
        with pytest.raises((ValueError, TypeError), match=message):
            hla.early_exit(model, layers)
    with pytest.raises(ValueError, match="no decoder that runs in batches"):
        hla.early_exit(tiny.shared("t5"), 1)
    with pytest.raises(ValueError, match="Lfm2ForCausalLM keeps a recurrent state"):
        hla.early_exit(tiny.shared("lfm2"), 1)


def generate(model, lengths=(9,), **settings):
    given = {"lossy_policy": "strict", "max_new_tokens": 12, "do_sample": False}
    return hla.enable(model).generate(**tiny.prompts(lengths), **given | settings)


def test_a_number_of_layers_that_the_model_has_not_got_is_refused():
    model = tiny.build("llama")
    for value in (-1, 0, 2, 10**6, True, 1.0, "1"):
        with pytest.raises((ValueError, TypeError), match=r"^early_exit.layers: expected[^\n]*$"):
            generate(model, assistant_early_exit=value)
        model.generation_config.assistant_early_exit = value
        expected = "early_exit.layers: expected" if value else "lossy_policy needs something to draft with"
        with pytest.raises((ValueError, TypeError), match=rf"^{expected}[^\n]*$"):  # 0 is no setting
            generate(model)
        model.generation_config.assistant_early_exit = None
    for name in ("t5", "lfm2"):
        with pytest.raises(ValueError, match=r"^early_exit: \w+ (keeps a recurrent|is no decoder)[^\n]*$"):
            generate(tiny.build(name), assistant_early_exit=1)


@pytest.mark.full
@pytest.mark.parametrize("name", ["gemma2", "gemma3", "qwen3"])
def test_drafts_of_every_length_for_ragged_rows(name):
    """Other targets are in the matrix of `generation/test_lossless.py`."""
    model, inputs = tiny.shared(name), tiny.prompts((9, 1, 4, 14))
    settings = {"eos_token_id": some_eos(tiny.greedy(model, inputs, eos_token_id=tiny.NEVER_EMITTED), 14)}
    expected = tiny.greedy(model, inputs, **settings)
    for gamma in (1, 2, 5, 12):
        out = tiny.assisted(model, inputs, None, assistant_early_exit=1, num_assistant_tokens=gamma, **settings)
        assert torch.equal(out.sequences, expected) and out.speculation.total().num_draft_tokens > 0, gamma


def test_two_threads_inside_their_drafts_of_which_one_fails():
    """The third forward of the first block is a draft's; the draft is a model beside the target, which stays as it is."""
    model, barrier, calls = hla.enable(tiny.build("llama")), Barrier(2), Counter()
    before, expected = dict(vars(model.config)), tiny.greedy(model, tiny.prompts((9,)), max_new_tokens=12)

    def meet(*_):
        calls[get_ident()] += 1
        if calls[get_ident()] == 3 and barrier.wait(60) == 0:
            raise RuntimeError("stop here")

    hook = model.model.layers[0].register_forward_pre_hook(meet)
    with ThreadPoolExecutor(2) as threads:
        runs = [threads.submit(generate, model, assistant_early_exit=1) for _ in range(2)]
    hook.remove()
    assert sorted(str(run.exception()) for run in runs) == ["None", "stop here"]
    assert all(torch.equal(run.result(), expected) for run in runs if run.exception() is None)
    assert vars(model.config) == before and torch.equal(generate(model, assistant_early_exit=1), expected)


def test_a_call_by_name_tries_no_exit_on_tokens(monkeypatch):
    model = tiny_models.tiny_model("bloom", "causal", "eager", 0)
    expected = generate(model, assistant_early_exit=1)  # the target is tried once
    monkeypatch.setattr(probe, "_try_rows", lambda base: pytest.fail(f"{base.name_or_path} was tried"))
    assert torch.equal(generate(model, assistant_early_exit=1), expected)


@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
def test_its_distributions_serve_stops_and_rules():
    """As those of `hla.early_exit(model, n)`."""
    model = tiny.build("llama")
    for policy in ("svip", hla.Confidence(0.3), Ensemble(0.5)):
        by_name, by_model = (
            generate(model, lossy_policy=policy, return_dict_in_generate=True, **exit)
            for exit in ({"assistant_early_exit": 1}, {"assistant_model": hla.early_exit(model, 1)})
        )
        assert torch.equal(by_name.sequences, by_model.sequences)
        assert by_name.speculation.total().steps == by_model.speculation.total().steps


def test_an_exit_in_the_config_does_not_take_an_assistants_place():
    """By the runner itself, where the generation config is not looked through before."""
    model, draft = tiny.build("llama"), tiny.draft_of(tiny.shared("llama"), "often")
    model.generation_config.assistant_early_exit = -1
    runner = hla.Runner("strict", draft)
    out = model.generate(**tiny.prompts((9,)), max_new_tokens=12, do_sample=False, custom_generate=runner)
    assert torch.equal(out, tiny.greedy(tiny.shared("llama"), tiny.prompts((9,)), max_new_tokens=12))


INPUTS = {"one": small.one(seed=4), "even": small.ragged((0, 0)), "ragged": small.ragged()}
SETTINGS = {"max_new_tokens": 24, "return_dict_in_generate": True}


@pytest.fixture(scope="module")
def target():
    """A target whose last layer changes little, so that leaving before it is often right."""
    model = small.llama(layers=4)
    with torch.no_grad():
        for weight in model.model.layers[3].parameters():
            if weight.dim() > 1:
                weight.mul_(0.4)
    return hla.enable(model)


@pytest.fixture
def fed(monkeypatch):
    """Record how many tokens each forward of a draft on the target's cache is fed."""
    seen, original = [], ExitModel.feed

    def feed(self, tokens, counts, keep=None):
        seen.append(list(counts))
        return original(self, tokens, counts, keep)

    monkeypatch.setattr(ExitModel, "feed", feed)
    return seen


@pytest.mark.full
@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
def test_it_reads_nothing_that_the_target_has_read(target, fed, inputs):
    policy, draft = hla.Constant(7), hla.early_exit(target, 3)
    expected = target.generate(**inputs, do_sample=False, **SETTINGS)
    out = target.generate(**inputs, assistant_model=draft, lossy_policy=policy, do_sample=False, **SETTINGS)
    assert out.sequences.equal(expected.sequences)
    accepted = {count for row in out.speculation.rows for _, count in row.steps}
    assert len(accepted) > 1, "some rounds accept a token, and some do not"
    assert {count for counts in fed for count in counts} == {1}


@pytest.mark.parametrize(
    ("inputs", "row_generators"),
    [(INPUTS["ragged"], True), pytest.param(INPUTS["even"], False, marks=pytest.mark.full)],
)
def test_samples_are_those_of_a_draft_with_a_separate_cache(target, monkeypatch, inputs, row_generators):
    texts, draft = [], hla.early_exit(target, 3)
    for shares in (True, False):
        monkeypatch.setattr(hla.Runner, "shares", shares)
        seeds = range(len(inputs["input_ids"])) if row_generators else [5]
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        settings = SETTINGS | {"do_sample": True, "generator": generators if row_generators else generators[0]}
        texts.append(target.generate(**inputs, assistant_model=draft, lossy_policy="svip", **settings))
    assert texts[0].sequences.equal(texts[1].sequences)
    assert [row.steps for row in texts[0].speculation.rows] == [row.steps for row in texts[1].speculation.rows]


def test_it_shares_the_targets_storage(target, monkeypatch):
    caches, original = [], RowCache.__init__

    def counted(self, *args, **kwargs):
        original(self, *args, **kwargs)
        caches.append(self)

    monkeypatch.setattr(RowCache, "__init__", counted)
    draft = hla.early_exit(target, 2)
    target.generate(**small.ragged(), assistant_model=draft, lossy_policy="strict", do_sample=False, **SETTINGS)
    assert sum(any(layer.is_initialized for layer in cache.layers) for cache in caches) == 1


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
def test_lossy_rules_and_composites(target):
    """A round that keeps tokens which the target would not have written leaves the target's keys and values of them."""
    draft, inputs = hla.early_exit(target, 2), small.ragged()
    for policy, drafter in ((hla.TopK(5), None), ("strict", hla.CompositeDrafter())):
        texts = []
        for shares in (True, False):
            runner = type("Own", (hla.Runner,), {"shares": shares})
            given = {"custom_generate": runner(policy, draft, drafter=drafter), "do_sample": False}
            texts.append(target.generate(**inputs, **given, max_new_tokens=24))
        assert texts[0].equal(texts[1])


def test_what_is_made_of_the_targets_layers(target):
    assert leaves_early(hla.early_exit(target, 1), target)
    assert not leaves_early(small.near(target), target) and not leaves_early(target, target)
    assert not leaves_early(hla.early_exit(small.llama(layers=4), 1), target)
    shared = RowModel(target, 1, 20)
    assert ExitModel(hla.early_exit(target, 2), shared).export(1, None) is None
