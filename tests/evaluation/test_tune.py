"""The search for a certified setting, on answers and seconds that are known beforehand; once on the demo."""

import json
import types

import pytest

import hf_lossy_assist as hla
from hf_lossy_assist.cli.measure_commands import _choose_policy
from hf_lossy_assist.evaluation import tuning
from hf_lossy_assist.evaluation.arms import Arm
from hf_lossy_assist.evaluation.tuning import Search, describe_power, expand, parse_search_space, tune_policies
from hf_lossy_assist.evaluation.writer import ArmOutput, TextWriter
from hf_lossy_assist.stats.intervals import Estimate, harm_bound
from hf_lossy_assist.tasks.base import AnswerTask, Problem


class Known(AnswerTask):
    name = "known"

    def problems(self, limit=None):
        return [Problem(str(i), "yes") for i in range(limit)]

    def extract(self, problem, response):
        return response

    def same(self, problem, reference, answer):
        return reference == answer


class Scripted:
    """Writes an answer in known seconds, one number for all or one of each prompt; `wrong`: by arm, the prompts that it has wrong."""

    target = tokenizer = decoding = None

    def __init__(self, seconds, wrong):
        self.seconds, self.wrong, self.calls = seconds, wrong, []

    def write(self, arm, prompts, first, unit):
        self.calls.append((arm.name, first))
        texts = ["no" if first + i in self.wrong.get(arm.name, ()) else "yes" for i in range(len(prompts))]
        seconds = self.seconds[arm.name]
        took = seconds if isinstance(seconds, float) else seconds[first]
        return [ArmOutput(arm.name, first + i, len(prompts), unit, text, [1, 2], took) for i, text in enumerate(texts)]


SECONDS = {
    "target": 4.0, "svip": 2.0, "top_k:k=2+svip": 3.0, "top_k:k=3+svip": 1.5, "top_k:k=4+svip": 1.2,
    "top_k:k=8+svip": 1.0,
}  # fmt: skip
FIELD = ["svip", "top_k+svip"]


@pytest.fixture
def search(monkeypatch):
    """Run a search over 400 problems, the first 80 of which are for trying."""

    def arms(target, draft, policies, **_):
        made = [Arm(name, "policy", policy.lossless, write=None) for name, policy in policies.items()]
        return [Arm("target", "target", write=None), *made]

    monkeypatch.setattr(tuning, "make_arms", arms)

    def run(wrong, seconds=SECONDS, max_loss=0.02, field=FIELD, count=400):
        task, writer = Known(), Scripted(seconds, wrong)
        problems = task.problems(count)
        prompts = [problem.prompt for problem in problems]
        settings = Search(max_loss, 0.05, 80)
        writer.task = task
        return tune_policies(writer, None, parse_search_space(field), problems, prompts, settings), writer

    return run


@pytest.mark.full
def test_the_fastest_of_those_that_are_certified(search):
    """k = 2 is slower than svip, k = 8 harms too much; k = 4 harms one answer of 320."""
    found, writer = search({"top_k:k=8+svip": range(0, 400, 10), "top_k:k=4+svip": [200]})
    assert found.best.step.name == "top_k:k=4+svip"
    assert (found.best.tried.harms, found.best.tried.problems) == (1, 320)
    assert found.best.harm == harm_bound(1, 320, 0.05) < 0.02
    assert found.lossless.arm == "svip" and found.lossless.of_target.value == 2.0
    # k = 3 is outdone
    assert {name for name, first in writer.calls if first >= 80} == {"target", "svip", "top_k:k=4+svip"}
    found, _ = search({"top_k:k=8+svip": range(80, 400, 20), "top_k:k=4+svip": [0], "top_k:k=3+svip": [0, 1, 90]})
    by = {result.step.name: result for result in found.results}
    assert not by["top_k:k=8+svip"].certified and found.best is None
    wrong = set(range(0, 400, 2))
    found, _ = search({name: wrong for name in SECONDS} | {"top_k:k=8+svip": wrong - {100}})
    assert found.best.step.name == "top_k:k=8+svip"
    assert (found.best.tried.harms, found.best.tried.gains) == (0, 1)
    found, _ = search({}, max_loss=0.7, count=83)
    assert [result.certified for result in found.results] == [True] and found.best is None
    assert search({}, max_loss=0.7, count=84)[0].best is not None


@pytest.mark.full
def test_nothing_is_faster(search):
    """Than what is lossless, or than the target: a draft may cost more than it brings."""
    for seconds in (
        dict.fromkeys(SECONDS, 2.5) | {"svip": 2.0},
        dict.fromkeys(SECONDS, 1.95) | {"svip": 2.0, "target": 1.9},
    ):
        found, writer = search({}, seconds)
        assert found.best is None and found.results == []
        assert {name for name, first in writer.calls if first >= 80} == {"target", "svip"}


def test_the_policy_that_is_advised_is_the_one_that_is_written():
    space = types.SimpleNamespace(policies={"svip": hla.svip()})
    for speed, policy in ((0.9, None), (1.1, hla.svip())):
        lossless = types.SimpleNamespace(arm="svip", of_target=Estimate(speed, None, None))
        assert _choose_policy(types.SimpleNamespace(best=None, lossless=lossless), space, None) == policy


@pytest.mark.full
def test_a_gain_within_the_noise_is_none(search):
    """One second in a hundred saved on average, and the seconds of single texts differ by far more."""
    noisy = [1.98 + (-1.0 if i % 2 else 1.0) * (1 if i % 3 else -1) for i in range(400)]
    slow = {"top_k:k=3+svip": 3.0, "top_k:k=4+svip": 3.0}
    found, _ = search({}, SECONDS | slow | {"svip": 2.0, "top_k:k=8+svip": noisy})
    assert [result.certified for result in found.results] == [True] and found.best is None
    found, _ = search({}, SECONDS | slow | {"svip": 2.0, "top_k:k=8+svip": [t - 0.5 for t in noisy]})
    assert found.best.step.name == "top_k:k=8+svip"


@pytest.mark.full
def test_a_target_with_nothing_to_lose_is_refused(search):
    """With 1 of 80 right, 2 % of harm is more than a policy could do that is always wrong."""
    with pytest.raises(ValueError, match=r"^the target has 0 of 80 problems right[^\n]*$"):
        search({"target": range(400)})
    with pytest.raises(ValueError, match=r"^the target has 1 of 80 problems right[^\n]*certified at 2.00%[^\n]*$"):
        search({"target": range(1, 400)})
    assert search({"target": range(2, 400)})[0].best is not None
    with pytest.raises(ValueError, match="^the target has 2 of 80 problems right"):
        search({"target": range(2, 400)}, max_loss=2 / 80)  # a policy with none right would keep the limit


def test_what_is_promised_beforehand():
    search = Search(0.01, 0.05, 1)
    assert describe_power(700, search, 1) == (
        "700 problems for the certificate: up to 2 harms certify 1.00% (needed: 299 with 0, 473 with 1, 628 with 2, 1049 with 5 harms)"
    )
    assert "too few for 1.00%, 2.95% is the least they can certify" in describe_power(100, search, 1)
    assert "δ is shared by 3 ladders" in describe_power(700, search, 3)


SHORT = ("tune", "--limit", 6, "--first", 2, "--max-new-tokens", 72, "--policies", "svip,top_k:k=3+svip")


COMPARED = ("compare", "--limit", 2, "--max-new-tokens", 24, "--no-static", "--policies", "svip,top_k:k=2+svip", "--batch-size", "1,2")  # fmt: skip
INTERRUPTED = {  # the command, at which text it is, other settings and what is said of them, how many texts both runs have
    "tune": (SHORT, 6, ("--max-loss", 0.5), "was made with max_loss 0.01, this run has 0.5", 2 * 3 + 4 * 2),
    "compare": (COMPARED, 13, ("--gamma", 3), "was made with arms", 2 * 2 * 5),
}


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
@pytest.mark.parametrize("command", INTERRUPTED)
def test_a_command_is_resumed_to_the_same_answers(hf_lossy, tmp_path, monkeypatch, command):
    words, last, others, says, count = INTERRUPTED[command]
    whole = hf_lossy(*words, "--out", tmp_path / "whole")
    assert whole.code == 0 and "…" not in whole.out, whole
    original, calls = TextWriter.write, []

    def impatient(self, *args):
        calls.append(args)
        if len(calls) == last:
            raise KeyboardInterrupt
        return original(self, *args)

    monkeypatch.setattr(TextWriter, "write", impatient)
    stopped = hf_lossy(*words, "--out", tmp_path / "found")
    assert stopped.code == 130 and "the same command with --resume goes on" in stopped.out
    assert says in hf_lossy(*words, *others, "--out", tmp_path / "found", "--resume").line
    assert hf_lossy(*words, "--out", tmp_path / "found", "--resume").code == 0
    texts = []
    for folder in (tmp_path / "whole", tmp_path / "found"):
        lines = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
        place = ("arm", "batch_size", "prompt")
        texts.append({tuple(map(line.get, place)): (line["token_ids"], line["right"]) for line in lines})
        advice = json.loads((folder / "run.json").read_text())["found"]["advice"]
        if command == "tune" and advice.startswith("use "):  # with four problems nothing lossy is certified
            assert hla.LossyPolicy.from_pretrained(folder / "policy").lossless
    shared = texts[0].keys() & texts[1].keys()  # which are candidates is for the clock to say
    assert all(texts[0][key] == texts[1][key] for key in shared) and len(shared) >= count


def test_what_is_wrong_is_one_line_before_a_model_is_loaded(hf_lossy, monkeypatch):
    monkeypatch.setattr("hf_lossy_assist.artifacts.loading.load_model", None)
    for arguments, message in (
        (("--policies", "top_k:k=3"), "no lossless policy is among these"), (("--first", "6"), "--first"),
        (("--batch-size", "6"), "6 problems are too few for batches of 6"),
        (("--limit", "1"), "1 problems are too few for batches of 1"),
        (("--limit", "0"), "--limit: expected a whole number of at least 1, got 0"),
        (("--max-loss", "0"), "--max-loss"), (("--confidence", "1.5"), "--confidence"),
        (("--task", "nothing"), "unknown task 'nothing'"), (("--resume",), "pass its --out"),
    ):  # fmt: skip
        assert message in hf_lossy(*SHORT[:3], *arguments).line, arguments


@pytest.mark.filterwarnings("always:.*are repetitions")
def test_a_problem_counts_once(hf_lossy, tmp_path, monkeypatch):
    """300 rows of 3 problems certify what 3 problems do."""
    rows = [{"prompt": f"What is {i}?", "answer": str(i)} for i in (1, 2, 3)] * 100
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr("hf_lossy_assist.cli._models.load_models", no_models)
    done = hf_lossy("tune", "--task", tmp_path / "rows.jsonl", "--first", 1, "--policies", "svip,top_k:k=3")
    assert "2 problems for the certificate: too few for 1.00%" in done.out
    assert "warning: rows.jsonl: 297 of 300 problems are repetitions, and each problem counts once" in done.err


def no_models(*_):
    raise ValueError("no models here")


def test_a_rule_without_its_parameter_is_its_ladder():
    assert expand("top_k+svip") == ["top_k:k=2+svip", "top_k:k=3+svip", "top_k:k=4+svip", "top_k:k=8+svip"]
    assert expand("typical:delta=0.5+fallback")[0] == "typical:delta=0.5,epsilon=0.5+fallback"
    assert expand("sprinter:head=folder")[-1] == "sprinter:head=folder,threshold=0.5"
    for alone in ("svip", "top_k:k=3+svip", '{"stop": "svip"}', "strict", "all_but_last"):
        assert expand(alone) == [alone]
    field = parse_search_space(["svip", "top_k+svip", "lenience:lenience=0.5", "lenience:lenience=0.3", "strict"])
    assert list(field.lossless) == ["svip", "strict"] and len(field.policies) == 8
    assert [(step.ladder, step.rank) for step in field.steps] == [
        *(("top_k+svip", place) for place in range(4)), ("lenience", 0), ("lenience", 1),
    ]  # fmt: skip
    assert all(field.policies[step.name].lossless is False for step in field.steps)
