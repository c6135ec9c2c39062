"""Proves that a profile comes back from its files bit by bit, that other models are refused in one line, that its seconds follow what was measured, and that its cells are those that it was counted in."""

import dataclasses
import itertools

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import tiny
from support.heads import rewrite
from support.profiles import GAMMA, arrays, bins, companion, draft, latency, profile, target
from support.refusals import refused
from support.small import tokenizer, words
from support.tiny import assisted, prompts

from hf_lossy_assist import Confidence, Constant, Heuristic, LossyPolicy
from hf_lossy_assist.artifacts.profile_tables import Bins, Latency
from hf_lossy_assist.artifacts.sv_profile import PROFILE, TABLES, Profile
from hf_lossy_assist.filters.sv import SVFilter
from hf_lossy_assist.methods.sv.acceptance_table import Samples, find_cells
from hf_lossy_assist.policy.recipes import SpeculativeVerification


# -- files ----------------------------------------------------------------------------------------------------------------
@pytest.fixture
def saved(tmp_path):
    profile().save_pretrained(tmp_path / "profile")
    return tmp_path / "profile"


def test_round_trip(saved, tmp_path):
    made, back = profile(), Profile.from_pretrained(saved)
    for name, value in arrays(made).items():
        other = arrays(back)[name]
        assert value.dtype == other.dtype and value.shape == other.shape and value.tobytes() == other.tobytes(), name
    for f in dataclasses.fields(Profile):
        if f.name not in ("bins", "latency", "pays", "source"):
            assert getattr(back, f.name) == getattr(made, f.name), f.name
    assert back.source == str(saved)
    back.save_pretrained(tmp_path / "again")
    for name in (PROFILE, TABLES, "README.md"):
        assert (tmp_path / "again" / name).read_bytes() == (saved / name).read_bytes()
    assert back.source == str(tmp_path / "again")
    assert {p.name for p in saved.iterdir()} == {PROFILE, TABLES, "README.md"}


def test_seconds_that_flatten_load_as_they_are_and_say_so(saved):
    """As files of before the convex fit have them."""
    steps = with_one(latency().seconds, latency().seconds[1, 2], 1, 1)
    tables = safetensors.numpy.load_file(saved / TABLES) | {"latency.seconds": steps}
    rewrite(saved, safetensors.numpy.save(tables), True, PROFILE, TABLES)
    with pytest.warns(UserWarning, match=r"profile.json: the seconds flatten .*hf-lossy profile"):
        back = Profile.from_pretrained(saved)
    assert not back.latency.convex and np.array_equal(back.latency.seconds, steps)


# -- latency --------------------------------------------------------------------------------------------------------------
def with_one(values, value, *place):
    out = np.array(values, dtype=np.float64)
    out[place] = value
    return out


def test_tables_with_gaps_or_out_of_order():
    for changes, says in (
        ({"seconds": with_one(latency().seconds, np.nan, 1, 2)}, "gaps"),
        ({"seconds": with_one(latency().seconds, np.inf, 0, 3)}, "gaps"),
        ({"step": with_one(latency().step, np.nan, 0)}, "gaps"),
        ({"noise": with_one(latency().noise, np.nan, 2)}, "gaps"), ({"seconds": latency().seconds[:, :-1]}, "gaps"),
        ({"tokens": latency().tokens[:2], "seconds": latency().seconds[:2]}, "gaps"),
        ({"tokens": latency().tokens[:, :0], "seconds": latency().seconds[:, :0]}, "gaps"),
        ({"companion": latency().companion[:1]}, "gaps"),
        ({f.name: getattr(latency(), f.name)[:0] for f in dataclasses.fields(Latency)}, "gaps"),
        ({"batches": np.array([1, 16, 4])}, "out of order"), ({"batches": np.array([1, 4, 4])}, "out of order"),
        ({"batches": np.array([0, 4, 16])}, "out of order"), ({"tokens": latency().tokens[:, ::-1]}, "out of order"),
        ({"tokens": latency().tokens + 1}, "out of order"), ({"seconds": latency().seconds[:, ::-1]}, "out of order"),
        ({"seconds": with_one(latency().seconds, 0.0, 0, 0)}, "out of order"),
        ({"companion": -latency().companion}, "out of order"), ({"noise": -latency().noise}, "out of order"),
    ):  # fmt: skip
        refused(lambda: latency(**changes), f"the latency table .*{says}: measure it again")  # noqa: B023
    refused(lambda: profile(gamma=GAMMA + 1), f"not measured up to γ = {GAMMA + 1} tokens a row")
    refused(lambda: profile(gamma=GAMMA - 1), f"not measured up to γ = {GAMMA - 1} tokens a row")
    short = latency().tokens.copy()
    short[2, 3] -= 1  # of 16 rows 63 tokens at most
    refused(lambda: profile(latency=latency(tokens=short)), f"not measured up to γ = {GAMMA} tokens a row")


def test_latency_by_hand_between_batches_and_beyond():
    """In seconds: 4 rows, γ = 2, m tokens: 10 + 4 + m ms, two draft steps of 1.4 ms, 2 ms for the companion.

    Ten rows lie half-way between 4 and 16, and this table is linear in rows and tokens a row.
    """
    table = latency()
    expected = (10 + 4 + np.arange(9) + 2 * 1.4 + 2) / 1e3
    np.testing.assert_allclose(table.of(4, 2), expected, rtol=1e-12)
    assert table.unobserved(4, 2) == pytest.approx(expected[-1] - 2e-3, rel=1e-12)
    np.testing.assert_allclose(table.of(10, GAMMA), (10 + 10 + np.arange(41) + GAMMA * 2.0 + 2) / 1e3, rtol=1e-12)
    np.testing.assert_allclose(table.of(2, 1), (10 + 2 + np.arange(3) + 1.2 + 2) / 1e3, rtol=1e-12)
    table = latency()
    for batch, near in ((64, 16), (17, 16)):
        ours = table.of(batch, GAMMA)
        assert len(ours) == GAMMA * batch + 1
        for per_row in range(GAMMA + 1):
            assert ours[per_row * batch] == pytest.approx(table.of(near, GAMMA)[per_row * near] * batch / near)
    for left_out, rows, near in ((1, 1, 4), (2, 4, 16)):
        fewer = Latency(*(getattr(table, f.name)[left_out:] for f in dataclasses.fields(Latency)))
        np.testing.assert_allclose(fewer.of(rows, GAMMA), fewer.of(near, GAMMA)[::4] / 4, rtol=1e-12)


@pytest.mark.full
@given(st.data())
def test_latency_never_falls(data):
    """Above 0, and not falling in the number of tokens, whatever was measured: the scheduler relies on it."""
    sizes, m = sorted(data.draw(st.sets(st.integers(1, 40), min_size=1, max_size=4))), data.draw(st.integers(1, 5))
    times = st.floats(1e-4, 10.0)
    rows = [np.sort(data.draw(st.lists(times, min_size=m + 1, max_size=m + 1))) for _ in sizes]
    step, companion = (
        np.array(data.draw(st.lists(times, min_size=len(sizes), max_size=len(sizes)))) for _ in range(2)
    )
    batches = np.array(sizes)
    table = Latency(batches, batches[:, None] * np.arange(m + 1), np.stack(rows), step, companion, step * 0)
    for batch in (*sizes, data.draw(st.integers(1, 200))):
        for gamma in range(m + 1):
            seconds = table.of(batch, gamma)
            assert len(seconds) == batch * gamma + 1 and (seconds > 0).all()
            assert (np.diff(seconds) >= -1e-12 * seconds[-1]).all()
            assert table.unobserved(batch, gamma) > 0
    k = data.draw(st.integers(0, len(sizes) - 1))
    np.testing.assert_allclose(table.of(sizes[k], m)[:: sizes[k]], rows[k] + companion[k] + m * step[k], rtol=1e-9)


def test_worthwhile():
    """0.9 × strict at 1 row, 1.1 × at 4, 1.3 × at 16: in between on a line, beyond as at the nearest."""
    made = profile()
    assert [made.worthwhile(b) for b in (1, 2, 3, 4, 16, 500)] == [False, False, True, True, True, True]
    assert not profile(pays=np.ones(3)).worthwhile(4), "as fast is not faster"
    noisy = profile(latency=latency(noise=np.full(3, 0.2)))
    assert [noisy.worthwhile(b) for b in (1, 4, 16)] == [False, False, True], "a gain within the noise may be none"
    sv = SVFilter(made, companion())
    assert [sv.reads_companion(b) for b in (1, 4)] == [False, True]
    assert SVFilter(made, companion(), fallback=False).reads_companion(1)


# -- cells ----------------------------------------------------------------------------------------------------------------
def beside(edges):
    """Each edge and its neighbours among float32 numbers, 0 and 1."""
    edges = np.asarray(edges, dtype=np.float32).reshape(-1)
    near = [edges, np.nextafter(edges, np.float32(-1)), np.nextafter(edges, np.float32(2))]
    return np.concatenate([*near, np.array([0, 1], dtype=np.float32)])


def test_cells_are_those_of_the_profiling():
    """On and beside every edge, torch finds the cell that numpy counted in, also where edges coincide."""
    for ties, (rows, columns) in itertools.product((False, True), ((1, 5), (4, 1), (3, 4), (16, 17))):
        cells = bins(rows, rows, columns)
        if ties:  # quantiles of a few values
            cells = dataclasses.replace(cells, s_edges=cells.s_edges.round(1), a_edges=cells.a_edges.round(1))
        s, a = (grid.reshape(-1) for grid in np.meshgrid(beside(cells.s_edges), beside(cells.a_edges)))
        nothing = np.zeros(len(s))
        samples = Samples(**{f.name: nothing for f in dataclasses.fields(Samples)} | {"s": s, "a": a})
        s_cell, a_cell = find_cells(cells.s_edges, cells.a_edges, samples)
        by_torch = cells.of_s(torch.from_numpy(s))
        assert by_torch.tolist() == s_cell.tolist() and by_torch.dtype == torch.int64
        assert cells.of_a(by_torch, torch.from_numpy(a)[:, None])[:, 0].tolist() == a_cell.tolist()
        reached = [set(s_cell), set(a_cell)]
        if ties:
            assert reached[0] <= set(range(rows)) and reached[1] <= set(range(columns))
        else:
            assert reached == [set(range(rows)), set(range(columns))], "a cell is never reached"


def test_cells_by_hand():
    """An edge belongs to the cell above it; the edges of A are those of the row's cell of S."""
    cells = Bins(
        np.array([0.5], dtype=np.float32), np.array([[0.25], [0.75]], dtype=np.float32), np.array([[0.1, 0.2], [0.3, 0.4]]),
        np.array([0.15, 0.35]), np.ones((2, 2), dtype=np.int64),
    )  # fmt: skip
    s = torch.tensor([[0.0, 0.5], [0.49, 1.0]])
    assert cells.of_s(s).tolist() == [[0, 1], [0, 1]]
    a = torch.tensor([0.25, 0.5, 0.75])
    assert cells.of_a(cells.of_s(s[0]), a.expand(2, 3)).tolist() == [[1, 1, 1], [0, 0, 1]]
    by_s, accept = cells.tables(torch.device("cpu"))
    assert by_s.tolist() == [0.15, 0.35] and accept.tolist() == [[0.1, 0.2], [0.3, 0.4]]
    assert accept.dtype == torch.float64 and cells.tables(torch.device("cpu"))[1] is accept


# -- models and settings --------------------------------------------------------------------------------------------------
def test_other_models_are_refused_and_what_may_differ_warns():
    """In each role; `test_heads.py` has the facts that are compared."""
    for role in ("target", "draft", "companion"):
        made = profile(**{role: dataclasses.replace(getattr(profile(), role), vocab_size=7)})
        line = refused(lambda: made.check(target(), draft(), companion()), "vocab_size 7 there")  # noqa: B023
        assert f"the {role}" in line and "hf-lossy profile" in line
    made = profile(draft=dataclasses.replace(profile().draft, id="org/other"))
    with pytest.warns(UserWarning, match="the profile's draft .* may differ: id 'org/other' there"):
        made.check(target(), draft(), companion())
    with pytest.warns(UserWarning, match=r"taken on another machine \(an abacus; this is .*threads\)"):
        profile(machine="an abacus").check(target(), draft(), companion())
    profile().check(target(), draft(), companion(), tokenizer())


def test_other_sampling_settings_warn():
    made = profile(decoding={"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 1.0})
    made.check_decoding(made.decoding)
    made.check_decoding({"temperature": 0.7})
    with pytest.warns(UserWarning, match=r"\(temperature 0.7 there, 1.0 here\)") as caught:
        made.check_decoding(made.decoding | {"temperature": 1.0})
    assert "\n" not in str(caught[0].message) and "distribution is not affected" in str(caught[0].message)
    with pytest.warns(UserWarning, match="do_sample True there, False here"):
        made.check_decoding({"do_sample": False})
    policy = SpeculativeVerification(made, companion())
    with pytest.warns(UserWarning, match="do_sample True there, False here"):
        assisted(target(), prompts((5,)), draft(), policy, max_new_tokens=4)
    with pytest.warns(UserWarning, match=r"\(temperature 0.7 there, 1.0 here, top_k 0 there, 50 here\)"):
        assisted(target(), prompts((5,)), draft(), policy, max_new_tokens=4, do_sample=True)
    sampling = {"do_sample": True, "temperature": 0.7, "top_k": 0}
    assisted(target(), prompts((5,)), draft(), policy, max_new_tokens=4, **sampling)  # a warning would be an error
    made = profile(machine="x\x1b" * 50_000, decoding={"do_sample": "y\x1b" * 50_000})
    with pytest.warns(UserWarning) as caught:
        made.check(target(), draft(), companion())
        made.check_decoding({"do_sample": True})
    for warning in caught:
        text = str(warning.message)
        assert len(text) < 1000 and text.isprintable()
    assert len(caught) == 2


# -- drafts longer than profiled, and other wrong uses ----------------------------------------------------------------------
def test_a_longer_draft_is_refused():
    made, third, inputs = profile(), companion(), prompts((5, 3))
    says = f"drafts of up to {GAMMA} tokens, and up to 9 may be drafted here.*--gamma 9"
    refused(lambda: SpeculativeVerification(made, third, gamma=9), says)
    sv = SVFilter(made, third, fallback=False)
    for stop in (Constant(9), Heuristic(1, 9), Confidence(0.4, 9), None):
        at_call = {"num_assistant_tokens": 9} if stop is None else {}
        refused(lambda: assisted(target(), inputs, draft(), LossyPolicy(stop=stop, filter=sv), **at_call), says)  # noqa: B023
    right = SpeculativeVerification(made, third, fallback=False)
    refused(lambda: assisted(target(), inputs, draft(), right, num_assistant_tokens=9), says)
    refused(lambda: assisted(target(), inputs, draft(), sv), "up to 5 may be drafted")  # 5 is the default
    for policy in (right, LossyPolicy(stop=Constant(9), filter=sv), sv):
        out = assisted(target(), inputs, draft(), policy, num_assistant_tokens=3, max_new_tokens=8)
        assert out.speculation.num_spec_tokens == 3
    assert SpeculativeVerification(made, third).stop == Constant(GAMMA)
    fallback = SpeculativeVerification(profile(pays=np.zeros(3)), third)  # also where it would not be asked
    refused(lambda: assisted(target(), inputs, draft(), fallback, num_assistant_tokens=9), says)


def test_the_papers_form_says_that_it_is_lossy(monkeypatch):
    """Once, in one line, although this policy has no JSON form."""
    monkeypatch.setattr("hf_lossy_assist.generation.model_checks._warned", set())
    policy = SpeculativeVerification(profile(), companion(), exact="off")
    assert not policy.lossless and SpeculativeVerification(profile(), companion()).lossless
    with pytest.warns(UserWarning, match=r"Profile\(never saved, γ = 4.*exact='off'.*policy is lossy") as caught:
        assisted(target(), prompts((5,)), draft(), policy, max_new_tokens=4)
    assert len(caught) == 1 and "\n" not in str(caught[0].message)
    assisted(target(), prompts((5,)), draft(), policy, max_new_tokens=4)


def test_wrong_uses():
    made, inputs = profile(), prompts((5,))
    refused(lambda: SVFilter("folder", companion()), "expected Profile, got .folder.", TypeError)
    refused(lambda: SVFilter(made, companion(), exact="ful"), "Did you mean 'full'")
    policy = SpeculativeVerification(made, tiny.build("llama", vocab_size=60))
    refused(lambda: assisted(target(), inputs, draft(), policy), "draft has 97 token ids, the companion 60")
    right, t5 = (SpeculativeVerification(made, third) for third in (companion(), tiny.build("t5")))
    lookup, says = {"prompt_lookup_num_tokens": 3}, "PromptLookup has none for it: pass an assistant_model"
    refused(lambda: assisted(target(), inputs, None, right, **lookup), says)
    refused(lambda: assisted(target(), inputs, draft(), t5), "encoder-decoder")
    others = {"tokenizer": tokenizer(), "assistant_tokenizer": tokenizer(words()[::-1])}
    refused(
        lambda: assisted(target(), inputs, draft(), right, **others), "a draft with another tokenizer has none for it"
    )
