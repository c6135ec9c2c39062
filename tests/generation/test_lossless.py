"""Whatever drafts, for one row or several, greedy or sampled: the text is the target's own. A registered drafter without an entry fails.

Sampling from the one likeliest token has greedy decoding's text, through the code that draws. The distributions themselves are enumerated in
tests/rules/test_lossless_registry.py; every stop is in tests/stops/test_stop_matrix.py, and combinations of rules, stops and filters are in
tests/policy/test_combinations.py.
"""

import pytest
import torch
from support import eagle, small
from support.eagle import dflash_network

import hf_lossy_assist as hla
from hf_lossy_assist.drafters.trained import DFlashDrafter, DSparkDrafter
from hf_lossy_assist.generation.draft_settings import STATE_DRAFTS
from hf_lossy_assist.registry import list_entries


DRAFTERS = {
    "model": lambda target: {"assistant_model": small.near(target)},
    "suffix": lambda target: {"drafter": hla.SuffixDrafter(min_match=1)},
    "composite": lambda target: {"assistant_model": small.near(target), "drafter": hla.CompositeDrafter()},
    "auto": lambda target: {"assistant_model": small.near(target), "drafter": "auto"},
    "prompt lookup": lambda target: {"prompt_lookup_num_tokens": 3},
    "early exit": lambda target: {"assistant_model": hla.early_exit(target, 2)},
    "eagle3": lambda target: {"drafter": eagle.drafter(target)},
    "dflash": lambda target: {"drafter": DFlashDrafter(dflash_network(target))},
    "dspark": lambda target: {"drafter": DSparkDrafter(dflash_network(target, rank=4, from_anchor=True))},
    "mtp": lambda target: {"use_mtp": True},
}
STOPS = dict.fromkeys(DRAFTERS, "svip") | dict.fromkeys(
    ("suffix", "prompt lookup", "mtp"), hla.Constant(2)
)  # no draft model
MODES = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "top_k": 1}}


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    """A target for each drafter: the one of MTP has its layers in its checkpoint."""
    plain = hla.enable(small.llama(layers=3))
    mtp = STATE_DRAFTS and hla.enable(eagle.mtp_target(eagle.write_mtp(tmp_path_factory.mktemp("mtp"), 2)))
    return {name: mtp if name == "mtp" else plain for name in DRAFTERS}


@pytest.mark.full(every=8)
@pytest.mark.nightly(every=4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("stopped", [False, True], ids=["strict", "stop"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_text_is_the_targets(targets, name, stopped, rows, mode):
    target = targets[name]
    if name == "mtp" and (not STATE_DRAFTS or rows > 1):
        pytest.skip("one row at a time, in Transformers that have it")
    inputs = small.ragged((0, 3, 5)[:rows], vocab=target.config.vocab_size)
    settings = {"max_new_tokens": 20}
    expected = target.generate(**inputs, **settings, do_sample=False)
    given = DRAFTERS[name](target) | {
        "lossy_policy": STOPS[name] if stopped else "strict",
        "return_dict_in_generate": True,
    }
    out = target.generate(**inputs, **settings, **given, **MODES[mode])
    assert torch.equal(out.sequences, expected) and out.speculation.lossless
    assert out.speculation.rows[0].steps


def test_every_registered_drafter_is_here():
    assert {entry.name for entry in list_entries("drafter")} <= set(DRAFTERS)
