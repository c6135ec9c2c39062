"""Texts on a device of their own are those of the CPU, and no operation meets a tensor of another device: every policy and drafter.

The device is pretended (`support.second_device`), so that any machine can show it. Rows draw from generators of their own: what they draw does not
depend on how far ahead a draft ran.
"""

from functools import cache
from typing import Any

import pytest
import torch
from support import eagle, encoded, hybrids, second_device, small, tiny
from support.heads import head_for
from support.rule_cases import CASES as RULES
from support.second_device import moved, pretended

import hf_lossy_assist as hla
from hf_lossy_assist.drafters.trained import DFlashDrafter, Eagle3Drafter


pytestmark = [
    pytest.mark.skipif(second_device.why_not() is not None, reason=str(second_device.why_not())),
    pytest.mark.filterwarnings("ignore:.*policy is lossy"),
]
NEW = 10
SHY = hla.Confidence(0.3)
STOPS = {
    "constant": hla.Constant(4), "heuristic": hla.Heuristic(2, 9), "confidence": SHY, "svip": hla.SVIP(h=1.5, form="entropy"),
    "batch_schedule": hla.BatchSchedule({1: 7, 3: 2}), "joint_goodput": hla.JointGoodput(step=0.1, token=0.01),
    "at_least": hla.AtLeast(SHY, 3), "any_of": hla.AnyOf([SHY, hla.Heuristic(4, 9), hla.Constant(7)]),
    "all_of": hla.AllOf([SHY, hla.SVIP(h=1.5, form="entropy"), hla.Constant(2)]), "fallback": hla.Fallback(SHY, margin=1.0),
}  # fmt: skip
SHAPES = {"one row": (9,), "ragged rows": (9, 2, 6)}
POLICIES: dict[str, Any] = {
    **{f"rule {n}": lambda case=case: hla.LossyPolicy(case.ladder[-1], hla.Constant(3)) for n, case in RULES.items()},
    **{f"stop {name}": lambda stop=stop: stop for name, stop in STOPS.items()},
    "staged": lambda: hla.LossyPolicy(hla.Strict(), hla.Constant(3), hla.Staged(there("companion"))),
}


@cache
def here(name: str) -> Any:
    if name in ("draft", "companion"):
        return eager(tiny.noisy(here("target"), {"draft": 0.05, "companion": 0.2}[name]))
    return hla.enable(eager(tiny.build("llama")))


def eager(model: Any) -> Any:
    model.set_attn_implementation("eager")
    return model


@cache
def there(name: str, number: int = 0) -> Any:
    model = moved(here(name), second_device.device(number))
    return hla.enable(model) if name == "target" else model


def write(target: Any, inputs: dict[str, torch.Tensor], sampling: bool = False, **settings: Any) -> torch.Tensor:
    """One call's texts, on the CPU; on the second device if the target is there."""
    if sampling:
        rows = len(next(iter(inputs.values())))
        settings["generator"] = [torch.Generator().manual_seed(n) for n in range(rows)]
    known = {"max_new_tokens": NEW, "eos_token_id": tiny.NEVER_EMITTED, "lossy_policy": "strict"}
    settings = known | {"do_sample": sampling} | settings
    if target.device.type == "cpu":
        return target.generate(**inputs, **settings)
    with pretended() as traffic:
        out = target.generate(**{name: x.to(target.device) for name, x in inputs.items()}, **settings)
        assert len(traffic.rounds) > 1
        return out.cpu()


def spread(names):
    """Cases: one row or ragged rows, greedy or sampling, in turn; most are nightly."""
    cases = []
    for n, name in enumerate(names):
        marks = [pytest.mark.nightly] * (n % 9 > 0) + [pytest.mark.full]
        cases.append(pytest.param(name, list(SHAPES.values())[n % 2], n % 4 > 1, marks=marks, id=name))
    return cases


@pytest.mark.parametrize(("name", "lengths", "sampling"), spread(POLICIES))
def test_policies(name, lengths, sampling):
    policy, inputs = POLICIES[name](), tiny.prompts(lengths)
    modes = getattr(getattr(policy, "rule", None), "modes", ("greedy", "sampling"))
    sampling = sampling if ("sampling" if sampling else "greedy") in modes else not sampling
    found = write(there("target"), inputs, sampling, lossy_policy=policy, assistant_model=there("draft"))
    if name == "staged":
        policy = hla.LossyPolicy(hla.Strict(), hla.Constant(3), hla.Staged(here("companion")))
    expected = write(here("target"), inputs, sampling, lossy_policy=policy, assistant_model=here("draft"))
    assert torch.equal(found, expected)


def token_head() -> hla.Head:
    """A random head on the state that encodes a token."""
    out = hla.LinearHead(hla.HeadConfig(32, features=hla.FeatureSpec(position="token"))).eval()
    out.load_state_dict(head_for(here("draft")).state_dict())
    return out


def drafting(name: str, model: Any) -> dict[str, Any]:
    """The arguments of a call that drafts this way. `model`: `here` or `there`."""
    target, head = here("target"), head_for(here("draft"))
    return {
        "suffix": lambda: {"drafter": hla.SuffixDrafter(1)},
        "lookup": lambda: {"prompt_lookup_num_tokens": 3},
        "composite": lambda: {"drafter": hla.CompositeDrafter(), "assistant_model": model("draft")},
        "other device": lambda: {"assistant_model": model("draft", *[1] * (model is there)), "lossy_policy": "svip"},
        "early exit": lambda: {"assistant_model": hla.early_exit(model("target"), 1)},
        "eagle": lambda: {"drafter": Eagle3Drafter(eagle.network(target)), "lossy_policy": "svip"},
        "dflash": lambda: {"drafter": DFlashDrafter(eagle.dflash_network(target))},
        "sprinter": lambda: {"assistant_model": model("draft"), "lossy_policy": hla.Sprinter(head, 0.5)},
        "specdec": lambda: {"assistant_model": model("draft"), "lossy_policy": hla.SpecDecPP(token_head(), 0.5)},
    }[name]()


DRAFTERS = ("suffix", "lookup", "composite", "other device", "early exit", "eagle", "dflash", "sprinter", "specdec")


@pytest.mark.parametrize(("name", "lengths", "sampling"), spread(DRAFTERS))
def test_drafters(name, lengths, sampling):
    inputs = tiny.prompts(lengths)
    inputs["input_ids"][:, -3:] = inputs["input_ids"][:, :1]  # for a lookup to find
    found = write(there("target"), inputs, sampling, **drafting(name, there))
    assert torch.equal(found, write(here("target"), inputs, sampling, **drafting(name, here)))


PROCESSORS = {
    "warpers": {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "texts": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 2,
        "min_new_tokens": 4,
        "bad_words_ids": [[7], [9, 11]],
    },
    "bias": {"sequence_bias": [[[5], 2.0], [[6, 8], -3.0]], "suppress_tokens": [12], "begin_suppress_tokens": [13]},
    "both": {"temperature": 0.8, "top_k": 20, "repetition_penalty": 1.2, "forced_eos_token_id": 14},
    "a caller's": {"logits_processor": [lambda ids, scores: scores - ids[:, -1:] % 2]},
}


@pytest.mark.parametrize(("name", "lengths", "sampling"), spread(PROCESSORS))
def test_processors(name, lengths, sampling):
    settings = {"sampling": sampling, "lossy_policy": "svip"} | PROCESSORS[name]
    inputs = tiny.prompts(lengths)
    found = write(there("target"), inputs, assistant_model=there("draft"), **settings)
    assert torch.equal(found, write(here("target"), inputs, assistant_model=here("draft"), **settings))


@pytest.mark.full
def test_many_texts():
    texts = [small.one(width, seed=n)["input_ids"][0].tolist() for n, width in enumerate((9, 3, 14, 6, 1))]
    settings = {"max_new_tokens": NEW, "do_sample": False, "lossy_policy": "svip", "max_rows": 3}

    def written(target: Any, draft: Any) -> list[list[int]]:
        found = hla.generate_many(target, texts, assistant_model=draft, **settings)
        return [result.token_ids for result in sorted(found, key=lambda result: result.index)]

    with pretended():
        found = written(there("target"), there("draft"))
    assert found == written(here("target"), here("draft"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "lengths"),
    [("qwen3_5_text", (9,)), *(pytest.param(x, (9, 2, 6), marks=pytest.mark.nightly) for x in ("kimi_linear", "falcon_h1"))],
)  # fmt: skip
def test_hybrids(kind, lengths):
    """Kimi Linear beside a caller's criterion: its mixture of experts counts tokens by an operation that CPUs have for floats alone."""
    target, inputs = hla.enable(eager(hybrids.model(kind))), tiny.prompts(lengths)
    draft = hybrids.drafts(target)["often"]
    settings = {"lossy_policy": "svip", "max_new_tokens": 6}
    settings |= {"stopping_criteria": [ends_never]} if kind == "kimi_linear" else {}
    found = write(hla.enable(moved(target)), inputs, assistant_model=moved(draft), **settings)
    assert torch.equal(found, write(target, inputs, assistant_model=draft, **settings))


def ends_never(ids, scores, **_):
    return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)


@pytest.mark.full
def test_encoder_decoders():
    target, inputs = hla.enable(eager(encoded.build("whisper"))), encoded.inputs("whisper", 3)
    draft = encoded.draft_of(target, "often")
    found = write(hla.enable(moved(target)), inputs, assistant_model=moved(draft))
    assert torch.equal(found, write(target, inputs, assistant_model=draft))
