"""What recurrent states cost a round, and what drafting gains a hybrid, on random Qwen3.5 and Nemotron-H models of 12 layers.

    python benchmarks/hybrids.py                      # both, batches of 1 and 8: some minutes
    python benchmarks/hybrids.py --only nemotron_h --repeats 9

First the cost of a round (a block of γ + 1 tokens read by the target; and with it γ + 1 steps of a draft model that is a hybrid, too) whose
tokens are rolled back, ÷ the same round whose tokens all stay: each row keeps another number of them. Then speeds beside Transformers'
`generate`: greedy texts with a draft that agrees about 80 % of the tokens by construction (benchmarks/synthetic.py), one that is a hybrid of
2 layers and one that is a Llama of 1. Arms take turns; figures are medians of the repeats behind a warm-up, with the lowest and the
highest.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import synthetic
import torch
from engine import Arm, one_repeat, show_by_batch, warm_up
from pairs import machine, synchronize
from synthetic import Shape, Size, Synthetic

import hf_lossy_assist as hla
from hf_lossy_assist.models.row_model import RowModel


VOCABULARY = 4096
PROMPT = 64  # tokens
ROUNDS = 8  # of one measurement
QWEN = {"model_type": "qwen3_5_text", "head_dim": 64, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
NEMOTRON = {"model_type": "nemotron_h", "head_dim": 64, "mamba_head_dim": 64, "ssm_state_size": 64}
STATE, ATTENTION, MLP = "linear_attention", "full_attention", "mlp"
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen3_5": (  # three layers with states, one with attention
        {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 12, "num_attention_heads": 4, "num_key_value_heads": 2,
         "linear_num_key_heads": 2, "linear_num_value_heads": 4},
        {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
         "linear_num_key_heads": 1, "linear_num_value_heads": 2, "layer_types": [STATE, ATTENTION]},
        QWEN,
    ),
    "nemotron_h": (
        {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2, "mamba_num_heads": 8,
         "n_groups": 2, "layers_block_type": [STATE, MLP, STATE, MLP, STATE, ATTENTION, MLP, STATE, MLP, STATE, ATTENTION, MLP]},
        {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 2, "num_key_value_heads": 1, "mamba_num_heads": 4,
         "n_groups": 1, "layers_block_type": [STATE, ATTENTION, MLP]},
        NEMOTRON,
    ),
}  # fmt: skip
PLAIN = Size("llama", 128, 352, 1, 2, 1, 64)  # a draft that keeps no states


def pair_of(name: str, draft: Size | None = None) -> Synthetic:
    """A pair of one kind of hybrid, or with another draft."""
    target, own, shared = PAIRS[name]
    return Synthetic(name, Shape(shared | target), draft or Shape(shared | own), VOCABULARY)


@torch.inference_mode()
def round_seconds(models: list[Any], batch: int, gamma: int, rolls_back: bool, device: str) -> list[float]:
    """Seconds of a round, on average over `ROUNDS`: of the target's block, and of the draft's steps. `models`: target and draft."""
    generator, out = torch.Generator().manual_seed(0), []
    block = torch.randint(VOCABULARY, (batch, gamma + 1), generator=generator).to(device)
    prompts = torch.randint(VOCABULARY, (batch, PROMPT), generator=generator)
    for model, parts in zip(models, ([block], block.split(1, dim=1)), strict=True):
        rows = RowModel(model, batch, PROMPT + ROUNDS * (gamma + 1))
        rows.feed(prompts, [PROMPT] * batch, keep=0)
        synchronize(device)
        began = time.perf_counter()
        for number in range(ROUNDS):
            for part in parts:
                rows.feed(part, [part.shape[1]] * batch)
            lost = [1 + (number + b) % gamma if rolls_back else 0 for b in range(batch)]
            rows.rollback([length - n for length, n in zip(rows.lengths, lost, strict=True)])
            rows._settle()
        synchronize(device)
        out.append((time.perf_counter() - began) / ROUNDS)
    return out


def rounds(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """What rolling back costs, at each batch size."""
    found = []
    models = list(synthetic.models(pair_of(name), args.agreement, device=args.device))
    for batch in args.batch_sizes:
        times: dict[bool, list[list[float]]] = {False: [], True: []}
        for repeat in range(args.repeats + 1):
            for rolls_back in (False, True) if repeat % 2 else (True, False):
                times[rolls_back].append(round_seconds(models, batch, args.gamma, rolls_back, args.device))
        for what, of in {"target's block": [0], "draft and target": [0, 1]}.items():
            stays, back = ([sum(parts[i] for i in of) for parts in times[its][1:]] for its in (False, True))
            ratios = sorted(b / a for a, b in zip(stays, back, strict=True))
            row = {"pair": name, "batch_size": batch, "what": what, "stays_ms": 1e3 * statistics.median(stays),
                   "rolled_back_ms": 1e3 * statistics.median(back), "ratio": statistics.median(ratios),
                   "lowest": ratios[0], "highest": ratios[-1]}  # fmt: skip
            found.append(row)
            print(
                f"{name:12}batch {batch:<4}{what:18}{row['stays_ms']:8.1f} ms stays{row['rolled_back_ms']:8.1f} ms rolled back"
                f"   ratio {row['ratio']:.3f} ({ratios[0]:.3f}–{ratios[-1]:.3f})"
            )
    return found


def speeds(name: str, args: argparse.Namespace) -> None:
    """Texts with drafts beside Transformers' `generate`, at each batch size."""
    pair = pair_of(name)
    target, draft = synthetic.models(pair, args.agreement, device=args.device)
    _, plain = synthetic.models(pair_of(name, PLAIN), args.agreement, device=args.device)
    hla.enable(target)
    generate = type(target).generate
    arms = []
    for size in args.batch_sizes:
        arms.append(Arm("target", size, lambda **kwargs: generate(target, **kwargs)))
        for label, model in {"hybrid draft": draft, "Llama draft": plain}.items():
            for policy in ("strict", "svip"):
                own = {"assistant_model": model, "lossy_policy": policy}
                own |= {"num_assistant_tokens": args.gamma} if policy == "strict" else {}
                arms.append(
                    Arm(f"{policy}, {label}", size, lambda own=own, **kwargs: target.generate(**own, **kwargs))
                )
    prompts: list[Any] = synthetic.prompts(pair, max(args.prompts, *args.batch_sizes), PROMPT)
    warm_up(arms, synthetic.tokenizer, prompts[: max(args.batch_sizes)], args, set())
    for _ in range(args.repeats):
        one_repeat(arms, synthetic.tokenizer, prompts, args, set())
    path = args.json
    args.json = None if path is None else path.with_name(f"{path.stem}-{name}{path.suffix}")
    show_by_batch(arms, args)
    args.json = path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PAIRS, help="this kind of hybrid; default both")
    parser.add_argument("--agreement", type=float, default=0.8, help="of target and draft (default %(default)s)")
    parser.add_argument("--gamma", type=int, default=4, help="drafted tokens of a round (default %(default)s)")
    parser.add_argument("--batch-sizes", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--prompts", type=int, default=8, help="of each repeat (default %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5, help="the figure is the median of these (default 5)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="write speeds here as well, each kind to a file of its own")
    args = parser.parse_args()

    print(machine(args.device))
    for name in [args.only] if args.only else PAIRS:
        rounds(name, args)
        speeds(name, args)


if __name__ == "__main__":
    main()
