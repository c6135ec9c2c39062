"""SV is called worth it only where it beats the target alone, SVIP and strict acceptance, all measured with the profile."""

import pytest
import torch
from support import small
from support.profiles import draft, latency, profile, target
from transformers import GenerationConfig

from hf_lossy_assist.methods.sv.baselines import BASELINES, advise, compare_baselines, measure_baselines
from hf_lossy_assist.methods.sv.profiled_runner import ProfileSettings
from hf_lossy_assist.training.jobs import continue_prompts


# SV's predicted speeds are 0.9, 1.1 and 1.3 × strict at 1, 4 and 16 rows (`support.profiles`).
ALONE = [
    {"rows": 1, "target": 150.0, "strict": 100.0, "svip": 120.0},
    {"rows": 4, "target": 100.0, "strict": 200.0, "svip": 210.0},
    {"rows": 16, "target": 500.0, "strict": 400.0, "svip": 100.0},
]


def found(speeds=ALONE, **changes):
    return compare_baselines(profile(metrics={BASELINES: speeds}, **changes))


def test_speeds_by_hand():
    one, four, sixteen = found()
    assert (one.rows, four.rows, sixteen.rows) == (1, 4, 16)
    assert [speed.tokens_per_second for speed in (one, four, sixteen)] == pytest.approx([90, 220, 520])
    assert one.ratios == pytest.approx({"target": 0.6, "strict": 0.9, "svip": 0.75})
    assert (one.fastest, four.fastest, sixteen.fastest) == ("target", "svip", "target")
    assert [speed.gain for speed in (one, four, sixteen)] == pytest.approx([0.6, 220 / 210, 1.04])
    assert [speed.pays for speed in (one, four, sixteen)] == [False, True, True]
    assert advise([one, four, sixteen]) == "pays at 4, 16 rows"


def test_what_does_not_pay_says_what_to_do_instead():
    one, four, sixteen = found()
    assert advise([one]) == "does not pay: 0.60 × the target alone, at best (rows: 1); do not draft"
    svip = found([ALONE[0], ALONE[1] | {"svip": 275.0, "target": 110.0}, ALONE[2] | {"target": 1000.0}])
    assert advise(svip) == ("does not pay: 0.80 × svip, at best (rows: 4); use svip, 2.50 × the target alone")
    strict = found([{"rows": row["rows"], "target": 50.0, "strict": row["strict"], "svip": 1.0} for row in ALONE])
    assert advise(strict[:1]) == (
        "does not pay: 0.90 × strict, at best (rows: 1); use strict, 2.00 × the target alone"
    )


def test_a_gain_within_the_noise_is_none():
    loud = found(latency=latency(noise=latency().noise * 10))
    assert [speed.pays for speed in loud] == [False, False, False]
    assert advise(loud).startswith("does not pay beyond the noise of 10%: 1.05 × svip, at best (rows: 4)")


@pytest.mark.parametrize(
    ("ends", "expected"), [([2, 3], [[5, 6, 2], [2], [5, 6, 7]]), (None, [[5, 6, 2], [2, 2, 2], [5, 6, 7]])]
)
def test_rows_are_cut_behind_their_first_end_token(ends, expected):
    class Target:
        device, generation_config = torch.device("cpu"), GenerationConfig(eos_token_id=ends)

        def generate(self, ids, attention_mask, **_):
            assert ids.tolist() == [[0, 8], [8, 9], [0, 7]] and attention_mask.tolist() == [[0, 1], [1, 1], [0, 1]]
            return torch.cat([ids, torch.tensor([[5, 6, 2], [2, 2, 2], [5, 6, 7]])], dim=1)

    assert continue_prompts(Target(), small.tokenizer(), [[8], [8, 9], [7]], 3, {}) == expected


@pytest.mark.parametrize("do_sample", [False, True])
def test_all_alternatives_are_measured_on_the_same_batches(do_sample):
    settings = ProfileSettings((2,), 6, batches=(1, 3), batch_size=2, rounds=3, do_sample=do_sample)
    rows = measure_baselines(target(), draft(), small.tokenizer(), [f"w{n} w{n + 7}" for n in range(4)], settings)
    assert [row["rows"] for row in rows] == [1, 3]
    for row in rows:
        assert set(row) == {"rows", "target", "strict", "svip"} and min(row.values()) > 0
        assert torch.tensor([*row.values()]).isfinite().all()
