"""One row for every draft stop, for the tests that all of them must pass."""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

import hf_lossy_assist as hla
from hf_lossy_assist import SVIP, Confidence, Constant, DraftStop, FeatureSpec, HeadConfig, Heuristic, LinearHead
from support.drafts import draft_of, head_for


@dataclass(frozen=True)
class Case:
    """One stop, and what is true of it.

    `stop`: settings under which the rounds of the tiny models differ in length, where they can. `longest`: settings that always draft
    the longest, whatever is drafted and accepted. `form`: the JSON form of `stop`, but for a head.
    """

    stop: DraftStop
    form: dict[str, Any]
    longest: DraftStop | None
    state: bool  # its run keeps something from token to token or from round to round
    varied: bool = True  # rounds differ in length
    rows_apart: bool = True  # a row drafts as it would alone


@cache
def token_head() -> LinearHead:
    """A random head on the state that encodes a token, above a half for most tokens, so that products of it fall slowly."""
    predicting = state_head()
    head = LinearHead(HeadConfig(predicting.config.hidden_size, features=FeatureSpec(position="token"))).eval()
    head.load_state_dict(predicting.state_dict())
    with torch.no_grad():
        head.linear.bias += 4.0
    return head


@cache
def state_head() -> hla.Head:
    """A random head on the state that predicts a token; an object of its own, because saving marks a head."""
    return head_for.__wrapped__(draft_of("llama"))


SHY = {"name": "confidence", "threshold": 0.3, "max_draft": 20}  # in the forms of stops around it

CASES = {
    "constant": Case(
        Constant(4), {"name": "constant", "gamma": 4},
        longest=Constant(6), state=False, varied=False,
    ),
    "heuristic": Case(
        Heuristic(2, 9), {"name": "heuristic", "initial": 2, "max_draft": 9},
        longest=None, state=True,
    ),
    "confidence": Case(
        Confidence(0.17, 9), {"name": "confidence", "threshold": 0.17, "max_draft": 9},
        longest=Confidence(0.0, 6), state=False,
    ),
    "svip": Case(
        SVIP(h=1.5, form="entropy"), {"name": "svip", "h": 1.5, "c": 0.15, "form": "entropy", "max_draft": 40},
        longest=SVIP(h=math.inf, max_draft=6), state=False,
    ),
    "disco": Case(
        hla.DISCO(0.2), {"name": "disco", "threshold": 0.2, "missed": 3.0, "max_draft": 20},
        longest=None, state=True,
    ),
    "adaedl": Case(
        hla.AdaEDL(0.3, scale=0.1, epsilon=0.3, beta2=0.5),
        {"name": "adaedl", "threshold": 0.3, "scale": 0.1, "goal": 0.9, "epsilon": 0.3, "beta1": 0.5, "beta2": 0.5, "max_draft": 20},
        longest=hla.AdaEDL(scale=0.0, max_draft=6), state=True,
    ),
    "head": Case(
        hla.HeadStop(state_head(), 0.4), {"name": "head", "threshold": 0.4, "max_draft": 20, "patience": 1.0},
        longest=hla.HeadStop(state_head(), 0.0, 6), state=False,
    ),
    "specdec": Case(
        hla.SpecDecPP(token_head(), 0.5), {"name": "specdec", "threshold": 0.5, "max_draft": 20},
        longest=hla.SpecDecPP(token_head(), 1.0, 6), state=True,
    ),
    "moving_average": Case(
        hla.MovingAverage(step=0.1, token=0.01, max_draft=6),
        {"name": "moving_average", "profile": None, "step": 0.1, "token": 0.01, "fixed": 1.0, "per": "row", "window": 20, "initial": 0.7,
         "max_draft": 6},
        longest=hla.MovingAverage(step=0.0, initial=1.0, max_draft=6), state=True, rows_apart=False,
    ),
    "moving_average batch": Case(
        hla.MovingAverage(step=0.1, token=0.01, per="batch"),
        {"name": "moving_average", "profile": None, "step": 0.1, "token": 0.01, "fixed": 1.0, "per": "batch", "window": 20, "initial": 0.7,
         "max_draft": None},
        longest=hla.MovingAverage(step=0.0, initial=1.0, per="batch", max_draft=6), state=True, rows_apart=False,
    ),
    "batch_schedule": Case(
        hla.BatchSchedule({1: 7, 3: 2}), {"name": "batch_schedule", "table": [[1, 7], [3, 2]]},
        longest=hla.BatchSchedule({1: 6}), state=False, varied=False, rows_apart=False,
    ),
    "joint_goodput": Case(
        hla.JointGoodput(step=0.1, token=0.01),
        {"name": "joint_goodput", "h": 0.3, "c": 0.15, "max_draft": 40, "exponent": 2.0, "step": 0.1, "token": 0.01, "fixed": 1.0},
        longest=hla.JointGoodput(h=math.inf, max_draft=6, step=0.0), state=True, rows_apart=False,
    ),
    "at_least": Case(
        hla.AtLeast(Confidence(0.3), 3), {"name": "at_least", "stop": SHY, "n": 3},
        longest=hla.AtLeast(Confidence(1.0), 20), state=True,
    ),
    "any_of": Case(
        hla.AnyOf([Confidence(0.3), Heuristic(4, 9), Constant(7)]),
        {"name": "any_of", "stops": [SHY, {"name": "heuristic", "initial": 4, "max_draft": 9}, {"name": "constant", "gamma": 7}]},
        longest=hla.AnyOf([Constant(8), Confidence(0.0, 6)]), state=True,
    ),
    "all_of": Case(
        hla.AllOf([Confidence(0.3), SVIP(h=1.5, form="entropy"), Constant(2)]),
        {"name": "all_of", "stops": [SHY, {"name": "svip", "h": 1.5, "c": 0.15, "form": "entropy", "max_draft": 40},
                                     {"name": "constant", "gamma": 2}]},
        longest=hla.AllOf([Confidence(0.0, 6), Confidence(1.0, 6)]), state=True,
    ),
    "fallback": Case(  # with this margin nothing depends on the seconds of a round
        hla.Fallback(Confidence(0.3), margin=1.0),
        {"name": "fallback", "stop": SHY, "margin": 1.0, "first": 3, "window": 8, "wait": 32, "trials": 0.02},
        longest=None, state=True, rows_apart=False,
    ),
}  # fmt: skip
