"""Tokens per second by what drafts: a draft model, the text itself, or the text where it has a proposal and else the model.

    python benchmarks/drafters.py                                            # the demo pair, CPU
    python benchmarks/drafters.py --model M --assistant D --prompts gsm8k.jsonl --chat --problems 8

Arms: `target` (Transformers' generate alone), `lookup` (Transformers' own prompt lookup, batch 1), `suffix` (`SuffixDrafter`),
`suffix, earlier texts` (one with a memory, emptied before each repeat), `model γ` (strict acceptance of γ tokens of the draft model) and
`composite` (`CompositeDrafter`). Interleaved and counted as in benchmarks/engine.py, whose options it has.
"""

import argparse
from collections.abc import Callable
from typing import Any

from engine import Arm, one_repeat, show_by_batch, warm_up
from pairs import opened, options

import hf_lossy_assist as hla


def arms_for(target: Any, draft: Any, args: argparse.Namespace, memories: dict[int, hla.SuffixMemory]) -> list[Arm]:
    """`memories`: by batch size; one that another size has filled would hold this one's own texts."""
    plain = type(target).generate

    def ours(**settings: Any) -> Callable[..., Any]:
        return lambda **kwargs: target.generate(lossy_policy="strict", **settings, **kwargs)

    arms = []
    for size, memory in memories.items():
        arms.append(Arm("target", size, lambda **kwargs: plain(target, **kwargs)))
        if size == 1:
            arms.append(
                Arm("lookup", size, lambda **kwargs: plain(target, prompt_lookup_num_tokens=args.gamma, **kwargs))
            )
        model = {"assistant_model": draft, "num_assistant_tokens": args.gamma}
        arms.append(Arm("suffix", size, ours(drafter=hla.SuffixDrafter())))
        arms.append(Arm("suffix, earlier texts", size, ours(drafter=hla.SuffixDrafter(memory=memory))))
        arms.append(Arm(f"model γ={args.gamma}", size, ours(**model)))
        arms.append(Arm("composite", size, ours(**model, drafter=hla.CompositeDrafter())))
    return arms


def main() -> None:
    parser = options(__doc__, seed=777)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--batch-sizes", type=int, nargs="*", default=[1, 8])
    args = parser.parse_args()

    target, draft, tokenizer, prompts, ends = opened(args)
    memories = {size: hla.SuffixMemory() for size in sorted({1, *args.batch_sizes})}
    arms = arms_for(target, draft, args, memories)
    warm_up(arms, tokenizer, prompts[:2], args, ends)
    for _ in range(args.repeats):
        for memory in memories.values():
            memory.clear()
        one_repeat(arms, tokenizer, prompts, args, ends)

    show_by_batch(arms, args)


if __name__ == "__main__":
    main()
