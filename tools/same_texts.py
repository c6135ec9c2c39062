"""Record the greedy tokens of many policies with one checkout, and compare them with another's.

    git worktree add /tmp/before 7054678
    PYTHONPATH=/tmp/before python tools/same_texts.py record texts.json     # a few minutes
    python tools/same_texts.py compare texts.json                           # exit status 1 if one token differs
    python tools/same_texts.py compare texts.json --compile eager --models llama demo --problems 8   # compiled rounds

Each policy runs on 40 demo problems at batch 1 and at batch 8, and on ragged prompts of six tiny random architectures if it needs no head
of the demo's. Policies are written in their short and JSON forms, so that classes may be renamed between the two checkouts.
"""

import argparse
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


ARCHITECTURES = ("llama", "qwen3", "gemma2", "gpt2", "gpt_neox", "mistral")
BATCHES = (1, 8)
# Rules that are defined for greedy decoding, and stops.
RULES: tuple[Any, ...] = (
    "strict", "block_verification", {"name": "lenience", "lenience": 0.3}, {"name": "relaxed_top_k", "k": 10, "delta": 0.9}, {"name": "top_k", "k": 2},
    {"name": "top_k_tolerance", "k": 3, "tolerance": 3.0}, "typical", {"name": "limited", "rule": {"name": "top_k", "k": 4}, "per_request": 5},
    {"name": "union", "rules": ["typical", {"name": "relaxed_top_k", "k": 3}]},
)  # fmt: skip
STOPS: tuple[Any, ...] = (
    {"name": "constant", "gamma": 4}, "heuristic", "confidence", "svip", {"name": "batch_schedule", "table": {"1": 6, "4": 3}},
    {"name": "joint_goodput", "step": 0.1, "token": 0.005}, {"name": "at_least", "stop": "svip", "n": 3},
    {"name": "any_of", "stops": ["svip", {"name": "constant", "gamma": 7}]}, {"name": "all_of", "stops": ["svip", {"name": "confidence", "threshold": 0.8}]},
    {"name": "fallback", "stop": {"name": "constant", "gamma": 5}, "margin": 1.0},
)  # fmt: skip
HOW: dict[str, Any] = {}  # how calls are compiled, in the words of `generate`


def policies() -> list[Any]:
    """Return the policies that any pair of models can run."""
    rules = [{"rule": rule, "stop": {"name": "constant", "gamma": 6}} for rule in RULES]
    return rules + [{"stop": stop} | more for stop in STOPS for more in ({}, {"rule": {"name": "top_k", "k": 2}})]


def demo_policies(folder: Path, companion: Any) -> list[Any]:
    """Return the policies that need the demo's heads, profile or companion."""
    sprinter, judge, specdec = (str(folder / f"{name}_head") for name in ("sprinter", "autojudge", "specdec"))
    out: list[Any] = [{"stop": {"name": "head", "head": sprinter}}, {"stop": {"name": "specdec", "head": specdec}}]
    for patience in (1.0, 0.0):
        out.append({"rule": "all_but_last", "stop": {"name": "head", "head": sprinter, "patience": patience}})
    for stop in ({"name": "constant", "gamma": 32}, "svip"):
        out.append({"rule": {"name": "judge", "head": judge}, "stop": stop})
    for exact in ("full", "prefix", "off"):
        sv = {"name": "sv", "profile": str(folder / "sv_profile"), "companion": companion, "exact": exact}
        out.append({"filter": sv | {"fallback": False}, "stop": {"name": "constant", "gamma": 7}})
    staged = {"filter": {"name": "staged", "companion": companion}}
    return [*out, staged, staged | {"rule": {"name": "top_k", "k": 2}}]


def written(target: Any, draft: Any, inputs: Any, policy: Any, length: int) -> list[list[int]]:
    """Return each row's new tokens, padding included."""
    settings = {"max_new_tokens": length, "do_sample": False, **HOW}
    out = target.generate(**inputs, assistant_model=draft, lossy_policy=policy, **settings)
    return out[:, inputs["input_ids"].shape[1] :].tolist()


def on_demo(hla: Any, problems: int) -> Iterator[tuple[str, list[list[int]]]]:
    models = hla.demo.load()
    target, tokenizer = hla.enable(models.target), models.tokenizer
    prompts = [problem.prompt for problem in hla.demo.problems(problems, seed=2611)]
    for spec in [*policies(), *demo_policies(Path(hla.demo.FOLDER), models.companion)]:
        policy = hla.LossyPolicy.from_dict(spec)
        for batch in BATCHES:
            texts: list[list[int]] = []
            for first in range(0, problems, batch):
                inputs = tokenizer(prompts[first : first + batch], return_tensors="pt", padding=True)
                rows = written(target, models.draft, inputs, policy, 48)
                texts += [[t for t in row if t != tokenizer.pad_token_id] for row in rows]
            yield f"demo, batch {batch}: {json.dumps(spec, default=lambda _: 'companion')}", texts


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
        for spec in policies():
            inputs = {"input_ids": ids, "attention_mask": mask}
            yield f"{kind}: {json.dumps(spec)}", written(target, draft, inputs, hla.LossyPolicy.from_dict(spec), 24)


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
    recorded = {
        name: rows[: args.problems] if name.startswith("demo") else rows
        for name, rows in json.loads(args.file.read_text()).items()
    }
    shared = [name for name in recorded if name in made]
    differ = [f"differs: {name}" for name in shared if recorded[name] != made[name]]
    print(*differ, f"{len(shared) - len(differ)} of {len(shared)} equal; {len(made) - len(shared)} are new", sep="\n")
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
