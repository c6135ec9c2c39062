"""Record the greedy tokens of every registered policy with one checkout, and compare them with another's.

    git worktree add /tmp/before 7054678
    PYTHONPATH=/tmp/before python tools/same_texts.py record texts.json     # a few minutes
    python tools/same_texts.py compare texts.json                           # exit status 1 if one token differs
    python tools/same_texts.py compare texts.json --compile eager --models llama demo --problems 8   # compiled rounds

Each policy runs on 40 demo problems at batch 1 and at batch 8, and on ragged prompts of six tiny random architectures if it needs no head
of the demo's. Policies are written in their JSON form, so that classes may be renamed between the two checkouts.
"""

import argparse
import collections
import copy
import itertools
import json
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import CompileConfig


sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))  # tiny_models.py
ARCHITECTURES = ("llama", "qwen3", "gemma2", "gpt2", "gpt_neox", "mistral")
BATCHES = (1, 8)
# Rules that are defined for greedy decoding; every stop; every filter; the methods.
RULES: dict[str, dict[str, Any]] = {
    "strict": {},
    "block_verification": {},
    "lenience": {"lenience": 0.3},
    "limited": {"rule": {"name": "top_k", "k": 4}, "per_request": 5},
    "relaxed_top_k": {"k": 10, "delta": 0.9},
    "top_k": {"k": 2},
    "top_k_tolerance": {"k": 3, "tolerance": 3.0},
    "typical": {},
    "union": {"rules": [{"name": "typical"}, {"name": "relaxed_top_k", "k": 3}]},
}
STOPS: dict[str, dict[str, Any]] = {
    "constant": {"gamma": 4},
    "heuristic": {},
    "confidence": {},
    "svip": {},
    "batch_schedule": {"table": {"1": 6, "4": 3}},
    "joint_goodput": {"step": 0.1, "token": 0.005},
    "at_least": {"stop": {"name": "svip"}, "n": 3},
    "any_of": {"stops": [{"name": "svip"}, {"name": "constant", "gamma": 7}]},
    "all_of": {"stops": [{"name": "svip"}, {"name": "confidence", "threshold": 0.8}]},
    "fallback": {"stop": {"name": "constant", "gamma": 5}, "margin": 1.0},
}


def policies() -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the JSON forms of the policies that any pair of models can run, by name."""
    for name, settings in RULES.items():
        yield f"rule {name}", {"rule": {"name": name.split()[0], **settings}, "stop": {"name": "constant", "gamma": 6}}
    for name, settings in STOPS.items():
        yield f"stop {name}", {"stop": {"name": name, **settings}}
        yield f"stop {name}, top_k", {"stop": {"name": name, **settings}, "rule": {"name": "top_k", "k": 2}}


def demo_policies(hla: Any, companion: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the policies that need the demo's heads, profile or companion."""
    folder = Path(hla.demo.FOLDER)
    heads = {name: str(folder / f"{name}_head") for name in ("sprinter", "autojudge", "specdec")}
    yield "stop head", {"stop": {"name": "head", "head": heads["sprinter"]}}
    yield "stop specdec", {"stop": {"name": "specdec", "head": heads["specdec"]}}
    yield (
        "sprinter",
        {
            "rule": {"name": "all_but_last"},
            "stop": {"name": "head", "head": heads["sprinter"], "patience": 1.0},
        },
    )
    yield (
        "sprinter, patience 0",
        {
            "rule": {"name": "all_but_last"},
            "stop": {"name": "head", "head": heads["sprinter"], "patience": 0.0},
        },
    )
    judge = {"name": "judge", "head": heads["autojudge"]}
    yield "autojudge", {"rule": judge, "stop": {"name": "constant", "gamma": 32}}
    yield "autojudge, svip", {"rule": judge, "stop": {"name": "svip"}}
    for exact in ("full", "prefix", "off"):
        sv = {"name": "sv", "profile": str(folder / "sv_profile"), "companion": companion, "exact": exact}
        yield f"sv {exact}", {"filter": sv | {"fallback": False}, "stop": {"name": "constant", "gamma": 7}}
    yield "staged", {"filter": {"name": "staged", "companion": companion}}
    yield "staged, top_k", {"filter": {"name": "staged", "companion": companion}, "rule": {"name": "top_k", "k": 2}}


HOW: dict[str, Any] = {}  # how calls are compiled, in the words of `generate`
COUNTED: collections.Counter[str] = collections.Counter()  # calls, by how their rounds ran


def written(target: Any, draft: Any, inputs: Any, policy: Any, length: int) -> list[list[int]]:
    """Return each row's new tokens, padding included."""
    out = target.generate(
        **inputs,
        assistant_model=draft,
        lossy_policy=policy,
        max_new_tokens=length,
        do_sample=False,
        return_dict_in_generate=True,
        **HOW,
    )
    if HOW:
        stats = out.speculation
        kind = "whole rounds" if stats.num_compiled_rounds else "models" if stats.num_compiled_forwards else "nothing"
        COUNTED[f"{kind} compiled"] += 1
    return out.sequences[:, inputs["input_ids"].shape[1] :].tolist()


def on_demo(hla: Any, problems: int) -> Iterator[tuple[str, list[list[int]]]]:
    models = hla.demo.load()
    target, tokenizer = hla.enable(models.target), models.tokenizer
    prompts = [problem.prompt for problem in hla.demo.problems(problems, seed=2611)]
    pad = tokenizer.pad_token_id
    for name, spec in [*policies(), *demo_policies(hla, models.companion)]:
        policy = hla.LossyPolicy.from_dict(spec)
        for batch in BATCHES:
            texts: list[list[int]] = []
            for first in range(0, problems, batch):
                inputs = tokenizer(prompts[first : first + batch], return_tensors="pt", padding=True)
                rows = written(target, models.draft, inputs, policy, 48)
                texts += [[t for t in row if t != pad] for row in rows]
            yield f"demo, batch {batch}: {name}", texts


def on_tiny(hla: Any, kinds: Sequence[str]) -> Iterator[tuple[str, list[list[int]]]]:
    from tiny_models import lively, tiny_config  # of this checkout, whichever engine runs
    from transformers import AutoModelForCausalLM

    for kind in kinds:
        model = lively(AutoModelForCausalLM.from_config(tiny_config(kind))).eval()
        draft = copy.deepcopy(model)  # often right, and often not
        with torch.no_grad():
            torch.manual_seed(3)
            for weight in draft.parameters():
                weight.add_(0.1 * weight.std() * torch.randn_like(weight))
        target = hla.enable(model)
        ids = torch.randint(5, 60, (4, 12))
        mask = torch.ones_like(ids)
        mask[1, :3] = mask[2, :7] = 0
        for name, spec in policies():
            policy = hla.LossyPolicy.from_dict(spec)
            inputs = {"input_ids": ids, "attention_mask": mask}
            yield f"{kind}: {name}", written(target, draft, inputs, policy, 24)


def texts(problems: int, models: Sequence[str]) -> dict[str, list[list[int]]]:
    import hf_lossy_assist as hla

    warnings.simplefilter("ignore")  # that policies are lossy, and that the demo's profile is of another machine
    out, began = {}, time.monotonic()
    tiny = on_tiny(hla, [kind for kind in ARCHITECTURES if kind in models])
    for name, rows in itertools.chain(tiny, on_demo(hla, problems) if "demo" in models else []):
        out[name] = rows
        print(f"\r{len(out)} texts, {time.monotonic() - began:.0f} s", end="", file=sys.stderr)
    print(f"\n{hla.__file__}: {len(out)} policies on models", file=sys.stderr)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--problems", type=int, default=40)
    parser.add_argument("--models", nargs="*", default=["demo", *ARCHITECTURES])
    parser.add_argument("--compile", metavar="BACKEND", help="compare what compiled rounds write")
    args = parser.parse_args()
    if args.compile:
        HOW["compile_config"] = CompileConfig(backend=args.compile)
    made = texts(args.problems, args.models)
    if args.action == "record":
        args.file.write_text(json.dumps(made))
        return 0
    recorded = json.loads(args.file.read_text())
    recorded = {
        name: rows for name, rows in recorded.items() if name.partition(":")[0].partition(",")[0] in args.models
    }
    recorded = {name: rows[: args.problems] if name.startswith("demo") else rows for name, rows in recorded.items()}
    differ = [name for name in sorted(recorded) if recorded[name] != made.get(name)]
    for name in sorted(made.keys() - recorded.keys()):  # newer than the record
        print(f"not in {args.file}: {name}")
    for name in differ:
        print(f"differs: {name}")
    print(
        f"{len(recorded) - len(differ)} of {len(recorded)} equal{'; calls: ' if COUNTED else ''}{dict(COUNTED) or ''}"
    )
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
