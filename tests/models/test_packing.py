"""Proves that rows of different length fed side by side without padding give what the padded block gives: logits, cache contents and,
end to end, `model.generate`'s own tokens; and that packing is used where it pays and nowhere else."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny
from support.tiny import NEVER_EMITTED, assisted, greedy

from hf_lossy_assist import SVIP, Constant, FeatureSpec, LossyPolicy, VerifyFilter
from hf_lossy_assist.artifacts.features import FeatureTap
from hf_lossy_assist.models.introspection import PACKED
from hf_lossy_assist.models.patching import Layout, packed
from hf_lossy_assist.models.probe import why_not_rows
from hf_lossy_assist.models.row_model import PACKED_BELOW, RowModel
from hf_lossy_assist.round import Selection


LIMIT = 64
PACKING = [name for name in tiny.BATCHED if RowModel(tiny.shared(name), 2, LIMIT).packs]


@pytest.fixture(scope="module", autouse=True)
def small_models_too():
    """Tiny models have too few weights for packing to pay."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_lossy_assist.models.row_model.PACKED_FROM", 0.0)
        yield


@pytest.fixture
def taken(monkeypatch):
    """The `counts` of every packed feed, of any model."""
    seen, feed = [], RowModel._feed_packed

    def fed(self, tokens, counts, keep):
        seen.append([*counts])
        return feed(self, tokens, counts, keep)

    monkeypatch.setattr(RowModel, "_feed_packed", fed)
    return seen


class Both:
    """One text in two `RowModel`s: one packs whatever is short, the other pads always."""

    def __init__(self, model, lengths, atol=1e-4):
        self.packing, self.padding = (RowModel(model, len(lengths), LIMIT) for _ in range(2))
        self.padding.packs, self.atol = False, atol
        prompt = torch.randint(1, tiny.VOCABULARY, (len(lengths), max(lengths)))
        for rows in (self.packing, self.padding):
            rows.feed(prompt, lengths, keep=0)
        self.same_contents()

    def feed(self, counts, width):
        tokens = torch.randint(1, tiny.VOCABULARY, (len(counts), width))
        packed_out, padded_out = (rows.feed(tokens, counts, keep=width) for rows in (self.packing, self.padding))
        assert packed_out.shape == padded_out.shape and self.packing.lengths == self.padding.lengths
        for b, count in enumerate(counts):
            torch.testing.assert_close(packed_out[b, :count], padded_out[b, :count], atol=self.atol, rtol=self.atol)
        self.same_contents()

    def same_contents(self):
        """Slot by slot, as far as each row's text goes."""
        assert self.packing.cache.capacity >= max(self.packing.lengths)
        layers = zip(self.packing.cache.layers, self.padding.cache.layers, strict=True)
        for (ours, padded), name in itertools.product(layers, ("keys", "values")):
            for b, length in enumerate(self.packing.lengths):
                got, wanted = (getattr(layer, name)[b, :, :length] for layer in (ours, padded))
                torch.testing.assert_close(got, wanted, atol=self.atol, rtol=self.atol)

    def both(self, call):
        for rows in (self.packing, self.padding):
            call(rows)


def test_which_models_pack():
    """All of them but Gemma 2, whose soft-capping only eager attention has; and none under eager attention."""
    assert set(tiny.BATCHED) - set(PACKING) == {"gemma2"}
    assert {"mistral", "gemma3"} <= set(PACKING), "no sliding window among them"
    heads = [tiny.shared(name).config for name in PACKING]
    assert any(getattr(c, "num_key_value_heads", 9) < c.num_attention_heads for c in heads), "no grouped queries"
    eager = tiny.build("llama")
    eager.config._attn_implementation = "eager"
    assert not RowModel(eager, 2, LIMIT).packs


OFTEN = ("llama", "gemma3")  # all tokens, and windows


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.full) for name in PACKING]
)
@torch.no_grad()
def test_packed_is_padded(name, taken):
    """Texts longer than the sliding window (8 tokens), rollbacks, rows taken out and reordered; a row without a token."""
    torch.manual_seed(1)
    both = Both(tiny.shared(name), [9, 2, 5, 12])
    rounds = [[6, 1, 3, 1], [1, 1, 1, 6], [0, 6, 2, 1], [1, 0, 0, 2]]
    for counts in rounds:
        both.feed(counts, 6)
        held = [max(1, n - 2) for n in both.packing.lengths]
        both.both(lambda rows, held=held: rows.rollback(held))
    both.both(lambda rows: rows.select([3, 0]))
    both.feed([1, 5], 5)
    both.both(lambda rows: rows.select([1]))
    both.feed([2], 7)
    both.feed([1], 2)
    assert taken == [[9, 2, 5, 12], *rounds, [1, 5]], "a row alone is cut, not packed"
    both.packing.packs = False  # the padded feed goes on from what packed ones wrote
    both.feed([3], 3)


@torch.no_grad()
def test_storage_grows_under_packed_feeds():
    """Slots beyond what the first storage holds, and GPT-2's learned positions up to the very last one."""
    both = Both(tiny.build("gpt2", n_positions=LIMIT), [3, 1])
    for rows in (both.packing, both.padding):
        rows.cache.capacity = 3
        for layer in rows.cache.layers:
            layer.keys, layer.values = layer.keys[:, :, :3].clone(), layer.values[:, :, :3].clone()
    both.feed([1, 6], 6)
    assert both.packing.cache.capacity > 3
    both.feed([20, 1], 20)
    both.feed([40, 1], 40)
    assert max(both.packing.lengths) == LIMIT


@torch.no_grad()
def test_hidden_states_of_a_packed_feed(taken):
    """The states that a head reads come in the padded block's places."""
    for spec in (FeatureSpec("target"), FeatureSpec("target", layer=1, norm=False)):
        taken.clear()
        both, tokens = Both(tiny.shared("qwen2"), [5, 2, 7]), torch.randint(1, tiny.VOCABULARY, (3, 6))
        counts, seen = [2, 1, 4], []
        for rows in (both.packing, both.padding):
            with FeatureTap(rows.model, spec) as tap:
                rows.feed(tokens, counts, keep=6)
                seen.append(tap.value)
        assert taken[1:] == [counts] and seen[0].shape == (3, 6, 32) and seen[1].shape == (3, 4, 32)
        for b, count in enumerate(counts):
            torch.testing.assert_close(seen[0][b, :count], seen[1][b, :count], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_prompts_beyond_a_position_table_and_rows_that_go_back(taken):
    Both(tiny.build("gpt2", n_positions=8), [20, 3])  # which then drafts no more for the first row
    both, tokens = Both(tiny.shared("llama"), [5, 6, 3]), torch.randint(1, tiny.VOCABULARY, (3, 7))
    both.both(lambda rows: rows.feed(tokens, [7, -1, 2], keep=0))
    both.same_contents()
    assert both.packing.lengths == both.padding.lengths == [12, 5, 5] and taken == [[20, 3], [5, 6, 3]]


@torch.no_grad()
def test_when_it_is_taken(taken):
    rows = RowModel(tiny.shared("llama"), 2, LIMIT)
    tokens = torch.randint(1, tiny.VOCABULARY, (2, 10))
    rows.feed(tokens, [10, 9], keep=0)  # hardly any padding
    rows.feed(tokens, [9, 10], keep=10)
    rows.feed(tokens, [1, 1], keep=1)  # not all logits are wanted
    rows.feed(tokens, [1, 1])
    assert not taken
    for counts in ([10, 8], [8, 10], [0, 1]):  # 18 of 20 is the least padding that is packed away
        assert sum(counts) <= PACKED_BELOW * 20
        rows.feed(tokens, counts, keep=10)
    assert taken == [[10, 8], [8, 10], [0, 1]]
    rows.feed(tokens, [0, 0], keep=10)  # nothing to pack
    assert len(taken) == 3 and rows.lengths == [39, 40]


@torch.no_grad()
def test_it_must_be_worth_its_copies(taken, monkeypatch):
    """Ten tokens' worth of one layer's weights."""
    tokens = torch.randint(1, tiny.VOCABULARY, (2, 20))
    for wasted, packed_feeds in ((9, 0), (10, 2)):
        rows = RowModel(tiny.shared("llama"), 2, LIMIT)
        monkeypatch.setattr("hf_lossy_assist.models.row_model.PACKED_FROM", 10 * rows.facts.layer_weights)
        for keep in (0, 20):  # a prompt, and a round
            rows.feed(tokens, [20, 20 - wasted], keep=keep)
        assert len(taken) == packed_feeds


@torch.no_grad()
@pytest.mark.parametrize("name", OFTEN)
def test_columns_that_no_row_needs_are_left_out(taken, monkeypatch, name):
    monkeypatch.setattr("hf_lossy_assist.models.row_model.PACKED_FROM", float("inf"))
    model, widths = tiny.shared(name), []
    handle = model.get_input_embeddings().register_forward_hook(lambda module, given, out: widths.append(out.shape[1]))
    try:
        tokens, whole = torch.randint(1, tiny.VOCABULARY, (3, 8)), RowModel(model, 3, LIMIT)
        one = RowModel(model, 3, LIMIT)
        for rows in (whole, one):
            rows.feed(tokens, [8, 5, 2], keep=0)
        widths.clear()
        ours = one.feed(tokens, [1, 3, 2], keep=8)
        assert widths == [3] and ours.shape[1] == 8 and not taken and not bool(ours[:, 3:].any())
        monkeypatch.setattr(whole, "packs", False)
        padded = torch.cat([whole.feed(tokens[:, i : i + 1], [1, 1, 1], keep=1) for i in range(3)], dim=1)
        for b, count in enumerate([1, 3, 2]):
            torch.testing.assert_close(ours[b, :count], padded[b, :count], atol=1e-4, rtol=1e-4)
        assert one.lengths == [9, 8, 4]
    finally:
        handle.remove()


@torch.no_grad()
def test_the_attention_comes_back_after_an_error():
    model = tiny.build("qwen3")
    layout = Layout([1], 1, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="on purpose"), packed(model.config, layout):
        assert model.config._attn_implementation == PACKED
        raise RuntimeError("on purpose")
    assert model.config._attn_implementation == "sdpa"

    both = Both(model, [4, 2])
    with pytest.raises(IndexError):  # in the middle of a packed forward: a token that the model does not know
        both.packing.feed(torch.full((2, 3), tiny.VOCABULARY), [3, 1], keep=3)
    assert model.config._attn_implementation == "sdpa"
    both.feed([3, 1], 3)
    assert torch.equal(greedy(model, tiny.prompts((9, 4))), greedy(tiny.shared("qwen3"), tiny.prompts((9, 4))))


@pytest.mark.parametrize("name", OFTEN)
def test_other_threads_are_not_disturbed(name):
    """While one thread is inside a packed forward: Transformers' own `generate`, padded and packed feeds of others, on one model."""
    model, inputs = tiny.build(name), tiny.prompts((9, 1, 4))
    expected = greedy(model, inputs)

    @torch.no_grad()
    def other():
        both = Both(model, [9, 2])
        both.feed([5, 1], 5)
        both.feed([4, 4], 4)
        return why_not_rows(model), greedy(model, inputs)

    with ThreadPoolExecutor(1) as thread:
        with packed(model.config, Layout([2, 1], 2, torch.device("cpu"))):
            reason, text = thread.submit(other).result()
            assert model.config._attn_implementation == PACKED, "the other thread's packed forwards ended this one's"
        assert reason is None and torch.equal(text, expected)
    assert model.config._attn_implementation == "sdpa"


def test_rows_that_stop_drafting_early_are_not_padded(taken):
    """Where the host knows the lengths of drafts without a look at the device, as on a CPU."""
    model, inputs = tiny.shared("llama"), tiny.prompts((9, 1, 4, 14, 6))
    out = assisted(model, inputs, tiny.draft_of(model, "often"), SVIP(h=0.9, max_draft=8), eos_token_id=NEVER_EMITTED)
    assert torch.equal(out.sequences, greedy(model, inputs, eos_token_id=NEVER_EMITTED))
    assert any(len(set(counts)) > 1 for counts in taken[2:])


@pytest.mark.full
@pytest.mark.parametrize("name", OFTEN)
@settings(max_examples=25)
@given(data=st.data())
@torch.no_grad()
def test_any_packed_feeds(name, data):
    both = Both(tiny.shared(name), data.draw(st.lists(st.integers(1, 10), min_size=1, max_size=4), "prompts"))
    for _ in range(data.draw(st.integers(1, 5), "rounds")):
        batch, width = len(both.packing.lengths), data.draw(st.integers(1, 7), "width")
        both.feed(data.draw(st.lists(st.integers(0, width), min_size=batch, max_size=batch), "counts"), width)
        held = [data.draw(st.integers(max(1, n - 7), n), "length") for n in both.packing.lengths]
        both.both(lambda rows, held=held: rows.rollback(held))
        if data.draw(st.integers(0, 3)) == 0:
            order = data.draw(st.permutations(range(batch)), "order")[: max(1, batch - 1)]
            both.both(lambda rows, order=order: rows.select(order))


@dataclass(frozen=True)
class Staircase(VerifyFilter):
    """Row b of the batch has at most (b + `first`) mod `steps` of its drafted tokens verified."""

    first: int = 0
    steps: int = 5

    def select(self, draft, companion, randomness):
        number = torch.arange(draft.lengths.shape[0], device=draft.lengths.device)
        return Selection(draft, torch.minimum(draft.lengths, (number + self.first) % self.steps))


@pytest.mark.full
@pytest.mark.parametrize("name", [*OFTEN, "gpt2"])
def test_generate_with_rows_cut_to_different_lengths(name, taken):
    """Rows end at different times, so caches are narrowed as well; with one step nothing is ever verified."""
    model, inputs = tiny.shared(name), tiny.prompts((9, 1, 4, 14, 6))
    eos = int(greedy(model, inputs, eos_token_id=NEVER_EMITTED)[1, -12])
    expected = greedy(model, inputs, eos_token_id=eos)
    assert len({int((row != tiny.PAD).sum()) for row in expected[:, 14:]}) > 1, "no row ends before the others"
    for kind, filter_ in (("always", Staircase(0)), ("often", Staircase(2, 3)), ("often", Staircase(0, 1))):
        taken.clear()
        policy = LossyPolicy(stop=Constant(5), filter=filter_)
        out = assisted(model, inputs, tiny.draft_of(model, kind), policy, eos_token_id=eos)
        assert torch.equal(out.sequences, expected), (kind, filter_)
        rounds = taken[2:]
        assert taken[:2] == [[8, 0, 3, 13, 5]] * 2 and bool(rounds) == (filter_.steps > 1), (
            "rows of one length are cut alike"
        )
        total = out.speculation.total()
        assert total.num_dropped_tokens > 0 and (filter_.steps == 1) == (total.num_draft_tokens == 0)
