"""How far a model in int8 is from itself in float32: PyTorch's dynamic quantisation in its forms, and this package's.

Each form reads texts three ways: one in a forward, two side by side, and token by token. Figures: Kullback–Leibler divergence from the
model in float32, in nats, and how often both would choose the same token; the mean over all positions, with a 95 % interval over the texts.

    python benchmarks/int8_error.py --model M --prompts gsm8k/dev.jsonl --limit 8
"""

import argparse
import copy
import warnings
from collections.abc import Iterator
from statistics import fmean, stdev
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from scipy.stats import t
from torch.ao.quantization import default_dynamic_qconfig, per_channel_dynamic_qconfig, quantize_dynamic

import hf_lossy_assist as hla
from hf_lossy_assist.models.cache_name import CACHE, cache_of
from hf_lossy_assist.models.int8 import int8
from hf_lossy_assist.models.loading import load_model, load_tokenizer
from hf_lossy_assist.tasks.prompts import read_prompts


FORMS = {
    "PyTorch, a scale for a call and a layer": lambda model: quantised(model, default_dynamic_qconfig),
    "PyTorch, a scale for a call and each row of the weights": lambda model: quantised(model, per_channel_dynamic_qconfig),
    "ours: a scale for each token and each row of the weights": int8,
}  # fmt: skip


def quantised(model: Any, config: Any) -> Any:
    """A copy of `model` in PyTorch's dynamic int8."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return quantize_dynamic(copy.deepcopy(model), {torch.nn.Linear: config}, inplace=True)


def readings(model: Any, ids: list[torch.Tensor]) -> Iterator[tuple[str, int, torch.Tensor]]:
    """What a model says of each text, (n, V), by the way of reading and the text's number."""
    for i, text in enumerate(ids):
        yield "one forward", i, model(text[None]).logits[0]
        other = ids[(i + 1) % len(ids)]
        width = min(len(text), len(other))
        yield "two texts", i, model(torch.stack([text[:width], other[:width]])).logits[0]
        past, rows = None, []
        for token in text:
            out = model(token.view(1, 1), **{CACHE: past}, use_cache=True)
            past = cache_of(out)
            rows.append(out.logits[0, 0])
        yield "token by token", i, torch.stack(rows)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="a folder or Hub id (default: the demo's target)")
    parser.add_argument("--prompts", default=None, help="a file of prompts (default: the demo's problems)")
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--length", type=int, default=96, help="most tokens of a text")
    given = parser.parse_args()
    source = str(hla.demo.FOLDER / "target") if given.model is None else given.model
    model, tokenizer = load_model(source, dtype=torch.float32).eval(), load_tokenizer(source)
    if given.prompts is None:
        texts = [its.prompt for its in hla.demo.problems(given.limit, seed=0)]
    else:
        texts = read_prompts(given.prompts, given.limit)
    ids = [torch.tensor(tokenizer(text)["input_ids"][: given.length]) for text in texts]
    exact = [model(text[None]).logits[0].log_softmax(-1) for text in ids]

    table = Table("form", "read", "KL from float32", "same choice", title=f"{source}, {len(ids)} texts")
    for name, form in FORMS.items():
        its = form(model)
        found: dict[str, list[tuple[float, float]]] = {}
        for way, i, logits in readings(its, ids):
            true = exact[i][: len(logits)]
            said = logits.log_softmax(-1)
            divergence = (true.exp() * (true - said)).sum(-1).mean().item()
            same = (true.argmax(-1) == said.argmax(-1)).float().mean().item()
            found.setdefault(way, []).append((divergence, same))
        for way, figures in found.items():
            table.add_row(name, way, *(shown([f[k] for f in figures]) for k in (0, 1)))
        del its
    Console(width=140).print(table)


def shown(values: list[float]) -> str:
    """The mean, and Student's interval of it over the texts."""
    mean = fmean(values)
    error = t.ppf(0.975, len(values) - 1) * stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{mean:.3f} ({mean - error:.3f} to {mean + error:.3f})"


if __name__ == "__main__":
    main()
