"""Wrong heads, judges, profiles and companions, and the one line that each gets.

Run `python tools/wrong_policies.py`. It exits with 1 as `wrong_uses.py` does. Nothing is downloaded: the models are random and tiny.
"""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from refused import main
from right_use import draft, generate, llama, t5, target

import hf_lossy_assist as hla
from hf_lossy_assist.artifacts.conditions import describe_machine
from hf_lossy_assist.artifacts.profile_tables import Bins, Latency


CASES: dict[str, Callable[[], Any]] = {}


def case(name: str, call: Callable[[], Any]) -> None:
    assert name not in CASES, name
    CASES[name] = call


def head(hidden_size: int = 16, **config: Any) -> hla.Head:
    return hla.LinearHead(hla.HeadConfig(hidden_size, **config))


def other(**facts: Any) -> hla.ModelIdentity:
    return dataclasses.replace(hla.ModelIdentity.of(draft()), **facts)


def sprinter(head: Any, **settings: Any) -> Any:
    return generate(lossy_policy=hla.Sprinter(head, **settings))


case("a SPRINTER policy without a head", lambda: generate(lossy_policy="sprinter"))
case("a head that is a path", lambda: sprinter("org/name"))
case("a head of another draft's size", lambda: sprinter(head(24, draft=other(hidden_size=24))))
case("a head of another draft's vocabulary", lambda: sprinter(head(draft=other(vocab_size=60))))
case("a head of another draft's depth", lambda: sprinter(head(draft=other(num_layers=4))))
case("a head of another architecture", lambda: sprinter(head(draft=other(model_type="gpt2"))))
case("a head of another target", lambda: sprinter(head(target=other(hidden_size=64))))
case("a head whose size is not the draft's", lambda: sprinter(head(24)))
case("a judge's head as a verifier", lambda: sprinter(head(polarity="important")))
case("a head that reads the target", lambda: sprinter(head(features=hla.FeatureSpec(model="target"))))
case("a head that reads layer 9 of 1", lambda: sprinter(head(features=hla.FeatureSpec(layer=9, norm=False))))
case("threshold below 0", lambda: sprinter(head(), threshold=-0.1))
case("threshold NaN", lambda: sprinter(head(), threshold=float("nan")))
case("max_draft 0", lambda: sprinter(head(), max_draft=0))
case("patience 2", lambda: sprinter(head(), patience=2))
case(
    "a head stop with prompt lookup",
    lambda: generate(assistant_model=None, prompt_lookup_num_tokens=3, lossy_policy=hla.Sprinter(head())),
)
case("an unknown kind of head", lambda: head(kind="conv"))
case("an mlp without a width", lambda: head(kind="mlp"))
case("a hidden size of 0", lambda: head(0))
case("a feature of an unknown model", lambda: hla.FeatureSpec(model="teacher"))
case("a feature of an inner layer, normed", lambda: hla.FeatureSpec(layer=2))
case("a folder without a head", lambda: hla.Head.from_pretrained(Path(__file__).parent))
case("a repository name that is none", lambda: hla.Head.from_pretrained("no such folder"))
case("a policy folder without a policy", lambda: hla.LossyPolicy.from_pretrained(Path(__file__).parent))
case("a policy in JSON whose head is missing", lambda: generate(lossy_policy={"stop": "head"}))


def judged(**settings: Any) -> Any:
    judge = {"polarity": "important", "features": hla.FeatureSpec(model="target", position="token")}
    return generate(
        lossy_policy=hla.AutoJudge(head(**judge | settings.pop("head", {})), **{"threshold": 0.1} | settings)
    )


case("an AutoJudge policy without a head", lambda: generate(lossy_policy="autojudge"))
case("a verifier as a judge's head", lambda: judged(head={"polarity": "acceptable"}))
case("a judge's head that reads a companion", lambda: judged(head={"features": hla.FeatureSpec(model="companion")}))
case("a judge's head without a threshold", lambda: judged(threshold=None))
case("a judge's threshold above 1", lambda: judged(threshold=1.5))
case("a judge's threshold NaN", lambda: judged(threshold=float("nan")))
case("window 0", lambda: judged(window=0))
case("a judge's head of another target", lambda: judged(head={"target": other(num_layers=9)}))
case(
    "a judge's head of both models whose size is one model's",
    lambda: judged(head={"features": hla.FeatureSpec(model="both")}),
)
case(
    "a judge's head that reads the draft, without a draft model",
    lambda: generate(
        assistant_model=None, prompt_lookup_num_tokens=3,
        lossy_policy=hla.AutoJudge(head(polarity="important"), 0.1),
    ),
)  # fmt: skip
case("top-K with K = -1", lambda: generate(lossy_policy=hla.TopK(-1)))
case("top-K with K = 2.5", lambda: generate(lossy_policy={"rule": {"name": "top_k", "k": 2.5}}))
case("top-K without K", lambda: generate(lossy_policy={"rule": "top_k"}))
case("a rule that nobody knows", lambda: generate(lossy_policy={"rule": "typcal"}))
case("a parameter that nobody knows", lambda: generate(lossy_policy={"rule": {"name": "typical", "epsilom": 0.1}}))
case("typical acceptance with epsilon 2", lambda: generate(lossy_policy=hla.Typical(2.0)))
case("lenience 0, which would accept everything", lambda: generate(lossy_policy=hla.Lenience(0.0)))
case("thresholds without sampling", lambda: generate(lossy_policy=hla.Thresholds(0.1), do_sample=False))
case("relaxed top-k in sampling", lambda: generate(lossy_policy=hla.RelaxedTopK(), do_sample=True))
case("a limit around no rule", lambda: generate(lossy_policy={"rule": "limited"}))
case("a budget below 0", lambda: hla.Limited(hla.TopK(2), per_request=-1))
case("a span between the same marks", lambda: hla.Limited(hla.TopK(2), inside=(3, 3)))
case("a rule of one's own that gives no bool", lambda: generate(lossy_policy=hla.OwnRule(lambda dists: dists.px)))
case("a fallback without a stop", lambda: generate(lossy_policy={"stop": "fallback"}))
case("a fallback that never drafts", lambda: hla.Fallback(hla.SVIP(), first=0))
case("an unsaved head as JSON", lambda: hla.Sprinter(head()).to_dict())


# -- profiles and companions ------------------------------------------------------------------------------------------


def profile(gamma: int = 4, tokens: Any = (0, 2, 4), accept: float = 0.5, **facts: Any) -> hla.Profile:
    """Return a profile of these models with invented figures."""
    counted = np.array([tokens])
    latency = Latency(np.array([1]), counted, 1.0 + counted, *np.full((3, 1), 0.1))
    models = {"target": target(), "draft": draft(), "companion": llama()}
    identities = {name: hla.ModelIdentity.of(model) for name, model in models.items()}
    cells = np.full((2, 2), accept)
    bins = Bins(np.zeros(1, np.float32), np.zeros((2, 1), np.float32), cells, cells[0], np.ones((2, 2), np.int64))
    here = {"tokenizer_hash": "", "decoding": {}, "machine": describe_machine(torch.device("cpu"))}
    return hla.Profile(bins, latency, gamma, np.ones(1), **identities | here | facts)


def sv(made: Any = None, companion: Any = None, gamma: int | None = None, **settings: Any) -> Any:
    policy = hla.SpeculativeVerification(made or profile(), companion or llama(), gamma)
    return generate(lossy_policy=policy, **settings)


case("a profile that is a path", lambda: hla.SpeculativeVerification("org/name", llama()))  # type: ignore[arg-type]
case("a profile of another target", lambda: sv(profile(target=other(num_layers=9))))
case("a profile of another draft", lambda: sv(profile(draft=other(hidden_size=24))))
case("a profile of another companion", lambda: sv(profile(companion=other(vocab_size=60))))
case("a profile whose acceptance has a gap", lambda: sv(profile(accept=float("nan"))))
case("a profile whose seconds end too early", lambda: sv(profile(tokens=(0, 2))))
case("a profile whose seconds go back", lambda: sv(profile(tokens=(0, 4, 2))))
case("a profile whose seconds have a gap", lambda: sv(profile(tokens=(0, float("nan"), 4))))
case("more drafted tokens than were profiled", lambda: sv(gamma=5))
case("more drafted tokens than were profiled, at the call", lambda: sv(num_assistant_tokens=9))
case("a companion of another vocabulary", lambda: sv(companion=llama(60)))
case("a companion that is an encoder-decoder", lambda: sv(companion=t5()))
case("a companion that is no folder", lambda: sv(companion="no such folder"))
case("a companion without a draft model", lambda: sv(assistant_model=None, prompt_lookup_num_tokens=3))
case("an unknown form of exactness", lambda: hla.SpeculativeVerification(profile(), llama(), exact="ful"))  # type: ignore[arg-type]
case("a folder without a profile", lambda: hla.Profile.from_pretrained(Path(__file__).parent))
case("staged speculation with another vocabulary", lambda: generate(lossy_policy=hla.Staged(llama(60))))
case("early exit after more layers than there are", lambda: hla.early_exit(target(), 5))


if __name__ == "__main__":
    sys.exit(main(CASES))
