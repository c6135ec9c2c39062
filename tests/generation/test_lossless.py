"""Whatever drafts, by whatever entry, for whatever prompts: the text is the target's own, token for token. A registered drafter without an entry fails.

Each pair of values of two axes stands together in a row. Sampling from the one likeliest token has greedy decoding's text, through the code that draws.
The distributions themselves are enumerated in tests/rules/test_lossless_registry.py; every stop is in tests/stops/test_stop_matrix.py, combinations of
rules, stops and filters are in tests/policy/test_combinations.py, and compiled rounds in tests/engine.
"""

import copy
from functools import cache

import pytest
import torch
from support import eagle, small, tiny
from support.pairs import cover_pairs
from support.tiny import cache_of

import hf_lossy_assist as hla
from hf_lossy_assist.drafters.trained import DFlash2Drafter, DFlashDrafter, DSparkDrafter, Eagle3Drafter
from hf_lossy_assist.generation.draft_settings import STATE_DRAFTS
from hf_lossy_assist.models.facts import CACHE
from hf_lossy_assist.registry import list_entries


LAYERS = {"target_layers": (0, 1)}  # whose states are read, of two blocks


def near(target):
    return tiny.draft_of(target, "often")


def parallel(target):
    draft = near(target)
    draft.config.pard_token = 2
    return draft


def foreign(target):
    """Its ids are the target's words in reverse order."""
    draft, order = near(target), torch.cat([torch.arange(4), torch.arange(4, tiny.VOCABULARY).flip(0)])
    with torch.no_grad():
        for weight in (draft.get_input_embeddings().weight, draft.get_output_embeddings().weight):
            weight.copy_(weight[order])
    tokenizers = {"tokenizer": small.tokenizer(), "assistant_tokenizer": small.tokenizer(small.words()[::-1])}
    return {"assistant_model": draft} | tokenizers


def dflash(kind, **flags):
    return lambda target: {"drafter": kind(eagle.dflash_network(target, **LAYERS, **flags))}


DRAFTERS = {
    "model": lambda target: {"assistant_model": near(target)},
    "parallel": lambda target: {"assistant_model": parallel(target)},
    "foreign": foreign,
    "suffix": lambda target: {"drafter": hla.SuffixDrafter(min_match=1)},
    "composite": lambda target: {"assistant_model": near(target), "drafter": hla.CompositeDrafter()},
    "auto": lambda target: {"assistant_model": near(target), "drafter": "auto"},
    "prompt lookup": lambda target: {"prompt_lookup_num_tokens": 3},
    "early exit": lambda target: {"assistant_model": hla.early_exit(target, 1)},
    "eagle3": lambda target: {"drafter": Eagle3Drafter(eagle.network(target, **LAYERS))},
    "suffix, eagle3": lambda target: {
        "drafter": hla.CompositeDrafter(hla.SuffixDrafter(min_match=1), Eagle3Drafter(eagle.network(target, **LAYERS)))
    },
    "dflash": dflash(DFlashDrafter),
    "dflash2": dflash(DFlash2Drafter, group=8, rank=4, candidates=5),
    "dspark": dflash(DSparkDrafter, rank=4, from_anchor=True),
    "mtp": lambda target: {"use_mtp": True},
}
WITHOUT_MODEL = {"suffix", "prompt lookup", "mtp", "foreign"}  # which stops could ask
POLICIES = {
    "strict": "strict", "svip": hla.SVIP(h=0.6), "constant": hla.Constant(7),
    "fallback": hla.LossyPolicy(stop=hla.Fallback(hla.Constant(3), wait=2)),
}  # fmt: skip
PADS = {
    "one": (0,), "one token": (8,), "even": (0, 0), "ragged": (0, 3, 8, 5), "right": (0, 3, 8, 5), "holes": (0, 3), "cache": (0,),
    "embeddings": (0, 3),
}  # fmt: skip
DECODING = {
    "greedy": {"do_sample": False}, "sampled": {"do_sample": True, "top_k": 1},
    "processors": {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
}  # fmt: skip
ENDS = {"length": tiny.NEVER_EMITTED, "end tokens": list(range(4, 24))}
AXES = {
    "drafter": tuple(DRAFTERS),
    "target": ("llama", "gpt2", "gemma3", "gpt_neox", "mistral", "phi", "mtp"),  # all architectures: test_equality.py
    "inputs": tuple(PADS),
    "entry": ("generate", "runner", "standing", "generate_many"),
    "policy": tuple(POLICIES),
    "decoding": tuple(DECODING),
    "ends": tuple(ENDS),
}


def allowed(row):
    drafter, target, inputs, entry = map(row.get, ("drafter", "target", "inputs", "entry"))
    return not (
        (target and drafter and (target == "mtp") != (drafter == "mtp"))
        or ("mtp" in (target, drafter) and (inputs not in (None, "one", "one token") or entry == "generate_many"))
        or (row.get("policy") == "svip" and drafter in WITHOUT_MODEL)
        or (drafter == "foreign" and target not in (None, "llama", "mistral"))
        or (inputs == "holes" and target in ("mistral", "gemma3"))  # whose windows count them: refused
        or (entry == "generate_many" and inputs not in (None, "one", "one token", "even", "ragged"))
    )


ROWS = cover_pairs(AXES, allowed)
QUICK, FULL = 30, [pytest.mark.full]  # the first ones hold most pairs
CASES = [pytest.param(row, id=", ".join(row.values()), marks=FULL * (n >= QUICK)) for n, row in enumerate(ROWS)]


@pytest.fixture(scope="module")
def target_of(tmp_path_factory):
    """A target by its name; the one of MTP has its layers in its checkpoint."""

    @cache
    def make(name):
        if name != "mtp":
            return hla.enable(tiny.shared(name))
        return eagle.mtp_target(eagle.write_mtp(tmp_path_factory.mktemp("mtp"), 2))

    return make


def prompts(target, kind):
    """The inputs of a call, those with which Transformers writes the same text, and the width of the prompt in what either returns."""
    plain = small.ragged(PADS[kind], vocab=target.config.vocab_size)
    if kind == "one token":
        plain = {name: value[:, 8:] for name, value in plain.items()}
    width, given = plain["input_ids"].shape[1], plain
    if kind == "right":
        turn = torch.stack([torch.arange(width).roll(-pads) for pads in PADS[kind]])
        given = {name: value.gather(1, turn) for name, value in plain.items()}
    elif kind == "holes":
        plain["attention_mask"][:, 5] = 0
    elif kind == "embeddings":
        with torch.no_grad():
            embeds = target.get_input_embeddings()(plain["input_ids"])
        plain, width = {"inputs_embeds": embeds, "attention_mask": plain["attention_mask"]}, 0
        given = plain
    elif kind == "cache":
        settings = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
        first = target.generate(**plain, **settings)
        ids = torch.cat([first.sequences, torch.tensor([[7, 8, 9]])], dim=1)
        plain, width = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, ids.shape[1]
        given = plain | {CACHE: copy.deepcopy(cache_of(first))}
    return given, plain, width


def written(target, entry, inputs, drafting, policy, settings):
    """The output of a call by this entry."""
    settings = settings | {"return_dict_in_generate": True}
    if entry == "standing":
        with hla.using(target, **drafting, lossy_policy=policy):
            return target.generate(**inputs, **settings)
    if entry == "runner":
        names = {"assistant_model": "assistant", "tokenizer": "tokenizer", "assistant_tokenizer": "assistant_tokenizer", "drafter": "drafter"}  # fmt: skip
        held = {names[name]: value for name, value in drafting.items() if name in names}
        rest = {name: value for name, value in drafting.items() if name not in names}
        return target.generate(**inputs, **settings, **rest, custom_generate=hla.Runner(policy, **held))
    return target.generate(**inputs, **settings, **drafting, lossy_policy=policy)


@pytest.mark.filterwarnings("ignore:Passing .*with .inputs_embeds.:UserWarning")
@pytest.mark.filterwarnings("ignore:generate_many writes one text at a time here. RetokenizingRun:UserWarning")
@pytest.mark.parametrize("row", CASES)
def test_the_text_is_the_targets(target_of, row):
    target = target_of(row["target"])
    if row["target"] == "mtp" and not STATE_DRAFTS:
        pytest.skip("this Transformers has no MTP")
    inputs, plain, width = prompts(target, row["inputs"])
    settings = {"max_new_tokens": 16, "eos_token_id": ENDS[row["ends"]], "pad_token_id": tiny.PAD}
    if row["target"] == "mtp" and row["ends"] == "end tokens":
        settings["eos_token_id"] = 4
    settings |= DECODING[row["decoding"]]
    expected = target.generate(**plain, **settings | {"do_sample": False, "top_k": None})[:, width:]
    drafting, policy = DRAFTERS[row["drafter"]](target), POLICIES[row["policy"]]
    if row["entry"] == "generate_many":
        texts = [ids[mask.bool()].tolist() for ids, mask in zip(*inputs.values(), strict=True)]
        made = {"assistant_model": drafting.pop("assistant_model", None)} | drafting
        if settings.get("repetition_penalty"):  # which sees no padding there
            alone = [target.generate(torch.tensor([text]), **settings)[0, len(text) :].tolist() for text in texts]
        else:
            alone = [text.tolist() for text in expected]
        results = list(hla.generate_many(target, texts, **made, lossy_policy=policy, max_rows=2, **settings))
        assert len(results) == len(texts)
        for result in results:
            whole = alone[result.index]
            assert result.token_ids == whole[: len(result.token_ids)] and result.speculation.lossless
            assert set(whole[len(result.token_ids) :]) <= {tiny.PAD}
        return
    out = written(target, row["entry"], inputs, drafting, policy, settings)
    assert torch.equal(out.sequences[:, width:], expected)
    assert out.speculation.lossless and out.speculation.rows[0].steps


def test_every_registered_drafter_is_here():
    assert {entry.name for entry in list_entries("drafter")} <= set(DRAFTERS)
