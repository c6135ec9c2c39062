"""Proves that the states of mined tokens are those that separate forwards on prefix + token give."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from support import hybrids, tiny
from support.collecting import record
from support.refusals import refused
from transformers import DynamicCache

from hf_lossy_assist import FeatureSpec
from hf_lossy_assist.artifacts.features import POSITIONS, FeatureTap
from hf_lossy_assist.methods.autojudge.dataset import MinedTable, read_mined
from hf_lossy_assist.methods.autojudge.fit import read_hidden_states
from hf_lossy_assist.models.facts import CACHE


def mined(problems: list[tuple[list[int], list[int], list[tuple[int, int, int, bool]]]]) -> MinedTable:
    """Problems as (prompt, response, mismatches); a mismatch as (position, target's token, draft's token, important)."""
    rows = [(number, *row) for number, (_, _, found) in enumerate(problems) for row in found]
    columns = torch.tensor([list(map(int, row)) for row in rows]).T
    return MinedTable(
        *columns[:4], columns[4].bool(), texts={n: (p, r) for n, (p, r, _) in enumerate(problems)}, facts={}
    )  # fmt: skip


def random_mined(vocabulary: int, lengths: tuple[tuple[int, int], ...] = ((5, 30), (1, 12), (17, 25))) -> MinedTable:
    """Responses longer than the tiny windows; mismatches side by side, at position 0, and with either token in the text."""
    generator = torch.Generator().manual_seed(1)
    problems = []
    for prompt, response in lengths:
        ids = torch.randint(4, vocabulary, (prompt + response,), generator=generator).tolist()
        found = []
        for t in sorted({0, 3, 4, response // 2, response - 2, response - 1}):
            target_token = ids[prompt + t]
            other, important = 4 + (target_token + 7 * t + 1) % (vocabulary - 4), t % 2 == 0
            found.append((t, target_token, other, True) if important else (t, other, target_token, False))
        problems.append((ids[:prompt], ids[prompt:], found))
    return mined(problems)


@torch.no_grad()
def one_by_one(model: Any, data: MinedTable, decodes: bool = False) -> dict[str, torch.Tensor]:
    """The same by plain forwards on each prefix with one token behind it; `decodes`: on the prompt, and then on each token as decoding has it."""
    states: dict[str, list[torch.Tensor]] = {place: [] for place in POSITIONS}
    with FeatureTap(model, FeatureSpec("target")) as tap:
        for i in range(len(data)):
            prompt, response = data.texts[int(data.problem[i])]
            prefix = prompt + response[: int(data.position[i])]
            last = {"predicting": [], "token": [int(data.draft_token[i])]}
            for place, token in last.items():
                text, cache = prefix + token, DynamicCache(config=model.config)
                read = len(prompt) if decodes else len(text)
                for part in (text[:read], *([one] for one in text[read:])):
                    model(input_ids=torch.tensor([part]), **{CACHE: cache}, use_cache=True)
                states[place].append(tap.value[0, -1].clone())
    return {place: torch.stack(rows) for place, rows in states.items()}


def read_both(model: Any, data: MinedTable) -> dict[str, torch.Tensor]:
    return {position: read_hidden_states(model, data, position) for position in POSITIONS}


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(got) == set(expected)
    for place, states in expected.items():
        assert got[place].dtype == torch.float32 and got[place].shape == states.shape
        off = float((got[place] - states).abs().max() / states.abs().max())
        assert off < 1e-4, f"{place}: off by {off:.1e}"


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_states_are_those_of_separate_forwards(name):
    data = random_mined(tiny.VOCABULARY)
    model = tiny.shared(name)
    assert_same(read_both(model, data), one_by_one(model, data))


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["lfm2", *(pytest.param(name, marks=pytest.mark.full) for name in ("qwen3_5_text", "zamba2"))]
)
def test_a_recurrent_model_gives_what_separate_forwards_give(name):
    data, model = random_mined(hybrids.VOCABULARY, ((5, 20), (1, 9), (3, 6))), hybrids.model(name)
    # Nemotron-H and Zamba 2 read prompts otherwise than they decode
    assert_same(read_both(model, data), one_by_one(model, data, decodes=True))


def test_rows_keep_their_order():
    data, model = random_mined(tiny.VOCABULARY), tiny.shared("llama")
    whole = read_both(model, data)
    order = torch.randperm(len(data))
    shuffled = MinedTable(
        *(getattr(data, n)[order] for n in ("problem", "position", "target_token", "draft_token", "important")),
        texts=data.texts, facts={},
    )  # fmt: skip
    assert_same(read_both(model, shuffled), {position: states[order] for position, states in whole.items()})


def test_a_draft_that_does_not_know_every_token():
    """As in the engine: an id beyond its vocabulary is shown as its last one."""
    data, model = random_mined(tiny.VOCABULARY + 40), tiny.shared("llama")
    clamped = MinedTable(
        data.problem, data.position, data.target_token.clamp(max=96), data.draft_token.clamp(max=96), data.important,
        texts={n: tuple([min(i, 96) for i in ids] for ids in text) for n, text in data.texts.items()}, facts={},
    )  # fmt: skip
    assert_same(read_both(model, data), one_by_one(model, clamped))


def test_half_precision_gives_float32():
    model = tiny.build("llama").to(torch.bfloat16)
    for states in read_both(model, random_mined(tiny.VOCABULARY)).values():
        assert states.dtype == torch.float32 and states.isfinite().all()


def write(folder: Path, **changes: Any) -> Path:
    rows = {
        "problem": [4, 4, 9], "position": [0, 2, 1], "target_token": [5, 7, 8], "draft_token": [6, 9, 5],
        "important": [True, False, True], "prompt_ids": [[1, 2], [1, 2], [3]], "response_ids": [[5, 6, 9], [5, 6, 9], [4, 8]],
    }  # fmt: skip
    shards = changes.pop("shards", None)
    rows = {name: column for name, column in (rows | changes).items() if column is not None}
    Dataset.from_dict(rows).save_to_disk(str(folder), num_shards=shards)
    return record(folder, "mine.json", {"problems": 10})


def test_a_folder_comes_back(tmp_path):
    data = read_mined(write(tmp_path / "data"))
    assert len(data) == 3 and data.problem.tolist() == [4, 4, 9] and data.position.tolist() == [0, 2, 1]
    assert data.target_token.tolist() == [5, 7, 8] and data.draft_token.tolist() == [6, 9, 5]
    assert data.important.tolist() == [True, False, True] and data.important.dtype == torch.bool
    assert data.texts == {4: ([1, 2], [5, 6, 9]), 9: ([3], [4, 8])} and data.facts["problems"] == 10
    assert [(n, rows.tolist()) for n, rows in data.by_problem()] == [(4, [0, 1]), (9, [2])]


EMPTY = {name: [] for name in
         ("problem", "position", "target_token", "draft_token", "important", "prompt_ids", "response_ids")}  # fmt: skip


DAMAGES = (
    (EMPTY, "no mismatch: the draft guessed every token of 10 problems"),
    (EMPTY | {"shards": 1}, "no mismatch"),
    ({"important": None}, "cannot be read .*important"),
    ({"position": [0, 3, 1]}, "cannot be read .*index out of range"),
    ({"position": [0, -1, 1]}, "problem 4 does not differ at position -1"),
    ({"draft_token": [6, 8, 5]}, r"problem 4 does not differ at position 2 in the tokens \[7, 8\]"),
    ({"prompt_ids": [[1, 2], [1, 2], []]}, "problem 9 does not differ"),
)


def test_what_is_no_mined_dataset_is_refused_in_one_line(tmp_path):
    for number, (changes, says) in enumerate(DAMAGES):
        folder = write(tmp_path / f"data{number}", **changes)
        refused(lambda: read_mined(folder), says)  # noqa: B023
    refused(lambda: read_mined(tmp_path), r"no mine.json in it$")
    (tmp_path / "x.partial").mkdir()
    refused(lambda: read_mined(tmp_path / "x"), r"x.partial is unfinished: hf-lossy mine --resume")
    for text, says in (("[]", "expected an object"), ("{", "mine.json is not JSON")):
        (folder / "mine.json").write_text(text)
        refused(lambda: read_mined(folder), says)
