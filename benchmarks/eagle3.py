"""Compare an EAGLE-3 drafter with the draft model and the target alone, in one interleaved run.

    python benchmarks/eagle3.py                                              # the demo, batches of 1, 8 and 32, eager and compiled
    python benchmarks/eagle3.py --model M --assistant D --drafter FOLDER --weights int8 --prompts gsm8k.jsonl --chat --batch-sizes 1
    python benchmarks/eagle3.py … --no-compile --arms target "model svip" "eagle3 γ=3" "eagle3 tolerant" --warm-up 1

Arms: `target` (Transformers' generate), `target static` (compiled, with a static cache), `model γ` and `model svip` (the draft model, eager and
compiled), `eagle3 γ` (chains of 3 and 5), `eagle3 svip`, and `eagle3 tolerant` (lossy: `top_k_tolerance`, k = 3, 1 nat), all of them also compiled.
Counted as in benchmarks/engine.py.
"""

import argparse
import warnings
from collections.abc import Callable
from typing import Any

from engine import Arm, one_repeat, show_by_batch
from pairs import opened, options
from transformers import CompileConfig

import hf_lossy_assist as hla
from hf_lossy_assist.evaluation.arms import make_static_writer
from hf_lossy_assist.models.packed_linears import quantised


def arms_for(
    target: Any, draft: Any, drafter: hla.Eagle3Drafter | hla.DFlashDrafter, args: argparse.Namespace
) -> list[Arm]:
    plain = type(target).generate

    def ours(policy: Any, assistant: Any, **settings: Any) -> Callable[..., Any]:
        return lambda **kwargs: target.generate(lossy_policy=policy, assistant_model=assistant, **settings, **kwargs)

    eager, compiled = {"disable_compile": True}, {"compile_config": CompileConfig()}
    tolerant = hla.LossyPolicy(hla.TopKTolerance(3, 1.0), hla.Constant(5))
    arms = []
    for size in args.batch_sizes:
        arms.append(Arm("target", size, lambda **kwargs: plain(target, **kwargs)))
        if args.compile:
            arms.append(Arm("target static", size, make_static_writer(target, args.capacity, None)))
        for name, settings in {"": eager, " compiled": compiled}.items():
            if settings is compiled and not args.compile:
                continue
            arms.append(Arm(f"model γ=5{name}", size, ours("strict", draft, num_assistant_tokens=5, **settings)))
            arms.append(Arm(f"model svip{name}", size, ours("svip", draft, **settings)))
            for gamma in (3, 5):
                arms.append(Arm(f"eagle3 γ={gamma}{name}", size, ours(hla.Constant(gamma), drafter, **settings)))
            arms.append(Arm(f"eagle3 svip{name}", size, ours("svip", drafter, **settings)))
            arms.append(Arm(f"eagle3 tolerant{name}", size, ours(tolerant, drafter, **settings)))
    return arms


def main() -> None:
    parser = options(__doc__, seed=777)
    parser.add_argument("--drafter", help="folder or Hub id of the drafter; default the demo's")
    parser.add_argument("--weights", choices=["float", "int8"], default="float", help="of target, draft and drafter")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--batch-sizes", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--capacity", type=int, default=256, help="of the static caches, tokens")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="only eager arms")
    parser.add_argument("--warm-up", type=int, help="prompts of it (default all, which meets every shape)")
    parser.add_argument("--arms", nargs="+", metavar="NAME", help="only these (default all)")
    args = parser.parse_args()

    warnings.filterwarnings("ignore", message=".*this policy is lossy")
    target, draft, tokenizer, prompts, ends = opened(args)
    drafter: Any = hla.demo.drafter()
    if args.drafter is not None:
        drafter = hla.load_drafter(args.drafter)
    if args.weights == "int8":
        target, draft, drafter = quantised(target), quantised(draft), drafter.int8()
    arms = arms_for(target, draft, drafter, args)
    if args.arms:
        unknown = sorted(set(args.arms) - {arm.name for arm in arms})
        if unknown:
            raise SystemExit(
                f"--arms: no {', '.join(unknown)}; there are {', '.join(dict.fromkeys(other.name for other in arms))}"
            )
        arms = [arm for arm in arms if arm.name in args.arms]
    for arm in arms:  # compile for each batch size
        for start in range(0, args.warm_up or len(prompts), arm.batch_size):
            arm.run(tokenizer, prompts[start : start + arm.batch_size], args, ends)
    for _ in range(args.repeats):
        one_repeat(arms, tokenizer, prompts, args, ends)

    show_by_batch(arms, args)


if __name__ == "__main__":
    main()
