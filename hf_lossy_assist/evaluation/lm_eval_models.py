"""This package's engine in EleutherAI's lm-eval: a registered model, "hf-lossy", and runs of a model that measures its seconds.

    python -m hf_lossy_assist.evaluation.lm_eval_models run --model hf-lossy --model_args pretrained=M,assistant=D,policy=svip --tasks gsm8k

is lm-eval's command with that model registered.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..enabling import enable
from ..stats.clock import wait_for
from ..text.detokenizer import continuation
from ..validation import one_line


class PromptAwareDecoding:
    """Decodes lm-eval's texts after their prompts, since leading spaces of code belong to its indentation."""

    tokenizer: PreTrainedTokenizerBase
    prompts: deque[list[int]] = deque()  # prompts of the texts that lm-eval has not decoded yet, in its order

    def tok_decode(self, tokens: object, skip_special_tokens: bool = True) -> object:
        """Return the text of new tokens after the next prompt; other tokens, such as single end tokens, are decoded by lm-eval."""
        if not self.prompts or not isinstance(tokens, list):
            return super().tok_decode(tokens, skip_special_tokens)  # type: ignore[misc]
        return continuation(self.tokenizer, self.prompts.popleft(), tokens)


@cache
def make_models() -> tuple[type, type]:
    """Return lm-eval's Transformers model with `seconds`, and a model whose texts a policy writes, which is registered as "hf-lossy".

    `seconds` are spent in generation only; the first batch is generated twice, and counts when warm. They are created on demand, since
    lm-eval is an extra and takes seconds to import.
    """
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM

    class TimedLM(PromptAwareDecoding, HFLM):
        """`HFLM` that measures the seconds of generation."""

        def __init__(self, *args: object, **kwargs: object):
            super().__init__(*args, **kwargs)
            self.seconds, self._warm = 0.0, False

        def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **settings: Any) -> Any:
            if not self._warm:
                super()._model_generate(context, max_length, stop, **settings)
                self._warm = True
            wait_for(self.device)
            began = time.perf_counter()
            out = super()._model_generate(context, max_length, stop, **settings)
            wait_for(self.device)
            self.seconds += time.perf_counter() - began
            if self.backend == "causal":
                rows = zip(context, settings["attention_mask"].bool(), strict=True)
                self.prompts = deque(ids[mask].tolist() for ids, mask in rows)
            return out

    @register_model("hf-lossy")
    class LossyLM(HFLM):
        """`HFLM` whose target has a standing policy; likelihoods are those of the target.

        Args:
            pretrained: the target, a loaded model or whatever lm-eval accepts.
            assistant: the draft, a loaded model, a folder or a Hub id. policy: whatever `lossy_policy=` accepts.
            kwargs: of `HFLM`.
        """

        def __init__(
            self, pretrained: object, assistant: PreTrainedModel | str, policy: object = "svip", **kwargs: object
        ):
            super().__init__(pretrained, **kwargs)
            if isinstance(assistant, str):
                from ..artifacts.loading import load_model

                assistant = load_model(assistant, dtype=self.model.dtype).to(self.model.device).eval()
            enable(self.model, assistant, policy, strict=True, tokenizer=self.tokenizer)

    return TimedLM, LossyLM


def make_task_manager(tasks: Sequence[str], folder: Path | None) -> object:
    """Return lm-eval's task manager, including the task files in `folder`.

    lm-eval takes ten seconds to list its tasks, so they are included only if needed. Tasks are read once, before models are.

    Raises: `ValueError`, one line, for unknown tasks, and for those whose file or data cannot be read.
    """
    from lm_eval.tasks import TaskManager

    def make(defaults: bool) -> TaskManager:
        with _one_line_errors("--include-path" if folder is None else str(folder)):
            return TaskManager(include_path=None if folder is None else str(folder), include_defaults=defaults)

    manager = make(defaults=folder is None)
    if folder is not None and any(task not in manager.all_tasks for task in tasks):
        manager = make(defaults=True)
    unknown = [task for task in tasks if task not in manager.all_tasks]
    if unknown:
        raise ValueError(
            f"--tasks: lm-eval knows no {', '.join(unknown)}: see lm-eval ls tasks, or pass --include-path"
        )
    for task in tasks:
        with _one_line_errors(f"the task {task}"):
            (manager.load if hasattr(manager, "load") else manager.load_task_or_group)(task)  # the latter up to 0.4.9
    return manager


@contextmanager
def _one_line_errors(what: str) -> Iterator[None]:
    """Reraise errors of YAML, `datasets` and templates, of any type and length, as one line."""
    try:
        yield
    except (ImportError, MemoryError):
        raise
    except Exception as error:
        cause = str(error.__cause__ or "") or str(error) or type(error).__name__
        raise ValueError(
            f"{what} cannot be read: {one_line(cause, 300)}: mend its YAML file, or the data that it names"
        ) from None


def evaluate(model: object, tasks: Sequence[str], manager: object, **settings: object) -> dict[str, dict[str, float]]:
    """Return lm-eval's figures: by task and metric (with its filter), the value; standard errors are named `…_stderr`.

    Args:
        tasks: lm-eval's names. manager: from `make_task_manager`. settings: of `lm_eval.simple_evaluate`.

    Raises: `ValueError`, one line, if a task's template does not fit its data.
    """
    from jinja2 import TemplateError
    from lm_eval import simple_evaluate

    try:
        found = simple_evaluate(model=model, tasks=list(tasks), task_manager=manager, log_samples=False, **settings)
    except TemplateError as error:  # only the first row was tried when the task was read
        raise ValueError(
            f"{', '.join(tasks)}: a template does not fit a row of the data ({one_line(error, 200)}): mend the row, or the YAML file"
        ) from None
    results = {} if found is None else found["results"]
    return {
        task: {name: float(value) for name, value in figures.items() if isinstance(value, int | float)}
        for task, figures in results.items()
    }


if __name__ == "__main__":
    make_models()
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
