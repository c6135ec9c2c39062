"""Join the answers of Qwen2.5-Coder 1.5B, which are stored beside this script, to their questions, whose files are yours.

    python benchmarks/answers.py --data-dir DATA --out answers.jsonl
    hf-lossy collect --for eagle3 --model M --prompts answers.jsonl --written --chat --dtype int8 --out texts

Two of Spec-Bench's questions are rows 303 and 347 of GSM8K's test part: measure on others.
DATA: a folder with gsm8k/train.jsonl (the first 2000 of GSM8K's training part) and spec_bench/dev.jsonl (Spec-Bench's, first turns).
"""

import argparse
import json
import lzma
from pathlib import Path


STORED = Path(__file__).parent / "answers" / "qwen2.5-coder-1.5b.jsonl.xz"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines with prompt and continuation")
    args = parser.parse_args()
    with lzma.open(STORED, "rt", encoding="utf-8") as file:
        answers = [json.loads(line) for line in file]
    files = {answer["file"]: args.data_dir / answer["file"] for answer in answers}
    if missing := [str(file) for file in files.values() if not file.is_file()]:
        parser.error(f"--data-dir: there is no {missing[0]}")
    rows = {name: file.read_text(encoding="utf-8").splitlines() for name, file in files.items()}
    with args.out.open("w", encoding="utf-8") as out:
        for answer in answers:
            row = json.loads(rows[answer["file"]][answer["row"]])
            prompt = row["question"] if "question" in row else row["turns"][0]
            out.write(json.dumps({"prompt": prompt, "continuation": answer["answer"]}, ensure_ascii=False) + "\n")
    print(f"{args.out}: {len(answers)} answers")


if __name__ == "__main__":
    main()
