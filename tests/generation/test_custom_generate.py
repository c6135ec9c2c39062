"""`hub_cards/custom_generate` as Transformers loads it from a Hub: the same tokens, statistics and errors as after `enable`."""

import builtins
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard, create_repo, upload_folder
from support.hub_server import card_problems
from support.small import Listener
from transformers import AutoModelForCausalLM, GenerationConfig, MaxLengthCriteria, MinLengthLogitsProcessor

import hf_lossy_assist as hla


FOLDER = Path(__file__).parent.parent.parent / "hub_cards" / "custom_generate"
REPO = "org/hf-lossy-assist"
GREEDY = {"max_new_tokens": 24, "do_sample": False}
SAMPLING = {"max_new_tokens": 24, "do_sample": True, "temperature": 0.9, "top_p": 0.95}


@pytest.fixture(scope="module")
def demo():
    return hla.demo.load()


@pytest.fixture
def repo(hub):
    create_repo(REPO)
    upload_folder(repo_id=REPO, folder_path=FOLDER)
    return REPO


def prompts(demo, rows):
    texts = [problem.prompt for problem in hla.demo.problems(rows, seed=1)]
    return demo.tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)


def both(demo, repo, *args, **settings):
    """Return the outputs of the repository's `generate` and of an enabled model."""
    settings = {"assistant_model": demo.draft, "return_dict_in_generate": True} | settings
    torch.manual_seed(3)
    loading = {"custom_generate": repo, "trust_remote_code": True, "revision": "main"}
    from_repo = demo.target.generate(*args, **loading, **settings)
    settings.setdefault("lossy_policy", "strict")
    torch.manual_seed(3)
    hla.enable(demo.target)
    try:
        return from_repo, demo.target.generate(*args, **settings)
    finally:
        hla.disable(demo.target)


def same(from_repo, ours):
    assert torch.equal(from_repo.sequences, ours.sequences)
    found, expected = (out.speculation.to_dict(rows=True, sources=True) for out in (from_repo, ours))
    assert found.pop("seconds").keys() == expected.pop("seconds").keys()
    for name in [name for name in found if name.startswith("target_alone") or name == "worth"]:  # seconds as well
        assert type(found.pop(name)) is type(expected.pop(name)), name
    assert found == expected


@pytest.mark.full
def test_every_argument_arrives(demo, repo):
    ids = prompts(demo, 1)
    width, end = ids["input_ids"].shape[1], demo.target.generation_config.eos_token_id
    settings = {
        "generation_config": GenerationConfig(max_new_tokens=30, do_sample=False),
        "logits_processor": [MinLengthLogitsProcessor(width + 18, end)],
        "stopping_criteria": [MaxLengthCriteria(width + 20)],
        "prefix_allowed_tokens_fn": lambda row, text: range(2, 140),
        "num_assistant_tokens": 3,
        "tokenizer": demo.tokenizer,
        "output_scores": True,
    }
    streamer = Listener()
    first, second = both(demo, repo, **ids, **settings, streamer=streamer)
    same(first, second)
    assert streamer.heard == 2 * [*first.sequences[0].tolist(), "end"]
    assert len(first.speculation.to_dict()["acceptance_histogram"]) <= 4
    assert first.sequences.shape[1] == width + 20 and len(first.scores) == first.sequences.shape[1] - width
    assert all(torch.equal(a, b) for a, b in zip(first.scores, second.scores, strict=True))
    same(*both(demo, repo, ids["input_ids"], **GREEDY))
    same(*both(demo, repo, **prompts(demo, 3), **SAMPLING))


def test_a_folder_serves_as_well(demo, hub):
    same(*both(demo, str(FOLDER), **prompts(demo, 1), **GREEDY, lossy_policy="svip"))
    assert hub.requests == []


@pytest.mark.full
def test_in_a_models_repository(demo, hub, tmp_path):
    demo.target.save_pretrained(tmp_path)
    shutil.copytree(FOLDER / "custom_generate", tmp_path / "custom_generate")
    create_repo("org/model")
    upload_folder(repo_id="org/model", folder_path=tmp_path)
    model = AutoModelForCausalLM.from_pretrained("org/model", trust_remote_code=True, dtype=torch.float32)
    ids = prompts(demo, 1)
    out = model.generate(ids["input_ids"], **GREEDY, assistant_model=demo.draft, return_dict_in_generate=True)
    _, ours = both(demo, str(FOLDER), ids["input_ids"], **GREEDY)
    same(out, ours)
    again = hla.enable(model).generate(**ids, **GREEDY, assistant_model=demo.draft, lossy_policy="strict")
    assert torch.equal(again, ours.sequences)


def test_without_the_package_one_line_says_what_to_install(demo, repo, monkeypatch):
    found = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("hf_lossy_assist"):
            raise ModuleNotFoundError(f"No module named {name!r}", name="hf_lossy_assist")
        return found(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match="needs the package hf_lossy_assist: run `pip install") as error:
        demo.target.generate(**prompts(demo, 1), custom_generate=repo, trust_remote_code=True)
    assert "\n" not in str(error.value)


def test_the_card(repo):
    assert card_problems((FOLDER / "README.md").read_text(encoding="utf-8")) == ([], [])
    card = ModelCard.load(repo)
    assert card.data.library_name == "transformers" and "custom_generate" in card.data.tags
    assert card.data.license == "apache-2.0"
    assert all(f'"{name}"' in card.text for name in ("strict", "svip", "constant", "heuristic", "confidence"))
