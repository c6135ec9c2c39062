"""Compare tiny random models of every causal and encoder-decoder model type with Transformers' own `generate`.

`python tools/supported_models.py` builds each (`tiny_models.py`) with `sdpa` and with `eager` attention and compares strict
greedy decoding with `model.generate`: one prompt, prompts of different length in one left-padded batch, prompts of equal length.
Sequences are longer than windows, chunks and RoPE's original length. One draft is often right, another never. The table is written to
docs/models.md. It exits with 1 if an output differs or a model ends in a traceback. `--only llama bart` runs only these.
"""

import copy
import json
import logging
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from model_processes import main
from model_table import page
from tiny_models import model_types, output_layer, tiny_model
from tiny_sizes import NEVER_EMITTED, PAD, VOCABULARY

import hf_lossy_assist as hla


PACKAGE = Path(hla.__file__).resolve().parent
NEW = 24  # tokens
SHAPES = {"one": (9,), "ragged": (9, 1, 4, 14), "even": (9, 9, 9)}  # prompt lengths of a batch
SETTINGS = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": NEVER_EMITTED, "pad_token_id": PAD, "use_cache": True, "num_beams": 1, "return_dict_in_generate": True}  # fmt: skip
GAP = 2e-5  # a reference that chooses by less says nothing: rounding can turn it
SECONDS = 60  # of processor time for a model type and an attention, with all attempts
ATTEMPTS = 6  # seeds
ATTENTIONS = ("sdpa", "eager")
DRAFTED = {"often": 5, "never": 2}  # tokens a round, by how often the draft is right


class TooLong(BaseException):
    """More than `SECONDS` of CPU time; not an `Exception`, so that it does not count as a model's error."""


class NoVerdict(Exception):
    """A reference without information: it hardly varies, or chooses by less than rounding."""


def prompts(lengths: tuple[int, ...], seed: int) -> dict[str, torch.Tensor]:
    """Return random left-padded prompts: `input_ids` and `attention_mask` (rows, longest)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, VOCABULARY - 8, (len(lengths), max(lengths)), generator=generator)
    mask = (torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask + PAD * (1 - mask), "attention_mask": mask}


def reference(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the output of Transformers alone, (B, new). Raise `NoVerdict`."""
    out = model.generate(**inputs, **SETTINGS, output_logits=True)
    new = out.sequences[:, -len(out.logits) :]
    top = torch.stack(out.logits).float().topk(2).values  # (new, B, 2)
    if not torch.isfinite(top).all():
        raise NoVerdict("its logits are not finite")
    gap = float((top[..., 0] - top[..., 1]).min()) / max(1.0, float(top.abs().max()))
    if gap < GAP:
        raise NoVerdict(f"its reference chooses by {gap:.0e} somewhere")
    if sum(len(set(row.tolist())) for row in new) < 6 * len(new):
        raise NoVerdict("its reference text hardly varies")
    return new


@torch.no_grad()
def drafts(model: Any) -> dict[str, Any]:
    """Return a copy with noise, which is often right, and a model that always chooses the next token id."""
    often, never = copy.deepcopy(model), copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    for weight in often.parameters():
        if weight.dim() > 1 and weight.is_floating_point():
            weight.add_(0.02 * weight.std() * torch.randn(weight.shape, generator=generator))
    head = output_layer(never)
    if head is not None:
        head.weight = torch.nn.Parameter(head.weight.roll(1, dims=0))
        if getattr(head, "bias", None) is not None:
            head.bias = torch.nn.Parameter(head.bias.roll(1))
    return {"often": often, "never": never}


def try_shape(model: Any, pair: dict[str, Any], inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return {"verdict": "equal" | "unequal" | "refused" | "traceback", "why": …} of one batch with both drafts."""
    try:
        wanted = reference(model, inputs)
    except NoVerdict:
        raise
    except Exception as error:  # `generate` itself cannot: then each prompt alone is the measure
        if len(inputs["input_ids"]) == 1:
            raise
        wanted, failed = None, format_error(error)
    accepted = []
    for name, draft in pair.items():
        try:
            out = hla.enable(model).generate(
                **inputs, **SETTINGS, assistant_model=draft, lossy_policy="strict", num_assistant_tokens=DRAFTED[name]
            )
        except Exception as error:
            if refused_by_us(error):
                return {"verdict": "refused", "why": str(error)}
            return {"verdict": "traceback", "why": format_error(error)}
        finally:
            hla.disable(model)
        new = out.sequences[:, -NEW:]
        accepted.append(round(out.speculation.draft_acceptance_rate, 2))
        if wanted is not None and torch.equal(new, wanted):
            continue
        single = torch.cat([reference(model, one) for one in split_rows(inputs)])
        if torch.equal(new, single):
            why = "generate's own text of this batch differs"
            why = why if wanted is not None else f"generate fails on this batch ({failed})"
            return {"verdict": "equal", "why": f"to each prompt alone; {why}", "accepted": accepted}
        right = int((new == (single if wanted is None else wanted)).all(dim=1).sum())
        same = wanted is None or torch.equal(single, wanted)
        more = "" if same else "; generate's own batch differs from each prompt alone"
        return {"verdict": "unequal", "why": f"{right} of {len(new)} rows, {name} right draft{more}"}
    return {"verdict": "equal", "accepted": accepted}


def split_rows(inputs: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Return each row of a left-padded batch as a separate call, without padding."""
    return [
        {"input_ids": ids[mask.bool()][None], "attention_mask": mask[mask.bool()][None]}
        for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    ]


def refused_by_us(error: Exception) -> bool:
    """Return whether this package raised the error, in one line."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    ours = isinstance(error, ValueError | TypeError) and PACKAGE in Path(last).resolve().parents
    return ours and "\n" not in str(error)


def format_error(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:160]
    return f"{type(error).__name__}: {text} ({Path(frame.filename).name}:{frame.lineno})"


def examine(
    model_type: str, kind: str, attention: str, shapes: Iterable[str] = SHAPES, first: int = 0, **changes: Any
) -> dict[str, Any]:
    """Examine one model type with one attention: {"not built": …} or the result of `try_shape` for each shape. Seeds from `first` on."""
    why = ""
    for seed in range(first, first + ATTEMPTS):
        try:
            model = tiny_model(model_type, kind, attention, seed, **changes)
            inputs = {name: prompts(SHAPES[name], seed) for name in shapes}
            reference(model, prompts(SHAPES["one"], seed))
            pair = drafts(model)
            return {name: try_shape(model, pair, batch) for name, batch in inputs.items()}
        except NoVerdict as error:
            why = str(error)
            continue
        except Exception as error:
            return {"not built": format_error(error)}
    return {"not built": f"no verdict with {ATTEMPTS} seeds: {why}"}


def beside(name: str, attention: str, before: dict[str, Any]) -> dict[str, Any]:
    """Examine the batches that the other attention, tried `before`, did not decide."""
    model_type, kind = name.split("/")
    rows = before.get("sdpa", {}).get("ragged", {}).get("verdict") == "equal"
    shapes = ("ragged",) if rows else ("one",) if "one" in before.get("sdpa", {}) else tuple(SHAPES)
    return examine(model_type, kind, attention, shapes)


def work(names: list[str], tried: Callable[[str, str, dict[str, Any]], dict[str, Any]]) -> None:
    """Examine these models and print a line of JSON for each, in a separate process, because a model may hang or crash.

    `tried`: the result for a name with one attention, given the results with the earlier ones.
    """

    def too_long(*_: Any) -> None:
        raise TooLong(f"took more than {SECONDS} s")

    signal.signal(signal.SIGPROF, too_long)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity(logging.CRITICAL)
    warnings.simplefilter("ignore")
    for name in names:
        result: dict[str, Any] = {"name": name}
        start = time.process_time()
        for attention in ATTENTIONS:
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            try:
                result[attention] = tried(name, attention, result)
            except TooLong as error:
                result[attention] = {"not built": str(error)}
            signal.setitimer(signal.ITIMER_PROF, 0)
        result["seconds"] = round(time.process_time() - start, 1)
        print(json.dumps(result), flush=True)


def names(only: list[str] | None) -> list[str]:
    """Return the names "type/kind" of all models, or of these types."""
    return [f"{t}/{k}" for t, kinds in model_types().items() for k in kinds if not only or t in only]


if __name__ == "__main__":
    docs = PACKAGE.parent / "docs" / "models.md"
    sys.exit(main(__file__, str(__doc__), names, lambda given: work(given, beside), page, 10 * SECONDS, docs))
