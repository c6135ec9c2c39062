"""Compiled rounds draw texts from the target's own distribution: every text of three tokens is counted. They draw other numbers than rounds
that run stage by stage, so that equal texts prove nothing here."""

import pytest
import torch
from support.distributions import PROMPT, REJECT, goodness, pair, sample, target_law
from transformers import CompileConfig, TemperatureLogitsWarper


SETTINGS = {"compile_config": CompileConfig(backend="eager"), "num_assistant_tokens": 2, "top_k": 0}


@pytest.fixture(scope="module", autouse=True)
def graphs_are_freed():
    yield
    torch._dynamo.reset()


@pytest.mark.full
def test_the_distribution_is_the_targets():
    counts = sample("strict", SETTINGS, calls=2)
    assert goodness(counts, target_law(())) > REJECT
    assert goodness(counts, target_law((TemperatureLogitsWarper(1.1),))) < REJECT, "it would have been seen"
    target, draft = pair()
    out = target.generate(
        PROMPT.repeat(4000, 1), do_sample=True, max_new_tokens=3, assistant_model=draft, lossy_policy="strict",
        return_dict_in_generate=True, **SETTINGS,
    )  # fmt: skip
    assert out.speculation.num_compiled_rounds > 0 and out.speculation.num_graphs == 0, (
        "those that were counted ran so, too"
    )
