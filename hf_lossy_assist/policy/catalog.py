"""Every rule, stop, filter and policy by name: what it does, what it guarantees, where it comes from. `hf-lossy policies` prints it."""

import dataclasses
import inspect
import re
from dataclasses import asdict, dataclass
from typing import Any

from ..filters import FILTERS
from ..rules import RULES
from ..stops import STOPS
from .methods import METHODS, POLICIES, SpeculativeVerification


LOSSLESS, LOSSY = "lossless", "lossy"
# Where the guarantee depends on what is inside.
DEPENDS = {
    "union": "as the rules inside",
    "limited": "as the rule inside",
    "sv": 'lossless; lossy in sampling with exact="off"',
}
# Of those that stand in no paper, or in engines first.
ENGINES = {
    "strict": "huggingface.co/papers/2211.17192",
    "constant": "huggingface.co/papers/2211.17192",
    "heuristic": "Transformers",
    "confidence": "Transformers",
    "head": "huggingface.co/papers/2502.04557",
    "batch_schedule": "vLLM, TensorRT-LLM",
    "relaxed_top_k": "TensorRT-LLM",
    "top_k_tolerance": "vLLM's speculators",
    "thresholds": "SGLang",
    "entropy_verify": "vLLM-Ascend",
    "synthetic_for_benchmarks": "vLLM, SGLang",
}
NEUTRAL_SV = 'any but exact="off"'
OURS = "this package"


@dataclass(frozen=True)
class Entry:
    """One name that a policy's JSON form, or `lossy_policy=`, may hold."""

    name: str
    kind: str  # rule, stop, filter or policy
    class_name: str
    guarantee: str
    neutral: str  # the setting at which the output is strict acceptance's, bit by bit
    parameters: dict[str, Any]  # name → default; "required" where there is none
    source: str
    summary: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def catalog() -> list[Entry]:
    """All entries: rules, stops, filters, then policies."""
    out = []
    for kind, known in (("rule", RULES), ("stop", STOPS), ("filter", FILTERS)):
        for name, its in known.items():
            out.append(
                Entry(name, kind, its.__name__, _guarantee(name, its), _neutral(kind, its), _parameters(its), _source(name, its),
                      _summary(its))
            )  # fmt: skip
    for name, policy in POLICIES.items():
        source = ENGINES["strict"] if policy.stop is None else _source(name, type(policy.stop))
        summary = (
            "Strict acceptance, and the draft lengths of the call."
            if policy.stop is None
            else _summary(type(policy.stop))
        )
        out.append(Entry(name, "policy", "LossyPolicy", LOSSLESS, "itself", {}, source, summary))
    for name, method in (METHODS | {"sv": SpeculativeVerification}).items():
        neutral = {"sprinter": "threshold above 1", "autojudge": "threshold 0", "sv": NEUTRAL_SV}[name]
        guarantee = DEPENDS["sv"] if name == "sv" else LOSSY
        out.append(
            Entry(
                name,
                "policy",
                method.__name__,
                guarantee,
                neutral,
                _arguments(method),
                _source(name, method),
                _summary(method),
            )
        )
    return out


def _guarantee(name: str, its: type) -> str:
    flag = inspect.getattr_static(its, "lossless", True)
    return DEPENDS.get(name) or (LOSSLESS if flag is True else LOSSY)


def _neutral(kind: str, its: type) -> str:
    if its is FILTERS["sv"]:
        return NEUTRAL_SV
    found = re.search(r"Neutral: (.*?)\.(?:\s|$)", _doc(its))
    if found:
        return found[1]
    if kind == "stop":
        return "every setting"  # a stop changes no law
    return "itself" if not _parameters(its) else "every setting"


def _parameters(its: type) -> dict[str, Any]:
    out = {}
    for f in dataclasses.fields(its):
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        out[f.name] = "required" if default is dataclasses.MISSING else _plain(default)
    return out


def _arguments(method: type) -> dict[str, Any]:
    given = list(inspect.signature(method).parameters.values())
    return {p.name: "required" if p.default is p.empty else _plain(p.default) for p in given}


def _plain(value: Any) -> Any:
    """JSON has no infinity, and no tuples."""
    return str(value) if isinstance(value, float) and value in (float("inf"), float("-inf")) else value


def _source(name: str, its: type) -> str:
    found = re.search(r"huggingface\.co/(?:papers/\d{4}\.\d{5}|blog/[\w/-]+)", _doc(its))
    return ENGINES.get(name) or (found[0] if found else OURS)


def _summary(its: type) -> str:
    return re.split(r"(?<=[.;])\s", _doc(its), maxsplit=1)[0].rstrip(":;.") + "."


def _doc(its: type) -> str:
    return " ".join((inspect.cleandoc(its.__doc__ or "")).split())
