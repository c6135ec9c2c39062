"""Measure structured output: drafts beside the target alone, all under the same grammars, a different one for each prompt.

    python benchmarks/structured.py                                                            # the demo pair
    python benchmarks/structured.py --model M --assistant D --prompts gsm8k.jsonl --chat --problems 8 --weights int8

Arms in batches of each size: `target` (Transformers' generate with this package's processor), `target, xgrammar` (with xgrammar's own, which
serves no drafts), `strict γ` and `svip`. A demo prompt's grammar is the form of its worked answer with its names and things; a prompt of another
model gets a JSON schema of worked steps whose property names are its own. Grammars are compiled before the clock starts.
Greedy, otherwise as benchmarks/engine.py; "equal" compares with the first arm.
"""

import re
from collections.abc import Callable
from typing import Any

from engine import Arm, one_repeat, show_by_batch, warm_up
from pairs import opened, options
from xgrammar.contrib.hf import LogitsProcessor

import hf_lossy_assist as hla
from hf_lossy_assist.models.packed_linears import quantised


def demo_grammar(prompt: str) -> str:
    """Return the form of a demo answer: sentences with the numbers and things of this problem, then its result."""
    thing = re.findall(r"\d+ ([a-z]+)", prompt)[-1]
    step = f'[0-9]+ " " [-+] " " [0-9]+ " = " [0-9]+ " {thing}"'
    return f'root ::= (([A-Za-z ,] | {step}) [.;]?)+ " The answer is " [0-9]+ "."'


def schema_of(number: int) -> dict[str, Any]:
    """Return the schema of worked steps for prompt `number`."""
    step = {
        "type": "object",
        "properties": {f"calculation_{number}": {"type": "string"}, "result": {"type": "number"}},
        "required": [f"calculation_{number}", "result"],
    }
    steps = {"type": "array", "items": step, "minItems": 1, "maxItems": 2 + number % 4}
    return {
        "type": "object",
        "properties": {f"steps_{number}": steps, "answer": {"type": "number"}},
        "required": [f"steps_{number}", "answer"],
    }


def arms_of(target: Any, draft: Any, tokenizer: Any, grammars: dict[tuple[int, ...], Any], args: Any) -> list[Arm]:
    """Return the arms. grammars: compiled, by the ids of the prompt."""
    plain, processors = type(target).generate, list[Any]()

    def prepare(make: Callable[[list[Any]], Any]) -> Callable[..., None]:
        def prepared(input_ids: Any, attention_mask: Any, **_: Any) -> None:
            pairs = zip(input_ids, attention_mask.bool(), strict=True)
            processors[:] = [make([grammars[tuple(row[mask].tolist())] for row, mask in pairs])]

        return prepared

    def alone(**kwargs: Any) -> Any:
        return plain(target, logits_processor=[*processors], **kwargs)

    def ours(policy: str, **settings: Any) -> Callable[..., Any]:
        how = {"assistant_model": draft, "lossy_policy": policy, **settings}
        return lambda **kwargs: target.generate(logits_processor=[*processors], **how, **kwargs)

    made = prepare(lambda found: hla.structured(found, tokenizer))
    arms = []
    for size in args.batch_sizes:
        arms += [
            Arm("target", size, alone, made),
            Arm("target, xgrammar", size, alone, prepare(LogitsProcessor)),
            Arm(f"strict {args.gamma}", size, ours("strict", num_assistant_tokens=args.gamma), made),
            Arm("svip", size, ours("svip"), made),
        ]
    return arms


def main() -> None:
    parser = options(__doc__, problems=16, seed=777)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--batch-sizes", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--weights", choices=["int8"], help="convert both models")
    args = parser.parse_args()
    target, draft, tokenizer, prompts, ends = opened(args)
    if args.weights:
        quantised(draft)
        quantised(target)
    sources = [demo_grammar(text) if args.model is None else schema_of(n) for n, text in enumerate(prompts)]
    grammars = {
        tuple(tokenizer(text)["input_ids"]): hla.structured(source, tokenizer).grammars[0]
        for text, source in zip(prompts, sources, strict=True)
    }
    arms = arms_of(target, draft, tokenizer, grammars, args)
    warm_up(arms, tokenizer, prompts[: max(args.batch_sizes)], args, ends)
    for _ in range(args.repeats):
        one_repeat(arms, tokenizer, prompts, args, ends)
    show_by_batch(arms, args)


if __name__ == "__main__":
    main()
