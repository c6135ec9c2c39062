"""Fit SVIP to the embedded demo models, and report how far its bound holds on their outputs.

python examples/calibrate_svip.py
python examples/calibrate_svip.py --problems 200 --sample --json calibration.json
"""

import argparse
import json
from pathlib import Path

from hf_lossy_assist import demo
from hf_lossy_assist.methods.svip.calibrate import calibrate_svip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=64, help="held-out prompts")
    parser.add_argument("--sample", action="store_true", help="texts drawn at temperature 1 in place of greedy ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()

    target, draft, _, tokenizer = demo.load()
    prompts = [problem.prompt for problem in demo.problems(args.problems, args.seed, split="calibration")]
    found = calibrate_svip(
        target, draft, prompts, tokenizer=tokenizer, max_new_tokens=80, do_sample=args.sample, seed=args.seed
    )
    print(found)
    if args.json:
        args.json.write_text(json.dumps(found.to_dict(), indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
