"""The target's first layers as its draft: on the target's own cache they write what they would write on one of their own, and the text is the target's."""

import pytest
import torch
from support import small

import hf_lossy_assist as hla
from hf_lossy_assist.models.early_exit import ExitModel
from hf_lossy_assist.models.introspection import leaves_early
from hf_lossy_assist.models.row_cache import RowCache
from hf_lossy_assist.models.row_model import RowModel


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
