"""Proves that a profile comes back from its files bit by bit, that damaged ones and other models are refused in one line, that its
seconds follow what was measured, and that its cells are those that it was counted in."""

import dataclasses
import hashlib
import json

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import tiny
from support.profiles import GAMMA, arrays, bins, companion, draft, latency, profile, target
from support.refusals import refused
from support.small import tokenizer, words
from support.tiny import assisted, greedy, prompts

from hf_lossy_assist import Confidence, Constant, Heuristic, LossyPolicy, as_policy
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


def edit(folder, **changes):
    """Change entries of a saved profile.json; None takes one out."""
    facts = json.loads((folder / PROFILE).read_text(encoding="utf-8")) | changes
    (folder / PROFILE).write_text(json.dumps({k: v for k, v in facts.items() if v is not None}), encoding="utf-8")


def retable(folder, **changes):
    """Change tables of a saved profile, with the digest that belongs to them; None takes one out."""
    tables = safetensors.numpy.load_file(folder / TABLES) | changes
    rewrite(folder, safetensors.numpy.save({name: value for name, value in tables.items() if value is not None}))


def rewrite(folder, data):
    (folder / TABLES).write_bytes(data)
    edit(folder, tables_sha256=hashlib.sha256(data).hexdigest())


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
    retable(saved, **{"latency.seconds": steps})
    with pytest.warns(UserWarning, match=r"profile.json: the seconds flatten .*hf-lossy profile"):
        back = Profile.from_pretrained(saved)
    assert not back.latency.convex and np.array_equal(back.latency.seconds, steps)


def test_a_policys_folder(tmp_path):
    """The profile is saved with the policy, and the companion by its name."""
    third = tiny.build("llama")
    third.config.name_or_path = "org/companion"
    policy = SpeculativeVerification(profile(), third, gamma=3, exact="prefix", fallback=False)
    policy.save_pretrained(tmp_path / "policy")
    assert {p.name for p in (tmp_path / "policy").iterdir()} == {"policy.json", "README.md", "filter_profile"}
    back = as_policy(tmp_path / "policy")
    assert back.stop == Constant(3) and (back.filter.companion, back.filter.exact) == ("org/companion", "prefix")
    assert not back.filter.fallback and back.filter.corrections
    for name, value in arrays(profile()).items():
        assert arrays(back.filter.profile)[name].tobytes() == value.tobytes()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda f: (f / PROFILE).write_text((f / PROFILE).read_text()[:200]), "is not JSON"),
        (lambda f: (f / PROFILE).write_bytes(b"\xff\xfe{}"), "is not JSON"),
        (lambda f: (f / PROFILE).write_text("[1, 2]"), "expected an object"),
        (lambda f: edit(f, gama=7), "unexpected keyword argument 'gama'"),
        (lambda f: edit(f, gamma=None), "missing 1 required .*'gamma'"),
        (lambda f: edit(f, tables_sha256=None), "SHA-256 differs"),
        (lambda f: edit(f, gamma="7"), "'gamma' expected int, got str"),
        (lambda f: edit(f, gamma=True), "'gamma' expected int, got bool"),
        (lambda f: edit(f, decoding=[1]), "'decoding' expected a dict, got list"),
        (lambda f: edit(f, draft={"id": "x"}), "ModelIdentity.*missing"),
        (lambda f: edit(f, gamma=5), "not measured up to γ = 5 tokens"),
        (lambda f: (f / TABLES).write_bytes((f / TABLES).read_bytes()[:-8]), "SHA-256 differs"),
        (lambda f: edit(f, tables_sha256="0" * 64), "SHA-256 differs"),
        (lambda f: rewrite(f, b"nothing"), "header"),
        (lambda f: retable(f, **{"bins.accept": None}), "'bins.accept' is missing"),
        (lambda f: retable(f, pays=np.ones(2)), "predicted speeds have gaps"),
        (lambda f: retable(f, **{"bins.accept": bins(rows=2).accept}), "tables of acceptance have gaps"),
        (lambda f: retable(f, **{"bins.accept": bins().accept * np.nan}), "tables of acceptance have gaps"),
        (lambda f: retable(f, **{"bins.accept": -bins().accept}), "tables of acceptance are out of order"),
        (lambda f: retable(f, **{"bins.a_edges": bins().a_edges * np.nan}), "tables of acceptance have gaps"),
        (lambda f: retable(f, **{"bins.s_edges": bins().s_edges * np.nan}), "tables of acceptance have gaps"),
        (lambda f: retable(f, **{"bins.a_edges": np.array(0.5)}), "tables of acceptance have gaps"),
        (lambda f: retable(f, **{"latency.seconds": latency().seconds * np.nan}), "latency table has gaps"),
    ],
)
def test_damaged_files(saved, damage, says):
    damage(saved)
    refused(lambda: Profile.from_pretrained(saved), says)


@pytest.mark.parametrize("name", [PROFILE, TABLES])
def test_a_missing_file_is_named(saved, name):
    (saved / name).unlink()
    refused(lambda: Profile.from_pretrained(saved), f"{name} cannot be read: No such file")


def test_no_folder_and_no_repository():
    refused(lambda: Profile.from_pretrained("no/good/name"), "neither a folder here nor a repository")


# -- latency --------------------------------------------------------------------------------------------------------------


def with_one(values, value, *place):
    out = np.array(values, dtype=np.float64)
    out[place] = value
    return out


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seconds": with_one(latency().seconds, np.nan, 1, 2)}, "gaps"),
        ({"seconds": with_one(latency().seconds, np.inf, 0, 3)}, "gaps"),
        ({"step": with_one(latency().step, np.nan, 0)}, "gaps"),
        ({"noise": with_one(latency().noise, np.nan, 2)}, "gaps"),
        ({"seconds": latency().seconds[:, :-1]}, "gaps"),
        ({"tokens": latency().tokens[:2], "seconds": latency().seconds[:2]}, "gaps"),
        ({"tokens": latency().tokens[:, :0], "seconds": latency().seconds[:, :0]}, "gaps"),
        ({"companion": latency().companion[:1]}, "gaps"),
        ({f.name: getattr(latency(), f.name)[:0] for f in dataclasses.fields(Latency)}, "gaps"),
        ({"batches": np.array([1, 16, 4])}, "out of order"),
        ({"batches": np.array([1, 4, 4])}, "out of order"),
        ({"batches": np.array([0, 4, 16])}, "out of order"),
        ({"tokens": latency().tokens[:, ::-1]}, "out of order"),
        ({"tokens": latency().tokens + 1}, "out of order"),
        ({"seconds": latency().seconds[:, ::-1]}, "out of order"),
        ({"seconds": with_one(latency().seconds, 0.0, 0, 0)}, "out of order"),
        ({"companion": -latency().companion}, "out of order"),
        ({"noise": -latency().noise}, "out of order"),
    ],
)
def test_tables_with_gaps_or_out_of_order(changes, says):
    refused(lambda: latency(**changes), f"the latency table .*{says}: measure it again")


def test_a_table_that_ends_elsewhere_than_the_drafts():
    refused(lambda: profile(gamma=GAMMA + 1), f"not measured up to γ = {GAMMA + 1} tokens a row")
    refused(lambda: profile(gamma=GAMMA - 1), f"not measured up to γ = {GAMMA - 1} tokens a row")
    short = latency().tokens.copy()
    short[2, 3] -= 1  # of 16 rows 63 tokens at most
    refused(lambda: profile(latency=latency(tokens=short)), f"not measured up to γ = {GAMMA} tokens a row")


@pytest.mark.parametrize("wrong", [{"metrics": {"samples": float("nan")}}, {"training": {"source": "\ud800"}}])
def test_a_profile_that_could_not_be_read_back_replaces_none(tmp_path, wrong):
    profile().save_pretrained(tmp_path / "p")
    before = {file.name: file.read_bytes() for file in (tmp_path / "p").iterdir()}
    with pytest.raises(ValueError, match="JSON compliant|surrogates not allowed"):
        profile(**wrong).save_pretrained(tmp_path / "p")
    assert before == {file.name: file.read_bytes() for file in (tmp_path / "p").iterdir()}


def test_a_long_field_of_a_profile_is_shortened_in_warnings():
    made = profile(machine="x\x1b" * 50_000, decoding={"do_sample": "y\x1b" * 50_000})
    with pytest.warns(UserWarning) as caught:
        made.check(target(), draft(), companion())
        made.check_decoding({"do_sample": True})
    for warning in caught:
        text = str(warning.message)
        assert len(text) < 1000 and text.isprintable()
    assert len(caught) == 2


def test_latency_by_hand_and_between_batches():
    """In seconds: 4 rows, γ = 2, m tokens: 10 + 4 + m ms, two draft steps of 1.4 ms, 2 ms for the companion.

    Ten rows lie half-way between 4 and 16, and this table is linear in rows and tokens a row.
    """
    table = latency()
    expected = (10 + 4 + np.arange(9) + 2 * 1.4 + 2) / 1e3
    np.testing.assert_allclose(table.of(4, 2), expected, rtol=1e-12)
    assert table.unobserved(4, 2) == pytest.approx(expected[-1] - 2e-3, rel=1e-12)
    np.testing.assert_allclose(table.of(10, GAMMA), (10 + 10 + np.arange(41) + GAMMA * 2.0 + 2) / 1e3, rtol=1e-12)
    np.testing.assert_allclose(table.of(2, 1), (10 + 2 + np.arange(3) + 1.2 + 2) / 1e3, rtol=1e-12)


def test_latency_beyond_the_batches():
    """In proportion to the nearest: the choice is then the same as there."""
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


@pytest.mark.parametrize(("rows", "columns"), [(3, 4), (1, 5), (4, 1), (1, 1), (16, 17)])
@pytest.mark.parametrize("ties", [False, True])
def test_cells_are_those_of_the_profiling(rows, columns, ties):
    """On and beside every edge, torch finds the cell that numpy counted in, also where edges coincide."""
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
    assert set(s_cell) <= set(range(rows)) and set(a_cell) <= set(range(columns))
    if not ties:
        assert set(s_cell) == set(range(rows)) and set(a_cell) == set(range(columns)), "a cell is never reached"


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


@pytest.mark.parametrize("role", ["target", "draft", "companion"])
@pytest.mark.parametrize("fact", ["model_type", "hidden_size", "num_layers", "vocab_size"])
def test_other_models_are_refused(role, fact):
    there = {"model_type": "gpt2"}.get(fact, 7)
    made = profile(**{role: dataclasses.replace(getattr(profile(), role), **{fact: there})})
    line = refused(lambda: made.check(target(), draft(), companion()), f"{fact} {there!r} there")
    assert f"the {role}" in line and "hf-lossy profile" in line


@pytest.mark.parametrize(
    ("there", "here", "words"), [("a" * 40, "b" * 40, "revision"), ("a" * 40, None, None), (None, "b" * 40, None)]
)
def test_another_revision_warns(there, here, words):
    made = profile(companion=dataclasses.replace(profile().companion, revision=there))
    model = tiny.build("llama")
    model.config._commit_hash = here
    if words is None:
        return made.check(target(), draft(), model)  # what is not known is not compared
    with pytest.warns(UserWarning, match=f"the profile's companion .* may differ: {words}"):
        made.check(target(), draft(), model)


def test_another_id_or_machine_warns():
    made = profile(draft=dataclasses.replace(profile().draft, id="org/other"))
    with pytest.warns(UserWarning, match="the profile's draft .* may differ: id 'org/other' there"):
        made.check(target(), draft(), companion())
    with pytest.warns(UserWarning, match=r"taken on another machine \(an abacus; this is .*threads\)"):
        profile(machine="an abacus").check(target(), draft(), companion())
    profile().check(target(), draft(), companion(), tokenizer())


def test_another_tokenizer_is_refused():
    shuffled = tokenizer(words()[::-1])
    refused(
        lambda: profile().check(target(), draft(), companion(), shuffled),
        "the profile was made with a tokenizer of hash",
    )
    policy = SpeculativeVerification(profile(), companion(), fallback=False)
    refused(
        lambda: assisted(target(), prompts((5,)), draft(), policy, tokenizer=shuffled),
        "the profile was made with a tokenizer of hash",
    )


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


@pytest.mark.full(every=4)
@pytest.mark.filterwarnings("ignore:.*policy is lossy:UserWarning", "ignore:this profile was made with other sampling")
@pytest.mark.parametrize("exact", ["full", "prefix", "off"])
def test_to_the_last_token(exact):
    """Rounds in which some rows, or all, have no room to draft; rows that end early. Greedy, each form is lossless."""
    policy = SpeculativeVerification(profile(), companion(), exact=exact, fallback=False)
    for new in (1, 2, 7, tiny.NEW):
        expected = greedy(target(), prompts((9, 1, 4)), max_new_tokens=new)
        for gamma in (1, GAMMA):
            out = assisted(
                target(), prompts((9, 1, 4)), draft(), policy, max_new_tokens=new, num_assistant_tokens=gamma
            )
            assert torch.equal(out.sequences, expected), (new, gamma)
            assert ("companion" in out.speculation.forwards) == (new > 1)
        sampled = assisted(target(), prompts((9, 1, 4)), draft(), policy, max_new_tokens=new, do_sample=True)
        assert sampled.sequences.shape[1] <= 9 + new


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
