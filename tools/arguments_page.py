"""Writes docs/arguments.md from the lists of `hf_lossy_assist.generation.arguments`, with remarks.

python tools/arguments_page.py
"""

from pathlib import Path

from hf_lossy_assist.generation.arguments import HONOURED, IGNORED, REFUSED


PAGE = Path(__file__).parent.parent / "docs" / "arguments.md"
TOP = """# Arguments and settings of `generate`

Every parameter of Transformers' `generate` and every setting of its `GenerationConfig` (5.17 to 5.24), in a call
with a policy. `tools/arguments_page.py` writes this page; `tests/generation/test_arguments.py` tries every row.
"""
REMARKS = {
    "inputs generation_config kwargs": "`kwargs` are settings, and the model's own inputs; a cache is `cache`, or what a Transformers before 5.24 calls it",
    "logits_processor prefix_allowed_tokens_fn": "called as `generate` calls them for one row; one object for several rows must keep nothing",
    "stopping_criteria": "called as in `generate`: once for each token, with all rows; it gets scores if `output_scores` stores them",
    "assistant_model streamer": "a streamer takes one row",
    "max_new_tokens max_length min_length min_new_tokens max_time stop_strings": "`max_time` is checked once a round; `stop_strings` needs `tokenizer=`",
    "eos_token_id pad_token_id bos_token_id decoder_start_token_id": "",
    "do_sample": "",
    "temperature top_k top_p min_p typical_p top_h epsilon_cutoff eta_cutoff": "applied once to each model's logits",
    "repetition_penalty encoder_repetition_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size": "",
    "bad_words_ids suppress_tokens begin_suppress_tokens sequence_bias forced_bos_token_id forced_eos_token_id": "",
    "exponential_decay_length_penalty renormalize_logits remove_invalid_values watermarking_config": "SynthID's watermark has state: one row only",
    "num_return_sequences": "with sampling",
    "return_dict_in_generate output_scores output_logits": "",
    "use_cache": "the loop always has a cache; with `False` the output has none",
    "prefill_chunk_size": "the most tokens of each row in one forward of a prompt; a prompt with images or embeddings, for a drafter on hidden states, or under RoPE that changes with the length is read in one",
    "num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold": "if the policy has no stop (with a stop, `num_assistant_tokens` is its longest draft). Sources in order: the call, a standing policy or a `Runner`; a `generation_config` of the call, unless its value is the default or the target's; the draft's generation config",
    "prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit": "a match is the latest one, of up to 64 tokens; an early exit is `assistant_model=hla.early_exit(model, n)`",
    "speculation_type use_mtp": "the checkpoint's multi-token prediction layers draft, at batch 1; DFlash models of Transformers are refused",
    "cache_implementation compile_config disable_compile": '"static" or a `CompileConfig` requests [compiled rounds](how-to/compile.md), which Transformers before 5.24 refuses with a draft; "dynamic", "hybrid", "hybrid_chunked", "sliding_window", and "paged" in a generation config, have no effect; offloaded and quantised caches are refused',
    "synced_gpus": "as in Transformers: automatic if FSDP2 [shards the target](how-to/processes.md) over several processes; `True` is refused in one process",
}
HONOURED_TEXT = "As in Transformers: with the strict policy the output is the one of `generate` with the same value."
REFUSED_TEXT = "In one line that names the setting, if its value would change something."


def write_table(title: str, text: str, column: str, rows: dict[str, str]) -> str:
    """Return a section; `rows`: remarks by names, which are separated by spaces."""
    lines = [f"| {', '.join(f'`{name}`' for name in names.split())} | {remark} |" for names, remark in rows.items()]
    lines = [f"| names | {column} |", "|---|---|", *(line.replace("  |", " |") for line in lines)]
    return "\n".join([f"## {title}\n", *([f"{text}\n"] if text else []), *lines, ""])


def by_remark(remarks: dict[str, str]) -> dict[str, str]:
    """Return names with equal remarks in one row."""
    rows = {remark: " ".join(name for name in remarks if remarks[name] == remark) for remark in remarks.values()}
    return {names: remark for remark, names in rows.items()}


def write_page() -> str:
    """Return the page's text."""
    assert sorted(" ".join(REMARKS).split()) == sorted(HONOURED), "REMARKS: each honoured name once"
    refused = by_remark({name: feature for name, (feature, _) in REFUSED.items()})
    sections = [
        write_table("Honoured", HONOURED_TEXT, "remark", REMARKS),
        write_table("Refused", REFUSED_TEXT, "what it is", refused),
        write_table("Without effect", "", "why", by_remark(IGNORED)),
    ]
    return "\n".join([TOP, *sections])


if __name__ == "__main__":
    PAGE.write_text(write_page(), encoding="utf-8")
