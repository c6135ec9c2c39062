"""Proves that a profile says what was sampled and timed: cells recover a known law, samples agree with strict decoding, and `hf-lossy profile` makes one that decodes."""

import dataclasses
import itertools
import json
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from support import eagle, small, tiny
from support.commands import DEMO, prompts_file
from support.profiles import arrays
from support.refusals import names, refused
from support.small import tokenizer as other_tokenizer
from support.small import words
from support.sv_samples import random_samples, samples
from transformers import GenerationConfig

from hf_lossy_assist import demo, enable
from hf_lossy_assist.artifacts.profile_tables import Bins, Latency
from hf_lossy_assist.artifacts.sv_profile import PROFILE, Profile
from hf_lossy_assist.drafters.parallel import LONGEST
from hf_lossy_assist.drafters.trained import DFlashDrafter
from hf_lossy_assist.filters.sv import SVFilter, choose
from hf_lossy_assist.methods.sv import round_costs
from hf_lossy_assist.methods.sv.acceptance_table import (
    PRIOR,
    build_table,
    compute_edges,
    compute_quantiles,
    find_cells,
    predict_speed,
)
from hf_lossy_assist.methods.sv.collect_samples import STARTED, Profiled, ProfileSettings, collect
from hf_lossy_assist.methods.sv.profiling import profile
from hf_lossy_assist.methods.sv.round_costs import LEVELS, fit_convex, measure_latency
from hf_lossy_assist.training.jobs import continue_prompts
from hf_lossy_assist.training.run_folder import RunFolder


QUICK = ProfileSettings(gamma=(2, 4), new_tokens=24, batch_size=20, batches=(1, 2), rounds=3)


# -- P̂ --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "columns", "adaptive"), [(5, 5, False), (16, 17, True)])
def test_build_recovers_the_probabilities(rows, columns, adaptive):
    """Within five standard errors of a cell's mean, and the pull towards its row's mean."""

    def law(s, a):
        return 0.1 + 0.4 * s + 0.4 * a * s

    given = random_samples(law)
    made = build_table(given, rows, columns, adaptive)
    cell = find_cells(made.s_edges, made.a_edges, given)
    weight, total, squares = np.zeros((3, rows, columns))
    np.add.at(weight, cell, given.reached)
    np.add.at(total, cell, given.reached * law(given.s, given.a))
    np.add.at(squares, cell, given.reached**2)
    true = total / weight
    error = 5 * 0.5 * np.sqrt(squares) / weight + PRIOR / (weight + PRIOR) * np.ptp(true, axis=1)[:, None]
    assert (np.abs(made.accept - true) < error).all() and error.mean() < 0.35
    assert np.abs(made.accept - true).mean() < 0.03
    assert np.abs(made.accept_by_s - (total.sum(axis=1) / weight.sum(axis=1))).max() < 0.05
    assert made.counts.sum() == len(given.s) and made.counts.min() > 0


def test_build_by_hand():
    """One row of S. Cell [0, ½): X = 0, 1 of weight 1 and 3, so 3 of 4; cell [½, 1]: nothing. The mean of all is ¾."""
    made = build_table(samples([0.2, 0.9], [0.1, 0.3], [0.0, 1.0], [1.0, 3.0]), 1, 2, adaptive=False)
    assert made.a_edges.tolist() == [[0.5]] and made.s_edges.shape == (0,)
    assert made.accept_by_s.tolist() == [0.75] and made.accept.tolist() == [[0.75, 0.75]]
    assert made.counts.tolist() == [[2, 0]]
    pulled = build_table(samples([0.5] * 3, [0.1, 0.1, 0.9], [0.0, 0.0, 1.0]), 1, 2, adaptive=False)
    mean = 1 / 3
    np.testing.assert_allclose(pulled.accept, [[PRIOR * mean / (2 + PRIOR), (1 + PRIOR * mean) / (1 + PRIOR)]])


def test_accept_never_falls_along_a():
    """Where the samples say that it does, the whole row gets one number."""
    made = build_table(random_samples(lambda s, a: 0.9 - 0.6 * a), 4, 8, adaptive=False)
    assert (np.diff(made.accept, axis=1) >= 0).all() and np.ptp(made.accept, axis=1).max() < 1e-12
    np.testing.assert_allclose(made.accept, 0.6, atol=0.02)
    noisy = build_table(random_samples(lambda s, a: 0.5 + 0 * s, n=300), 5, 5, adaptive=False)
    assert (np.diff(noisy.accept, axis=1) >= 0).all() and noisy.accept.min() >= 0 and noisy.accept.max() <= 1


def test_quantiles_by_hand():
    """Four values of weight 1, 1, 1, 3: half of the weight is reached at the third, a third at the second."""
    values, weights = np.array([0.3, 0.1, 0.2, 0.4]), np.array([1.0, 1.0, 1.0, 3.0])
    assert compute_quantiles(values, weights, 2).tolist() == [np.float32(0.3)]
    assert compute_quantiles(values, weights, 3).tolist() == [np.float32(0.2), np.float32(0.4)]
    assert compute_quantiles(values, weights, 1).shape == (0,)


def test_adaptive_cells_have_equal_shares():
    """Also where samples crowd, as real S do near 1; and cells of a value that half of the samples have."""
    random = np.random.default_rng(0)
    s, a = random.beta(5, 1, 30_000), random.beta(1, 4, 30_000)
    s_edges, a_edges = compute_edges(samples(s, a, s), 8, 5, adaptive=True)
    cell = find_cells(s_edges, a_edges, samples(s, a, s))
    counts = np.bincount(np.ravel_multi_index(cell, (8, 5)))
    assert counts.min() > 0.97 * 750 and counts.max() < 1.03 * 750
    assert np.diff(s_edges)[0] > 3 * np.diff(s_edges)[-1], "cells are not smaller where samples are denser"
    tied = build_table(samples(np.ones(1000), (a[:1000] > 0.1).astype(float), s[:1000]), 16, 17, adaptive=True)
    assert np.isfinite(tied.accept).all() and tied.counts.sum() == 1000


def certain(probability, gamma=3, rounds=50):
    """Bins and samples in which every token is accepted with this probability, and a table of flat seconds."""
    certain_bins = Bins(np.zeros(0, np.float32), np.zeros((1, 0), np.float32), np.full((1, 1), probability),
               np.full(1, probability), np.ones((1, 1), np.int64))  # fmt: skip
    n = gamma * rounds
    given = samples(
        np.ones(n), np.ones(n), np.full(n, probability), slot=np.tile(np.arange(gamma), rounds),
        round=np.repeat(np.arange(rounds), gamma), gamma=np.full(n, gamma),
    )  # fmt: skip
    return certain_bins, given


def test_predicted_speed_by_hand():
    """4 rows, γ = 3. All is accepted: SV verifies all and pays the companion. Nothing is: SV verifies none of the 12 tokens."""
    seconds = np.array([[1.0, 1.6]]), np.array([0.1]), np.array([0.05]), np.zeros(1)
    table = Latency(np.array([4]), np.array([[0, 12]]), *seconds)
    for probability, expected in ((1.0, 1.9 / 1.95), (0.0, 1.9 / 1.35)):
        bins, given = certain(probability)
        assert predict_speed(bins, table, given, 4, 3, 0) == pytest.approx(expected)


# -- samples and seconds of real models ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models():
    return demo.load()


def texts(count, seed=0):
    return [p.prompt for p in demo.problems(count, seed, "calibration")]


def collected(models, settings=QUICK, count=6, **others):
    given = {"target": models.target, "draft": models.draft, "companion": models.companion} | others
    with tempfile.TemporaryDirectory() as part:
        run = RunFolder(Path(part) / "profile", STARTED, {})
        run.part.mkdir()
        return collect(Profiled(**given, tokenizer=models.tokenizer, texts=texts(count), settings=settings), run)


@pytest.fixture(scope="module")
def plain(models):
    return collected(models)


@pytest.mark.full
def test_samples(models, plain):
    one = plain
    assert set(one.text) == set(range(6)) and set(one.gamma) == {2, 4}
    assert {len(values) for values in vars(one).values()} == {len(one.x)}
    for name in ("s", "a", "x", "similarity", "reached"):
        values = getattr(one, name)
        assert (values >= 0).all() and (values <= 1 + 1e-5).all() and np.ptp(values) > 0.5, name
    for number, count in Counter(one.round.tolist()).items():
        inside = one.of(one.round == number)
        assert inside.slot.tolist() == list(range(count)) and count <= inside.gamma[0] and len(set(inside.text)) == 1
        np.testing.assert_allclose(inside.reached, np.cumprod([1.0, *inside.x[:-1]]))
    again, other = collected(models), collected(models, dataclasses.replace(QUICK, seed=1))
    assert all(np.array_equal(value, vars(again)[name]) for name, value in vars(one).items())
    assert len(other.x) != len(one.x) or not np.array_equal(other.x, one.x)


@pytest.mark.full
def test_samples_where_two_models_are_one(models, plain):
    alike = collected(models, count=2, companion=models.draft)
    np.testing.assert_allclose(alike.s, 1.0, atol=1e-4)
    np.testing.assert_allclose(alike.a, 1.0, atol=1e-3)
    certain = collected(models, count=2, draft=models.target)
    np.testing.assert_allclose(certain.x, 1.0, atol=1e-3)
    np.testing.assert_allclose(certain.similarity, 1.0, atol=1e-4)
    np.testing.assert_allclose(collected(models, companion=models.target).s, plain.similarity, atol=1e-4)


def test_rows_are_cut_behind_their_first_end_token():
    written = [[5, 6, 2], [2, 2, 2], [5, 6, 7]]

    class Target:
        device = torch.device("cpu")

        def generate(self, ids, attention_mask, **_):
            assert ids.tolist() == [[0, 8], [8, 9], [0, 7]] and attention_mask.tolist() == [[0, 1], [1, 1], [0, 1]]
            return torch.cat([ids, torch.tensor(written)], dim=1)

    for ends, expected in (([2, 3], [[5, 6, 2], [2], [5, 6, 7]]), (None, written)):
        Target.generation_config = GenerationConfig(eos_token_id=ends)
        assert continue_prompts(Target(), small.tokenizer(), [[8], [8, 9], [7]], 3, {}) == expected


def test_greedy_samples_count_what_strict_decoding_accepts(models):
    """Token for token: the sum of `reached`·X is the number of accepted tokens of a strict call."""
    greedy = dataclasses.replace(QUICK, gamma=(4,), do_sample=False, batch_size=6)
    found = collected(models, greedy)
    assert set(found.x.tolist()) == {0.0, 1.0}
    inputs = models.tokenizer(texts(6), return_tensors="pt", padding=True)
    out = enable(models.target).generate(
        **inputs, assistant_model=models.draft, lossy_policy="strict", num_assistant_tokens=4, do_sample=False,
        max_new_tokens=greedy.new_tokens, return_dict_in_generate=True,
    )  # fmt: skip
    total = out.speculation.total()
    assert (found.reached * found.x).sum() == total.num_accepted_draft_tokens
    assert len(found.x) == total.num_draft_tokens


def test_the_schedule_is_the_best_on_fitted_seconds():
    """The best of all token counts for a row, on random noisy seconds of random levels; on seconds that only never fall it often is not."""
    random, missed = np.random.default_rng(0), Counter()
    every = np.array(list(itertools.product(range(4), repeat=3)))  # (64, 3) tokens of each row verified
    for _ in range(300):
        levels = [0, *np.sort(random.choice(np.arange(1, 9), random.integers(0, 6), replace=False)), 9]
        times = 1 + np.sort(random.random(len(levels))) * random.choice([0.3, 3.0])
        times = (times + random.normal(0, 0.1, len(levels))).clip(0.1)
        accept, sure = random.random((3, 3)), float(random.choice([0, 3]))
        reached = np.concatenate([np.zeros((3, 1)), np.cumprod(accept, axis=1).cumsum(axis=1)], axis=1)
        gained = sure + reached[np.arange(3), every].sum(axis=1)
        fitted = fit_convex(levels, times)
        assert (np.diff(fitted) >= 0).all() and fitted[0] >= times.min() * (1 - 1e-9)
        table = Latency(np.array([3]), np.array([levels]), fitted[None], *np.zeros((3, 1)))
        assert table.convex
        for name, points in (("fitted", table.seconds[0]), ("monotone", np.maximum.accumulate(times))):
            seconds = np.interp(np.arange(10), levels, points)
            counts = choose(accept, seconds, sure).counts
            speed = (sure + reached[np.arange(3), counts].sum()) / seconds[counts.sum()]
            missed[name] += speed < (gained / seconds[every.sum(axis=1)]).max() * (1 - 1e-9)
    assert missed["fitted"] == 0 and missed["monotone"] > 20
    convex = [1.0, 1.5, 3.0, 7.0]
    np.testing.assert_allclose(fit_convex([0, 1, 2, 3], convex), convex)
    np.testing.assert_allclose(fit_convex([0, 1, 2], [1.0, 3.0, 2.0]), [1.5, 2.0, 2.5])  # the least-squares line


@pytest.mark.full
@pytest.mark.parametrize(("gamma", "batches"), [((1,), (1, 3)), pytest.param((3,), (2, 3), marks=pytest.mark.nightly)])
def test_seconds(models, gamma, batches):
    """Short drafts of few rows have fewer numbers of tokens to time, and all batch sizes get as many of them."""
    settings = ProfileSettings(gamma=gamma, new_tokens=32, batches=batches, rounds=3)
    table = measure_latency(Profiled(*models[:4], texts(3), settings), certain(0.5)[0])
    assert table.batches.tolist() == list(batches)
    assert table.tokens.shape == (2, min(LEVELS, batches[0] * gamma[0] + 1))
    assert table.tokens[:, -1].tolist() == [b * gamma[0] for b in batches]
    assert all((each > 0).all() for each in (table.seconds, table.step))
    assert all((each >= 0).all() for each in (table.companion, table.noise))


def test_timed_rounds_are_whole(models, monkeypatch):
    """Every timed round verified as many tokens as it is filed under, with the companion in all rounds of a call or in none."""
    calls, begin, corrected = [], Profiled.run, []
    correct = SVFilter._would_verify
    monkeypatch.setattr(SVFilter, "_would_verify", lambda *a: corrected.append(a) or correct(*a))
    monkeypatch.setattr(Profiled, "run", lambda *a, **k: (calls.append([]), begin(*a, **k))[1])
    watch = round_costs.Stopwatch.__call__

    def spy(self, call, verified):
        before = Counter({kind: len(times) for kind, times in self.seconds.items()})
        watch(self, call, verified)
        [*new] = Counter({kind: len(times) for kind, times in self.seconds.items()}) - before
        if verified.draft.gamma:
            observed = verified.selection.companion is not None
            calls[-1].append((observed, int(verified.sent.sum()), verified.drafted.tolist(), new))

    monkeypatch.setattr(round_costs.Stopwatch, "__call__", spy)
    settings = ProfileSettings(gamma=(2,), new_tokens=16, batches=(3,), rounds=3)
    measure_latency(Profiled(*models[:4], texts(3), settings), certain(0.5)[0])
    assert {calls[0][0][0], calls[1][0][0]} == {False, True}
    for rounds in calls:
        assert len({observed for observed, *_ in rounds}) == 1 and not rounds[0][3], "the prompt's round was timed"
        for observed, sent, drafted, new in rounds[1:]:
            assert new == ([(sent, observed)] if drafted == [2, 2, 2] else [])
    observed = sum(observed for rounds in calls for observed, *_ in rounds)
    assert len(corrected) == observed, "the correction was not timed"
    kinds = Counter(new[0] for rounds in calls for *_, new in rounds if new)
    assert min(kinds.values()) >= 3 and {m for m, _ in kinds} == {0, 1, 2, 4, 5, 6}


# -- what is refused -------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_what_is_refused_leaves_nothing(models, tmp_path):
    def run(settings=QUICK, count=3, out=tmp_path / "x", **others):
        given = {"target": models.target, "draft": models.draft, "companion": models.companion} | others
        return profile(**given, tokenizer=models.tokenizer, texts=texts(count), out=out, settings=settings)

    llama, t5 = tiny.build("llama"), tiny.build("t5")
    for changes, says in (
        ({}, "3 prompts gave .* drafted tokens; at least 1000 are needed: pass more prompts"),
        ({"count": 0}, "at least 2 prompts .*got 0"), ({"count": 1}, "at least 2 prompts .*got 1"), ({"out": Path(__file__).parent}, "exists"),
        ({"companion": llama}, "the draft has .* token ids, the companion 97"), ({"draft": t5}, "the draft does not"),
        ({"companion": t5}, "a companion must run in batches.*encoder-decoder"), ({"target": t5}, "the target does not"),
        ({"draft": llama}, "the target has .* the assistant 97"),
    ):  # fmt: skip
        refused(partial(run, **changes), says)
    assert not list(tmp_path.iterdir())


def test_settings():
    for settings, says, error in (
        ({"gamma": ()}, "gamma: expected at least one number", ValueError),
        ({"gamma": ("5",)}, "gamma: .*got '5'", TypeError),
        ({"batches": ()}, "batches: expected at least one", ValueError),
        ({"new_tokens": 15}, "new_tokens: .*at least 16, got 15", ValueError),
        ({"top_p": 0.0}, "top_p: expected a number above 0", ValueError),
        ({"temperature": 0.0}, "temperature: .*--greedy", ValueError),
    ):
        refused(lambda: ProfileSettings(**settings), says, error)  # noqa: B023
    one = ProfileSettings(gamma=(7, 5, 7), batches=(16, 4, 4))
    assert one.gamma == (5, 7) and one.batches == (4, 16)
    assert json.loads(json.dumps(one.to_dict())) == one.to_dict()
    assert ProfileSettings(do_sample=False, temperature=3.0).decoding() == {"do_sample": False}


def test_gammas_beyond_a_drafts_block_are_refused(tmp_path):
    """Before anything is collected: no round of that many tokens would ever be there to time."""
    target = enable(small.llama(layers=3))
    pard, block = small.near(target), DFlashDrafter(eagle.dflash_network(target, block=5))
    pard.config.pard_token = 2
    for draft, most in ((block, 4), (pard, LONGEST)):
        given, settings = (target, draft, target, small.tokenizer(), ["w1", "w2"]), ProfileSettings(gamma=(2, 17))
        refused(partial(profile, *given, tmp_path / "out", settings), f"at most {most} tokens a round, got 17: pass")
        assert not list(tmp_path.iterdir())


# -- from the command line ----------------------------------------------------------------------------------------------


COMPANION = ("--companion", demo.FOLDER / "companion")
SMALL = ("--gamma", 3, "--max-new-tokens", 24, "--sample-batch-size", 20, "--batch-size", "2,1", "--rounds", 3)
PROMPTS = 52


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:(the profile's seconds were taken|this profile was made) .*other:UserWarning")
def test_the_demo(hf_lossy, tmp_path):
    """The README's commands, in small."""
    more = ("--limit", PROMPTS, "--gamma", 2, "--top-k", 40, "--seed", 3)
    done = hf_lossy("profile", "--out", tmp_path / "p", *SMALL, *more)
    assert done.code == 0 and "…" not in done.out, done
    made = Profile.from_pretrained(tmp_path / "p")
    assert made.gamma == 3 and made.latency.batches.tolist() == [1, 2]
    assert made.decoding == {"do_sample": True, "temperature": 1.0, "top_k": 40, "top_p": 1.0}
    assert made.training["source"] == "the demo task, calibration problems of seed 3"
    assert (made.training["prompts"], made.training["settings"]["gamma"]) == (PROMPTS, [2, 3])
    assert (made.target.id, made.draft.id, made.companion.id) == ("demo-target", "demo-draft", "demo-companion")
    samples, held_out = made.metrics["samples"], made.metrics["held_out"]
    assert made.bins.counts.shape == (16, 17) and made.bins.counts.sum() == samples - held_out and samples >= 1000
    assert 0.1 < held_out / samples < 0.3 < made.metrics["acceptance"] < 1 and 0 < made.metrics["correlation"] <= 1
    assert all(np.isfinite(values).all() for values in arrays(made).values())
    assert f"{made.metrics['samples']} drafted tokens" in " ".join(done.out.split())
    last = done.out.splitlines()[-1]
    assert last.startswith(f"{tmp_path / 'p'}: by this prediction SV ")
    assert last.endswith(f"hf-lossy compare --policies strict,svip,sv:profile={tmp_path / 'p'}")
    assert ("does not pay" in last) == (not any(made.worthwhile(batch) for batch in (1, 2)))

    given = ("--do-sample", "--batch-size", 3, "--max-new-tokens", 12, "--top-k", 40, "--policy")
    for policy in ("sv", f"sv:profile={tmp_path / 'p'},gamma=2"):
        generated = hf_lossy("generate", "--json", *given, policy)
        assert generated.code == 0, generated.err
        report = json.loads(generated.out)
        assert len(report["outputs"]) == 3 and all(0 < len(o["token_ids"]) <= 12 for o in report["outputs"])
    assert "demo-companion" in hf_lossy("generate", *given, "sv:companion=int8").line, "the profile's is another"
    assert "up to 3 tokens" in hf_lossy("generate", *given, f"sv:profile={tmp_path / 'p'},gamma=5").line


@pytest.mark.nightly
def test_custom_models(hf_lossy, tmp_path):
    """The demo's own folders, with prompts from a file, greedy."""
    file, out = prompts_file(tmp_path, PROMPTS), tmp_path / "p"
    done = hf_lossy("profile", "--out", out, *DEMO, *COMPANION, "--prompts", file, *SMALL, "--gamma", 4, "--greedy")
    assert done.code == 0, done.err
    facts = json.loads((out / PROFILE).read_text())
    assert facts["decoding"] == {"do_sample": False} and facts["training"]["source"] == "prompts.jsonl"
    assert [facts[name]["id"] for name in ("target", "draft", "companion")] == ["target", "draft", "companion"]
    assert facts["training"]["prompts"] == PROMPTS
    assert set(Path(tmp_path).iterdir()) == {file, out}


REFUSED = (
    (["--batch-size", "1,x"], "--batch-size: expected a number, or several with commas between them"),
    (["--max-new-tokens", "15"], "new_tokens: expected a whole number of at least 16"),
    (["--gamma", "40"], "new_tokens: expected a whole number of at least 82"), (["--temperature", "0"], "--greedy"),
    (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"), (["--device", "abacus"], "load: device 'abacus' cannot be used here"),
    ([*DEMO[:2], "--companion", "c", "--prompts", "{tmp}/one.jsonl"], "expected both"),
    ([*DEMO], "--companion"), ([*DEMO, *map(str, COMPANION)], "name other prompts"),
    ([*DEMO, "--companion", "nowhere", "--prompts", "{tmp}/one.jsonl"], "nowhere"),
)  # fmt: skip


@pytest.mark.full
def test_refused_in_one_line(hf_lossy, tmp_path):
    prompts_file(tmp_path, 1).rename(tmp_path / "one.jsonl")
    for arguments, says in REFUSED:
        done = hf_lossy("profile", "--out", tmp_path / "x", *(a.replace("{tmp}", str(tmp_path)) for a in arguments))
        assert says in done.line and not done.out, arguments
        assert names(tmp_path) == {"one.jsonl"}


def test_a_companion_with_another_tokenizer(hf_lossy, tmp_path):
    """Its size is the same: only the ids tell."""
    models, file = demo.load(), prompts_file(tmp_path, PROMPTS)
    models.companion.save_pretrained(tmp_path / "companion")
    vocabulary = sorted(models.tokenizer.get_vocab().items(), key=lambda pair: pair[1])
    swapped = [token for token, _ in vocabulary[4:]][::-1]
    other_tokenizer(swapped).save_pretrained(tmp_path / "companion")
    given = ("--out", tmp_path / "x", *DEMO, "--prompts", file, "--companion", tmp_path / "companion")
    line = hf_lossy("profile", *given, *SMALL).line
    assert "companion has another tokenizer" in line and "token ids mean other words" in line
    other_tokenizer(words()).save_pretrained(tmp_path / "companion")  # no token in common but the special ones
    assert "another tokenizer" in hf_lossy("profile", *given, *SMALL).line
    assert not (tmp_path / "x").exists()
