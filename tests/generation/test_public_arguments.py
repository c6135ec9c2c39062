"""Every parameter of every public name, given what it cannot be: refused in one line by this package, or said to be free."""

import functools
import inspect

import pytest
import refused
import right_use
import torch
from support.small import tokenizer

import hf_lossy_assist as hla
from hf_lossy_assist.registry import KINDS, list_entries


def head(**config):
    return hla.LinearHead(hla.HeadConfig(16, **config))


# What a parameter without a default is given while another one is tried.
GIVEN = {
    "head": head, "stop": hla.SVIP, "stops": lambda: (hla.SVIP(),), "rule": hla.Typical, "rules": lambda: (hla.Typical(),),
    "policy": lambda: "svip", "model": right_use.target, "config": lambda: hla.HeadConfig(16), "table": lambda: ((1, 2),),
    "layers": lambda: 1, "hidden_size": lambda: 16, "alpha": lambda: 0.5, "weight": lambda: 0.5, "threshold": lambda: 0.1,
    "budget": lambda: 0.5, "lenience": lambda: 0.5, "k": lambda: 4, "companion": right_use.draft, "given": lambda: "svip",
    "function": lambda: max, "name": lambda: "x", "target": right_use.target, "prompts": list, "tokenizer": tokenizer,
}  # fmt: skip
WRONG = (object(), "x", -3, 2.5, float("nan"), True, [], {}, None, "\n", torch.zeros(2))

# Made by the engine and handed to rules and stops, or bases without parameters.
NOT_CALLED_BY_USERS = {
    "Draft",
    "DraftContext",
    "Randomness",
    "Rows",
    "Selection",
    "Verified",
    "Verdict",
    "Distributions",
    "DrafterRun",
    "RuleRun",
    "Result",
    "RowStats",
    "SpeculationStats",
    "StoppingCandidateGenerator",
    "StopRun",
    "WarmUp",
}
REGISTERING = {name for name in hla.__all__ if name.startswith("register_")} | {
    "forget"
}  # tests/policy/test_registry.py
COMPILING = {"warmup"}  # tests/generation/test_warmup.py: what is right here compiles
# Looked at when they are used, with the models at hand; `generate` and the wrong uses try those.
LATER = {
    *(("Runner", name) for name in ("assistant", "streamer", "tokenizer", "assistant_tokenizer", "cache_given")),
    ("Staged", "companion"), ("disable", "model"), ("is_enabled", "model"),
    *(("ModelIdentity", name) for name in ("id", "revision", "model_type", "hidden_size", "num_layers", "vocab_size")),
}  # fmt: skip
# Of a profile's tables: tests/artifacts; of a drafter's files: tests/drafters.
BY_FILES = {
    "Profile",
    "SVFilter",
    "SpeculativeVerification",
    "sv",
    "Eagle3Drafter",
    "DFlashDrafter",
    "load_drafter",
    "save_drafter",
}


def parameters():
    for name in hla.__all__:
        its = getattr(hla, name)
        if not callable(its) or name in NOT_CALLED_BY_USERS | REGISTERING | BY_FILES | COMPILING:
            continue
        for parameter in inspect.signature(its).parameters.values():
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                yield name, parameter.name


@functools.cache
def given(name):
    return GIVEN[name]()


@functools.cache
def examples(its):
    """What the registry's entry of a rule, stop or filter gives for parameters that are not in `GIVEN`."""
    found = [entry.example for kind in KINDS for entry in list_entries(kind) if entry.make is its]
    return {name: value for example in found for name, value in example.items() if name not in GIVEN}


def attempt(name, parameter, value):
    its = getattr(hla, name)
    needed = [p.name for p in inspect.signature(its).parameters.values() if p.default is p.empty and p.name in GIVEN]
    out = its(**{**examples(its), **{p: given(p) for p in needed if p != parameter}, parameter: value})
    return out.__enter__() if name == "stock_stop" else out


@pytest.mark.parametrize(("name", "parameter"), [pair for pair in parameters() if pair not in LATER])
def test_a_wrong_argument_gets_one_line(name, parameter):
    for value in WRONG:
        error = refused.refusal(functools.partial(attempt, name, parameter, value))
        assert error is None or refused.fault(error) is None, f"{value!r}: {error!r}"
    assert refused.refusal(functools.partial(attempt, name, parameter, WRONG[0])) is not None


def test_what_is_looked_at_later_exists():
    assert set(parameters()) >= LATER
