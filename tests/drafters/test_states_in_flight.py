"""Drafters on the target's states in `generate_many`: a text takes a free place with the states of its own prompt."""

import pytest
import torch
from support import eagle, small
from support.eagle import dflash_network
from support.many import ENDS, SETTINGS, alone, prompts, together
from transformers import CompileConfig

import hf_lossy_assist as hla
from hf_lossy_assist.drafters.hidden_state import HiddenStateRun
from hf_lossy_assist.drafters.trained import DFlash2Drafter, DFlashDrafter, DSparkDrafter


KINDS = {"eagle3": eagle.drafter, "dflash": lambda target: DFlashDrafter(dflash_network(target))}


@pytest.fixture(scope="module")
def target():
    target = small.llama(layers=3)
    target.generation_config.eos_token_id = ENDS
    return hla.enable(target)


def test_a_prompt_of_one_token_that_is_read_beside_a_long_one_takes_a_place_alone(target):
    """The drafter has nothing to copy from that prompt."""
    limits, settings = (3, 9, 12, 5), SETTINGS | {"eos_token_id": None}
    texts = [*prompts((9, 9, 40)), [5]]
    expected = [alone(target, text, **settings | {"max_new_tokens": n}) for text, n in zip(texts, limits, strict=True)]
    given = [{"prompt": text, "max_new_tokens": n} for text, n in zip(texts, limits, strict=True)]
    assert together((target, eagle.drafter(target)), given, hla.Constant(1), max_rows=2, **settings) == expected


@pytest.mark.full
@pytest.mark.parametrize("kind", ["dflash", pytest.param("eagle3", marks=pytest.mark.full)])
def test_a_row_drafts_what_it_drafts_alone(target, kind, monkeypatch):
    """Whatever stood in its place before: the same tokens with the same distributions, prompts of one and two tokens included."""
    drafted = {}
    original = HiddenStateRun._draft

    def watched(run, rows, limits, steps):
        draft = original(run, rows, limits, steps)
        for b, text in enumerate(rows.token_ids()):
            if limits[b] and int(draft.lengths[b]):
                drafted.setdefault(tuple(text.tolist()), []).append(draft.validity[b, : int(draft.lengths[b])])
        return draft

    monkeypatch.setattr(HiddenStateRun, "_draft", watched)
    texts = prompts((9, 2, 14, 1, 3, 11, 7))
    drafter = KINDS[kind](target)
    both = []
    for rows in (1, 3):
        together((target, drafter), texts, hla.Constant(4), max_rows=rows, eos_token_id=None)
        both.append(dict(drafted))
        drafted.clear()
    one, three = both
    assert one.keys() == three.keys() and len(one) > 20
    for text, validity in one.items():
        for found, expected in zip(validity, three[text], strict=True):
            torch.testing.assert_close(found, expected)


STATES = KINDS | {
    "dspark": lambda target: DSparkDrafter(dflash_network(target, rank=4, from_anchor=True)),
    "dflash2": lambda target: DFlash2Drafter(dflash_network(target, rank=4, candidates=3, from_anchor=True)),
}
COMPILED = {"compile_config": CompileConfig(backend="eager")}


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("eagle3", {}),
        pytest.param("dflash", {"prefill_chunk_size": 3}, marks=pytest.mark.full),
        pytest.param("dflash2", {}, marks=pytest.mark.full),
        *(pytest.param(kind, COMPILED, marks=pytest.mark.nightly) for kind in ("dspark", "eagle3")),
    ],
)
def test_a_row_with_its_generator_is_the_row_alone(target, kind, way):
    """Its first draft begins behind the prompt, whatever stands beside it: the samples, and what was drafted for them."""
    drafter, inputs = STATES[kind](target), small.ragged((0, 2, 5, 1))
    settings = {"do_sample": True, "max_new_tokens": 12, "eos_token_id": None, "lossy_policy": hla.Constant(3)}
    settings |= {"assistant_model": drafter, "return_dict_in_generate": True}

    def written(inputs, seeds, **more):
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        out = target.generate(**inputs, generator=generators, **settings | more)
        counts = [(row.num_draft_tokens, row.num_spec_steps) for row in out.speculation.rows]
        return list(zip(out.sequences[:, inputs["input_ids"].shape[1] :].tolist(), counts, strict=True))

    alone = []
    for seed, (ids, mask) in enumerate(zip(*inputs.values(), strict=True)):
        alone += written({"input_ids": ids[mask.bool()][None], "attention_mask": mask[mask.bool()][None]}, [seed])
    assert written(inputs, range(4), **way) == alone
