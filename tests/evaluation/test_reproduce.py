"""The papers' tables: every file parses and names what there is, rules judge as they say, and the driver runs, resumes and prints."""

import importlib
import json
import shlex
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from support import small
from support.enumeration import off
from support.refusals import refused

import hf_lossy_assist as hla
from hf_lossy_assist.cli import app
from hf_lossy_assist.evaluation.writer import ArmOutput
from hf_lossy_assist.policy.json_form import PARTS
from hf_lossy_assist.policy.parse import list_parts, split_policies
from hf_lossy_assist.registry import Names, find_entry
from hf_lossy_assist.stats.intervals import Estimate
from hf_lossy_assist.tasks.load import NAMES


FOLDER = Path(__file__).parents[2] / "examples" / "reproduce"
MODULES = (
    "baselines", "paper_tables", "target_texts", "along_texts", "flops", "information", "medusa", "regimes",
    "demo_runs", "claims", "results_page", "run",
)  # fmt: skip
HEADLINES = {
    "svip-figure-5", "svip-table-1", "svip-table-2", "svip-table-3", "sv-figure-3", "sv-figure-4", "sv-figure-7", "sv-figure-8", "sprinter-figure-10", "sv-table-1", "sv-table-2",
    "sv-table-3", "sprinter-figure-3", "sprinter-table-1", "sprinter-table-2", "sprinter-table-3", "sprinter-table-4", "autojudge-figure-3",
    "autojudge-figure-12", "autojudge-table-1", "autojudge-table-2", "autojudge-table-10",
}  # fmt: skip
TABLES = sorted(FOLDER.glob("tables/*.json"))
BASELINES = {"mentored": "rule", "adaedl": "stop", "moving_average": "stop"}  # which the example registers
KNOWN = {name for kind in (*PARTS, "method") for name in Names(kind)} | {"fallback", *BASELINES}
BUILT = {"sv", "sv paper", "staged", "moving_average", "math", "math+top_k:k=4"}  # by the runs themselves


@pytest.fixture(scope="module")
def of():
    """The example's modules by name, as its script imports them."""
    sys.path.insert(0, str(FOLDER))
    yield {name: importlib.import_module(name) for name in MODULES}
    sys.path.remove(str(FOLDER))
    for name in MODULES:
        del sys.modules[name]
    for name, kind in BASELINES.items():
        hla.forget(kind, name)


def names_in(policies):
    return {name for policy in policies for name, _ in list_parts(policy)}


# The files
@pytest.mark.full
def test_every_headline_table_has_a_file(of):
    assert {path.stem for path in TABLES} == HEADLINES
    group = typer.main.get_command(app)
    for text in (text for path in TABLES for text in of["paper_tables"].read_table(path).published["commands"]):
        program, name, *words = shlex.split(text)
        command = group.commands[name]
        if hasattr(command, "commands"):
            command, words = command.commands[words[0]], words[1:]
        context = command.make_context(name, words)  # parses, and runs nothing
        assert program == "hf-lossy" and context.params.get("task") in (None, *NAMES), text
        if name == "compare":
            assert names_in(split_policies(context.params["policies"])) <= KNOWN, text


@pytest.mark.full
def test_tables_parse_and_name_what_there_is(of):
    for path in TABLES:
        table = of["paper_tables"].read_table(path)
        assert table.checks and any(check.cannot is None for check in table.checks), path
        for run in table.runs.values():
            heads = dict.fromkeys(run.get("heads", {}), "folder")
            specs = [spec.format(demo="folder", **heads) for spec in run.get("policies", {}).values()]
            assert names_in(spec for spec in specs if spec not in BUILT) <= KNOWN, path
        assert table.published["hardware"] and table.published["settings"] and table.published["commands"], path


CHECK = {"says": "a", "figure": "speed", "arm": "svip", "beside": "target", "above": 1.0}


def test_a_file_that_is_no_table_is_refused_with_its_name(of, tmp_path):
    path = tmp_path / "bad.json"
    given = json.loads((FOLDER / "tables" / "svip-figure-5.json").read_text())
    for change, expected in (
        ({"figure": "charm"}, "expected a figure of speed"),
        ({"figure": None}, "expected a figure, or why there is none"),
        ({"cannot": "no"}, "expected a figure, or why there is none"),
        ({"below": 1.0}, "expected one of above, below, at_most"), ({"arm": "svpi"}, "expected arms of target"),
        ({"run": "other"}, "there is no run 'other'"), ({"batch_size": 8}, "no batches of 8 are measured"),
        ({"figure": "information", "pair": "x"}, "information is no figure of a run of kind compare"),
        ({"figure": "auroc"}, "auroc is no figure of a run of kind compare"),
        ({"size": 0.9}, "the published size 0.9 is not beyond the rule's bound 1"), ({"colour": 1}, "colour"),
    ):  # fmt: skip
        path.write_text(json.dumps(given | {"checks": [CHECK | change]}))
        refused(lambda: of["paper_tables"].read_table(path), f"bad.json.*{expected}")
    path.write_text(json.dumps({"claim": "a"}))
    refused(lambda: of["paper_tables"].read_table(path), "bad.json: expected an object with paper, where, claim")


# The rules
def test_a_rule_looks_at_the_whole_interval(of):
    for rule, figure, verdict, why in (
        ({"above": 1.0}, (1.2, 1.1, 1.3), "direction only", ""),
        ({"above": 1.0, "size": 1.1}, (1.2, 1.1, 1.3), "confirmed in size", ""),
        ({"above": 1.0, "size": 1.15}, (1.2, 1.1, 1.3), "direction only", ""),
        ({"above": 1.0}, (1.2, 0.9, 1.3), "not confirmed", "includes 1"),
        ({"above": 1.0}, (0.8, 0.7, 0.9), "not confirmed", "below 1"),
        ({"above": 1.0}, (1.2, None, None), "not confirmed", "there is no interval"),
        ({"below": 1.0, "size": 0.9}, (0.8, 0.7, 0.9), "confirmed in size", ""),
        ({"below": 1.0, "size": 0.8}, (0.8, 0.7, 0.9), "direction only", ""),
        ({"below": 1.0}, (1.2, 1.1, 1.3), "not confirmed", "above 1"),
        ({"at_most": 0.03, "size": 0.03}, (0.0, None, 0.02), "confirmed in size", ""),
        ({"at_most": 0.03}, (0.02, None, 0.05), "not confirmed", "includes 0.03"),
        ({"at_most": 0.03}, (0.04, None, 0.07), "not confirmed", "above 0.03"),
    ):
        check = of["paper_tables"].Check(**{**CHECK, "above": None, **rule})
        found = of["claims"]._verdict(check, Estimate(*figure))
        assert found[0] == verdict and found[1].startswith(why), (rule, figure)


def test_what_cannot_be_tested_says_why(of):
    check = of["paper_tables"].Check(says="a", cannot="no head")
    assert of["claims"].outcome(check, None).verdict == "cannot be tested here"
    judged = of["paper_tables"].Check(**CHECK | {"figure": "win_tie"})
    assert "judge model" in of["claims"].outcome(judged, None).why
    rows = [[{"resolution": "5 × 5", "gain": 0.1 + i / 100, "entropy": 0.5}] for i in range(4)]
    found = of["demo_runs"].Measured(information={"pair": rows})
    check = of["paper_tables"].Check(says="a", figure="information", pair="pair", cells="5 × 5", above=0.16)
    outcome = of["claims"].outcome(check, found)
    assert outcome.verdict == "direction only" and outcome.value == pytest.approx(0.23)
    assert "0.115 of 0.500 bits" in outcome.shown
    found = of["demo_runs"].Measured(
        information={str(i): [[{"resolution": "adaptive", "gain": gain}]] for i, gain in enumerate((0.1, 0.2, -0.1))}
    )
    check = of["paper_tables"].Check(says="a", figure="positive", cells="adaptive", above=0.05, size=0.3)
    outcome = of["claims"].outcome(check, found)
    assert outcome.shown == "2 of 3 pairs, -0.100 to 0.200 bits" and outcome.verdict == "direction only"


def test_lengths_along_a_text_are_those_of_the_stops(of):
    """Entropy doubts token 3 (rejected) and token 5 (accepted): SVIP's drafts end behind either, the oracle's before the rejected."""
    entropy = torch.tensor([0.1, 0.1, 0.1, 2.0, 0.1, 2.0, 0.1, 0.1], dtype=torch.float64)
    match = torch.tensor([True, True, True, False, True, True, True, True])
    text = of["target_texts"].TargetText(list(range(8)), entropy, entropy, match)
    assert text.lengths("svip") == [(4, 3), (2, 4), (1, 1)]
    assert text.lengths("2") == [(2, 3), (2, 0), (2, 4), (1, 1)]
    assert text.lengths("heuristic")[0] == (5, 3)


def test_a_wider_target_writes_the_same_and_a_noisy_draft_does_not(of, tmp_path):
    demo, make = hla.demo.load(), partial(of["regimes"].make_model, out=tmp_path)
    ids = demo.tokenizer("Finn has 3 books.", return_tensors="pt").input_ids
    with torch.no_grad():
        wide = make({"model": "target", "width": 512}, demo)
        assert wide.model.layers[0].mlp.up_proj.weight.shape[0] == 512
        assert torch.allclose(wide(ids).logits, demo.target(ids).logits, atol=1e-5)
        noisy = make({"model": "draft", "noise": 0.5}, demo)
        assert not torch.allclose(noisy(ids).logits, demo.draft(ids).logits, atol=1.0)
    assert make({"model": "target", "layers": 2}, demo).config.num_hidden_layers == 2


@pytest.mark.full
def test_medusas_heads_are_trained_stored_and_lossless(of, tmp_path, monkeypatch):
    """Greedy texts are the target's, of ragged rows that finish at different times; a head ahead of the text is often right."""
    demo, medusa, file = hla.demo.load(), of["medusa"], tmp_path / "medusa.safetensors"
    monkeypatch.setattr(medusa, "STATES", 64)
    monkeypatch.setattr(medusa, "LEARNING_RATE", 0.01)
    medusa.load_medusa(demo, file, problems=4, steps=40)
    drafter = medusa.load_medusa(demo, file, problems=0)  # which would leave nothing to train on
    prompts = [problem.prompt for problem in hla.demo.problems(2, seed=3)]
    inputs = demo.tokenizer(prompts, return_tensors="pt", padding=True)
    settings = {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True}
    out = hla.enable(demo.target).generate(**inputs, drafter=drafter, lossy_policy="strict", **settings)
    assert out.sequences.equal(type(demo.target).generate(demo.target, **inputs, **settings).sequences)
    assert out.speculation.draft_acceptance_rate > 0.1


@pytest.mark.full
def test_the_law_of_medusas_texts(of):
    """Exactly, of two rows together, with an end token: the q of a place is its head's."""
    medusa, target = of["medusa"], hla.enable(small.llama(vocab=4).float())
    network = medusa.MedusaNetwork(target, 2)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(parameter.numel()))
    drafter = medusa.MedusaDrafter(network.eval().requires_grad_(False))
    prompts = {"input_ids": torch.tensor([[0, 3, 2], [3, 2, 3]]), "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])}  # fmt: skip
    distance, runner = off(target, drafter, hla.Constant(2), prompts, end=1, real=True)
    assert distance < 1e-6 and max(runner.widths) == 2


PARTS_OF_TEXTS = {
    "constant 5": [[2.0, 4.0], [2.2, 4.1], [1.9, 4.2], [2.0, 4.1]],
    "svip": [[2.0, 2.0], [2.1, 2.1], [2.0, 2.0], [1.9, 2.1]],
}


@pytest.mark.parametrize("figure, value, verdict", [("long_speed", 24.5 / 16.2, "direction only"), ("growth", 16.4 / 8.2 / (8.1 / 8.0), "direction only")])  # fmt: skip
def test_gains_along_texts_are_ratios_of_seconds(of, figure, value, verdict):
    """For the whole text, and for the last part beside the first; with no model they cannot be measured, and the row says what it needs."""
    check = of["paper_tables"].Check(says="a", figure=figure, arm="svip", beside="constant 5", above=1.0)
    found = of["demo_runs"].Measured(along=of["along_texts"].AlongTexts([256, 512], "m with d", PARTS_OF_TEXTS))
    outcome = of["claims"].outcome(check, found)
    assert outcome.verdict == verdict and outcome.value == pytest.approx(value) and "4 texts of 512 tokens, m with d" in outcome.shown  # fmt: skip
    missing = of["claims"].outcome(check, of["demo_runs"].Measured())
    assert missing.verdict == "cannot be tested here" and "--long-model" in missing.why


def test_flops_are_counted_from_configs(of):
    """By hand: a layer's products 2·T·12·d² and attention's 4·T²·d are 6656; head and embedding 4·T·V·d are 1280."""
    sizes = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1, "vocab_size": 10}
    run = {"kind": "flops", "tokens": 4, "configs": {"a": sizes | {"n_layer": 2}, "b": sizes}}
    check = of["paper_tables"].Check(says="a", figure="flops", arm="a", beside="b", above=1.0, size=1.5)
    outcome = of["claims"].outcome(check, of["demo_runs"].measure(run, None))
    assert outcome.verdict == "confirmed in size" and outcome.value == pytest.approx((2 * 6656 + 1280) / (6656 + 1280))


@pytest.mark.full
def test_long_texts_are_measured_part_by_part_and_resumed(of, tmp_path):
    """Beyond the end token; after an interruption only what is missing is written."""
    along, prompts, file = of["along_texts"], tmp_path / "prompts.jsonl", tmp_path / "long.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": p.prompt}) + "\n" for p in hla.demo.problems(2, seed=4)))
    pair = along.LongPair(*(str(hla.demo.FOLDER / name) for name in ("target", "eagle3_drafter")), prompts, tokens=24)
    run = {"texts": 2, "seed": 1, "windows": [8, 24, 999], "policies": {"constant": "strict", "svip": "svip"}}
    found = along.long_run(run, pair, file)
    assert found.windows == [8, 24] and all(len(text) == 2 and min(text) > 0 for texts in found.seconds.values() for text in texts)  # fmt: skip
    first, second = file.read_text().splitlines()
    file.write_text(first + "\n")
    again = along.long_run(run, pair, file)
    assert [texts[0] for texts in again.seconds.values()] == [texts[0] for texts in found.seconds.values()]
    assert file.read_text().splitlines()[1] != second  # the clock's new figures


def test_two_arms_that_did_the_same_are_not_separated_by_noise(of):
    def wrote(arm, seconds, accepted):
        return [
            ArmOutput(arm, i, 1, i, "a", [1, 2, 3], seconds + i / 1e3, accept_lengths=[accepted, 3 - accepted])
            for i in range(9)
        ]

    check = of["paper_tables"].Check(**CHECK)
    for accepted, verdict in ((1, "not confirmed"), (2, "direction only")):
        answers = [*wrote("svip", 0.1, accepted), *wrote("target", 0.2, 1)]
        found = of["claims"].outcome(check, of["demo_runs"].Measured(answers))
        assert found.verdict == verdict and ("in the same rounds" in found.why) == (accepted == 1)
        assert found.low is not None and found.low > 1  # which would have confirmed it


# The baselines, through the door of users
def test_the_command_knows_the_baselines(of, hf_lossy):
    for name, kind in BASELINES.items():
        entry = find_entry(kind, name)
        lines = hf_lossy("policies", name).out
        assert entry.summary in " ".join(lines.split()) and f"in Python: baselines.{entry.make.__name__}" in lines
    assert "in Python: hla.TopK" in hf_lossy("policies", "top_k").out


@pytest.mark.parametrize("budget", [1e-3, 1.0])
def test_mentored_decoding_spends_its_budget_and_rejects_least(of, budget):
    """π is a distribution with KL(p‖π) = D, or less where all of q that p allows passes; its form makes it the one that rejects least."""
    torch.manual_seed(0)
    p, q = (2 * torch.randn(2, 40, 12, dtype=torch.float64)).softmax(-1)
    p[::2, 3] = q[::4, 5] = 0  # holes in one or the other
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    alpha, beta = of["baselines"].find_bounds(p, q, budget)
    law = torch.maximum(p / beta, torch.minimum(q, p / alpha))
    torch.testing.assert_close(law.sum(-1), torch.ones_like(law[:, 0]))
    assert (alpha <= 1).all() and (beta >= 1).all() and (law[p == 0] == 0).all()
    kl = torch.special.xlogy(p, p / law).nan_to_num(nan=0.0).sum(-1)  # 0/0 where neither has the token
    whole = alpha[:, 0] < 1e-40  # every token of p passes
    assert (kl[whole] <= budget).all() and ((kl - budget).abs()[~whole] < 1e-6).all() and 0 < (~whole).sum()
    emitted = of["baselines"].Mentored(budget).output_distribution(p.log(), q)
    torch.testing.assert_close(emitted, law, atol=1e-9, rtol=0)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*policy is lossy:UserWarning")
def test_mentored_decoding_in_a_call(of):
    """By its registered name; without a budget it is strict acceptance, and greedily it is refused."""
    demo = hla.demo.load()
    inputs = demo.tokenizer([p.prompt for p in hla.demo.problems(2, seed=5)], return_tensors="pt", padding=True)

    def write(policy, **settings):
        torch.manual_seed(1)
        settings = {"max_new_tokens": 16, "return_dict_in_generate": True, "do_sample": True} | settings
        target = hla.enable(demo.target)
        return target.generate(**inputs, assistant_model=demo.draft, lossy_policy=policy, **settings)

    neutral = write({"rule": {"name": "mentored", "budget": 0.0}})
    assert neutral.sequences.equal(write("strict").sequences) and neutral.speculation.num_lossy_accepts == 0
    assert write({"rule": {"name": "mentored", "budget": 5.0}}, temperature=2.0).speculation.num_lossy_accepts > 0
    with pytest.raises(ValueError, match="Mentored is defined for sampling decoding alone"):
        write({"rule": {"name": "mentored", "budget": 0.1}}, do_sample=False)


def test_adaedl_moves_its_threshold_by_the_acceptance_rate(of):
    """r̄: .5·.9 + .5·.25 = .575, then .7875, .89375 and .946875; below .9 λ rises by .1 · .01, above it falls by as much.

    1 − √(.2·H) < .7  ⇔  H > .45 nats: H(.16, .84) = .4397, H(.17, .83) = .4559.
    """
    stop = of["baselines"].AdaEDL(0.6).start(2)
    for accepted, threshold in ((1, 0.601), (4, 0.602), (4, 0.603), (4, 0.602)):
        stop.observe([0], [4], [accepted])
        assert stop.thresholds == [pytest.approx(threshold, abs=1e-12), 0.6]
    stop.observe([0], [0], [0])
    assert stop.thresholds[0] == pytest.approx(0.602), "nothing was drafted, so nothing was learnt"
    scores = (torch.tensor([[0.16, 0.84], [0.17, 0.83]]).log(),)
    assert of["baselines"].AdaEDL(0.7).start(2)(torch.zeros(2, 1), scores).tolist() == [False, True]
    stop.thresholds[:] = [0.9, 0.0]
    assert stop(torch.zeros(2, 1), scores, rows=[1, 0]).tolist() == [False, True]


def test_a_moving_average_plans_the_most_tokens_per_second(of):
    """α = .5, T = 1 + .1·γ: 1/1, 1.5/1.1 = 1.364, 1.75/1.2 = 1.458, 1.875/1.3 = 1.442. At α = .9: 4.10/1.4 = 2.93 for γ = 4."""
    plan = of["baselines"].plan
    cheap, dear = ([np.full(gamma + 1, 1 + step * gamma) for gamma in range(5)] for step in (0.1, 0.6))
    assert [plan(np.array([alpha]), cheap) for alpha in (0.5, 0.9, 0.0)] == [[2], [4], [0]]
    assert plan(np.array([0.5]), dear) == [0], "1.5 tokens in 1.6 are fewer than 1 in 1"
    both = [1 + 0.1 * gamma + 0.1 * np.arange(2 * gamma + 1) for gamma in range(5)]  # a verified token costs .1
    assert plan(np.array([0.9, 0.1]), both) == [4, 0], "the second row's tokens do not pay"


def test_a_moving_average_forgets_and_is_saved_with_its_profile(of, tmp_path):
    """Accepted 3 of 4: 3 and 1 rejected. With window 2 a round weighs half the next one's: α of row 0 = (1.5 + .5)/(3 + 1)."""
    hla.demo.profile().save_pretrained(tmp_path / "profile")
    spec = {
        "name": "moving_average", "profile": str(tmp_path / "profile"), "window": 2, "initial": 0.5, "max_draft": 3,
    }  # fmt: skip
    policy = hla.as_policy({"stop": spec})
    assert policy.stop.longest == 3 and hla.as_policy(policy.to_dict()) == policy
    policy.save_pretrained(tmp_path / "policy")
    assert hla.LossyPolicy.from_pretrained(tmp_path / "policy").stop.seconds(1, 2).tolist() == policy.stop.seconds(1, 2).tolist()  # fmt: skip
    stop = policy.stop.start(2)
    stop.observe([0, 1], [4, 2], [3, 2])
    stop.observe([0], [4], [0])
    assert (stop.accepted, stop.rejected) == ([1.5, 2.0], [1.5, 0.0])
    costs = [policy.stop.seconds(1, gamma) for gamma in range(4)]
    assert stop.begin_round([0]) == of["baselines"].plan(np.array([0.5]), costs) and stop.begin_round([]) == []


# The driver
@pytest.fixture
def driver(of, monkeypatch, tmp_path):
    def drive(*arguments):
        monkeypatch.setattr(sys, "argv", ["run.py", *arguments, "--out", str(tmp_path / "out")])
        return of["run"].main()

    return drive


TRIAL = ("--only", "svip-figure-5", "--problems", "2")


@pytest.mark.nightly
def test_a_table_is_run_interrupted_resumed_and_reused(of, driver, monkeypatch, tmp_path, capsys):
    runs, write, measure = of["demo_runs"], of["demo_runs"].TextWriter.write, of["demo_runs"].measure
    calls = []

    def interrupted(self, *arguments):
        calls.append(arguments)
        if len(calls) == 16:  # seven arms were warmed up and one batch is done
            raise KeyboardInterrupt
        return write(self, *arguments)

    monkeypatch.setattr(runs.TextWriter, "write", interrupted)
    assert driver(*TRIAL) == 130 and "the same command goes on" in capsys.readouterr().err
    assert driver(*TRIAL) == 0
    assert len(calls) == 16 + 14  # again a warm-up, and of the two batches the one that was not done
    page = (tmp_path / "out" / "results.md").read_text(encoding="utf-8")
    assert (
        "### Figures 5, 6 and 7a" in page and "cannot be tested here" in page and page.count("Not measured yet") == 21
    )
    capsys.readouterr()
    monkeypatch.setattr(runs, "measure", lambda *_: pytest.fail("it has a result"))
    assert driver(*TRIAL) == 0 and (tmp_path / "out" / "results.md").read_text(encoding="utf-8") == page
    assert "svip-figure-5: SVIP is faster than the target alone: " in capsys.readouterr().out
    monkeypatch.setattr(runs, "measure", measure)
    monkeypatch.setattr(runs, "compare_arms", lambda *_, **__: pytest.fail("it is measured"))
    monkeypatch.setattr(of["claims"], "_verdict", lambda *_: ("direction only", "by the new rule"))
    file = tmp_path / "out" / "svip-figure-5.json"
    before = json.loads(file.read_text()) | {"date": "2026-11-01", "machine": "another"}
    file.write_text(json.dumps(before | {"key": "of the rules before"}))
    assert driver(*TRIAL, "--judge-again") == 0
    after = json.loads(file.read_text())
    assert "by the new rule" in (tmp_path / "out" / "results.md").read_text(encoding="utf-8")
    assert after["checks"] != before["checks"] and after | {"checks": 0} == before | {"checks": 0}


def test_what_the_authors_ran_is_printed(driver, capsys, tmp_path):
    assert driver("--published") == 0
    printed = capsys.readouterr().out
    assert all(f"\n{name}: " in printed for name in HEADLINES) and "NVIDIA A100" in printed
    assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit, match="there is no table svip; there are: autojudge-figure-12, "):
        driver("--only", "svip")
    with pytest.raises(SystemExit, match="--run is for --published"):
        driver("--run")
    with pytest.raises(SystemExit, match="belong together"):
        driver("--only", "svip-figure-5", "--judge-url", "http://localhost")
    with pytest.raises(SystemExit, match="--long-model, --long-drafter and --long-prompts belong together"):
        driver("--only", "svip-figure-5", "--long-model", "M")
