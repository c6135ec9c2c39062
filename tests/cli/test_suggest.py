"""`hf-lossy suggest`: drafts for a target's name, as a table has them."""

import re

from hf_lossy_assist.cli.without_models import _TABLE, DFLASH, DSPARK, EAGLE, MODEL, PARALLEL, PICKLE, find_published


PUBLISHED = [
        ("Qwen/Qwen2.5-7B-Instruct", ["Qwen/Qwen2.5-0.5B-Instruct", "amd/PARD-Qwen2.5-0.5B"]),
        ("Qwen/Qwen2.5-7B", ["Qwen/Qwen2.5-0.5B"]),
        ("models/qwen2.5-7b-instruct/", ["Qwen/Qwen2.5-0.5B-instruct", "amd/PARD-Qwen2.5-0.5B"]),  # the Hub redirects other letter case
        ("Qwen/Qwen2.5-Coder-32B-Instruct-AWQ", ["Qwen/Qwen2.5-Coder-0.5B-Instruct"]),
        ("Qwen/Qwen3-14B", ["Qwen/Qwen3-0.6B", "RedHatAI/Qwen3-14B-speculator.eagle3", "deepseek-ai/dspark_qwen3_14b_block7"]),
        ("google/gemma-2-27b-it", ["google/gemma-2-2b-it"]),
        ("openai/gpt-oss-120b", ["RedHatAI/gpt-oss-120b-speculator.eagle3", "z-lab/gpt-oss-120b-DFlash"]),
        ("Qwen/Qwen3.6-35B-A3B", ["z-lab/Qwen3.6-35B-A3B-DFlash"]),
        ("Qwen/Qwen3.8-27B", ["z-lab/Qwen3.8-27B-DFlash2"]),
        ("Qwen/Qwen3.6-4B", []),
        ("facebook/opt-6.7b", ["facebook/opt-125m"]),
        *((name, []) for name in ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-VL-7B-Instruct", "facebook/opt-125m", "org/a", "")),
        *((name, []) for name in ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-8B-Base", "Qwen/Qwen3-1.7B", "org/my-copt-6.7b", "Qwen/Qwen2.5-7B.1")),
]  # fmt: skip


def test_a_targets_name():
    for target, drafts in PUBLISHED:
        assert [found["draft"] for found in find_published(target)] == drafts, target


def test_every_row_has_a_source_and_a_way():
    assert all(source == "" or re.fullmatch(r"https://\S+", source) for *_, source in _TABLE)
    for found in find_published("meta-llama/Meta-Llama-3.1-8B-Instruct"):
        ways = {EAGLE: "--drafter ", PICKLE: "assistant_model=hla.load_drafter("}
        way = ways.get(found["kind"], "--assistant ")
        assert found["line"].startswith(way) and found["draft"] in found["line"]
        assert found["source"].startswith("https://")
    assert {kind for _, _, kind, _ in _TABLE} == {MODEL, EAGLE, PICKLE, DSPARK, PARALLEL, DFLASH}


def test_the_command(hf_lossy):
    found = hf_lossy("suggest", "Qwen/Qwen3-8B")
    assert found.code == 0 and "--assistant Qwen/Qwen3-0.6B" in found.out
    assert "hf-lossy compare --model Qwen/Qwen3-8B" in found.out
    assert hf_lossy("suggest", "Qwen/Qwen3-8B", "--json").json[0]["draft"] == "Qwen/Qwen3-0.6B"
    none = hf_lossy("suggest", "org/model")
    assert none.code == 0 and "no draft for org/model" in none.out and "--drafter suffix" in none.out
    assert hf_lossy("suggest", " ").line == "hf-lossy: MODEL: expected a Hub id or a folder, got an empty text"
