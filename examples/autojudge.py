"""AutoJudge on the demo models: accept mismatches that do not change the answer, and count the target calls that this saves.

python examples/autojudge.py [--problems N]
"""

import argparse
import warnings

import hf_lossy_assist as hla
from hf_lossy_assist.stats.speculation import SpeculationStats


WINDOW = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=24)
    args = parser.parse_args()

    target, draft, _, tokenizer = hla.demo.load()
    hla.enable(target)
    head = hla.demo.head("autojudge")  # or hla.Head.from_pretrained("org/name")
    problems = hla.demo.problems(args.problems, seed=3)
    constant = hla.Constant(WINDOW)
    policies: list[tuple[str, hla.LossyPolicy]] = [("strict", hla.LossyPolicy(stop=constant))]
    policies += [(f"top-{k}", hla.LossyPolicy(rule=hla.TopK(k), stop=constant)) for k in (2, 4)]
    policies += [("AutoJudge, its own τ", hla.AutoJudge(head, window=WINDOW))]
    policies += [(f"AutoJudge, τ = {tau}", hla.AutoJudge(head, tau, window=WINDOW)) for tau in (0.05, 0.9)]

    warnings.simplefilter("ignore", UserWarning)  # each lossy policy says once that it is lossy
    inputs = tokenizer([p.prompt for p in problems], return_tensors="pt", padding=True)
    for name, policy in policies:
        out = target.generate(
            **inputs, assistant_model=draft, lossy_policy=policy, max_new_tokens=96, return_dict_in_generate=True
        )
        stats: SpeculationStats = out.speculation
        answers = [hla.demo.answer(text) for text in tokenizer.batch_decode(out.sequences)]
        right = sum(a == p.answer for a, p in zip(answers, problems, strict=True))
        print(
            f"{name:20} {stats.mean_acceptance_length:5.2f} tokens a target call, {stats.num_lossy_accepts:3} of "
            f"{stats.num_new_tokens} would have been rejected, {right} of {len(problems)} answers right"
        )


if __name__ == "__main__":
    main()
