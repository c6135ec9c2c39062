"""What a judge cannot be fitted to: models that the data was not mined with, a record no run wrote, labels of one kind."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from ...artifacts.conditions import check_decoding
from ...models.identity import ModelIdentity, check_weights, named_int8, tokenizer_hash
from ...training.finished import check_entries
from ...validation import check_flag, check_int, shown
from .hidden_states import MinedTable
from .splits import Parts


def check_models(mined: MinedTable, target: Any, draft: Any, tokenizer: Any) -> dict[str, ModelIdentity | None]:
    """Refuse models that the mismatches were not mined with; warn of another id or precision under the same sizes.

    Returns: the models that the data is of; None: a target that was behind a server and is not here. Raises: `ValueError`.
    """
    facts = mined.facts
    missing = [name for name in ("settings", "target", "draft", "tokenizer_hash") if name not in facts]
    if missing:
        raise ValueError(f"the dataset's mine.json does not say its {', '.join(missing)}: mine it again")
    _check_record(facts, Path("mine.json"))
    identities: dict[str, ModelIdentity | None] = {}
    models = {"target": target, "draft": draft}
    for (name, model), dtype in zip(models.items(), facts.get("dtypes") or (None, None), strict=True):
        recorded = ModelIdentity.from_dict(facts[name]) if facts[name] is not None else None
        identities[name] = recorded
        if model is None:
            continue
        given = ModelIdentity.of(model)
        if dtype is not None and dtype != str(model.dtype):
            warnings.warn(
                f"the {name} was in {dtype} when the data was mined and is in {model.dtype} here: a head should be fitted in the "
                "precision it will decode in (--dtype)",
                stacklevel=3,
            )
        if recorded is None:  # mined behind a server, which does not say what it runs
            warnings.warn(
                f"the data was mined with {shown(facts.get('served'))} behind a server, taken to be {given}",
                stacklevel=3,
            )
            identities[name] = given
            continue
        instead = "Pass the models it names (--model, --assistant), or mine with these"
        recorded.check(given, name, "the dataset", "the dataset was mined", instead)
        precision = "int8" if named_int8(recorded.id) else str(dtype).removeprefix("torch.")
        check_weights(
            facts.get(f"{name}_weights"),
            precision,
            model,
            name,
            "the dataset was mined",
            "use the same, or mine again",
        )
    here = tokenizer_hash(tokenizer)
    if here != facts["tokenizer_hash"]:
        raise ValueError(
            f"the dataset was mined with a tokenizer of hash {facts['tokenizer_hash'][:12]}…, and the tokenizer here has "
            f"{here[:12]}…: pass the models it names (--model), or mine with these"
        )
    sizes = [identity.vocab_size for identity in identities.values() if identity is not None]
    mined.check_tokens(sizes[0] if identities["target"] is not None else max(len(tokenizer), *sizes), "the dataset")
    return identities


def _check_record(facts: dict[str, Any], where: Path) -> None:
    """Refuse a record that says what no run of `hf-lossy mine` had."""
    objects = dict.fromkeys(("settings", "draft", "versions"), dict)
    texts = dict.fromkeys(("task", "source", "tokenizer_hash"), str)
    check_entries(facts, objects | texts | {"problems": int, "dtypes": list}, where)
    try:
        check_int("problems", facts["problems"], 1)
        check_decoding(facts["settings"])
        check_flag("naive", facts["settings"].get("naive", False))
        if len(facts["dtypes"]) != 2 or not all(dtype is None or isinstance(dtype, str) for dtype in facts["dtypes"]):
            raise ValueError(f"dtypes: expected those of the target and the draft, got {shown(facts['dtypes'])}")
        for name in ("target", "draft"):
            if facts[name] is not None:  # a target behind a server
                ModelIdentity.from_dict(facts[name])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}: mine it again") from None


def check_labels(important: np.ndarray, problem: np.ndarray, parts: Parts, mlp: bool) -> None:
    """Refuse data that no classifier can be fitted to, or that no figure can be had from.

    `mlp`: a network is to be fitted too, which stops early on a tenth of its own training rows, of both labels.
    """
    problems = len(np.unique(problem))
    whole = [("the dataset", np.ones_like(important))]
    sides = [
        (f"the {side} problems" + (f" of fold {k}" if len(parts) > 1 else ""), mask)
        for k, part in enumerate(parts)
        for side, mask in zip(("training", "held-out"), part, strict=True)
    ]
    advice = "pass fewer --folds" if len(parts) > 1 else "try --folds 5"
    for name, mask in whole + sides:
        labels = important[mask]
        if labels.all() or not labels.any():
            kind = "important" if labels.all() else "unimportant"
            hint = "" if mask.all() else f", {advice}, or another --seed"
            raise ValueError(
                f"{name}: only {kind} mismatches ({len(labels)} in {len(np.unique(problem[mask]))} of {problems} problems), and "
                f"both kinds are needed: mine more problems{hint}"
            )
    for name, mask in sides:
        labels = important[mask]
        if mlp and name.startswith("the training") and (len(labels) < 20 or min(labels.sum(), (~labels).sum()) < 2):
            raise ValueError(
                f"{name}: {len(labels)} mismatches, {labels.sum()} of them important; an MLP needs 20 and two of each kind: mine "
                "more problems, or fit --head linear without --compare"
            )
