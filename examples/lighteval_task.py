"""Run lighteval on the demo's target, whose texts a standing policy writes; lighteval's code is as it was.

python examples/lighteval_task.py --limit 8            # needs lighteval, and a network: it downloads a file to list its tasks
python examples/lighteval_task.py --limit 8 --plain    # the same with Transformers' own texts

Likelihoods are the target's: they pass by `generate`.
"""

import argparse
import json
import tempfile
from pathlib import Path
from types import ModuleType

import numpy as np
from lighteval.logging.evaluation_tracker import EvaluationTracker
from lighteval.metrics.metrics_sample import ExactMatches
from lighteval.metrics.utils.metric_utils import SampleLevelMetric
from lighteval.models.transformers.transformers_model import TransformersModelConfig
from lighteval.pipeline import ParallelismManager, Pipeline, PipelineParameters
from lighteval.tasks.lighteval_task import LightevalTaskConfig
from lighteval.tasks.requests import Doc, SamplingMethod

import hf_lossy_assist as hla


def find_number(text: str) -> str:
    return str(hla.demo.answer(text))


def make_doc(row: dict, task_name: str) -> Doc:
    return Doc(task_name=task_name, query=row["question"], choices=[row["solution"]], gold_index=0)


def make_tasks(folder: Path, count: int) -> ModuleType:
    """Write `count` of the demo's problems into a folder, and return the module with their task that lighteval wants."""
    problems = hla.demo.problems(count, seed=3)
    rows = [json.dumps({"question": p.prompt, "solution": p.solution}) for p in problems]
    (folder / "test.jsonl").write_text("\n".join(rows), encoding="utf-8")
    right = SampleLevelMetric(
        metric_name="right",
        sample_level_fn=ExactMatches(normalize_gold=find_number, normalize_pred=find_number),
        category=SamplingMethod.GENERATIVE,
        corpus_level_fn=np.mean,
        higher_is_better=True,
    )
    module = ModuleType("demo_tasks")
    module.TASKS_TABLE = [  # type: ignore[attr-defined]
        LightevalTaskConfig(
            name="word_problems",
            prompt_function=make_doc,
            hf_repo=str(folder),
            hf_subset="default",
            evaluation_splits=["test"],
            metrics=[right],
            generation_size=96,
            stop_sequence=["\n\n"],
        )
    ]
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--plain", action="store_true", help="without a standing policy")
    args = parser.parse_args()

    target, draft, _, _ = hla.demo.load()
    if not args.plain:
        hla.enable(target, assistant_model=draft, lossy_policy="svip", strict=True)
    with tempfile.TemporaryDirectory() as folder:
        (data := Path(folder, "data")).mkdir()
        pipeline = Pipeline(
            tasks="word_problems|0",
            pipeline_parameters=PipelineParameters(
                ParallelismManager.NONE, custom_tasks_directory=make_tasks(data, args.limit)
            ),
            evaluation_tracker=EvaluationTracker(output_dir=folder),
            model=target,
            model_config=TransformersModelConfig(
                model_name="demo-target",
                tokenizer=str(hla.demo.FOLDER / "target"),
                device="cpu",
                batch_size=4,
                override_chat_template=False,
                cache_dir=folder,  # lighteval remembers texts by this configuration, which says nothing of the policy
            ),
        )
        pipeline.evaluate()
    for samples in pipeline.get_details().values():
        print(json.dumps([sample.model_response.text for sample in samples]))
    print(f"right: {pipeline.get_results()['results']['all']['right']:.2f}")
    for report in hla.reports(target)[-1:]:
        print(f"the last batch: {report.draft_acceptance_rate:.0%} of the drafted tokens accepted")


if __name__ == "__main__":
    main()
