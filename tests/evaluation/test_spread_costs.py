"""Rounds of a target spread over devices: the formulas by hand, and what the command says."""

import pytest
import transformers
from support import small, tiny

from hf_lossy_assist.cli.plan_spread import EXAMPLE
from hf_lossy_assist.evaluation.spread_costs import (
    Device,
    Link,
    Load,
    Shape,
    best_round,
    offloaded,
    part_of,
    pipeline,
    tensor_parallel,
    tokens_a_round,
)
from hf_lossy_assist.evaluation.spread_times import between, forward_seconds, part_seconds, random_model


LINK = Link(latency=1e-5, speed=1e9)
SHAPE = Shape(layers=2, hidden=8, intermediate=16, heads=4, kv_heads=2, head_dim=2, vocabulary=32)


def test_weights_are_those_of_the_models():
    """All matrices that a token is multiplied with: of a built model, and of the known sizes."""
    for name in ("llama", "qwen2", "qwen3"):
        model = tiny.build(name)
        matrices = sum(its.weight.numel() for n, its in model.named_modules() if type(its).__name__ == "Linear")
        assert Shape.of(model.config).weights == matrices, name
    assert EXAMPLE["70B"].weights == pytest.approx(70e9, rel=0.01)
    assert EXAMPLE["8B"].weights == pytest.approx(7.5e9, rel=0.01)


def test_a_forward_reads_or_multiplies():
    load = Load(rows=3, context=10)
    weights = 2 * (8 * 2 * (8 + 4) + 3 * 8 * 16) + 8 * 32
    assert SHAPE.weights == weights and SHAPE.states(30) == 2 * 2 * 2 * 2 * 30
    reads = Device(memory=1e3, flops=1e30).forward(SHAPE, load)
    assert reads(1) == reads(5) == pytest.approx(2 * (weights + 480) / 1e3)
    multiplies = Device(memory=1e30, flops=1e3, overhead=0.5).forward(SHAPE, load, parts=2)
    assert multiplies(4) == pytest.approx(4 * 2 * 3 * (weights + 2 * 2 * 4 * 2 * 10) / 2 / 1e3 + 2 * 0.5)


def test_what_the_link_takes():
    load, part = Load(rows=3, context=0), between({1: 1.0, 5: 3.0})
    whole, link = tensor_parallel(part, SHAPE, load, 4, LINK)
    size = 3 * 5 * 2
    reduced = 1e-5 + 2 * 3 / 4 * size * 8 / 1e9
    assert link(5) == pytest.approx(5 * reduced + 1e-5 + 3 / 4 * size * 32 / 1e9 + 1e-5)
    assert whole(5) == pytest.approx(3.0 + link(5))
    assert tensor_parallel(part, SHAPE, load, 1, LINK)[1](5) == 0.0
    assert pipeline(part, SHAPE, load, 4, LINK)[0](5) == pytest.approx(
        3.0 + 3 * (1e-5 + size * 8 / 1e9) + 1e-5 + size * 32 / 1e9
    )
    assert offloaded(part, SHAPE, load, 0.25, LINK)[1](1) == pytest.approx(1e-5 + 0.25 * 2 * SHAPE.weights / 1e9)


def test_the_best_draft_length():
    """By hand: a target whose block costs what a step does, and a draft of a tenth."""
    assert tokens_a_round(0.5, 3) == 1.875 and tokens_a_round(1.0, 4) == 5.0 and tokens_a_round(0.0, 7) == 1.0
    flat = (lambda tokens: 1.0), (lambda tokens: 0.0)
    gains = {gamma: tokens_a_round(0.8, gamma) / (1 + 0.1 * gamma) for gamma in range(1, 17)}
    found = best_round(flat, 0.1, 0.8)
    assert found.gain == pytest.approx(max(gains.values())) and gains[found.gamma] == max(gains.values())
    assert best_round(flat, 2.0, 0.1).gain < 1, "a draft as slow as that never pays"
    slower = best_round(flat, 0.1, 0.8, overhead=0.3)
    assert slower.gain < found.gain and slower.gamma >= found.gamma


def test_parts_of_a_model():
    """A rank's part computes half of the products; sizes that cannot be shared out are named."""
    config = tiny.build("qwen3").config
    part = random_model(part_of(config, 2), "cpu", None)
    halves = sum(its.weight.numel() for its in part.modules() if type(its).__name__ == "Linear")
    assert halves == Shape.of(part.config).weights == pytest.approx(Shape.of(config).weights / 2, rel=0.01)
    odd = small.llama().config
    with pytest.raises(
        ValueError, match=r"^tensor parallelism over 3 ranks: num_attention_heads is 4, which 3 does not"
    ):
        part_of(odd, 3)
    with pytest.raises(ValueError, match=r"^a plan needs a decoder of attention and MLP layers, and gpt2 has no"):
        Shape.of(tiny.build("gpt2").config)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    with pytest.raises(ValueError, match=r"one gated MLP, and mixtral has other matrices$"):
        Shape.of(transformers.MixtralConfig(**sizes, vocab_size=98, num_local_experts=2))


def test_seconds_are_of_forwards_that_ran(monkeypatch):
    model = small.llama(vocab=98)
    seen = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    seconds = forward_seconds(model, Load(rows=3, context=5), widths=(1, 4), repeats=2)
    assert seen == [(3, 5), *[(3, 1)] * 3, *[(3, 4)] * 3]
    assert 0 < seconds(1) and seconds(2) == pytest.approx((2 * seconds(1) + seconds(4)) / 3)
    assert part_seconds(model.config, 2, Load(1, 4), "cpu", None, repeats=1)(1) > 0


def test_the_command(hf_lossy, tmp_path):
    """Of the example, of given times and of folders; more ranks, less time, and a link that takes its share."""
    lines = hf_lossy("plan", "--tp", 4, "--batch-size", "1,64", "--device-gb", 72, "--json").json["lines"]
    by = {(line["way"], line["batch_size"]): line for line in lines}
    assert len(lines) == 8
    one, four = by["1 device", 1], by["TP 4", 1]
    assert four["target_step"] < one["target_step"] / 2 and four["device_gb"] == pytest.approx(one["device_gb"] / 4)
    assert by["pipeline 4", 1]["target_step"] > one["target_step"]
    assert one["gain"] > four["gain"] > 1, "the draft is not spread, so its steps weigh more"
    assert one["gain"] > by["1 device", 64]["gain"], "a batch multiplies more than it reads"
    assert by["48% in RAM", 1]["target_step"] > 10 * one["target_step"]
    given = hf_lossy("plan", "--tp", 1, "--step-ms", "46,54,23", "--acceptance", "0.6,0.9", "--json").json["lines"]
    assert [round(line["target_step"] * 1e3) for line in given] == [46, 46] and given[0]["gain"] < given[1]["gain"]
    for name in ("target", "draft"):
        tiny.build("llama").config.save_pretrained(tmp_path / name)
    pair = ("--model", tmp_path / "target", "--assistant", tmp_path / "draft")
    ran = hf_lossy("plan", "--tp", 1, *pair, "--context", 16, "--dtype", "float32")
    assert ran.code == 0 and "1 device" in ran.out and "times the target alone" in ran.out and "…" not in ran.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--link", 3), "--link is for a target spread over devices"),
        (("--tp", 2, "--memory", 3), "--memory and --tflops describe a device together"),
        (("--tp", 2, "--step-ms", "1,2"), "expected three numbers"),
        (("--tp", 2, "--step-ms", "1,2,x"), "--step-ms: expected a number"),
        (("--tp", 2, "--step-ms", "1,2,3", "--batch-size", 4), "--step-ms is of one batch size"),
        (("--tp", 2, "--step-ms", "1,2,3", "--memory", 4, "--tflops", 4), "pass one of the two"),
        (("--tp", 2, "--step-ms", "3,2,1"), "takes no less than a step"),
        (("--tp", 2, "--step-ms", "1,2,3", "--context", 9), "leave --context out"),
        (("--tp", 2, "--limit", 4), "--limit is for SPRINTER's plan"),
        (("--tp", 2, "--acceptance", 1.5), "--acceptance"),
        (("--tp", 2, "--model", "M"), "--model needs --assistant"),
        (("--tp", 2, "--dtype", "float99"), "--dtype"),
    ],
)
def test_wrong_calls_are_one_line(hf_lossy, words, said):
    ran = hf_lossy("plan", *words)
    assert ran.code != 0 and said in ran.err and len(ran.err.strip().splitlines()) == 1
