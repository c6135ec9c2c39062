"""Proves every figure of `out.speculation`: by hand on written-down rounds, and by a recount of real runs."""

import copy
import json
import pickle
import re
from pathlib import Path

import pytest
import torch
from support import tiny
from transformers import StoppingCriteria, StoppingCriteriaList

import hf_lossy_assist as hla
from hf_lossy_assist import RowStats, SpeculationStats
from hf_lossy_assist.stats.speculation import SOURCES, Record


@pytest.fixture
def two_rows() -> SpeculationStats:
    """
    Row 0, γ = 3:  drafted 3, sent 3, accepted 3 (the second one lossy), bonus      → 4 tokens
                   drafted 3, sent 2, accepted 1, correction                        → 2 tokens
                   drafted 3, sent 3, accepted 3, but the row ended after the second → 2 tokens
    Row 1:         drafted 2, sent 2, accepted 0, correction                        → 1 token
                   drafted 1, sent 1, accepted 1 (lossy), bonus                     → 2 tokens
    """
    first, second = RowStats(), RowStats()
    first.record(Record(drafted=3, sent=3, accepted=3, lossy=[0, 1, 0], taken=4))
    first.record(Record(drafted=3, sent=2, accepted=1, lossy=[0, 0, 0], taken=2))
    first.record(Record(drafted=3, sent=3, accepted=3, lossy=[0, 0, 1], taken=2))
    second.record(Record(drafted=2, sent=2, accepted=0, lossy=[0, 0], taken=1))
    second.record(Record(drafted=1, sent=1, accepted=1, lossy=[1], taken=2))
    return SpeculationStats([first, second], 3, False, {"target": 3, "draft": 9}, {"target": 0.25, "draft": 0.125})


def test_one_row_by_hand(two_rows):
    out = two_rows.summary(two_rows.rows[0], sources=True)
    assert out["num_new_tokens"] == 4 + 2 + 2
    assert out["num_spec_steps"] == 3
    assert out["num_draft_tokens"] == 3 + 2 + 3
    assert out["num_dropped_tokens"] == 0 + 1 + 0
    assert out["num_accepted_draft_tokens"] == 3 + 1 + 2  # the third accepted token of the last round was cut off
    assert out["num_lossy_accepts"] == 1  # and with it the lossy one
    assert out["mean_acceptance_length"] == 8 / 3  # the last round wrote two of its four
    assert out["draft_acceptance_rate"] == 6 / 8
    assert out["acceptance_histogram"] == [0, 1, 1, 1]
    assert out["acceptance_histogram_by_draft_length"] == {"2": [0, 1, 0], "3": [0, 0, 1, 1]}
    assert out["lossy_share_by_position"] == [0 / 3, 1 / 2]  # and 0 / 1, a zero at the end
    assert out["token_sources"] == [
        "draft", "draft-lossy", "draft", "bonus", "draft", "correction", "draft", "draft"
    ]  # fmt: skip


def test_rows_are_summed(two_rows):
    out = two_rows.summary()
    assert out["num_new_tokens"] == two_rows.num_new_tokens == 8 + 3
    assert out["num_spec_steps"] == 5
    assert out["num_draft_tokens"] == 8 + 3
    assert out["num_dropped_tokens"] == 1
    assert out["num_accepted_draft_tokens"] == 6 + 1
    assert out["num_lossy_accepts"] == two_rows.num_lossy_accepts == 1 + 1
    assert out["mean_acceptance_length"] == two_rows.mean_acceptance_length == 11 / 5
    assert out["draft_acceptance_rate"] == two_rows.draft_acceptance_rate == 7 / 11
    assert out["acceptance_histogram"] == [1, 2, 1, 1]
    assert out["acceptance_histogram_by_draft_length"] == {"1": [0, 1], "2": [1, 1, 0], "3": [0, 0, 1, 1]}
    assert out["lossy_share_by_position"] == [1 / 4, 1 / 2]
    assert "token_sources" not in out
    # Summing is not allowed to change the rows.
    assert two_rows.rows[0].num_new_tokens == 8 and sum(two_rows.rows[0].steps.values()) == 3


# Rounds of one row: (drafted, sent, accepted, lossy, taken), and the sources of their tokens.
ROUNDS = {
    "ends on its first drafted token": ([(5, 5, 5, [1, 0, 0, 0, 0], 1)], ["draft-lossy"]),
    "all of the 2 of 3 that a filter sent": ([(3, 2, 2, [0, 0, 0], 3)], ["draft", "draft", "bonus"]),
    "other kinds": ([(2, 2, 0, [0, 0], 1), (1, 1, 1, [1], 2)], ["correction", "draft-lossy", "bonus"]),
}  # fmt: skip


def test_tokens_have_sources():
    for name, (rounds, sources) in ROUNDS.items():
        row = RowStats()
        for each in rounds:
            row.record(Record(*each))
        assert [SOURCES[source] for source in row.token_sources] == sources, name
        assert (row.num_new_tokens, row.num_lossy_accepts) == (len(sources), sources.count("draft-lossy")), name
        assert row.num_dropped_tokens == sum(drafted - sent for drafted, sent, *_ in rounds), name


def test_calls_that_verified_nothing_do_not_count():
    """Without a draft, or with one that a filter dropped, the target writes one token."""
    row = RowStats()
    row.record(Record(0, 0, 0, [], 1))
    assert row.mean_acceptance_length == 0.0
    for each in ((2, 0, 0, [0, 0], 1), (4, 4, 3, [0] * 4, 4)):
        row.record(Record(*each))
    assert row.mean_acceptance_length == 4.0 and row.num_new_tokens == 6 and row.num_spec_steps == 3


def test_rounds_after_a_cut_wrote_nothing():
    stats = SpeculationStats([RowStats()], 2, True)
    for begins in (5, 8, 11):
        stats.record(0, Record(2, 2, 2, [0, 0], 3), begins)
    stats.settle([10])
    assert stats.num_new_tokens == 5 and stats.num_spec_steps == 2 and stats.mean_acceptance_length == 2.5


def test_without_any_round():
    empty = SpeculationStats([RowStats()], 5, True)
    out = empty.to_dict(rows=True, sources=True)
    assert out["mean_acceptance_length"] == 0.0 and out["draft_acceptance_rate"] == 0.0
    assert out["acceptance_histogram"] == out["lossy_share_by_position"] == out["rows"][0]["token_sources"] == []
    assert "lossless" in str(empty)


def test_json(two_rows):
    out = two_rows.to_dict(rows=True, sources=True)
    assert json.loads(json.dumps(out)) == out
    assert out["forwards"] == {"target": 3, "draft": 9} and out["seconds"] == {"target": 0.25, "draft": 0.125}
    assert out["lossless"] is False
    assert [row["num_new_tokens"] for row in out["rows"]] == [8, 3]
    assert "rows" not in two_rows.to_dict()


def test_table(two_rows):
    lines = [" ".join(line.split()) for line in str(two_rows).splitlines()]
    text = "\n".join(lines)
    assert "guarantee │ lossy" in text or "guarantee lossy" in text
    for line in (
        "new tokens │ 11", "rounds of 2 rows, added up │ 5", "mean acceptance length (bonus included) │ 2.20",
        "draft acceptance rate │ 63.6%", "accepted │ 7", "of these lossy │ 2", "draft forwards │ 9 in 0.125 s",
        "target forwards, each of all rows │ 3 in 0.250 s",
    ):  # fmt: skip
        assert line in lines, (line, lines)
    alone = str(SpeculationStats(two_rows.rows[:1], 3, True, {"target": 3}))
    assert "rows" not in alone and "lossy" not in alone


@pytest.mark.parametrize(
    ("dtype", "words"), [("float32", "lossless"), ("float64", "lossless"), ("bfloat16", "lossless up to rounding")]
)
@pytest.mark.filterwarnings("ignore:.*this policy is lossy:UserWarning")
def test_a_report_says_how_far_lossless_goes(dtype, words):
    """In every entrance, by the target's precision; the flag stays one."""
    target = copy.deepcopy(tiny.shared("llama")).to(getattr(torch, dtype))
    settings = {"assistant_model": copy.deepcopy(target), "max_new_tokens": 4, "do_sample": False}
    inputs, ours = tiny.prompts((9,)), {"return_dict_in_generate": True, "lossy_policy": "strict"}
    reports = [hla.enable(target).generate(**inputs, **settings, **ours).speculation]
    reports += [each.speculation for each in hla.generate_many(target, [[5, 6], [7]], **settings, lossy_policy="svip")]
    with hla.in_transformers_loop(target, "svip") as loop:
        target.generate(**inputs, **settings)
    reports += [loop.speculation, SpeculationStats.merge(reports)]
    for report in reports:
        assert report.lossless is True and report.guarantee == report.to_dict()["guarantee"] == words
        assert f"│ {words}\n" in re.sub(" +", " ", str(report)).replace(" \n", "\n")
    lossy = target.generate(**inputs, **settings, **ours | {"lossy_policy": hla.TopK(3)}).speculation
    assert lossy.guarantee == "lossy" and lossy.lossless is False


def run(
    kind: str, lengths: tuple[int, ...] = (9,), policy="strict", **settings
) -> tuple[torch.Tensor, SpeculationStats]:
    model = tiny.shared("llama")
    out = hla.enable(model).generate(
        **tiny.prompts(lengths), do_sample=False, eos_token_id=tiny.NEVER_EMITTED, lossy_policy=policy,
        assistant_model=tiny.draft_of(model, kind), return_dict_in_generate=True, **settings,
    )  # fmt: skip
    return out.sequences[:, max(lengths) :], out.speculation


def test_target_as_its_draft():
    """γ = 5 and 20 new tokens: 6 + 6 + 6, then 2 places are left: 1 drafted token and the bonus. 16 of 16 accepted."""
    new, stats = run("always", max_new_tokens=20, num_assistant_tokens=5)
    out = stats.to_dict(rows=True, sources=True)
    assert new.shape[1] == out["num_new_tokens"] == 20
    assert out["num_spec_steps"] == 4 and out["num_spec_tokens"] == 5
    assert out["num_draft_tokens"] == out["num_accepted_draft_tokens"] == 16
    assert out["acceptance_histogram"] == [0, 1, 0, 0, 0, 3]
    assert out["acceptance_histogram_by_draft_length"] == {"1": [0, 1], "5": [0, 0, 0, 0, 0, 3]}
    assert out["mean_acceptance_length"] == 20 / 4
    assert out["rows"][0]["token_sources"] == (["draft"] * 5 + ["bonus"]) * 3 + ["draft", "bonus"]
    # One target forward a round, one draft forward a drafted token; the first of each brings the prompt along.
    assert out["forwards"] == {"target": 4, "draft": 16}
    assert set(out["seconds"]) == {"target", "draft"} and all(s > 0 for s in out["seconds"].values())
    assert out["lossless"] is True


def test_recount_of_a_ragged_batch():
    """Each row's text is followed by hand: the draft, run alone from scratch, says what was proposed in each round."""
    lengths, gamma, total = (9, 1, 4, 14), 4, 30
    new, stats = run("often", lengths, max_new_tokens=total, num_assistant_tokens=gamma)
    draft = tiny.draft_of(tiny.shared("llama"), "often")
    inputs, all_rounds = tiny.prompts(lengths), []
    for b, length in enumerate(lengths):
        prompt, text = inputs["input_ids"][b, -length:].tolist(), new[b].tolist()
        steps, written, rounds = {}, 0, 0
        while written < total:
            room, accepted = min(gamma, total - written - 1), 0
            context = prompt + text[:written]
            for place in range(room):
                with torch.no_grad():
                    proposal = int(draft(torch.tensor([context])).logits[0, -1].argmax())
                if proposal != text[written + place]:
                    break
                context.append(proposal)
                accepted += 1
            steps[room, accepted] = steps.get((room, accepted), 0) + 1
            written, rounds = written + accepted + 1, rounds + 1
        row = stats.rows[b]
        all_rounds.append(rounds)
        assert dict(row.steps) == steps and row.num_spec_steps == rounds and row.num_new_tokens == total
    assert len(set(all_rounds)) > 1, "the rows were meant to get ahead of each other"


class After(StoppingCriteria):
    """Ends each row at a length of its own."""

    def __init__(self, *lengths):
        self.lengths = torch.tensor(lengths)

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= self.lengths[: len(input_ids)]


def test_tokens_that_are_cut_in_the_end_do_not_count():
    """Without an end token `generate` writes rows on until all have ended, and so the texts are cut to one length."""
    model, inputs = tiny.build("llama"), tiny.prompts((9, 5, 7))
    model.generation_config.eos_token_id = None
    draft = tiny.draft_of(tiny.shared("llama"), "often")
    for lengths in ((10, 10, 10), (10, 14, 12), (25, 11, 10)):
        settings = {"stopping_criteria": StoppingCriteriaList([After(*lengths)]), "eos_token_id": None}
        out = tiny.assisted(model, inputs, draft, **settings, max_new_tokens=30)
        new = out.sequences.shape[1] - 9
        assert new == max(lengths) - 9
        for row in out.speculation.rows:
            assert row.num_new_tokens == len(row.token_sources) == new
            assert row.num_accepted_draft_tokens == sum(source < 2 for source in row.token_sources)
            assert sum(row.steps.values()) == row.num_spec_steps


def test_every_documented_name_is_an_attribute():
    """docs/reference/statistics.md, but for what each row has of its own."""
    page = (Path(__file__).parents[2] / "docs" / "reference" / "statistics.md").read_text()
    names = {
        name
        for line in page.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`([a-z_]+)`", line.split("|")[1])
    }
    stats = SpeculationStats([RowStats()], 5, True)
    for name in names - {"token_sources"}:
        getattr(stats, name)
    assert len(names) > 15 and "<pre" in stats._repr_html_() and "speculation" in stats._repr_html_()
    assert copy.deepcopy(stats) == stats and pickle.loads(pickle.dumps(stats)) == stats
    with pytest.raises(AttributeError, match="no attribute 'num_spec_step'"):
        _ = stats.num_spec_step
