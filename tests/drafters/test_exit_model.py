"""The target's first layers as its draft: on the target's own cache they write what they would write on one of their own, and the text is the target's."""

import time

import pytest
import torch
from support import small, tiny
from transformers import DynamicCache

import hf_lossy_assist as hla
from hf_lossy_assist.generation.find_early_exit import WIDTHS, find_best_draft_length
from hf_lossy_assist.models.compat import CACHE
from hf_lossy_assist.models.early_exit import ExitModel, leaves_early
from hf_lossy_assist.models.row_cache import RowCache
from hf_lossy_assist.models.row_model import RowModel


INPUTS = {"one": small.one(seed=4), "even": small.ragged((0, 0)), "ragged": small.ragged()}
SETTINGS = {"max_new_tokens": 24, "return_dict_in_generate": True}


def quiet(layer):
    """A target in which one layer changes little, so that leaving it out is often right."""
    model = small.llama(layers=4)
    with torch.no_grad():
        for weight in model.model.layers[layer].parameters():
            if weight.dim() > 1:
                weight.mul_(0.4)
    return hla.enable(model)


@pytest.fixture(scope="module")
def target():
    return quiet(3)


@pytest.fixture
def fed(monkeypatch):
    """Record how many tokens each forward of a draft on the target's cache is fed."""
    seen, original = [], ExitModel.feed

    def feed(self, tokens, counts, keep=None):
        seen.append(list(counts))
        return original(self, tokens, counts, keep)

    monkeypatch.setattr(ExitModel, "feed", feed)
    return seen


@pytest.mark.full(every=4)
@pytest.mark.nightly(every=2)
@pytest.mark.parametrize(
    "policy", ["strict", "svip", hla.LossyPolicy(stop=hla.Constant(7))], ids=["strict", "svip", "7"]
)
@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
def test_greedy_is_generate(target, fed, inputs, policy):
    draft = hla.early_exit(target, 3)
    expected = target.generate(**inputs, do_sample=False, **SETTINGS)
    out = target.generate(**inputs, assistant_model=draft, lossy_policy=policy, do_sample=False, **SETTINGS)
    assert out.sequences.equal(expected.sequences)
    accepted = {count for row in out.speculation.rows for _, count in row.steps}
    assert len(accepted) > 1, "some rounds accept a token, and some do not"
    assert {count for counts in fed for count in counts} == {1}, "it never reads what the target has read"


@pytest.mark.parametrize("shares", [True, False])
def test_greedy_is_generate_without_a_middle_layer(monkeypatch, fed, shares):
    """After the target's keys in the layers that it has, or on a cache of its own."""
    target, inputs = quiet(1), small.ragged()
    monkeypatch.setattr(hla.Runner, "shares", shares)
    expected = target.generate(**inputs, do_sample=False, **SETTINGS).sequences
    draft = hla.skip_layers(target, [1])
    out = target.generate(**inputs, assistant_model=draft, lossy_policy="strict", do_sample=False, **SETTINGS)
    assert out.sequences.equal(expected)
    assert len({count for row in out.speculation.rows for _, count in row.steps}) > 1
    assert bool(fed) == shares and {count for counts in fed for count in counts} <= {1}


@pytest.mark.full(every=3)
@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("row_generators", [False, True])
def test_samples_are_those_of_a_draft_with_a_separate_cache(target, monkeypatch, inputs, row_generators):
    texts, draft = [], hla.early_exit(target, 3)
    for shares in (True, False):
        monkeypatch.setattr(hla.Runner, "shares", shares)
        seeds = range(len(inputs["input_ids"])) if row_generators else [5]
        generator = [torch.Generator().manual_seed(seed) for seed in seeds]
        out = target.generate(
            **inputs, assistant_model=draft, lossy_policy="svip", do_sample=True, generator=generator if row_generators else generator[0], **SETTINGS
        )  # fmt: skip
        texts.append(out)
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


def test_rows_that_leave_and_ends(target):
    inputs = small.ragged((0, 1, 2, 3, 4, 5))
    plain = target.generate(**inputs, do_sample=False, **SETTINGS).sequences
    ends = sorted({int(plain[row, 9 + 3 * row]) for row in range(5)})
    settings = SETTINGS | {"eos_token_id": ends, "do_sample": False}
    expected = target.generate(**inputs, **settings).sequences
    draft = hla.early_exit(target, 3)
    out = target.generate(**inputs, assistant_model=draft, lossy_policy="strict", **settings).sequences
    assert out.equal(expected) and len({int((row != 0).sum()) for row in out[:, 9:]}) > 2


@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
def test_lossy_rules_and_composites(target):
    """A round that keeps tokens which the target would not have written leaves the target's keys and values of them."""
    draft, inputs = hla.early_exit(target, 2), small.ragged()
    for given in ({"lossy_policy": hla.TopK(5)}, {"lossy_policy": "strict", "drafter": hla.CompositeDrafter()}):
        texts = []
        for shares in (True, False):
            runner = type("Own", (hla.Runner,), {"shares": shares})
            policy, drafter = given["lossy_policy"], given.get("drafter")
            texts.append(
                target.generate(
                    **inputs,
                    custom_generate=runner(policy, draft, drafter=drafter),
                    do_sample=False,
                    max_new_tokens=24,
                )
            )
        assert texts[0].equal(texts[1])


def test_texts_in_flight_are_not_mixed_up(target, fed):
    prompts = [row[mask.bool()].tolist() for row, mask in zip(*small.ragged((0, 1, 2, 3)).values(), strict=True)]
    settings = {"max_new_tokens": 12, "do_sample": False}
    found = hla.generate_many(
        target, prompts, assistant_model=hla.early_exit(target, 3), lossy_policy="strict", max_rows=2, **settings
    )
    for result in found:
        expected = target.generate(torch.tensor([prompts[result.index]]), **settings)[0, len(prompts[result.index]) :]
        assert result.token_ids == expected.tolist()
    assert not fed


def test_what_is_made_of_the_targets_layers(target):
    assert leaves_early(hla.early_exit(target, 1), target)
    assert not leaves_early(small.near(target), target) and not leaves_early(target, target)
    assert not leaves_early(hla.early_exit(small.llama(layers=4), 1), target)
    shared = RowModel(target, 1, 20)
    assert ExitModel(hla.early_exit(target, 2), shared).export(1, None) is None


def test_which_exit_pays(target, capsys):
    """Acceptance is counted by hand; the layer that changes little is the one to leave at."""
    tokenizer = small.tokenizer()
    prompts = ["w1 w2 w3 w4", "w9 w8 w7 w30 w31"]
    found = hla.find_exit(target, tokenizer, prompts, layers=[1, 3], new_tokens=12, repeats=1)
    for candidate in found.found:
        right = []
        for prompt in prompts:
            ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
            text = target.generate(ids, max_new_tokens=12, do_sample=False)
            draft = hla.early_exit(target, candidate.layers)
            for end in range(ids.shape[1], text.shape[1]):
                with torch.no_grad():
                    right.append(int(draft(text[:, :end]).logits[0, -1].argmax()) == int(text[0, end]))
        assert candidate.acceptance.value == pytest.approx(sum(right) / len(right))
        assert candidate.step > 0 and candidate.target_step > 0 and candidate.gamma >= 1
    few, most = found.found
    assert few.acceptance.value < most.acceptance.value
    assert (found.best is None) == all(candidate.gain <= 1 for candidate in found.found)
    assert ("no exit pays" in str(found)) == (found.best is None)


def test_layers_to_leave_out_are_searched_until_the_clock_says_so(monkeypatch):
    """The clock counts blocks. A seed repeats the search; acceptance is counted by hand, after the target's cache of the prompt."""
    target, now, tokenizer = quiet(1), [0], small.tokenizer()
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    for block in target.model.layers:
        block.register_forward_pre_hook(lambda *_: now.__setitem__(0, now[0] + 1))
    given = {"layers": [1], "new_tokens": 12, "repeats": 1}

    def search(seconds, seed=0):
        return hla.find_exit(target, tokenizer, ["w1 w2 w3 w4"], seconds=seconds, seed=seed, **given).found[1:]

    assert search(0.0) == () and len(search(1.0)) == 0 and 0 < len(search(20.0)) < 6
    found = search(8e4)
    assert found == search(8e4) != search(8e4, 1) and len(found) == 6, "all within two layers of the best set"
    assert {one.skipped for one in found} >= {(1,), (2,), (1, 3)} and {one.layers for one in found} == {1, 2, 3}
    best = max(found, key=lambda one: one.acceptance.value)
    assert best.skipped == (1,) and best.code.startswith("assistant_model=hla.skip_layers(target, [1]), num_")
    ids = tokenizer("w1 w2 w3 w4", return_tensors="pt")["input_ids"]
    text, draft, cache = target.generate(ids, max_new_tokens=12, do_sample=False), best.draft(target), DynamicCache()
    with torch.no_grad():
        target(ids[:, :-1], **{CACHE: cache})
        right = draft(text[:, ids.shape[1] - 1 : -1], **{CACHE: cache}).logits.argmax(-1) == text[:, ids.shape[1] :]
    assert best.acceptance.value == float(right.double().mean()) and 0.5 < best.acceptance.value


@pytest.mark.parametrize(
    "config",
    [{"return_dict_in_generate": True}, {"num_return_sequences": 2}, {"repetition_penalty": 1.9}, {"stop_strings": ["w1"]}, {"num_beams": 3}],
    ids=str,
)  # fmt: skip
def test_what_the_target_says_does_not_hang_on_its_generation_config(config):
    """An exit is asked for its likeliest token, and so is the target."""
    model, tokenizer = small.llama(layers=4), small.tokenizer()
    settings = {"layers": [3], "new_tokens": 12, "repeats": 1}
    expected = hla.find_exit(model, tokenizer, ["w1 w2 w3", "w9"], **settings).found[0].acceptance
    for name, value in config.items():
        setattr(model.generation_config, name, value)
    assert hla.find_exit(model, tokenizer, ["w1 w2 w3", "w9"], **settings).found[0].acceptance == expected
    assert 0 < expected.value < 1


def test_a_text_that_finds_an_end_is_tried_up_to_there():
    """An end token, or the end of a table of positions."""
    model, tokenizer, prompt = small.llama(layers=4), small.tokenizer(), ["w5 w2 w7"]
    ids = tokenizer(prompt[0], return_tensors="pt")["input_ids"]
    text = model.generate(ids, max_new_tokens=12, do_sample=False)[0, 3:].tolist()
    end = next(token for n, token in enumerate(text) if n > 0 and token not in text[:n])
    settings = {"layers": [3], "repeats": 1}
    up_to_it = hla.find_exit(model, tokenizer, prompt, new_tokens=text.index(end) + 1, **settings).found[0].acceptance
    model.generation_config.eos_token_id = [2, end]
    assert hla.find_exit(model, tokenizer, prompt, new_tokens=40, **settings).found[0].acceptance == up_to_it
    table = tiny.build("gpt2", n_layer=4, n_positions=8)
    few = hla.find_exit(table, tokenizer, prompt, new_tokens=5, **settings).found[0].acceptance
    assert hla.find_exit(table, tokenizer, prompt, new_tokens=40, **settings).found[0].acceptance == few
    with pytest.raises(ValueError, match=r"has 9 tokens, and GPT2LMHeadModel has positions for 8: shorten it$"):
        hla.find_exit(table, tokenizer, ["w1 " * 9], **settings)


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"prompts": []}, ValueError, "no prompt"),
        ({"layers": []}, ValueError, "at least one number"),
        ({"layers": [4]}, ValueError, "fewer than the 4 blocks"),
        ({"new_tokens": 1}, ValueError, r"^find_exit.new_tokens: expected"),
        ({"layers": 2}, TypeError, "expected a list of numbers of layers"),
        ({"layers": "12"}, TypeError, "expected a list of numbers of layers"),
        ({"seconds": -1.0}, ValueError, r"^find_exit.seconds: expected"),
        ({"prompts": "w1 w2"}, TypeError, "expected a list of texts"),
        ({"prompts": None}, TypeError, "expected a list of texts"),
        ({"prompts": ["w1", 3]}, TypeError, r"prompts\[1\]: expected a text"),
        ({"prompts": ["w1", ""]}, ValueError, r"prompts\[1\] has no token"),
        ({"tokenizer": None}, TypeError, "expected the target's tokenizer"),
        ({"target": "a model"}, TypeError, "expected a loaded Transformers model, got str"),
    ],
)
def test_what_cannot_be_tried(target, given, kind, message):
    right = {"target": target, "tokenizer": small.tokenizer(), "prompts": ["w1 w2"]}
    with pytest.raises(kind, match=message) as error:
        hla.find_exit(**(right | given))
    assert "\n" not in str(error.value)


def test_the_draft_length_that_gains_most():
    """By hand: tokens of a round × a target step ÷ (γ draft steps + a block of γ + 1), interpolated between the widths."""
    flat = [1.0] * len(WIDTHS)
    assert find_best_draft_length(flat, 0.0, 1.0) == (16, pytest.approx(17.0))
    assert find_best_draft_length(flat, 1.0, 0.0) == (1, pytest.approx(0.5))
    gains = {g: sum(0.8**n for n in range(g + 1)) / (0.1 * g + 1.0) for g in range(1, 17)}
    assert find_best_draft_length(flat, 0.1, 0.8) == (max(gains, key=gains.get), pytest.approx(max(gains.values())))
    growing = [float(width) for width in WIDTHS]  # a block costs what its tokens cost: nothing is gained
    assert find_best_draft_length(growing, 0.1, 0.8) == (1, pytest.approx(1.8 / 2.1))
