"""Whether drafting paid: the target's estimated seconds alone, on numbers made by hand, and what the statistics say of them."""

import json

import pytest
from support import small

import hf_lossy_assist as hla
from hf_lossy_assist import RowStats, SpeculationStats
from hf_lossy_assist.stats.clock import ForwardRecord, TargetAlone, estimate_target_alone


PROMPT = ForwardRecord(2, 40, 1.0)


def linear(rows: int, tokens: int, start: float = 0.1, token: float = 0.01) -> ForwardRecord:
    """A forward that takes `start` and `token` for each token it reads."""
    return ForwardRecord(rows, tokens, start + token * tokens)


def test_rounds_without_drafts_are_the_measure():
    """2 rows of 4 and 6 tokens: the first comes with the prompt, then 3 rounds of both rows and 2 of one."""
    reads = [
        PROMPT, ForwardRecord(2, 12, 0.9), ForwardRecord(2, 2, 0.3), ForwardRecord(2, 2, 0.2),
        ForwardRecord(2, 2, 9.0), ForwardRecord(1, 6, 0.5),
    ]  # fmt: skip
    found = estimate_target_alone(reads, [4, 6], prefill=0.5)
    assert found.kind == "measured"
    assert found.seconds == pytest.approx(0.5 + 1.0 + 5 * 0.3)  # the median; for one row it is taken for as much


def test_a_line_through_blocks_of_different_sizes():
    """8 rows, blocks of 48 tokens and, as limits shrink, of fewer: 0.1 + 0.01 n seconds, so a round of 8 tokens takes 0.18."""
    reads = [PROMPT] + [linear(8, n) for n in (48, 48, 48, 48, 40, 32, 24, 48)]
    found = estimate_target_alone(reads, [11] * 8)
    assert found.kind == "fitted" and found.seconds == pytest.approx(1.0 + 10 * 0.18)


def test_a_line_is_not_followed_beyond_reason():
    """A token costs its share of a block at least, and a block at most."""
    for token, start, one in ((0.01, 0.0, 0.08), (-0.001, 0.5, 0.5 - 0.048)):
        reads = [PROMPT] + [linear(8, n, start, token) for n in (48,) * 8 + (16,)]
        assert estimate_target_alone(reads, [2] * 8).seconds == pytest.approx(1.0 + one)


def test_where_nothing_tells_them_apart_a_block_is_the_bound():
    few = [ForwardRecord(8, 48, 0.6), ForwardRecord(8, 16, 0.2), ForwardRecord(8, 48, 0.8)]
    for reads in ([ForwardRecord(8, 48, 0.6)] * 20, few):
        assert estimate_target_alone([PROMPT, *reads], [3] * 8) == TargetAlone(1.0 + 2 * 0.6, "at most")


def test_rounds_of_far_fewer_rows_do_not_count_as_measured():
    reads = [PROMPT] + [ForwardRecord(8, 48, 0.6)] * 9 + [ForwardRecord(1, 1, 0.1)]
    found = estimate_target_alone(reads, [2] * 8)
    assert found.kind == "fitted" and 1.1 < found.seconds < 1.6


def test_one_round_is_too_little():
    assert estimate_target_alone([PROMPT], [1, 1]) is None and estimate_target_alone([], [0]) is None


def stats(alone: TargetAlone | None, **settings) -> SpeculationStats:
    return SpeculationStats([RowStats()], 5, True, {"target": 3}, {"target": 1.0, "draft": 0.5}, alone, **settings)


def test_a_loss_is_reported_with_the_way_out():
    lost = stats(TargetAlone(0.9, "fitted"))
    line = "drafting did not pay: 1.500 s, and the target alone would take about 0.900 s; try policy.with_fallback()"
    assert lost.worth == pytest.approx(0.6) and lost.advice() == line
    text = " ".join(str(lost).split())
    assert line in text and "target alone, estimated seconds (fitted)" in text
    assert "at most 0.900 s" in stats(TargetAlone(0.9, "at most")).advice()
    assert not stats(TargetAlone(0.9, "measured"), falls_back=True).advice().endswith("with_fallback()")


def test_a_gain_and_a_tie_are_not():
    for alone in (None, TargetAlone(1.45, "measured"), TargetAlone(3.0, "at most")):
        assert stats(alone).advice() is None and "did not pay" not in str(stats(alone))


def test_json_and_several_calls_together():
    one, other = stats(TargetAlone(0.9, "measured")), stats(TargetAlone(0.4, "at most"))
    both = SpeculationStats.merge([one, other])
    assert both.alone == TargetAlone(pytest.approx(1.3), "at most") and both.worth == pytest.approx(1.3 / 3)
    assert SpeculationStats.merge([one, stats(None)]).alone is None
    out = json.loads(json.dumps(both.to_dict()))
    assert out["target_alone_seconds"] == 1.3 and out["target_alone_estimate"] == "at most"
    assert stats(None).to_dict()["target_alone_estimate"] is None


def test_a_call_reports_it():
    target = hla.enable(small.llama())
    for policy, kinds in (
        ("strict", {"at most", "fitted"}),
        (hla.LossyPolicy().with_fallback(margin=0.0), {"measured"}),
    ):
        out = target.generate(
            **small.ragged((0, 3, 5)), assistant_model=small.near(target, 0.02), lossy_policy=policy, do_sample=False,
            max_new_tokens=16, num_assistant_tokens=3, return_dict_in_generate=True,
        )  # fmt: skip
        found = out.speculation
        assert found.alone.kind in kinds | {"measured"} and found.alone.seconds > 0
        assert found.worth == found.alone.seconds / sum(found.seconds.values())
        assert found.falls_back == (policy != "strict")
