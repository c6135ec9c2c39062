"""Models, heads and files that do not go together, or are none of what was asked for: one line, before weights are read."""

import json
import shutil

import pytest
from support import small
from support.commands import DEMO

from hf_lossy_assist import demo
from hf_lossy_assist.artifacts import loading
from hf_lossy_assist.generation import model_checks


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*policy is lossy:UserWarning"),
    pytest.mark.filterwarnings("ignore:the head's .* may differ:UserWarning"),
]


@pytest.mark.filterwarnings("always:the head .* was trained for:UserWarning")
def test_a_head_for_another_kind_of_decoding_is_warned_of(hf_lossy, monkeypatch):
    """The demo's was trained on samples."""
    monkeypatch.setattr(model_checks, "_warned", set())
    short = ("generate", "--policy", "sprinter", "--prompt", "1 + 1", "--max-new-tokens", 2)
    greedy, sampled = (hf_lossy(*short, option) for option in ("--greedy", "--do-sample"))
    [line] = [line for line in greedy.err.splitlines() if "the head" in line]
    assert "was trained for sampling, and this is greedy decoding" in line and "hf-lossy collect --greedy" in line
    assert line.startswith("warning: ") and "the head" not in sampled.err
    judged = hf_lossy("generate", "--policy", "autojudge", "--prompt", "1 + 1", "--max-new-tokens", 2, "--do-sample")
    assert "hf-lossy mine --do-sample" in judged.err


def test_the_demos_problems_are_not_for_other_models(hf_lossy, tmp_path):
    for command in ("tune", "compare"):
        done = hf_lossy(command, "--policies", "svip", *DEMO, "--task", "demo")
        assert "the demo's problems are for the demo models" in done.line
    assert "the demo's problems are for the demo models" in hf_lossy("collect", *DEMO, "--out", tmp_path / "x").line


GOOD = json.dumps({"prompt": "1 + 1?", "answer": "2"}) + "\n"
BAD = {
    "a missing field": (GOOD + '{"text": "1 + 1?"}\n', "line 2: expected a text under 'prompt' or 'question' or 'turns'"),
    "JSON that ends early": (GOOD + '\n{"prompt": "1 +\n', "line 3 is not JSON: "),
    "a list": (GOOD + "[1, 2]\n", "line 2: expected "), "an empty file": ("", "holds no "),
    "bytes": (b"\x89PNG\r\n\x1a\n\x00\xff", "line 1 is not JSON: 'utf-8' codec"),
}  # fmt: skip
READERS = {  # the commands that read a file of prompts or problems, and how it is passed
    "compare prompts": ["compare", "--prompts"],
    "compare task": ["compare", "--task"],
    "tune": ["tune", "--task"],
    "mine": ["mine", "--out", "{tmp}/out", "--task"],
    "collect": ["collect", "--out", "{tmp}/out", "--prompts"],
    "generate": ["generate", "--prompts"],
}


@pytest.fixture
def no_weights(monkeypatch):
    monkeypatch.setattr(loading, "load_model", lambda *_, **__: pytest.fail("weights were read"))
    monkeypatch.setattr(demo, "load", lambda *_, **__: pytest.fail("weights were read"))


@pytest.fixture
def line(hf_lossy, tmp_path, no_weights):
    """The one line that a command of these words ends with."""

    def run(*words):
        done = hf_lossy(*(str(word).replace("{tmp}", str(tmp_path)) for word in words))
        assert not done.out and not (tmp_path / "out").exists()
        return done.line

    return run


def test_a_file_that_cannot_be_read(line, tmp_path):
    """Each kind of damage, and each command that reads such a file."""
    for reader, bad in zip(READERS.values(), [*BAD.values(), *BAD.values()], strict=False):
        content, says = bad
        file = tmp_path / "rows.jsonl"
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        message = line(*reader, file, *DEMO)
        assert says in message and "rows.jsonl" in message, message


def test_a_task_whose_answers_cannot_be_counted(line, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n{"question": "2 + 2?"}\n')
    for command in ("compare", "tune", "mine"):
        more = ["--out", "{tmp}/out"] if command == "mine" else []
        message = line(command, *more, "--task", "gsm8k", "--data", file, *DEMO)
        assert "line 2" in message and "'answer'" in message, message
    file.write_text(GOOD + '{"prompt": "2 + 2?"}\n')
    message = line("tune", "--task", file, *DEMO)
    assert "rows.jsonl: problem 2 has no right answer" in message and "add `answer`" in message
    file.write_text(GOOD)
    for command in ("compare", "tune"):
        assert "allow" in line(command, "--task", "code", "--data", file, *DEMO)


def test_a_draft_with_another_tokenizer(line, tmp_path):
    """Its sizes are the same, with other words under its ids."""
    draft, file = tmp_path / "draft", tmp_path / "rows.jsonl"
    shutil.copytree(demo.FOLDER / "draft", draft)
    small.tokenizer().save_pretrained(draft)
    file.write_text("".join(GOOD.replace("1 + 1", f"1 + {i}") for i in range(8)))
    for reader, words in READERS.items():
        more = ["--json"] if reader == "tune" else []  # else it says first what the problems can certify
        message = line(*words, file, "--model", DEMO[1], "--assistant", draft, *more)
        assert "has another tokenizer than" in message and "token ids mean other words; pass a draft" in message
