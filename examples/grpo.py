"""Train the demo's target by GRPO with TRL; its rollouts speculate by a standing policy, and the trainer's code is as it was.

python examples/grpo.py --steps 4            # needs trl, and the extra "train"
python examples/grpo.py --steps 4 --plain    # the same with Transformers' own rollouts
python examples/grpo.py --steps 20 --compare # both in turn, of the same weights and prompts, timed

Rollouts are of the target's distribution at each step, so rewards and the loss mean what they meant before.
"""

import argparse
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import set_seed
from trl import GRPOConfig, GRPOTrainer

import hf_lossy_assist as hla


def right(completions: list[str], answer: list[int], **columns: object) -> list[float]:
    """Reward a right answer. `columns`: what else TRL hands over."""
    return [float(hla.demo.answer(text) == wanted) for text, wanted in zip(completions, answer, strict=True)]


class BothRollouts:
    """`generate` of an enabled target that also writes each rollout as Transformers does, and times both; the order alternates."""

    def __init__(self, target: Any, pad: int):
        self.ways = {"speculating": target.generate, "Transformers' own": type(target).generate.__get__(target)}
        self.pad, self.speeds = pad, {name: list[float]() for name in self.ways}

    def __call__(self, **given: Any) -> Any:
        turn, texts = len(self.speeds["speculating"]) % 2, {}
        for name in sorted(self.ways, reverse=turn == 1):
            began = time.perf_counter()
            texts[name] = self.ways[name](**given)
            seconds = time.perf_counter() - began
            new = texts[name][:, given["input_ids"].shape[1] :]
            self.speeds[name].append(int((new != self.pad).sum()) / seconds)
        return texts["speculating"]

    def __str__(self) -> str:
        ours, plain = (torch.tensor(self.speeds[name][1:]) for name in self.ways)  # the first one warms up
        low, middle, high = (ours / plain).quantile(torch.tensor([0.1, 0.5, 0.9])).tolist()
        return (
            f"rollouts: {middle:.2f} × Transformers' own by wall clock (tenths {low:.2f} to {high:.2f} of {len(ours)}); "
            f"{ours.median():.0f} and {plain.median():.0f} tokens/s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--plain", action="store_true", help="without a standing policy")
    parser.add_argument("--compare", action="store_true", help="time each rollout beside Transformers' own")
    parser.add_argument("--policy", default="strict")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the rollouts (default: TRL's)")
    args = parser.parse_args()

    set_seed(0)
    target, draft, _, tokenizer = hla.demo.load()
    if not args.plain:
        hla.enable(target, assistant_model=draft, lossy_policy=args.policy, num_assistant_tokens=8, strict=True)
    both = BothRollouts(target, tokenizer.pad_token_id)
    if args.compare:
        target.generate = both
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            target,
            reward_funcs=right,
            args=GRPOConfig(
                output_dir=folder,
                max_steps=args.steps,
                per_device_train_batch_size=16,
                num_generations=4,
                max_completion_length=64,
                temperature=args.temperature,
                learning_rate=1e-5,
                use_cpu=not torch.cuda.is_available(),
                bf16=False,
                gradient_checkpointing=False,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
            ),
            train_dataset=Dataset.from_list(
                [{"prompt": p.prompt, "answer": p.answer} for p in hla.demo.problems(4 * args.steps, seed=1)]
            ),
            processing_class=tokenizer,
        )
        trainer.train()
    if args.compare:
        print(both)
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print(f"rewards: {', '.join(f'{reward:.2f}' for reward in rewards)}")
    for number, report in enumerate(hla.reports(target)):
        print(
            f"rollout {number}: {report.num_new_tokens} tokens in {report.forwards['target']} forwards of the target, "
            f"{report.draft_acceptance_rate:.0%} of the drafted tokens accepted"
        )


if __name__ == "__main__":
    main()
