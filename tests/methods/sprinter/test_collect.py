"""Proves what a collected dataset says: every number by plain forwards on texts rebuilt from the data, every distribution by counting."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import load_from_disk
from support import eagle, small, tiny
from support.collecting import models, run, tiny_pair, word_prompts
from support.distributions import REJECT, goodness
from support.hub_server import card_problems
from support.refusals import refused
from transformers import RwkvConfig, RwkvForCausalLM

import hf_lossy_assist as hla
from hf_lossy_assist import ModelIdentity, demo
from hf_lossy_assist.methods.sprinter.collect import CollectSettings, collect
from hf_lossy_assist.tasks.prompts import PromptText, read_texts
from hf_lossy_assist.training.verifier_dataset import KINDS, REPLACED, label_acceptable, read_dataset


ORIGINAL, DRAFT, TARGET, MIXED = range(4)
NEW = 8


def texts(count: int, seed: int = 0) -> list[PromptText]:
    return [PromptText(p.prompt, p.solution) for p in demo.problems(count, seed, "calibration")]


def demo_run(where: Path, given: list[PromptText], name: str = "data", **settings: Any) -> Any:
    m = models()
    return run(where, (m.target, m.draft, m.tokenizer), given, name, **settings)


def split_text(tokenizer: Any, text: PromptText, kind: int, new_tokens: int) -> tuple[list[int], list[int]]:
    """Return the tokens before a row's first record and, for the original kind, those that follow."""
    prompt = tokenizer(text.prompt)["input_ids"]
    if kind != ORIGINAL:
        return prompt, []
    if text.continuation:
        return prompt, tokenizer(text.continuation, add_special_tokens=False)["input_ids"]
    cut = max(len(prompt) // 2, len(prompt) - new_tokens, 1)
    return prompt[:cut], prompt[cut:]


def warped(logits: torch.Tensor, settings: CollectSettings) -> torch.Tensor:
    """The distribution of logits (…, V), by formula: temperature, then top-k, then the fewest tokens that reach top_p."""
    if not settings.do_sample:
        return torch.nn.functional.one_hot(logits.argmax(dim=-1), logits.shape[-1]).float()
    logits = logits / settings.temperature
    if settings.top_k:
        logits = logits.masked_fill(logits < logits.topk(settings.top_k).values[..., -1:], float("-inf"))
    p, order = logits.softmax(dim=-1).sort(dim=-1, descending=True)
    nucleus = p * (p.cumsum(dim=-1) - p < settings.top_p)
    return torch.zeros_like(p).scatter(-1, order, nucleus / nucleus.sum(dim=-1, keepdim=True))


def close(features: list[float], states: torch.Tensor) -> bool:
    return torch.allclose(torch.tensor(features), states.float(), atol=1e-3, rtol=1e-3)


@torch.no_grad()
def compare(pair: Any, text: list[int], at: int, records: list[dict[str, Any]], settings: CollectSettings) -> None:
    """Token, p, q, distance and, where they are those that predict it, features of `records`, the first of which is behind text[:at]."""
    target, draft, _ = pair
    ids = torch.tensor([text])
    both = []
    for model in (target, draft):
        out = model(ids, output_hidden_states=True)
        both.append(warped(out.logits[0, at - 1 :].float(), settings))
    p, q = both
    hidden = out.hidden_states[-1][0, at - 1 :].float()  # as it is stored; Llama's last one is behind the final norm
    for i, record in enumerate(records):
        x = record["token"]
        want = [float(p[i, x]), float(q[i, x]), float((p[i] - q[i]).abs().sum() / 2)]
        assert [record["p"], record["q"], record["distance"]] == pytest.approx(want, abs=2e-4)
        assert settings.mix is not None or close(record["features"], hidden[i])
        assert record["q"] > 0
        if not settings.do_sample:
            assert record["q"] == 1 and record["p"] in (0, 1) and x == int(q[i].argmax())


def test_columns_rows_and_what_is_recorded(tmp_path):
    given = texts(3)
    rows = demo_run(tmp_path, given, new_tokens=NEW, batch_size=2, seed=4)
    data = load_from_disk(str(tmp_path / "data"))
    assert data.column_names == ["prompt", "kind", "position", "token", "p", "q", "distance", "features"]
    assert data.features["kind"].names == list(KINDS) == ["original", "draft", "target", "mixed"]
    assert list(rows) == [(prompt, kind) for prompt in range(3) for kind in range(4)]
    assert all([r["position"] for r in row] == list(range(NEW)) for row in rows.values())
    facts = json.loads((tmp_path / "data" / "collect.json").read_text())
    m = models()
    assert facts["settings"]["new_tokens"] == NEW and facts["settings"]["seed"] == 4 and facts["prompts"] == 3
    assert [facts[n] for n in ("target", "draft")] == [ModelIdentity.of(x).to_dict() for x in (m.target, m.draft)]
    table = read_dataset(tmp_path / "data")
    assert len(table) == 3 * 4 * NEW and table.features.shape == (len(table), facts["hidden_size"])
    assert table.p.tolist() == data["p"][:] and table.prompt.tolist() == data["prompt"][:]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data"]
    here = [p.name for p in (tmp_path / "data").iterdir() if str(tmp_path).encode() in p.read_bytes()]
    assert not here, "a dataset that is shared would tell where it was made"


@pytest.mark.full
@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.7, "top_k": 5}, {"lam": 0.5, "temperature": 2.0, "top_p": 0.9}, {"do_sample": False}],
)
def test_every_kind_by_plain_forwards(tmp_path, sampling):
    """The tokens that rows went on with are not in the data; the draft's state one position later betrays them."""
    pair, given = tiny_pair(), word_prompts(9, 4, 13, 6)
    given[0] = PromptText(given[0].prompt, "w3 w1 w4 w1 w5 w9 w2")
    settings = CollectSettings(new_tokens=NEW, batch_size=3, **sampling)
    went_on, rows = [], run(tmp_path, pair, given, new_tokens=NEW, batch_size=3, **sampling)
    for (prompt, kind), records in rows.items():
        text, ending = split_text(pair[2], given[prompt], kind, NEW)
        at = len(text)
        if kind == ORIGINAL:
            assert len(records) == min(NEW, len(ending) + 1)
            text = text + ending
        for i, record in enumerate(records if kind != ORIGINAL else []):
            if i:
                text.append(rebuilt(pair[1], text, record["features"]))
                before = records[i - 1]
                accepted = text[-1] == before["token"]
                went_on.append((kind, accepted))
                assert kind != DRAFT or accepted
                if kind == MIXED and label_acceptable(
                    torch.tensor(before["p"]), torch.tensor(before["q"]), settings.lam
                ):
                    assert accepted
        compare(pair, text[: at + NEW - 1], at, records, settings)
    assert {(TARGET, False), (MIXED, True), (MIXED, False)} <= set(went_on)
    if not settings.do_sample:
        assert rows[0, TARGET] == [record | {"kind": TARGET} for record in rows[0, MIXED]]
        assert {record["p"] for row in rows.values() for record in row} == {0.0, 1.0}


@torch.no_grad()
def rebuilt(draft: Any, text: list[int], features: list[float], *behind: int) -> int:
    """The one token behind `text` for which the draft's state, after a token behind it if there is one, is `features`."""
    ids = torch.tensor([[*text, token, *behind] for token in range(small.VOCAB)])
    hidden = draft(ids, output_hidden_states=True).hidden_states[-1][:, -1]
    off = (hidden - torch.tensor(features)).abs().amax(dim=1)
    assert off.min() < 1e-3 < off.sort().values[1]
    return int(off.argmin())


@pytest.mark.full
@torch.no_grad()
@pytest.mark.parametrize("mix", [0.5, *(pytest.param(mix, marks=pytest.mark.full) for mix in (0.0, 1.0))])
def test_replaced_tokens_by_plain_forwards(tmp_path, mix):
    """For SpecDec++ a record is the draft's token, with its own state, behind a text of which the share `mix` is the target's own draw."""
    pair, given, settings = tiny_pair(), word_prompts(5, 8, 3, 6), CollectSettings(new_tokens=10, mix=mix)
    accepted, expected, spread = 0, 0.0, 0.0
    for (number, kind), records in run(tmp_path, pair, given, new_tokens=10, mix=mix).items():
        text = pair[2](given[number].prompt)["input_ids"]
        assert kind == 0 and [record["position"] for record in records] == list(range(10))
        for i, record in enumerate(records):
            compare(pair, text, len(text), [record], settings)
            output = pair[1](torch.tensor([[*text, record["token"]]]), output_hidden_states=True)
            assert close(record["features"], output.hidden_states[-1][0, -1])
            if i + 1 == len(records):
                break
            text.append(rebuilt(pair[1], text, records[i + 1]["features"], records[i + 1]["token"]))
            chance, is_draft = 1 - mix + mix * record["p"], text[-1] == record["token"]
            accepted, expected, spread = accepted + is_draft, expected + chance, spread + chance * (1 - chance)
    assert float(accepted) == pytest.approx(expected, abs=3.5 * math.sqrt(spread) + 1e-4)
    assert mix == 0 or spread > 1
    facts, card = read_dataset(tmp_path / "data"), (tmp_path / "data" / "README.md").read_text()
    assert facts.kinds == [REPLACED] and len(facts) == 40 and facts.facts["settings"]["mix"] == mix
    assert card_problems(card) == ([], []) and "hf-lossy fit specdec" in card and "SPRINTER" not in card


@pytest.mark.full
@torch.no_grad()
@pytest.mark.parametrize("lam", [0.3, 1.2])
def test_what_rows_go_on_with_has_the_right_distribution(tmp_path, lam):
    target, draft, tokenizer = pair = tiny_pair()
    count, temperature = 500, 1.2
    given = word_prompts(5) * count
    rows = run(tmp_path, pair, given, new_tokens=2, batch_size=count, lam=lam, temperature=temperature)
    prompt = tokenizer(given[0].prompt)["input_ids"]
    p, q = ((model(torch.tensor([prompt])).logits[0, -1] / temperature).softmax(dim=-1) for model in (target, draft))
    accepted = q * torch.where(q <= lam * p, 1.0, (p / q).clamp(max=1.0))
    residual = (p - q).clamp(min=0)
    expected_of = {DRAFT: q, TARGET: p, MIXED: accepted + (1 - accepted.sum()) * residual / residual.sum()}
    assert (p - q).abs().sum() / 2 > 0.2, "they are too alike to tell apart"

    ids = torch.cat([torch.tensor([prompt]).expand(small.VOCAB, -1), torch.arange(small.VOCAB)[:, None]], dim=1)
    states = draft(ids, output_hidden_states=True).hidden_states[-1][:, -1].float()  # (V, H), as they are stored
    for kind, p_kind in expected_of.items():
        second = torch.tensor([rows[i, kind][1]["features"] for i in range(count)])
        went_on = torch.cdist(second, states).argmin(dim=1)
        proposed = torch.tensor([rows[i, kind][0]["token"] for i in range(count)])
        for tokens, expected in ((went_on, p_kind), (proposed, q)):
            assert goodness(torch.bincount(tokens, minlength=small.VOCAB), expected) > REJECT


def test_the_targets_generation_config_changes_nothing(tmp_path):
    pair, given = tiny_pair(), word_prompts(6)
    plain = run(tmp_path, pair, given, "plain", new_tokens=6)
    target = tiny.build("llama", eos_token_id=None)
    target.generation_config.update(do_sample=True, temperature=0.1, top_k=2, top_p=0.3)
    assert run(tmp_path, (target, *pair[1:]), given, "other", new_tokens=6) == plain


@pytest.mark.full
def test_an_end_token_ends_a_row(tmp_path):
    given = texts(1, seed=5)
    m = models()
    rows = demo_run(tmp_path, given, new_tokens=70, do_sample=False, batch_size=1)
    for (prompt, kind), records in rows.items():
        ids = m.tokenizer(given[prompt].prompt)["input_ids"]
        if kind == ORIGINAL:  # a proposal behind each of its tokens; the end is never forced
            assert len(records) == 1 + len(m.tokenizer(given[prompt].continuation)["input_ids"])
            continue
        model = m.draft if kind == DRAFT else m.target
        whole = model.generate(torch.tensor([ids]), max_new_tokens=70, do_sample=False)[0]
        assert whole[-1] == m.tokenizer.eos_token_id
        assert len(records) == len(whole) - len(ids)
        if kind == DRAFT:
            assert [r["token"] for r in records] == whole[len(ids) :].tolist()


def test_label_and_settings():
    p, q = torch.tensor([0.5, 0.5, 0.5, 0.0, 0.0]), torch.tensor([0.5, 0.625, 0.75, 0.1, 0.0])
    assert label_acceptable(p, q, 1.25).tolist() == [True, True, False, False, True]
    assert label_acceptable(p, q, 1.0).tolist() == [True, False, False, False, True]
    for wrong in (
        {"new_tokens": 0}, {"batch_size": -1}, {"top_k": -1}, {"top_p": 1.5}, {"top_p": 0.0}, {"temperature": 0.0}, {"temperature": -1.0},
        {"lam": float("nan")}, {"lam": -0.1}, {"mix": 1.5},
    ):  # fmt: skip
        with pytest.raises(ValueError) as error:
            CollectSettings(**wrong)
        assert "\n" not in str(error.value)


@pytest.mark.full
def test_a_seed_names_a_dataset(tmp_path):
    pair, given = tiny_pair(), word_prompts(4, 6, 5)
    torch.manual_seed(1)
    one = run(tmp_path, pair, given, "1", new_tokens=6, batch_size=2)
    state = torch.random.get_rng_state()
    torch.manual_seed(2)
    assert run(tmp_path, pair, given, "2", new_tokens=6, batch_size=2) == one
    assert run(tmp_path, pair, given, "3", new_tokens=6, batch_size=2, seed=1) != one
    torch.manual_seed(1)
    assert torch.equal(torch.random.get_rng_state(), state), "collecting must not touch the caller's random state"
    again = run(tmp_path, pair, given[:1] * 3, "4", new_tokens=6, batch_size=1)
    assert len({tuple(r["token"] for r in again[prompt, DRAFT]) for prompt in range(3)}) > 1


def test_models_that_cannot_be_used_are_refused_before_anything_is_written(tmp_path):
    target, draft, tokenizer = tiny_pair()
    sizes = {"vocab_size": small.VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "context_length": 64}
    rwkv = RwkvForCausalLM(RwkvConfig(**sizes))
    for pair in ((small.t5(), draft), (target, small.t5()), (rwkv, draft)):
        with pytest.raises(ValueError, match="collecting needs models that run in batches") as error:
            collect(*pair, tokenizer, word_prompts(4), tmp_path / "data")
        assert "\n" not in str(error.value)
    draft.config.pard_token = 3
    refused(lambda: collect(target, draft, tokenizer, word_prompts(4), tmp_path / "data"), "delete pard_token")
    del draft.config.pard_token
    blocks = hla.DFlashDrafter(eagle.dflash_network(target, target_layers=(0, 1)))
    refused(lambda: collect(target, blocks, tokenizer, word_prompts(4), tmp_path / "data"), "needs a draft model")
    (tmp_path / "there").mkdir()
    refused(lambda: collect(target, draft, tokenizer, word_prompts(4), tmp_path / "there"), "exists")
    assert [p.name for p in tmp_path.iterdir()] == ["there"] and not list((tmp_path / "there").iterdir())


def test_texts_come_with_their_continuation(tmp_path):
    file = tmp_path / "p.jsonl"
    lines = [
        {"prompt": "a", "continuation": "b"}, {"question": "c", "answer": "d"}, {"turns": ["e", "x"], "reference": ["f", "y"]},
        {"prompt": "g"}, {"prompt": "h", "answer": ""}, {"prompt": "i", "reference": []},
    ]  # fmt: skip
    file.write_text("\n\n".join(json.dumps(line) for line in lines))
    want = [("a", "b"), ("c", "d"), ("e", "f"), ("g", None), ("h", None), ("i", None)]
    assert [(text.prompt, text.continuation) for text in read_texts(file)] == want
    assert [(text.prompt, text.continuation) for text in read_texts(file, 2)] == want[:2]
    file.write_text('{"prompt": "a"}\n{"text": "b"}')
    refused(lambda: read_texts(file), "line 2")


def test_the_card_counts_what_is_there(tmp_path):
    given = [*word_prompts(5, 8), PromptText("w1 w2", "w3 w4")]
    collect(*tiny_pair(), given, tmp_path / "data", CollectSettings(new_tokens=6, lam=1.5), source="three prompts")
    card = (tmp_path / "data" / "README.md").read_text()
    assert card_problems(card) == ([], [])
    table = read_dataset(tmp_path / "data")
    assert f"{len(table)} tokens of 3 prompts (three prompts)" in card
    for k, name in enumerate(KINDS):
        selected = table.kind == k
        share = float((table.q <= 1.5 * table.p)[selected].double().mean())
        (found,) = re.findall(rf"^\| {name} \| (\d+) \| ([\d.]+) % \|$", card, flags=re.M)
        assert (int(found[0]), float(found[1])) == (int(selected.sum()), pytest.approx(100 * share, abs=0.051))
