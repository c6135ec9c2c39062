"""Proves that a plan's rounds are SPRINTER's by hand-made texts, and its token counts by really generating."""

import hashlib
import json
import math
import shutil
import warnings
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from support import tiny

import hf_lossy_assist as hla
from hf_lossy_assist import HeadConfig, LinearHead, demo
from hf_lossy_assist.methods.sprinter.held_out import DIGEST, HELD_OUT, held_out, read_held_out
from hf_lossy_assist.methods.sprinter.plan import Line, _advice, plan
from hf_lossy_assist.methods.sprinter.replay import replay, replay_all, run_lengths
from hf_lossy_assist.methods.sprinter.theory import expected_accepted
from hf_lossy_assist.training.dataset import KINDS, Table


pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*policy is lossy:UserWarning")]


@cache
def models() -> demo.Demo:
    return demo.load()


@cache
def shipped() -> tuple[Any, dict[str, torch.Tensor]]:
    return demo.head(), read_held_out(str(demo.FOLDER / "sprinter_head"))


def replayed(
    v: list[float], accept: str, threshold: float = 0.5, cap: int = 20, new: int = 99, far: Any = None
) -> Any:
    """`accept`: + where the target would take the proposed token."""
    distance = np.array([2.0**-i for i in range(len(v))] if far is None else far)
    return replay(np.array(v), np.array([c == "+" for c in accept]), distance, threshold, cap, new)


# -- rounds by hand ---------------------------------------------------------------------------------------------------

YES, NO = 0.9, 0.1
CASES = {
    # v, accept, cap: tokens, calls, drafted, places of the unseen tokens
    "one position is the target's own": ([YES], "+", 20, (1, 1, 0, [])),
    "two positions: one drafted, kept, and the bonus": ([YES, YES], "+-", 20, (2, 1, 1, [])),
    "two positions: the drafted one is corrected, so the next round only adds one": ([YES, YES], "--", 20, (2, 2, 1, [])),
    "the doubted token is kept, and a bonus follows": ([YES, YES, NO, YES, NO, YES, YES], "+++++++", 20, (7, 3, 4, [0, 1])),
    "the doubted token is corrected": ([YES, YES, NO, YES, NO, YES, YES], "++-++++", 20, (7, 3, 5, [0, 1, 3])),
    "the draft ends the round by its cap": ([YES] * 7, "+++++++", 3, (7, 2, 5, [0, 1, 4])),
    "a cap of one: strict with one token": ([YES] * 5, "-++++", 1, (5, 3, 3, [])),
    "everything doubted": ([NO] * 5, "+++++", 20, (5, 3, 2, [])),
    "everything doubted and corrected": ([NO] * 4, "----", 20, (4, 4, 3, [])),
    "an unseen token is kept, whatever the target thinks": ([YES, YES, NO, NO], "---+", 20, (4, 2, 3, [0, 1])),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_rounds_by_hand(case):
    v, accept, cap, (tokens, calls, drafted, unseen) = CASES[case]
    got = replayed(v, accept, cap=cap)
    assert (got.tokens, got.calls, got.drafted, got.unchecked) == (tokens, calls, drafted, len(unseen))
    assert got.distance == pytest.approx(sum(2.0**-i for i in unseen))


def test_a_budget_ends_a_text_early():
    v, accept = [YES] * 10, "+" * 10
    assert replayed(v, accept, new=4) == replayed(v[:4], accept[:4])
    got = replayed(v, accept, new=4)
    assert (got.tokens, got.calls, got.drafted, got.unchecked) == (4, 1, 3, 2)
    assert replayed(v, accept, new=1).drafted == 0


def test_the_threshold_itself_is_enough():
    assert replayed([0.5, 0.5, 0.5, 0.5], "++++", threshold=0.5).calls == 1
    assert replayed([0.5, 0.5, 0.5, 0.5], "++++", threshold=0.51).calls == 2


@pytest.mark.parametrize("cap", [1, 2, 7])
def test_thresholds_at_both_ends(cap):
    generator = np.random.default_rng(cap)
    v, accept, distance = generator.random(50), generator.random(50) < 0.6, generator.random(50)
    strict = replay(v, accept, distance, 1.5, cap, 50)
    assert strict.unchecked == strict.distance == 0
    assert strict.drafted in (strict.calls, strict.calls - 1)  # one a call, and none where one place is left
    trusting = replay(v, accept, distance, 0.0, cap, 50)
    assert trusting.drafted >= cap * (trusting.calls - 2) and trusting.drafted - trusting.unchecked <= trusting.calls
    assert replay(v, np.zeros(50, bool), distance, 0.0, cap, 50).calls == math.ceil(49 / cap) + 1
    assert replay(v, np.ones(50, bool), distance, 0.0, cap, 50).calls == math.ceil(50 / (cap + 1))


@torch.no_grad()
@pytest.mark.parametrize(("threshold", "cap"), [(0.0, 4), (0.3, 20), (0.5, 20), (0.5, 3), (0.7, 20), (1.5, 20)])
def test_a_replayed_text_has_the_rounds_it_was_written_in(threshold, cap):
    """What Sprinter writes greedily, read again by plain forwards: V and the draft's proposal at each of its prefixes."""
    target = tiny.build("llama", eos_token_id=None)
    draft = tiny.noisy(target, 0.1)
    torch.manual_seed(2)
    head = LinearHead(HeadConfig(32)).eval()
    head.linear.weight.mul_(4.0)
    head.linear.bias.fill_(2.0)
    inputs, new = tiny.prompts((7,)), 60
    out = tiny.assisted(target, inputs, draft, hla.Sprinter(head, threshold, cap), max_new_tokens=new)
    seen = draft(out.sequences, output_hidden_states=True)
    at = slice(6, 6 + new)
    v = head(seen.hidden_states[-1][0, at])
    proposed, best = seen.logits[0, at].argmax(dim=-1), target(out.sequences).logits[0, at].argmax(dim=-1)
    got = replay(v.numpy(), (proposed == best).numpy(), np.zeros(new), threshold, cap, new)
    row = out.speculation.rows[0]
    assert (got.tokens, got.calls, got.drafted, got.unchecked) == (
        row.num_new_tokens, row.num_spec_steps, row.num_draft_tokens, row.num_unchecked_tokens,
    )  # fmt: skip
    assert 0 < int((proposed == best).sum()) < new
    assert threshold in (0.0, 1.5) or 0 < int((v >= threshold).sum()) < new


def records(*rows: tuple[int, list[float], list[float]]) -> dict[str, torch.Tensor]:
    """Held-out records: of each row its kind, V and p; q is 1."""
    of_row = [(number, kind, v, p) for number, (kind, vs, ps) in enumerate(rows) for v, p in zip(vs, ps, strict=True)]
    row, kind, v, p = (torch.tensor(column) for column in zip(*of_row, strict=True))
    return {"row": row.int(), "kind": kind.to(torch.int8), "v": v, "p": p, "q": torch.ones_like(p), "distance": 1 - p}


def test_all_texts_of_a_kind_are_added_up():
    data = records((3, [YES, NO, YES], [1.0, 1.0, 0.0]), (1, [YES] * 9, [1.0] * 9), (3, [NO, NO], [0.0, 1.0]))
    got = replay_all(data, 3, 0.5, 20, 99)
    parts = [replayed([YES, NO, YES], "++-", far=[0, 0, 1]), replayed([NO, NO], "-+", far=[1, 0])]
    assert asdict(got) == {name: sum(getattr(part, name) for part in parts) for name in asdict(got)}
    assert replay_all(data, 1, 0.5, 20, 99).tokens == 9 and replay_all(data, 0, 0.5, 20, 99).calls == 0
    assert replay_all(data, 3, 0.5, 20, 1).tokens == 2


def test_the_strict_test_is_a_coin_of_p_over_q():
    data = records((3, [NO] * 4000, [0.3] * 4000))
    got = replay_all(data, 3, 0.5, 20, 99999)
    assert got.tokens / got.calls == pytest.approx(1.3, abs=0.03)
    assert got == replay_all(data, 3, 0.5, 20, 99999, seed=0) != replay_all(data, 3, 0.5, 20, 99999, seed=1)


def test_run_lengths_by_hand():
    data = records((3, [YES] * 6, [1, 1, 0, 0, 1, 0.5]), (0, [YES] * 2, [1, 1]), (3, [YES] * 2, [0, 1]))
    assert run_lengths(data, 3, 1.0) == {0: 3, 1: 2, 2: 1}  # 2 0 1 0 and, behind the last no, 0 and 1
    assert run_lengths(data, 3, 2.0) == {0: 2, 1: 1, 2: 2}
    assert run_lengths(data, 0, 1.0) == {2: 1}


def test_held_out_keeps_64_prompts_with_every_row_apart():
    prompts, each = 70, 3
    torch.manual_seed(1)
    count = prompts * len(KINDS) * each
    place = torch.arange(count)
    given = Table(
        features=torch.randn(count, 2), p=torch.rand(count), q=torch.rand(count), distance=torch.rand(count),
        prompt=1000 - place // (len(KINDS) * each), kind=place // each % len(KINDS), position=place % each,
        kinds=list(KINDS), facts={},
    )  # fmt: skip
    head = LinearHead(HeadConfig(2)).eval()
    kept = held_out(given, head)
    mine = torch.isin(given.prompt, given.prompt.unique()[:64])
    assert all(len(column) == 64 * len(KINDS) * each for column in kept.values())
    for name in ("p", "q", "distance"):
        assert torch.equal(kept[name], getattr(given, name)[mine])
    assert torch.equal(kept["v"], head(given.features[mine]).detach()) and not kept["v"].requires_grad
    assert torch.equal(kept["kind"].long(), given.kind[mine])
    assert kept["row"].bincount().tolist() == [each] * (64 * len(KINDS))
    assert all(len(kept["kind"][kept["row"] == row].unique()) == 1 for row in range(10))
    safetensors.torch.save(kept)


# -- what it says -----------------------------------------------------------------------------------------------------


def line(threshold: float, of_strict: float, distance: float, of_svip: float = 2.5, of_target: float = 3.0) -> Line:
    return Line(threshold, 0.9, 0.1, 6.5, 6.0, 0.7, distance, 100.0, of_strict, of_svip, of_target)


def test_advice():
    slow = [line(0.3, 0.9, 0.001), line(0.6, 1.0, 0.0)]
    assert _advice(slow, 0.02) == (
        "does not pay: 1.00 × strict, which loses nothing; use strict, 3.00 × the target alone (τ = 0.6 is the fastest threshold)"
    )
    good = [line(0.2, 1.9, 0.05), line(0.5, 1.4, 0.02), line(0.8, 1.2, 0.001)]
    assert _advice(good, 0.02).startswith("τ = 0.5:") and "1.40 × strict" in _advice(good, 0.02)
    assert "6.5 tokens a target call, distance 0.0200" in _advice(good, 0.02)
    assert _advice(good, 0.1).startswith("τ = 0.2:")
    none = _advice(good, 0.0005)
    assert none.startswith("no threshold keeps") and "τ = 0.2" in none and "0.050" in none
    assert _advice([line(0.2, 1.5, 0.5), line(0.9, 0.8, 0.0)], 0.02).startswith(
        "does not pay within a mean distance of at most 0.02 per token: 0.80 × strict, which loses nothing; use strict"
    )


def test_a_threshold_is_advised_only_where_it_beats_the_target_and_svip():
    """1.78 × strict is no gain where strict itself is a third of the target alone."""
    slow = [line(0.3, 1.9, 0.03, 1.7, 0.64), line(0.5, 1.78, 0.0146, 1.6, 0.6)]
    assert (
        _advice(slow, 0.02) == "does not pay: 0.64 × the target alone; do not draft (τ = 0.3 is the fastest threshold)"
    )
    assert _advice(slow[1:], 0.02).startswith("does not pay: 0.60 × the target alone; do not draft")
    svip = [line(0.5, 1.2, 0.01, 0.9, 1.8)]
    assert _advice(svip, 0.02).startswith(
        "does not pay: 0.90 × svip, which loses nothing; use svip, 2.00 × the target alone"
    )
    good = _advice([line(0.5, 1.4, 0.01, 1.1, 1.3)], 0.02)
    assert good.startswith("τ = 0.5:") and "1.30 × the target alone, 1.40 × strict, 1.10 × svip" in good


@pytest.fixture(scope="module")
def found():
    m, (head, data) = models(), shipped()
    prompts = [p.prompt for p in demo.problems(2, 3, "calibration")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a fixture is outside the mark above
        out = plan(
            m.target, m.draft, m.tokenizer, prompts, head, data, new_tokens=52, repeats=1,
            thresholds=(0.0, 0.3, 0.5, 0.8, 1.5),
        )  # fmt: skip
    assert not hla.is_enabled(m.target)
    return out


def numbers(given: Any) -> list[float]:
    if isinstance(given, dict):
        return [n for value in given.values() for n in numbers(value)]
    if isinstance(given, list):
        return [n for value in given for n in numbers(value)]
    return [float(given)] if isinstance(given, int | float) else []


def test_a_plan_is_consistent(found):
    head, data = shipped()
    assert len(numbers(asdict(found))) > 50 and all(math.isfinite(n) for n in numbers(asdict(found)))
    assert min(found.t_draft, found.t_target, found.t_verifier, found.target_per_second, found.strict_per_second) > 0
    fits = data["q"] <= 1.2 * data["p"]
    assert found.acceptable == pytest.approx(float(fits.float().mean()))
    assert found.runs == run_lengths(data, KINDS.index("mixed"), 1.2)
    assert 1 < found.strict_per_call <= 6
    assert [one.threshold for one in found.lines] == [0.0, 0.3, 0.5, 0.8, 1.5]
    for one in found.lines:
        says = data["v"] >= one.threshold
        assert one.eta_tp == pytest.approx(float(says[fits].float().mean()))
        assert one.eta_fp == pytest.approx(float(says[~fits].float().mean()))
        assert 1 <= one.tokens_per_call <= 21 and 0 <= one.unchecked < 1 and 0 <= one.distance < 1
        assert one.of_strict == pytest.approx(one.tokens_per_second / found.strict_per_second)
        assert one.of_target == pytest.approx(one.tokens_per_second / found.target_per_second)
        assert one.of_svip == pytest.approx(one.tokens_per_second / found.svip_per_second)
        assert one.gain == min(one.of_strict, one.of_svip, one.of_target)
    for name in ("eta_tp", "eta_fp", "tokens_per_call", "unchecked", "distance"):
        values = [getattr(one, name) for one in found.lines]
        assert values == sorted(values, reverse=True), name
    assert (found.lines[0].eta_tp, found.lines[0].eta_fp) == (1, 1)
    never = found.lines[-1]
    assert (never.eta_tp, never.eta_fp, never.unchecked, never.distance) == (0, 0, 0, 0)
    # By Theorem 3.3 with every token doubted: the target's own token and, by the strict test, the doubted one.
    strict_test = float((data["p"] / data["q"]).clamp(max=1).mean())
    assert never.by_theorem == pytest.approx(1 + strict_test, abs=1e-5)
    assert expected_accepted(5, 0.0, 0.0, cap=11) == 0
    assert found.advice


def test_predicted_tokens_a_call_are_those_of_really_generating(found):
    m, (head, _) = models(), shipped()
    inputs = m.tokenizer([p.prompt for p in demo.problems(12, 77)], return_tensors="pt", padding=True)
    target = hla.enable(m.target)
    for predicted in found.lines[2:4]:
        policy = hla.Sprinter(
            head, predicted.threshold, patience=1.0
        )  # rows as they would be alone: that is what is predicted
        out = target.generate(
            **inputs, assistant_model=m.draft, lossy_policy=policy, max_new_tokens=52, do_sample=True, return_dict_in_generate=True,
        )  # fmt: skip
        whole = out.speculation.total()
        assert predicted.tokens_per_call == pytest.approx(whole.num_new_tokens / whole.num_spec_steps, rel=0.2)
        assert predicted.unchecked == pytest.approx(whole.num_unchecked_tokens / whole.num_new_tokens, abs=0.1)
    hla.disable(m.target)


@pytest.mark.parametrize(("p", "only"), [(1.0, "acceptable"), (1e-9, "not acceptable")])
def test_held_out_tokens_of_one_kind_tell_nothing_of_the_other(p, only):
    m, (head, data) = models(), shipped()
    data = data | {"p": torch.full_like(data["p"], p), "q": torch.full_like(data["q"], 0.5)}
    with pytest.raises(ValueError, match=f"^all {len(data['p'])} held-out tokens are {only} at λ = [^\n]*$"):
        plan(m.target, m.draft, m.tokenizer, ["1 + 1"], head, data, thresholds=(0.5,), repeats=1, new_tokens=4)


def test_wrong_settings_are_refused():
    m, (head, data) = models(), shipped()
    hla.disable(m.target)
    prompts = [demo.problems(1)[0].prompt]
    good = {"thresholds": (0.5,), "repeats": 1, "new_tokens": 4}
    for wrong in ({"new_tokens": 1}, {"max_draft": 0}, {"max_distance": 1.5}, {"max_distance": -0.1}, {"repeats": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))) as error:
            plan(m.target, m.draft, m.tokenizer, prompts, head, data, **(good | wrong))
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="prompt"):
        plan(m.target, m.draft, m.tokenizer, [], head, data, **good)
    with pytest.raises(ValueError, match="threshold"):
        plan(m.target, m.draft, m.tokenizer, prompts, head, data, **(good | {"thresholds": ()}))
    assert not hla.is_enabled(m.target)


def test_a_target_that_was_enabled_stays_so_and_one_that_fails_is_given_back():
    m, (head, data) = models(), shipped()
    prompts = [demo.problems(1)[0].prompt]
    settings: dict[str, Any] = {"thresholds": (0.5,), "repeats": 1, "new_tokens": 4, "max_draft": 1}
    hla.enable(m.target)
    plan(m.target, m.draft, m.tokenizer, prompts, head, data, **settings)
    assert hla.is_enabled(m.target)
    hla.disable(m.target)
    strange = LinearHead(replace(head.config, kind="linear", hidden_size=5))
    with pytest.raises((ValueError, RuntimeError)):
        plan(m.target, m.draft, m.tokenizer, prompts, strange, data, **settings)
    assert not hla.is_enabled(m.target)


def beside(folder: Path, data: bytes | dict[str, torch.Tensor], digest: Any = ...) -> str:
    """A folder of the shipped head with other held-out records; `digest`: what its config says of them."""
    shutil.copy(demo.FOLDER / "sprinter_head" / "config.json", folder)
    data = safetensors.torch.save(data) if isinstance(data, dict) else data
    (folder / HELD_OUT).write_bytes(data)
    spec = json.loads((folder / "config.json").read_text())
    spec["training"][DIGEST] = hashlib.sha256(data).hexdigest() if digest is ... else digest
    (folder / "config.json").write_text(json.dumps(spec))
    return str(folder)


def with_one(column: torch.Tensor, value: float) -> torch.Tensor:
    column = column.clone()
    column[3] = value
    return column


def test_held_out_records_are_read_or_refused_in_one_line(tmp_path):
    _, data = shipped()
    assert set(data) == {"row", "kind", "v", "p", "q", "distance"}
    with pytest.raises(ValueError, match=HELD_OUT):
        read_held_out(str(tmp_path))
    back = read_held_out(beside(tmp_path, data))
    assert all(torch.equal(back[name], data[name]) for name in data)
    whole = (demo.FOLDER / "sprinter_head" / HELD_OUT).read_bytes()
    for changes, says in (
        (whole[:1000], "is not a whole safetensors file"),
        ({name: data[name] for name in data if name != "q"}, "expected the columns row, kind, v, p, q, distance"),
        (data | {"more": data["p"].clone()}, "expected the columns"),
        (data | {"p": data["p"].double()}, "expected the columns"),
        (data | {"q": data["q"][:-1].clone()}, "of one length"),
        ({name: column[:0].clone() for name, column in data.items()}, "of one length"),
        ({name: column[None].clone() for name, column in data.items()}, "of one length"),
        (data | {"p": with_one(data["p"], math.nan)}, "p is not from 0 to 1"),
        (data | {"q": with_one(data["q"], math.inf)}, "q is not from 0 to 1"),
        (data | {"distance": with_one(data["distance"], -1.0)}, "distance is not from 0 to 1"),
        (data | {"v": with_one(data["v"], math.nan)}, "v is not from 0 to 1"),
        (data | {"kind": with_one(data["kind"], 9)}, "kind is not from 0 to 3"),
        (data | {"kind": torch.zeros_like(data["kind"])}, "holds no texts of the kind 'draft'"),
    ):
        with pytest.raises(ValueError, match=says) as error:
            read_held_out(beside(tmp_path, changes))
        assert "\n" not in str(error.value) and HELD_OUT in str(error.value)


def test_held_out_records_of_another_head_are_refused(tmp_path, monkeypatch):
    """The head's config has their checksum, as that of the weights."""
    _, data = shipped()
    for digest in (None, 5, "0" * 64):
        with pytest.raises(ValueError, match=f"{HELD_OUT} is not the file that config.json was saved with") as error:
            read_held_out(beside(tmp_path, data, digest))
        assert "\n" not in str(error.value)
    monkeypatch.setattr("hf_lossy_assist.methods.sprinter.held_out.LARGEST", 1000)
    with pytest.raises(ValueError, match=f"{HELD_OUT} has more than 1000 bytes"):
        read_held_out(beside(tmp_path, data))


@pytest.mark.parametrize(("value", "line"), [(None, "has no λ"), (1e12, "lam: expected a number")])
def test_a_head_without_a_lambda_of_use_is_refused_with_the_files_name(tmp_path, value, line):
    m, (head, data) = models(), shipped()
    odd = type(head)(replace(head.config, lam=value))
    odd.source = str(tmp_path)
    with pytest.raises(ValueError, match=f"config.json.* {line}") as error:
        plan(m.target, m.draft, m.tokenizer, ["1 + 1"], odd, data)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)
