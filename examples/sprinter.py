"""SPRINTER on the demo models: target calls that a trained head saves, and its cost in right answers.

python examples/sprinter.py [--problems N]
"""

import argparse
import warnings

import hf_lossy_assist as hla
from hf_lossy_assist.stats.speculation import SpeculationStats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=12)
    args = parser.parse_args()

    target, draft, _, tokenizer = hla.demo.load()
    hla.enable(target)
    head = hla.demo.head()  # or hla.Head.from_pretrained("org/name")
    problems = hla.demo.problems(args.problems, seed=3)
    policies: list[tuple[str, hla.LossyPolicy]] = [("strict, γ = 5", hla.LossyPolicy(stop=hla.Constant(5)))]
    policies += [(f"SPRINTER, τ = {tau}", hla.Sprinter(head, threshold=tau)) for tau in (0.9, 0.7, 0.5, 0.3)]

    warnings.simplefilter("ignore", UserWarning)  # each lossy policy says once that it is lossy
    for name, policy in policies:
        calls, right = [], 0
        for problem in problems:
            inputs = tokenizer(problem.prompt, return_tensors="pt")
            out = target.generate(
                **inputs, assistant_model=draft, lossy_policy=policy, max_new_tokens=96, return_dict_in_generate=True
            )
            calls.append(out.speculation)
            right += hla.demo.answer(tokenizer.decode(out.sequences[0])) == problem.answer
        stats = SpeculationStats.merge(calls)
        unchecked = stats.num_unchecked_tokens / stats.num_new_tokens
        print(
            f"{name:18} {stats.mean_acceptance_length:5.2f} tokens a target call, {unchecked:5.1%} of them never checked, "
            f"{right} of {len(problems)} answers right"
        )


if __name__ == "__main__":
    main()
