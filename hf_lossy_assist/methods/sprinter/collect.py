"""Collect training data for SPRINTER's verifier: the draft's hidden state, the token it proposes, and p and q of that token.

Each prompt gives rows of four kinds in equal parts (Zhong et al., §3.2, huggingface.co/papers/2502.04557): the text continues with the original
text, the draft's tokens, the target's, or both interleaved as in inference. At every position of every row the draft proposes one token, which is
judged and, in some kinds, kept.

With `mix` the data is for SpecDec++'s head (Huang et al., §3.2, huggingface.co/papers/2405.19715): rows of one kind, the draft's text with that
share of its tokens replaced by the target's, and the state of each proposed token, which costs another draft step.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...artifacts.identity import ModelIdentity
from ...drafters.hidden_state import DraftModel, HiddenStateDrafter, refuse_models
from ...drafters.parallel import refuse_features
from ...tasks.prompts import PromptText
from ...training.jobs import check_places, continue_prompts, describe_run, refuse_blank
from ...training.processes import Models, Processes
from ...training.run_folder import RunFolder, Tell, name_units
from ...training.verifier_dataset import RECORD, assemble, make_schema
from .collect_runner import CollectRunner, CollectSettings


DEFAULTS = CollectSettings()


def collect(
    target: PreTrainedModel,
    draft: DraftModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[PromptText],
    out: str | Path,
    settings: CollectSettings = DEFAULTS,
    *,
    resume: bool = False,
    source: str = "",
    processes: Processes | None = None,
) -> Path:
    """Collect a dataset into the folder `out`.

    Each batch of prompts is a file with random numbers that depend only on `settings.seed` and its number, so a run that was killed and
    resumed gives the same rows. Processes started by `accelerate launch` share the batches.

    Args:
        target, draft: loaded decoder-only models with one tokenizer; the draft may be a drafter on the target's states.
        texts: prompts, with an original continuation if there is one.
        resume: continue an unfinished collection with the same settings.
        source: where the prompts come from, for the data card.
        processes: what shares the batches; None: the processes that `accelerate launch` started.

    Returns: `out`, a folder for `datasets.load_from_disk`, with a data card.

    Raises: `ValueError`, one line, for models that cannot be used or settings that differ from those of the unfinished run.
    """
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()  # those of `datasets`, one for each file
    refuse_blank([text.prompt for text in texts])
    refuse_models("collecting", target, draft)
    check_places(settings.places, draft)
    refuse_features(settings.features, draft)
    pairs, size = [[text.prompt, text.continuation] for text in texts], ModelIdentity.of(draft).hidden_size
    facts = describe_run(asdict(settings), {"target": target, "draft": draft}, tokenizer, pairs, source) | {
        "hidden_size": size
    }
    processes = Processes.started() if processes is None else processes

    def make(models: Models, index: int, tell: Tell) -> bytes:
        first = index * settings.batch_size
        chosen = texts[first : first + settings.batch_size]
        rows = run_batch(*models, chosen, settings, first, lambda done: tell(done / settings.new_tokens))
        data = io.BytesIO()
        Dataset.from_dict(rows, features=make_schema(size, settings.kinds)).to_parquet(data)
        return data.getvalue()

    count = -(-len(texts) // settings.batch_size)
    names = name_units(count, "parquet")
    with RunFolder.opened(out, RECORD, facts, resume=resume, processes=processes) as run:
        run.write_units(names, make, (target, draft, tokenizer), settings.seed)
        processes.on_first(lambda: assemble(run, names))
    return run.out


def run_batch(
    target: PreTrainedModel,
    draft: DraftModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[PromptText],
    settings: CollectSettings,
    first: int,
    progress: Callable[[int], None] = lambda positions: None,
) -> dict[str, list]:
    """Return all rows of some prompts, as columns. `first`: the number of the first prompt; `progress`: called with the positions done."""
    starts, forced, kinds = list[list[int]](), list[list[int] | None](), settings.kinds
    for index, text in enumerate(texts, first):
        prompt = tokenizer(text.prompt)["input_ids"]
        cut = len(prompt)
        if text.continuation:
            ending = tokenizer(text.continuation, add_special_tokens=False)["input_ids"]
        else:  # no original continuation: the prompt's end serves as one
            cut = max(len(prompt) // 2, len(prompt) - settings.new_tokens, 1)
            ending = prompt[cut:]
        if isinstance(draft, HiddenStateDrafter) and cut < 2:
            raise ValueError(f"prompt {index} is too short: {draft.kind} drafts behind two tokens or more")
        starts += [prompt[:cut] if kind == "original" else prompt for kind in kinds]
        forced += [ending if kind == "original" else None for kind in kinds]
    # `generate` prepares processors and stop conditions as in decoding, so p and q are the distributions used in decoding.
    runner = CollectRunner(draft, settings, forced, progress)
    continue_prompts(target, tokenizer, starts, settings.new_tokens + 1, settings.decoding(), runner)
    recorded = sorted(zip(runner.records, runner.features, strict=True), key=lambda pair: pair[0][:2])
    names = ("row", "position", "token", "p", "q", "distance")
    columns = {name: [record[i] for record, _ in recorded] for i, name in enumerate(names)}
    rows = columns.pop("row")
    prompt_columns = {
        "prompt": [first + row // len(kinds) for row in rows],
        "kind": [row % len(kinds) for row in rows],
    }
    return prompt_columns | columns | {"features": [features for _, features in recorded]}
