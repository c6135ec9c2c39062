"""`hf-lossy` as a user runs it: its output and its exit code, and what a user mistypes, whoever finds it; once each, also as a process."""

import json
import os
import signal
import threading
import time

import pytest

from hf_lossy_assist import Heuristic, LossyPolicy, demo


LONG = "x" * 100_000
CANNOT_BE_SET = [
    ("num_beam=1", "--set: unknown setting 'num_beam'. Did you mean 'num_beams'?"),
    ("num_beams", "--set: expected NAME=VALUE such as num_beams=1, got 'num_beams'"),
    ("do_sample=true", "--set do_sample: the command decides it: pass --do-sample"),
    ("cache_implementation=fast", "--set 'cache_implementation=fast': Invalid `cache_implementation` (fast)"),
    ("num_assistant_tokens=9", "--set num_assistant_tokens: the policy decides it: pass a stop"),
    ("watermarking_config=5", "--set 'watermarking_config=5': "),
    ("suppress_tokens=5", "--set 'suppress_tokens=5': "),
]


def test_the_demo_solves_its_problems_and_shows_statistics(hf_lossy, tmp_path):
    done = hf_lossy("generate", "--policy", "svip", "--batch-size", "3")
    assert done.code == 0, done.err
    assert "The answer is" in done.out and "solved 3 of 3 problems" in done.out and "draft acceptance rate" in done.out
    assert "\x1b[" not in done.out  # plain where there is no terminal
    problems = demo.problems(3, seed=9)
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": p.prompt}) + "\n" for p in problems))
    report = hf_lossy("generate", "--prompts", file, "--policy", "svip", "--batch-size", 2, "--json").json
    assert list(report) == ["model", "assistant", "drafter", "policy", "seconds", "speculation", "outputs"]
    assert [o["prompt"] for o in report["outputs"]] == [p.prompt for p in problems]
    for output, problem in zip(report["outputs"], problems, strict=True):
        assert set(output) == {"prompt", "text", "token_ids", "finish_reason", "speculation"}
        assert demo.answer(output["text"]) == problem.answer
        assert len(output["token_ids"]) == output["speculation"]["num_new_tokens"]
        assert len(output["token_ids"]) == len(output["speculation"]["token_sources"])
    assert report["speculation"]["num_new_tokens"] == sum(len(o["token_ids"]) for o in report["outputs"])


def test_policies_agree_with_the_target_alone_and_a_policy_may_be_json_or_a_folder(hf_lossy, tmp_path):
    LossyPolicy(stop=Heuristic()).save_pretrained(tmp_path / "policy")
    texts = []
    for policy in ("target", "strict", '{"stop": {"name": "svip", "h": 0.5}}', str(tmp_path / "policy")):
        report = hf_lossy("generate", "--policy", policy, "--limit", 1, "--json").json
        assert (report["speculation"] is None) == (policy == "target")
        texts.append([(o["text"], o["token_ids"]) for o in report["outputs"]])
    assert all(t == texts[0] for t in texts)


@pytest.mark.full
def test_sampling_is_reproducible_by_seed(hf_lossy):
    sampled = ("generate", "--do-sample", "--temperature", 1.5, "--json")
    runs = [hf_lossy(*sampled, "--seed", seed).json["outputs"] for seed in (1, 1, 2)]
    ids = [[output["token_ids"] for output in run] for run in runs]
    assert ids[0] == ids[1] != ids[2]


def test_wrong_arguments_give_one_line_and_exit_code_2(hf_lossy):
    for arguments, says in (
        (["--policy", "svpi"], "svip"), (["--policy", '{"stop": {"name": "svip", "hh": 1}}'], "hh"),
        (["--policy", "nowhere.json"], "nowhere.json"), (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--model", "somewhere", "--prompt", "a"], "model and assistant: expected both"),
        (["--dtype", "float7"], "float7"), (["--device", "tpu9"], "tpu9"),
        (["--device", "meta"], "device 'meta' cannot be used here"),
        (["--dtype", "int8", "--device", "cuda"], "pass device cpu"),
        (["--model", "/nonexistent/model"], "/nonexistent/model"),
        (["--model", "/nonexistent/model", "--assistant", "/nonexistent/model", "--prompt", "a"], "/nonexistent/model"),
        (["--prompt", " "], "empty"), (["--temperature", "2"], "are for --do-sample: pass it"),
        (["--drafter", "sufix"], "suffix"), (["--drafter", '{"name":'], "JSON"),
        (["--drafter", "suffix", "--policy", "target"], "leave --drafter out"),
        (["--drafter", "suffix", "--policy", "svip"], "a stop that plans ahead"),
        *((["--set", given], says) for given, says in CANNOT_BE_SET),
    ):  # fmt: skip
        done = hf_lossy("generate", *arguments)
        assert says in done.line and done.out == "", arguments


@pytest.mark.full
def test_the_target_alone_is_not_the_policy_that_came_with_it(hf_lossy, tmp_path):
    models = demo.load()
    models.target.generation_config.lossy_policy = {"rule": {"name": "top_k", "k": 50}}
    models.target.save_pretrained(tmp_path)
    models.tokenizer.save_pretrained(tmp_path)
    options = ("--policy", "target", "--prompt", "1 + 1", "--max-new-tokens", 4, "--json")
    assert "lossy_policy" in (tmp_path / "generation_config.json").read_text()
    given = hf_lossy("generate", "--model", tmp_path, *options)
    assert given.json["outputs"] == hf_lossy("generate", *options).json["outputs"]
    assert "lossy" not in given.err


def test_the_policies_and_one_in_full(hf_lossy, monkeypatch):
    for columns in ("80", "60"):  # nothing in the table is cut
        monkeypatch.setenv("COLUMNS", columns)
        done = hf_lossy("policies")
        assert done.code == 0 and "…" not in done.out and max(map(len, done.out.splitlines())) <= int(columns)
        assert all(f"\n{name}  " in done.out for name in ("all_but_last", "block_verification", "top_k", "svip"))
    done = hf_lossy("policies", "top_k")
    assert done.code == 0 and done.out.startswith("rule top_k: ") and "tune tries: k = 2, 3, 4, 8" in done.out
    svip = hf_lossy("policies", "svip").out
    assert svip.count("guarantee: ") == 2 and "H > 0.60 nats" in svip  # a method and a stop; what h means
    assert "Did you mean 'top_k'" in hf_lossy("policies", "topk").line
    assert hf_lossy("-h").out == hf_lossy("--help").out


def test_a_mistyped_command_is_one_line_of_300_characters(hf_lossy):
    for arguments, says in (
        (["genrate"], "generate"), (["generate", "--max-new-tokens", "x"], "--max-new-tokens"),
        (["generate", "--prompt"], "--prompt"), (["generate", "--promt", "x"], "--promt"),
        (["fit", "sprinter", "data"], "--out"), (["fit", "sprinter"], "data"), (["pull", "org/name", "extra"], "extra"),
        (["policies", "--kind", "x" * 5000], "--kind"), (["policies", "--kind", "\x1b[31mred\x07"], "--kind"),
        (["fit", "specdec", "y" * 5000, "--out", "z"], "yyy"), (["generate", "--policy", LONG], "xxx"),
        (["generate", "--policy", f"sprinter:head={LONG}"], "xxx"),
        (["generate", "--model", LONG, "--assistant", "x", "--prompt", "x"], "xxx"),
        (["generate", "--prompts", LONG], "xxx"), (["generate", "--drafter", LONG], "xxx"),
        (["generate", f"--{LONG}"], "xxx"), (["report", LONG], "xxx"), (["collect", "--out", LONG], "xxx"),
        (["serve", "--policies", LONG], "xxx"),
    ):  # fmt: skip
        done = hf_lossy(*arguments)
        line = done.line
        assert done.out == "" and says in line, arguments
        assert len(line) <= 300 and line.isprintable()
    for arguments in ([], ["fit"]):  # a command alone shows its help
        done = hf_lossy(*arguments)
        assert done.code == 2 and done.err == "" and "--help" in done.out


@pytest.mark.nightly
def test_a_job_whose_time_is_over_is_gone_on_with(hf_lossy, tmp_path):
    """By SIGTERM, which schedulers and `timeout` send: nothing is lost."""

    def end():
        while len(list(tmp_path.glob("data.partial/*"))) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end).start()
    job = ("collect", "--prompts", "demo", "--limit", 40, "--max-new-tokens", 24, "--batch-size", 2)
    ended = hf_lossy(*job, "--out", tmp_path / "data")
    assert ended.code == 130 and "--resume goes on" in ended.out
    assert ended.err.splitlines()[-1] == "hf-lossy: interrupted" and os.listdir(tmp_path) == ["data.partial"]
    done = hf_lossy(*job, "--out", tmp_path / "data", "--resume")
    assert done.code == 0 and os.listdir(tmp_path) == ["data"]
    whole = hf_lossy(*job, "--out", tmp_path / "whole")
    assert whole.code == 0 and whole.out.split()[1] == done.out.split()[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The demo's pair, whose target's file has beams and Gemma's name of a cache."""
    folder, models = tmp_path_factory.mktemp("beams"), demo.load()
    for name in ("target", "draft"):
        getattr(models, name).save_pretrained(folder / name)
        models.tokenizer.save_pretrained(folder / name)
    file = folder / "target" / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_beams": 4, "cache_implementation": "hybrid"}))
    return folder


@pytest.mark.full
@pytest.mark.parametrize("command", [
    ("generate", "--prompt", "1 + 1", "--policy", "strict"),
    ("compare", "--policies", "strict", "--limit", 2, "--no-static", "--batch-size", 1, "--prompts"),
])  # fmt: skip
def test_a_setting_that_a_command_refuses_is_set_otherwise(hf_lossy, folder, tmp_path, command):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{n} + 1"}) + "\n" for n in range(4)))
    files = [prompts, "--out"] if command[0] != "generate" else []
    models = ("--model", folder / "target", "--assistant", folder / "draft", "--max-new-tokens", 4)
    refused = hf_lossy(*command, *files, *[tmp_path / "one"] * bool(files), *models)
    assert refused.code == 2 and "--set num_beams=1" in refused.err
    done = hf_lossy(*command, *files, *[tmp_path / "two"] * bool(files), *models, "--set", "num_beams=1")
    assert done.code == 0, done.err
