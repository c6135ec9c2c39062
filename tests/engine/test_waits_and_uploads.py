"""What a round costs a device beside its forwards: how often the host waits for it, and how often it uploads something.

Counted on a pretended device (`support.second_device`) in the steady state: from the third round on, where no row ends. A change may lower a number of
`BUDGETS` and never raise one.
"""

from functools import cache
from typing import Any, NamedTuple

import pytest
from support import second_device
from support.second_device import moved, pretended

import hf_lossy_assist as hla


pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore:.*policy is lossy"),
    pytest.mark.skipif(second_device.why_not() is not None, reason=str(second_device.why_not())),
]


class Budget(NamedTuple):
    """Of a mean round."""

    waits: float
    uploads: float
    rows: int
    settings: dict[str, Any]


NEW = {
    "max_new_tokens": 48,
    "do_sample": False,
    "eos_token_id": 9999,
    "pad_token_id": 0,
}  # which is no token: all rows go on
PENALTY = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.95, "repetition_penalty": 1.1}
BUDGETS = {
    "strict": Budget(1, 14, 4, {"lossy_policy": "strict"}),
    "svip": Budget(9, 17, 4, {"lossy_policy": "svip"}),
    "confidence": Budget(21, 27, 4, {"lossy_policy": "confidence"}),
    "adaedl": Budget(14, 32, 4, {"lossy_policy": "adaedl"}),
    "disco": Budget(22, 48, 4, {"lossy_policy": "disco"}),
    "joint": Budget(11, 19, 4, {"lossy_policy": {"rule": "strict", "stop": {"name": "joint_goodput", "step": 0.1}}}),
    "typical": Budget(1, 14, 4, {"lossy_policy": "typical"}),
    "other device": Budget(1, 14, 4, {"lossy_policy": "strict", "device": 1}),
    "one row": Budget(1, 3, 1, {"lossy_policy": "strict"}),
    "sampling": Budget(1, 14, 4, {"lossy_policy": "strict", "do_sample": True}),
    "penalty": Budget(1, 255, 4, {"lossy_policy": "strict"} | PENALTY),
    "penalty, one row": Budget(1, 3, 1, {"lossy_policy": "strict"} | PENALTY),
    "penalty, svip": Budget(9, 211, 4, {"lossy_policy": "svip"} | PENALTY),
    "texts": Budget(
        1,
        213,
        4,
        {"lossy_policy": "strict", "no_repeat_ngram_size": 3, "bad_words_ids": [[7], [9, 11]], "min_new_tokens": 9},
    ),
    "lookup": Budget(2, 3, 1, {"lossy_policy": "strict", "prompt_lookup_num_tokens": 5}),
    "suffix": Budget(5, 5.5, 4, {"lossy_policy": "strict", "drafter": "suffix"}),
    "composite": Budget(6, 16, 4, {"lossy_policy": "strict", "drafter": "composite"}),
}


@cache
def models() -> tuple[Any, Any, Any, Any]:
    target, draft, _, tokenizer = hla.demo.load()
    there = [moved(draft, second_device.device(number)) for number in (0, 1)]
    return hla.enable(moved(target)), *there, tokenizer


@pytest.mark.parametrize("name", BUDGETS)
def test_a_round_stays_within_its_budget(name):
    target, *drafts, tokenizer = models()
    budget, settings = BUDGETS[name], dict(BUDGETS[name].settings)
    draft = drafts[settings.pop("device", 0)]
    if settings.get("drafter") != "suffix" and name != "lookup":
        settings["assistant_model"] = draft
    prompts = [problem.prompt for problem in hla.demo.problems(budget.rows, seed=5)]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    with pretended() as traffic:
        there = {key: x.to(target.device) for key, x in inputs.items()}
        target.generate(**there, **NEW | settings)
    rounds = traffic.steady()
    assert rounds, "texts too short to have a steady state"
    for kind in ("waits", "uploads"):
        total = sum((getattr(one, kind) for one in rounds), second_device.Counter())
        print(f"{name}: {total.total() / len(rounds):.2f} {kind} a round, {total.most_common(9)}")
        allowed = getattr(budget, kind)
        assert total.total() <= allowed * len(rounds), f"more than {allowed} {kind} a round: {total.most_common(5)}"
