"""EleutherAI's lm-eval with this package's engine: a registered model, "hf-lossy", and a run of it beside the plain one."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..generation.enable import enable
from ..generation.many import generate_many
from ..models.texts import continuation
from ..policy.parse import as_policy
from ..stats.clock import wait_for
from ..stats.speculation import SpeculationStats
from ..terminal import Bar
from ..validation import one_line


class BehindPrompts:
    """Reads lm-eval's texts behind their prompts, for a first space of code is part of its indentation."""

    tokenizer: Any
    prompts: deque[list[int]] = deque()  # of the texts that lm-eval has not read yet, in its order

    def tok_decode(self, tokens: Any, skip_special_tokens: bool = True) -> Any:
        """Return the text of new tokens behind the next prompt; of others, as end tokens by themselves, lm-eval's."""
        if not self.prompts or not isinstance(tokens, list):
            return super().tok_decode(tokens, skip_special_tokens)  # type: ignore[misc]
        return continuation(self.tokenizer, self.prompts.popleft(), tokens)


@cache
def make_models() -> tuple[type, type]:
    """lm-eval's model of Transformers, and the one whose texts a policy writes, which this registers as "hf-lossy". Both have `seconds`:
    of generating alone, without what lm-eval does beside it; the first batch is generated once more, and counts warm.

    Made when they are asked for: lm-eval is an extra, and takes seconds to import.
    """
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM, stop_sequences_criteria

    class TimedLM(BehindPrompts, HFLM):
        """`HFLM` that keeps the seconds of its texts."""

        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self.seconds, self._warm = 0.0, False
            self._rows: int | None = (
                None  # texts at a time, where lm-eval does not share them out; None: as many as it gives
            )

        def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **settings: Any) -> Any:
            if not self._warm:
                mask = settings["attention_mask"][: self._rows]
                self._texts(context[: self._rows], max_length, stop, **settings | {"attention_mask": mask})
                self._warm = True
            wait_for(self.device)
            began = time.perf_counter()
            out = self._texts(context, max_length, stop, **settings)
            wait_for(self.device)
            self.seconds += time.perf_counter() - began
            causal = self.backend == "causal"
            self.prompts = deque(_remove_padding(context, settings["attention_mask"]) if causal else ())
            return out

        def _texts(self, context: torch.Tensor, max_length: int, stop: list[str], **settings: Any) -> Any:
            """Prompts and what is written behind them, as `_model_generate` returns it."""
            return super()._model_generate(context, max_length, stop, **settings)

    @register_model("hf-lossy")
    class LossyLM(TimedLM):
        """`HFLM` with a draft and a policy; likelihoods are the target's own, as ever. `batch_size` texts are written at a time, and one that
        has ended gives its place to the next (`generate_many`).

        Args:
            pretrained: the target, a loaded model or what lm-eval takes.
            assistant: the draft, a loaded model or a folder or Hub id. policy: whatever `lossy_policy=` accepts.
            kwargs: of `HFLM`.
        """

        def __init__(self, pretrained: Any, assistant: Any, policy: Any = "svip", **kwargs: Any):
            super().__init__(pretrained, **kwargs)
            if isinstance(assistant, str):
                from ..models.loading import load_model

                assistant = load_model(assistant, dtype=self.model.dtype).to(self.model.device).eval()
            self.assistant, self.policy = assistant, as_policy(policy)
            self.calls: list[SpeculationStats] = []
            enable(self.model)

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
            """Return all requests with the same settings come to `_model_generate` at once."""
            rows: Any = self.batch_size_per_gpu  # type: ignore[has-type]
            if not isinstance(rows, int) or self.backend != "causal":
                return super().generate_until(requests, disable_tqdm)
            self._rows, self.batch_size_per_gpu = rows, len(requests)
            try:
                return super().generate_until(requests, disable_tqdm=True)
            finally:
                self._rows, self.batch_size_per_gpu = None, rows

        def _texts(self, context: torch.Tensor, max_length: int, stop: list[str], **settings: Any) -> Any:
            if self._rows is None:
                extra = {
                    "assistant_model": self.assistant,
                    "lossy_policy": self.policy,
                    "return_dict_in_generate": True,
                }
                out = super()._texts(context, max_length, stop, **extra, **settings)
                self.calls.append(out.speculation)
                return out.sequences
            if not settings.get("temperature"):  # as lm-eval has it, 0 is greedy
                settings.pop("temperature", None)
                settings.setdefault("do_sample", False)
            settings |= {
                "assistant_model": self.assistant, "lossy_policy": self.policy, "max_rows": self._rows, "tokenizer": self.tokenizer,
                "stopping_criteria": lambda ids: stop_sequences_criteria(self.tokenizer, stop, len(ids), 1),
                "max_new_tokens": max_length - context.shape[1],
            }  # fmt: skip
            out, stats = _generate_in_flight(
                self.model, context, self.tokenizer.pad_token_id, self.rank != 0, settings
            )
            self.calls += [] if stats is None else [stats]
            return out

    return TimedLM, LossyLM


def _generate_in_flight(
    target: Any, context: torch.Tensor, pad: int, quiet: bool, settings: dict[str, Any]
) -> tuple[torch.Tensor, SpeculationStats | None]:
    """Prompts (B, width), padded on the left, with what is written behind them, padded on the right; and the statistics of all of them.

    `settings`: of `generate_many`, and the `attention_mask` of `context`.
    """
    prompts = _remove_padding(context, settings.pop("attention_mask"))
    many = generate_many(target, prompts, pad_token_id=pad, **settings)
    found: list[list[int]] = [[]] * len(prompts)
    with Bar(len(found), "writing", "texts", quiet=quiet) as bar:
        for done, result in enumerate(many, 1):
            found[result.index] = result.token_ids
            bar.to(done)
    texts = [torch.tensor(ids) for ids in found]
    new = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=pad)
    return torch.cat([context.cpu(), new], dim=1), many.speculation


def _remove_padding(context: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    return [ids[shown].tolist() for ids, shown in zip(context, mask.bool(), strict=True)]


def make_task_manager(tasks: Sequence[str], folder: Path | None) -> Any:
    """lm-eval's tasks, those of the files in `folder` among them; alone where they are all that is asked for, since lm-eval
    takes ten seconds to list its own. They are read once, before models are.

    Raises: `ValueError`, one line, for tasks that there are not, and for those whose file or data cannot be read.
    """
    from lm_eval.tasks import TaskManager

    def listed(defaults: bool) -> Any:
        with _readable("--include-path" if folder is None else str(folder)):
            return TaskManager(include_path=None if folder is None else str(folder), include_defaults=defaults)

    manager = listed(defaults=folder is None)
    if folder is not None and any(task not in manager.all_tasks for task in tasks):
        manager = listed(defaults=True)
    unknown = [task for task in tasks if task not in manager.all_tasks]
    if unknown:
        raise ValueError(
            f"--tasks: lm-eval knows no {', '.join(unknown)}: see lm-eval ls tasks, or pass --include-path"
        )
    for task in tasks:
        with _readable(f"the task {task}"):
            (manager.load if hasattr(manager, "load") else manager.load_task_or_group)(task)  # the latter up to 0.4.9
    return manager


@contextmanager
def _readable(what: str) -> Iterator[None]:
    """Shorten what YAML, `datasets` and templates raise, of any type and many lines, to one line."""
    try:
        yield
    except (ImportError, MemoryError):
        raise
    except Exception as error:
        cause = (
            str(error.__cause__ or "") or str(error) or type(error).__name__
        )  # an empty file: StopIteration, without a word
        raise ValueError(
            f"{what} cannot be read: {one_line(cause, 400)}: mend its YAML file, or the data that it names"
        ) from None


def evaluate(model: Any, tasks: Sequence[str], manager: Any, **settings: Any) -> dict[str, dict[str, float]]:
    """lm-eval's figures: by task, by metric (with its filter), the value; standard errors as `…_stderr`.

    Args:
        tasks: names as lm-eval has them. manager: from `manager_of`. settings: of `lm_eval.simple_evaluate`.

    Raises: `ValueError`, one line, where a task's template does not fit its data.
    """
    from jinja2 import TemplateError
    from lm_eval import simple_evaluate

    try:
        found = simple_evaluate(model=model, tasks=list(tasks), task_manager=manager, log_samples=False, **settings)
    except TemplateError as error:  # the first row was tried when the task was read, and the others were not
        raise ValueError(
            f"{', '.join(tasks)}: a template does not fit a row of the data ({one_line(error, 200)}): mend the row, or the YAML file"
        ) from None
    results = {} if found is None else found["results"]
    return {
        task: {name: float(value) for name, value in figures.items() if isinstance(value, int | float)}
        for task, figures in results.items()
    }
