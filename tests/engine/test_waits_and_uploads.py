"""A round's cost to a device beside its forwards: how often the host waits for it, and how often it uploads something.

Counted on a pretended device (`support.second_device`) in the steady state: from the third round on, where no row ends. A change may lower a number of
`CALLS` and never raise one.
"""

from collections import Counter
from functools import cache
from typing import Any, NamedTuple

import pytest
from support import second_device
from support.second_device import moved, pretended

import hf_lossy_assist as hla
from hf_lossy_assist import tensors


pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore:.*policy is lossy"),
    pytest.mark.skipif(second_device.why_not() is not None, reason=str(second_device.why_not())),
]


class Budget(NamedTuple):
    """Counts of a mean round."""

    waits: float
    uploads: float


NEW = {"max_new_tokens": 48, "do_sample": False, "eos_token_id": 9999, "pad_token_id": 0}  # no token: all rows go on
PENALTY = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.95, "repetition_penalty": 1.1}
TEXTS = {"no_repeat_ngram_size": 3, "bad_words_ids": [[7], [9, 11]], "min_new_tokens": 9}
JOINT = {"rule": "strict", "stop": {"name": "joint_goodput", "step": 0.1}}
# Of calls with a draft model, 4 rows and strict acceptance, but for what is said. Confidence drafts 20 tokens a round here, SVIP 8.
CALLS: dict[str, tuple[dict[str, Any], Budget]] = {
    "strict": ({}, Budget(1, 1)),
    "svip": ({"lossy_policy": "svip"}, Budget(3.7, 2)),
    "confidence": ({"lossy_policy": "confidence"}, Budget(6, 1)),
    "joint": ({"lossy_policy": JOINT}, Budget(3.5, 2.8)),
    "typical": ({"lossy_policy": "typical"}, Budget(1, 1)),
    "other device": ({"device": 1}, Budget(1, 2)),
    "parallel": ({"mask": 0, "device": 1}, Budget(1, 2.1)),
    "parallel, svip": ({"mask": 0, "lossy_policy": "svip"}, Budget(3, 1.5)),
    "one row": ({"rows": 1}, Budget(1, 0)),
    "sampling": ({"do_sample": True}, Budget(1, 1)),
    "penalty": (PENALTY, Budget(1, 2.2)),
    "penalty, one row": (PENALTY | {"rows": 1}, Budget(1, 0)),
    "penalty, svip": (PENALTY | {"lossy_policy": "svip", "max_new_tokens": 24}, Budget(3.7, 4)),
    "texts": (TEXTS, Budget(1, 2.2)),
    "lookup": ({"prompt_lookup_num_tokens": 5, "rows": 1}, Budget(1, 1.1)),
    "suffix": ({"drafter": "suffix"}, Budget(1, 1.7)),
    "composite": ({"drafter": "composite"}, Budget(1, 2.8)),
    "eagle": ({"drafter": "demo"}, Budget(1, 1.6)),
}


@cache
def models() -> tuple[Any, Any, Any, Any]:
    target, draft, _, tokenizer = hla.demo.load()
    there = [moved(draft, second_device.device(number)) for number in (0, 1)]
    return hla.enable(moved(target)), *there, tokenizer


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name != "penalty, svip")) for name in CALLS]
)
def test_a_round_stays_within_its_budget(monkeypatch, name):
    target, *drafts, tokenizer = models()
    settings = {"lossy_policy": "strict"} | NEW | CALLS[name][0]
    rows, device = settings.pop("rows", 4), settings.pop("device", 0)
    if "mask" in settings:
        monkeypatch.setattr(drafts[device].config, "pard_token", settings.pop("mask"), raising=False)
    if settings.get("drafter") == "demo":
        settings["drafter"] = hla.demo.drafter()
    elif settings.get("drafter") != "suffix" and name != "lookup":
        settings["assistant_model"] = drafts[device]
    texts = [problem.prompt for problem in hla.demo.problems(rows, seed=5)]
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    tensors._uploaded.tensors.clear()  # an earlier test's lists would count as free
    with pretended() as traffic:
        target.generate(**{key: x.to(target.device) for key, x in inputs.items()}, **settings)
    rounds = traffic.steady()
    assert rounds, "texts too short to have a steady state"
    for kind in ("waits", "uploads"):
        lines = sum((getattr(one, kind) for one in rounds), Counter())
        print(f"{name}: {lines.total() / len(rounds):.2f} {kind} a round, {lines.most_common(9)}")
        allowed = getattr(CALLS[name][1], kind)
        assert lines.total() <= allowed * len(rounds), f"more than {allowed} {kind} a round: {lines.most_common(5)}"
