"""Texts that a command writes: several at a time, each place taken by the next prompt, or batch by batch."""

import time
from dataclasses import dataclass, replace
from typing import Any

import hf_lossy_assist as hla

from ..terminal import Bar, streamer
from ..training.processes import Processes
from ..validation import MOST_NEW_TOKENS, MOST_ROWS, check_int, check_positive
from .generated import Output, Written
from .options import check_sampling


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How the texts are written."""

    max_new_tokens: int
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    seed: int
    batch_size: int
    stream: bool

    def __post_init__(self) -> None:
        check_int("--max-new-tokens", self.max_new_tokens, 1, MOST_NEW_TOKENS)
        check_int("--batch-size", self.batch_size, 1, MOST_ROWS)
        check_int("--seed", self.seed, 0)
        check_int("--top-k", self.top_k, 0)
        check_positive("--top-p", self.top_p, 1.0, hint=": leave --do-sample out for greedy decoding")
        check_positive("--temperature", self.temperature)
        check_sampling(self.do_sample, self.temperature, self.top_k, self.top_p)

    def settings(self) -> dict[str, Any]:
        """Arguments of `generate`."""
        settings: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "do_sample": self.do_sample}
        if self.do_sample:
            settings |= {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        return settings


def write(target: Any, tokenizer: Any, asked: dict[str, Any], texts: list[str], decoding: Decoding) -> Written:
    """Each text's continuation. `asked`: what drafts, and the policy."""
    import torch

    settings = decoding.settings()
    torch.manual_seed(decoding.seed)
    if asked["lossy_policy"] is None:  # the target's own `generate`, whatever policy came with its files
        return _in_batches(target, tokenizer, texts, decoding, settings)
    hla.enable(target)
    # The tokenizer too: heads and profiles refuse one that they were not made with.
    settings |= {name: value for name, value in asked.items() if value is not None} | {"tokenizer": tokenizer}
    if decoding.stream or "cache_implementation" in asked:  # compiled rounds keep the rows that a call began with
        return _in_batches(target, tokenizer, texts, decoding, settings)
    return _in_flight(target, texts, decoding, settings)


def _in_flight(target: Any, texts: list[str], decoding: Decoding, settings: dict[str, Any]) -> Written:
    """`batch_size` texts at a time: one that has ended gives its place to the next."""
    processes = Processes.started()
    numbers = processes.share(range(len(texts)))
    outputs: dict[int, Output] = {}
    began, ends = time.perf_counter(), _ends(target.generation_config)
    few = len(numbers) <= decoding.batch_size
    with Bar(len(numbers), "writing", "prompts", quiet=few or not processes.first) as bar:
        own = [texts[number] for number in numbers]
        many = hla.generate_many(
            target, own, max_rows=decoding.batch_size, seed=decoding.seed, numbers=numbers, **settings
        )
        for done, its in enumerate(many, 1):
            cut = not set(its.token_ids[-1:]) & set(ends)
            outputs[its.index] = Output(texts[its.index], its.token_ids, its.speculation, cut)
            bar.to(done)
    outputs = {number: output for theirs in processes.all(outputs) for number, output in theirs.items()}
    seconds = time.perf_counter() - began
    stats = [its for its in processes.all(many.speculation) if its is not None]
    return Written([outputs[number] for number in sorted(outputs)], seconds, hla.SpeculationStats.merge(stats))


def _in_batches(
    target: Any, tokenizer: Any, texts: list[str], decoding: Decoding, settings: dict[str, Any]
) -> Written:
    """`batch_size` texts in a call, which ends with the longest of them."""
    outputs: list[Output] = []
    calls, seconds = [], 0.0
    with Bar(len(texts), "writing", "prompts", quiet=decoding.stream or len(texts) <= decoding.batch_size) as bar:
        for start in range(0, len(texts), decoding.batch_size):
            batch = texts[start : start + decoding.batch_size]
            inputs = tokenizer(batch, return_tensors="pt", padding=True).to(target.device)
            inputs.pop("token_type_ids", None)
            if decoding.stream:
                inputs["streamer"] = streamer(tokenizer, skip_prompt=True)
            began = time.perf_counter()
            out = target.generate(**inputs, **settings, return_dict_in_generate=True)
            seconds += time.perf_counter() - began
            stats = getattr(out, "speculation", None)
            calls += [stats] if stats is not None else []
            new = out.sequences[:, inputs["input_ids"].shape[1] :]
            for i, padded in enumerate(new.tolist()):
                own = None if stats is None else replace(stats, rows=[stats.rows[i]])
                ids = _trimmed(padded, target.generation_config) if own is None else padded[: own.num_new_tokens]
                outputs.append(Output(batch[i], ids, own, not set(ids[-1:]) & set(_ends(target.generation_config))))
            bar.to(start + len(batch))
    return Written(outputs, seconds, hla.SpeculationStats.merge(calls) if calls else None)


def _trimmed(ids: list[int], config: Any) -> list[int]:
    """New tokens up to the first end token; the rest is padding."""
    ends = _ends(config)
    return next((ids[: i + 1] for i, token in enumerate(ids) if token in ends), ids)


def _ends(config: Any) -> list[int | None]:
    return config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
