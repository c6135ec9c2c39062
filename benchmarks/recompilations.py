"""What compiled rounds compile again: calls of mixed lengths, batch sizes and policies behind a warm-up. Wanted: nothing.

    python benchmarks/recompilations.py                          # 500 calls of the demo pair, inductor
    python benchmarks/recompilations.py --backend eager --calls 100

Prompts are demo problems cut to random lengths, so that rows are ragged; each call writes a random number of new tokens. Any graph that is
made behind the warm-up is counted, and shown with its call.
"""

import random
import time
from typing import Any

from pairs import machine, opened, options, record
from rich.progress import track
from torch._dynamo.utils import counters
from transformers import CompileConfig

import hf_lossy_assist as hla


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def drawn(chance: random.Random, tokenizer: Any, prompts: list[str], sizes: list[int], longest: int) -> dict[str, Any]:
    """Inputs of one call and how much it writes: texts of `longest` tokens at most."""
    rows = chance.choice(sizes)
    texts = [ids[: chance.randint(2, len(ids))] for ids in tokenizer(chance.choices(prompts, k=rows))["input_ids"]]
    inputs = tokenizer.pad({"input_ids": texts}, return_tensors="pt", padding_side="left")
    room = longest - inputs["input_ids"].shape[1]
    return {**inputs, "max_new_tokens": chance.randint(4, min(room, 96))}


def main() -> None:
    parser = options(__doc__, problems=64)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--batch-sizes", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--length", type=int, default=256, help="tokens of the longest text (default %(default)s)")
    parser.add_argument("--policies", nargs="*", default=["strict", "svip", '{"rule": {"name": "top_k", "k": 4}}'])
    parser.add_argument("--backend", default="inductor")
    args = parser.parse_args()

    target, draft, tokenizer, prompts, _ = opened(args)
    how, chance, began = CompileConfig(backend=args.backend), random.Random(args.seed), time.perf_counter()
    for policy in args.policies:
        hla.warmup(target, draft, policy, args.batch_sizes, [args.length], compile_config=how, repeats=1)
    warm, known, compiled, again = time.perf_counter() - began, graphs(), 0, []
    began = time.perf_counter()
    for i in track(range(args.calls), description="calls"):
        policy, inputs = chance.choice(args.policies), drawn(chance, tokenizer, prompts, args.batch_sizes, args.length)
        asked = {"compile_config": how} if chance.random() < 0.5 else {}  # or as the warm-up found it to be faster
        inputs = {name: x.to(args.device) if hasattr(x, "to") else x for name, x in inputs.items()}
        out = target.generate(
            **inputs,
            assistant_model=draft,
            lossy_policy=policy,
            do_sample=False,
            return_dict_in_generate=True,
            **asked,
        )
        compiled += out.speculation.num_compiled_rounds > 0
        if graphs() > known:
            shape = tuple(inputs["input_ids"].shape)
            again.append({"call": i, "policy": policy, "prompt": shape, "new": inputs["max_new_tokens"]})
            known = graphs()
    took = time.perf_counter() - began
    where = machine(args.device)
    print(
        f"{where}: {args.calls} calls in {took:.0f} s behind a warm-up of {warm:.0f} s, {compiled} of them compiled; compiled again: {len(again)}"
    )
    for call in again:
        print(call)
    record(args, where, calls=args.calls, compiled=compiled, again=again, warm_up_seconds=warm, seconds=took)
    raise SystemExit(1 if again else 0)


if __name__ == "__main__":
    main()
