"""Try the calls of Transformers' own generation tests, with the strict policy forced on them, on tiny random models of every type.

    python tools/generation_calls.py                        # all types: some 20 minutes; exit status 1 if an output is wrong
    python tools/generation_calls.py --only llama bart      # these

Transformers' `GenerationTesterMixin` is in no wheel and no source archive (whose tests are the common ones alone), so its calls are written
anew here. Each is made twice: as Transformers' own `generate` and under `hla.using(model, draft, "strict", strict=True)`. What comes back must
be equal; what is refused is counted by its reason. Beams, which no draft serves, are not among them.
"""

import collections
import json
import logging
import re
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from model_processes import main
from supported_models import drafts, format_error, refused_by_us
from supported_models import names as model_names
from tiny_models import tiny_model
from tiny_sizes import NEVER_EMITTED, PAD, VOCABULARY

import hf_lossy_assist as hla
from hf_lossy_assist.models.facts import CACHE


NEW, SECONDS = 8, 120
GREEDY = {
    "do_sample": False, "num_beams": 1, "max_new_tokens": NEW, "eos_token_id": NEVER_EMITTED, "pad_token_id": PAD,
}  # fmt: skip
GAP = 2e-5  # as in supported_models.py
Call = Callable[..., Any]


@dataclass(frozen=True)
class Texts:
    """Two random prompts, and with which of Transformers' tests' masks."""

    model: Any
    seed: int
    ours: bool  # the call under the policy; else the one that says what is right

    @property
    def ids(self) -> torch.Tensor:  # (2, 7)
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(4, VOCABULARY - 8, (2, 7), generator=generator)

    @property
    def whole(self) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids, "attention_mask": torch.ones(2, 7, dtype=torch.int64)}

    @property
    def decoder_only(self) -> bool:
        return not self.model.config.is_encoder_decoder

    def masked(self, *rows: list[int]) -> dict[str, torch.Tensor]:
        """Return prompts with this mask; where it hides last tokens, Transformers' own call has the same text padded on the left."""
        ids, mask = self.ids, torch.tensor(rows)
        if self.decoder_only and not self.ours:
            turns = [next(n for n in range(7) if row[6 - n]) for row in rows]
            ids, mask = (torch.stack([row.roll(n) for row, n in zip(x, turns, strict=True)]) for x in (ids, mask))
        return {"input_ids": ids, "attention_mask": mask}

    @property
    def embeddings(self) -> torch.Tensor:
        with torch.no_grad():
            return self.model.get_input_embeddings()(self.ids)


def greedy_without_a_mask(call: Call, texts: Texts) -> Any:
    return call(texts.ids)


def greedy_padded_on_the_left(call: Call, texts: Texts) -> Any:
    return call(**texts.masked([0, 0, 0, 1, 1, 1, 1], [1] * 7))


def greedy_with_a_random_mask(call: Call, texts: Texts) -> Any:
    """As `random_attention_mask` makes them: the first token counts, any other may be hidden."""
    return call(**texts.masked([1, 0, 1, 1, 0, 1, 1], [1, 1, 1, 0, 1, 1, 1]))


def greedy_with_a_random_mask_that_hides_the_last_token(call: Call, texts: Texts) -> Any:
    return call(**texts.masked([1, 0, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 0, 0]))


def greedy_padded_on_the_right(call: Call, texts: Texts) -> Any:
    return call(**texts.masked([1, 1, 1, 1, 0, 0, 0], [1] * 7))


def outputs(call: Call, texts: Texts) -> Any:
    return call(**texts.whole, return_dict_in_generate=True, output_scores=True, output_logits=True)


def without_a_cache(call: Call, texts: Texts) -> Any:
    return call(**texts.whole, use_cache=False, return_dict_in_generate=True)


def processors(call: Call, texts: Texts) -> Any:
    settings = {"min_length": 10, "bad_words_ids": [[5, 6], [7]], "no_repeat_ngram_size": 2, "repetition_penalty": 1.2}
    return call(**texts.whole, **settings, remove_invalid_values=True)


def sampled(call: Call, texts: Texts) -> Any:
    """Draw from one token, so that there is one text."""
    return call(**texts.whole, do_sample=True, top_k=1, num_return_sequences=2, temperature=0.7)


def by_length(call: Call, texts: Texts) -> Any:
    return call(**texts.whole, max_new_tokens=None, max_length=12)


def from_the_first_token(call: Call, texts: Texts) -> Any:
    return call(bos_token_id=5)


def in_chunks(call: Call, texts: Texts) -> Any:
    return call(**texts.whole, prefill_chunk_size=3)


def with_logits_to_keep(call: Call, texts: Texts) -> Any:
    return call(**texts.whole, logits_to_keep=1)


def drafted_by_prompt_lookup(call: Call, texts: Texts) -> Any:
    return call(texts.ids[:1], **({"prompt_lookup_num_tokens": 3} if texts.ours else {}))


def from_embeddings_beside_ids(call: Call, texts: Texts) -> Any:
    return call(input_ids=texts.ids, inputs_embeds=texts.embeddings)


def from_random_embeddings(call: Call, texts: Texts) -> Any:
    noise = torch.randn(texts.embeddings.shape, generator=torch.Generator().manual_seed(texts.seed))
    mixed = texts.embeddings + 0.3 * texts.embeddings.std() * noise
    return call(inputs_embeds=mixed, return_dict_in_generate=True, output_scores=True)


def continued(call: Call, texts: Texts) -> Any:
    first = call(texts.ids[:1], return_dict_in_generate=True, max_new_tokens=3)
    mask = torch.ones_like(first.sequences)  # else a new token that is the padding token would be hidden
    return call(first.sequences, attention_mask=mask, **{CACHE: first[CACHE]}, max_new_tokens=5)


def continued_from_embeddings(call: Call, texts: Texts) -> Any:
    embeds = texts.embeddings[:1]
    first = call(inputs_embeds=embeds, return_dict_in_generate=True, max_new_tokens=3)
    with torch.no_grad():
        new = texts.model.get_input_embeddings()(first.sequences)
    return call(inputs_embeds=torch.cat([embeds, new], 1), **{CACHE: first[CACHE]}, max_new_tokens=5)


def from_what_the_encoder_made(call: Call, texts: Texts) -> Any:
    with torch.no_grad():
        encoded = texts.model.get_encoder()(texts.ids)
    return call(encoder_outputs=encoded)


EVERYWHERE = (
    greedy_without_a_mask, outputs, without_a_cache, processors, sampled, drafted_by_prompt_lookup, from_random_embeddings,
)  # fmt: skip
OF_DECODERS = (
    greedy_padded_on_the_left, greedy_with_a_random_mask, greedy_with_a_random_mask_that_hides_the_last_token, greedy_padded_on_the_right, by_length,
    from_the_first_token, in_chunks, with_logits_to_keep, from_embeddings_beside_ids, continued, continued_from_embeddings,
)  # fmt: skip
MASKED = OF_DECODERS[:4]
OF_ENCODERS = (from_what_the_encoder_made,)
SHORT = (by_length, continued, continued_from_embeddings)  # of which five tokens are new


def judge(model: Any, draft: Any, function: Callable[[Call, Texts], Any], seed: int) -> dict[str, str]:
    """Compare a call under the strict policy with plain `generate`: {"verdict": "equal" | "wrong" | "refused" | "no verdict" | "generate fails", "why": …}."""
    torch.manual_seed(0)
    gaps = []

    def stock(*args: Any, **settings: Any) -> Any:
        given = GREEDY | settings
        if CACHE not in given:
            look = model.generate(*args, **given | {"return_dict_in_generate": True, "output_logits": True})
            top = torch.stack(look.logits).float().topk(2).values
            gaps.append(float((top[..., 0] - top[..., 1]).min()) / max(1.0, float(top.abs().max())))
        return model.generate(*args, **given)

    try:
        wanted = function(stock, Texts(model, seed, ours=False))
    except Exception as error:
        return {"verdict": "generate fails", "why": format_error(error)}
    new = 5 if function in SHORT else NEW
    try:
        with hla.using(model, draft, "strict", strict=True):
            got = function(
                lambda *args, **settings: model.generate(*args, **GREEDY | settings), Texts(model, seed, ours=True)
            )
    except Exception as error:
        if refused_by_us(error):
            return {"verdict": "refused", "why": str(error)}
        return {"verdict": "wrong", "why": format_error(error)}
    finally:
        hla.disable(model)
    texts = [out if isinstance(out, torch.Tensor) else out.sequences for out in (got, wanted)]
    if texts[0].shape == texts[1].shape and torch.equal(*(text[:, -new:] for text in texts)):
        fields = {"sequences", "scores", "logits"}
        same = isinstance(got, torch.Tensor) or fields & got.keys() == fields & wanted.keys()
        return {"verdict": "equal" if same else "wrong", "why": "" if same else f"fields {list(got.keys())}"}
    alone = each_alone(model, function, seed) if function in MASKED else None  # as supported_models.py counts
    if alone is not None and torch.equal(texts[0][:, -new:], alone):
        return {"verdict": "equal", "why": "to each prompt alone; generate's own text of this batch differs"}
    at_once = Texts(model, seed, ours=True).whole if function is in_chunks else None
    if at_once is not None and torch.equal(texts[0], model.generate(**at_once, **GREEDY)):
        return {"verdict": "equal", "why": "to the prompt read at once; generate's own chunks of it forget the state"}
    if min(gaps, default=0.0) < GAP:
        return {"verdict": "no verdict", "why": "its reference chooses by less than rounding"}
    return {"verdict": "wrong", "why": f"{texts[0].tolist()} in place of {texts[1].tolist()}"}


def each_alone(model: Any, function: Callable[[Call, Texts], Any], seed: int) -> torch.Tensor:
    """Return what Transformers writes for each prompt alone, without the tokens that are hidden, (B, new)."""
    given = function(lambda **inputs: inputs, Texts(model, seed, ours=True))
    rows = [ids[mask.bool()][None] for ids, mask in zip(given["input_ids"], given["attention_mask"], strict=True)]
    return torch.cat([model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)[:, -NEW:] for ids in rows])


def examine(name: str, seed: int = 0) -> dict[str, dict[str, str]]:
    """Make all calls with a model "type/kind"."""
    model_type, kind = name.split("/")
    try:
        model = tiny_model(model_type, kind, "eager", seed)
        draft = drafts(model)["often"]
    except Exception as error:
        return {"not built": {"verdict": "generate fails", "why": format_error(error)}}
    functions = EVERYWHERE + (OF_ENCODERS if model.config.is_encoder_decoder else OF_DECODERS)
    return {function.__name__: judge(model, draft, function, seed) for function in functions}


def work(names: list[str]) -> None:
    """Print a line of JSON for each model, in a separate process."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity(logging.CRITICAL)
    warnings.simplefilter("ignore")
    for name in names:
        start = time.process_time()
        calls, seconds = examine(name), round(time.process_time() - start, 1)
        print(json.dumps({"name": name, "calls": calls, "seconds": seconds}), flush=True)


def page(results: list[dict[str, Any]]) -> tuple[str, int]:
    """Return the counts and the reasons, and how many outputs are wrong."""
    lost = {"its process": {"verdict": "generate fails", "why": "ended, or hung"}}
    found = [(result["name"], call, out) for result in results for call, out in result.get("calls", lost).items()]
    counts, lines = collections.Counter(out["verdict"] for *_, out in found), list[str]()
    for kind in ("refused", "generate fails", "wrong"):
        reasons = (f"{name} {call}: {out['why']}" if kind == "wrong" else re.sub(r"\d+", "0", out["why"])[:170]
                   for name, call, out in found if out["verdict"] == kind)  # fmt: skip
        lines += [f"\n{kind}: {counts[kind]}"]
        lines += [f"{number:6} {why}" for why, number in collections.Counter(reasons).most_common(40)]
    lines += [f"\n{len(found) - counts['generate fails']} calls that generate can make: {dict(counts)}"]
    return "\n".join(lines), counts["wrong"]


if __name__ == "__main__":
    sys.exit(main(__file__, str(__doc__), model_names, work, page, SECONDS))
