"""The demo's word problems as a task of lm-eval, in a folder for its `--include-path`."""

import json
from pathlib import Path

from hf_lossy_assist.tasks.demo_task import problems


PROBLEMS = 12
_TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 96, do_sample: false}}
filter_list:
  - name: number
    filter:
      - {{function: regex, regex_pattern: "answer is (-?[0-9]+)"}}
      - {{function: take_first}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


def write_task(folder: Path, name: str, count: int = PROBLEMS) -> None:
    """Write a task of `count` problems into an existing folder: `name`.yaml and `name`.jsonl."""
    rows = folder / f"{name}.jsonl"
    lines = (json.dumps({"question": p.prompt, "answer": str(p.answer)}) for p in problems(count, seed=3))
    rows.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    (folder / f"{name}.yaml").write_text(_TASK.format(name=name, rows=json.dumps(str(rows))), encoding="utf-8")
