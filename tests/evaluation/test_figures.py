"""Every figure of a hand-made run, to the digit."""

import csv
import io
import re
from dataclasses import replace

import pytest
from support.runs import ARMS, a_run

from hf_lossy_assist.evaluation.arms import STATIC
from hf_lossy_assist.evaluation.comparison import format_csv
from hf_lossy_assist.evaluation.metrics import compute_metrics
from hf_lossy_assist.evaluation.recommend import recommend


TIE = "400 batches might not tell them apart, so do not draft"


def test_every_figure():
    target, assisted, svip, lossy = compute_metrics(a_run(), ARMS)
    assert [arm.tokens_per_second.value for arm in (target, assisted, svip, lossy)] == [100 / 6, 25, 50, 100]
    assert [arm.of_target.value for arm in (target, assisted, svip, lossy)] == pytest.approx([1, 1.5, 3, 6])
    assert [arm.of_assisted.value for arm in (target, assisted, svip, lossy)] == pytest.approx([2 / 3, 1, 2, 4])
    assert (target.first_token, assisted.first_token) == (0.2, None)
    assert [arm.tokens_per_target_call for arm in (target, assisted, svip, lossy)] == [1, 4, 5, 10]
    assert [arm.acceptance for arm in (target, assisted, svip, lossy)] == [None, None, 0.8, 0.8]
    assert [arm.equal for arm in (target, assisted, svip, lossy)] == [2, 2, 2, 1]
    assert (svip.lossy, svip.unchecked, lossy.lossy, lossy.unchecked) == (0, 0, 0.1, 0.1)
    assert (target.right, target.judged, target.accuracy.value) == (1, 2, 0.5)
    assert (lossy.right, lossy.better, lossy.worse, lossy.p) == (1, 1, 1, 1.0)
    assert (svip.better, svip.worse) == (0, 0) and target.p is None
    assert [arm.lossless for arm in (target, assisted, svip, lossy)] == [True, True, True, False]
    run = a_run()
    for answer in run:
        answer.right = None if answer.prompt == 1 else answer.right
    target, *_, lossy = compute_metrics(run, ARMS)
    assert (target.right, target.judged, target.accuracy.value) == (1, 1, 1.0)
    assert (lossy.right, lossy.judged, lossy.better, lossy.worse) == (0, 1, 0, 1)
    rows = list(csv.DictReader(io.StringIO(format_csv(compute_metrics(a_run(copies=2), ARMS)))))
    assert [row["arm"] for row in rows] == [arm.name for arm in ARMS]
    assert float(rows[2]["of_target"]) == pytest.approx(3) and float(rows[2]["of_target_low"]) > 1
    assert rows[0]["acceptance"] == "" and rows[3]["lossless"] == "False"


def test_the_advice():
    found = compute_metrics(a_run(copies=2), ARMS)
    assert recommend(found, 1) == (
        "use svip: 3.00 × (1.62 to 5.55) the target, same text; top_k:k=4 is 6.00 × (3.24 to 11.10) and lossy: "
        "2 of 4 texts differ, 2 of 4 right (2 lost, 2 won, p = 1)"
    )
    for found, says in (
        (advised(svip=6.0), "do not draft here: svip, the fastest policy, is 0.50 × (0.27 to 0.92) the target"),
        (advised(svip=2.7), "no clear gain: svip, the fastest policy, is 1.11 × (0.60 to 2.06) the target: about 138 batches would tell, --limit 138"),
        (advised(svip=3.1), f"no clear gain: svip, the fastest policy, is 0.97 × (0.52 to 1.79) the target: {TIE}"),
        (advised(1.0, prompts=1), "no clear gain: svip, the fastest policy, is 2.00 × the target, on 1 batch of prompts, and 4 make an interval: --limit 4"),
    ):  # fmt: skip
        assert found == says
    advice = "use Transformers' own assisted generation (assisted): 1.50 × (1.29 to 1.74) the target, same text; "
    assert advised(6.0, ("target", "assisted", "svip"), 8, 4) == advice + "svip 0.50 × (0.37 to 0.67)"
    assert advised(1.0, ("target", "assisted", "svip")).startswith("use svip: 3.00 ×")
    assert advised(9.0, prompts=1).startswith("no clear gain: svip, the fastest policy, is 0.22 × the target")
    advice = advised(svip=1.9)
    found = re.fullmatch(r"no clear gain: svip, .* the target: about (\d+) batches would tell, --limit \1", advice)
    needed = int(found[1])
    more, half = (advised(1.9, prompts=n, copies=n // 2 + 1) for n in (needed, needed // 2))
    assert more.startswith("use svip: ") and half.startswith("no clear gain: "), (advice, half, more)
    run = a_run(9.0) + [replace(answer, arm=STATIC, seconds=1.0) for answer in a_run() if answer.arm == "target"]
    advice = recommend(compute_metrics(run, [*ARMS, replace(ARMS[0], name=STATIC)]), 1)
    assert re.match(f"{STATIC} with .*, on 2 batches of prompts, and 4 make an interval: --limit 4", advice)


def advised(svip, arms=("target", "svip"), prompts=4, copies=2):
    answers = [answer for answer in a_run(svip, copies) if answer.arm in arms and answer.prompt < prompts]
    return recommend(compute_metrics(answers, ARMS), 1)


def test_fallback_that_stands_beside_the_target_does_not_hide_what_drafting_does():
    """Whatever it is called."""
    for svip, fallback, says in (
        (9.0, 3.1, "do not draft here: svip, the fastest policy that always drafts, is 0.33 × (0.18 to 0.62) the target"),
        (9.0, 2.9, "do not draft here: svip, the fastest policy that always drafts, is 0.33 × (0.18 to 0.62) the target"),
        (3.3, 3.1, "no clear gain: svip+fallback, the fastest policy, is 0.97 × (0.52 to 1.79) the target: " + TIE),
        (1.0, 0.9, "use svip+fallback: 3.33 ×"),
    ):  # fmt: skip
        assert beside_fallback(svip, fallback).startswith(says), (svip, fallback)
    for name in ("svip+fallback compiled", "svip+fallback:wait=2", '{"stop": {"name": "fallback"}}'):
        says = "do not draft here: svip, the fastest policy that always drafts, is 0.33 ×"
        assert beside_fallback(9.0, 3.1, name).startswith(says), name


def beside_fallback(svip, fallback, name="svip+fallback"):
    answers = [answer for answer in a_run(svip, copies=2) if answer.arm in ("target", "svip")]
    answers += [replace(answer, arm=name) for answer in a_run(fallback, copies=2) if answer.arm == "svip"]
    return recommend(compute_metrics(answers, [*ARMS, replace(ARMS[2], name=name)]), 1)


def test_a_slow_form_of_drafting_says_nothing_of_the_fastest_one():
    """svip is like the target and strict far slower: that is no reason not to draft."""
    arms = [*ARMS, *(replace(ARMS[2], name=name) for name in ("strict", "svip+fallback"))]
    answers = [answer for answer in a_run(2.9, copies=2) if answer.arm in ("target", "svip")]
    for name, seconds in (("strict", 9.0), ("svip+fallback", 2.8)):
        answers += [replace(answer, arm=name) for answer in a_run(seconds, copies=2) if answer.arm == "svip"]
    advice = recommend(compute_metrics(answers, arms), 1)
    assert advice == f"no clear gain: svip+fallback, the fastest policy, is 1.07 × (0.58 to 1.98) the target: {TIE}"
    answers = [answer for answer in a_run(0.9, copies=2) if answer.arm in ("target", "svip")]
    slow = [replace(answer, seconds=answer.seconds * 2) for answer in answers if answer.arm == "svip"]
    more = [replace(answer, arm=f"svip {n}") for n in range(20) for answer in slow]
    few = compute_metrics(answers, ARMS)
    many = compute_metrics(answers + more, ARMS + [replace(ARMS[2], name=f"svip {n}") for n in range(20)])
    assert few[1].of_target == many[1].of_target and few[1].of_target_all == few[1].of_target
    assert many[1].of_target_all.low < 1 < many[1].of_target.low
    assert recommend(few, 1).startswith("use svip")
    assert recommend(many, 1).startswith("no clear gain: svip, the fastest policy")
