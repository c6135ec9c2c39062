"""generation_config.json of model families as their repositories on the Hub have it, written from memory of the families' cards: by the
family's name the model type, its kind and the file.

Token ids are those of the file; `fitted` brings them into a tiny vocabulary. `LIMITS` names what docs/reference/limits.md refuses.
"""

from typing import Any


CAUSAL, SEQ2SEQ = "causal", "encoder-decoder"
DERIVED = {
    "_from_model_config": True,
    "transformers_version": "4.31.0",
}  # of files that Transformers made of a config.json
LLAMA3 = {
    "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "do_sample": True, "temperature": 0.6, "top_p": 0.9,
}  # fmt: skip
QWEN25 = {
    "bos_token_id": 151643, "pad_token_id": 151643, "eos_token_id": [151645, 151643], "do_sample": True, "repetition_penalty": 1.05,
    "temperature": 0.7, "top_p": 0.8, "top_k": 20,
}  # fmt: skip
GEMMA3 = {
    "bos_token_id": 2, "eos_token_id": [1, 106], "pad_token_id": 0, "cache_implementation": "hybrid", "do_sample": True, "top_k": 64, "top_p": 0.95,
}  # fmt: skip
WHISPER = {
    "begin_suppress_tokens": [220, 50257], "suppress_tokens": [1, 2, 7, 8, 9, 10, 14, 25, 26, 27], "bos_token_id": 50257, "eos_token_id": 50257,
    "pad_token_id": 50257, "decoder_start_token_id": 50258, "forced_decoder_ids": [[1, None], [2, 50359]], "is_multilingual": True,
    "lang_to_id": {"<|en|>": 50259}, "task_to_id": {"transcribe": 50359}, "no_timestamps_token_id": 50363, "max_initial_timestamp_index": 50,
    "alignment_heads": [[2, 2], [3, 0]], "prev_sot_token_id": 50361, "return_timestamps": False, "max_length": 448,
}  # fmt: skip
BART = {
    "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "decoder_start_token_id": 2, "forced_bos_token_id": 0, "forced_eos_token_id": 2,
    "early_stopping": True, "no_repeat_ngram_size": 3, "num_beams": 4,
}  # fmt: skip
MBART = {
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "decoder_start_token_id": 2,
    "max_length": 200,
    "num_beams": 5,
}

FILES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama 1": ("llama", CAUSAL, DERIVED | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": -1}),
    "Llama 2 chat": ("llama", CAUSAL, {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_length": 4096}),
    "Llama 3 Instruct": ("llama", CAUSAL, LLAMA3 | {"max_length": 4096}),
    "Llama 3.1": ("llama", CAUSAL, LLAMA3),
    "CodeLlama": ("llama", CAUSAL, DERIVED | {"bos_token_id": 1, "eos_token_id": 2}),
    "Vicuna": ("llama", CAUSAL, DERIVED | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "max_length": 4096, "temperature": 0.9, "top_p": 0.6}),
    "DeepSeek R1 Distill": ("qwen2", CAUSAL, DERIVED | {"bos_token_id": 151646, "eos_token_id": 151643, "do_sample": True, "temperature": 0.6, "top_p": 0.95}),
    "SmolLM2 Instruct": ("llama", CAUSAL, DERIVED | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}),
    "Yi chat": ("llama", CAUSAL, DERIVED | {"bos_token_id": 1, "eos_token_id": 7, "pad_token_id": 0, "do_sample": True, "temperature": 0.6, "top_p": 0.8, "max_length": 4096}),
    "Baichuan-like": ("llama", CAUSAL, {"assistant_token_id": 196, "user_token_id": 195, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "max_new_tokens": 2048, "temperature": 0.3, "top_k": 5, "top_p": 0.85, "repetition_penalty": 1.05, "do_sample": True}),
    "Qwen 1-like": ("qwen2", CAUSAL, {"chat_format": "chatml", "eos_token_id": 151643, "pad_token_id": 151643, "max_window_size": 24000, "max_new_tokens": 512, "do_sample": True, "top_k": 0, "top_p": 0.8}),
    "Qwen 2.5 Instruct": ("qwen2", CAUSAL, QWEN25),
    "Qwen 2.5 base": ("qwen2", CAUSAL, {"bos_token_id": 151643, "eos_token_id": 151643, "do_sample": False, "max_new_tokens": 2048}),
    "Qwen 3": ("qwen3", CAUSAL, {"bos_token_id": 151643, "eos_token_id": [151645, 151643], "pad_token_id": 151643, "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}),
    "Qwen 3 MoE": ("qwen3_moe", CAUSAL, {"bos_token_id": 151643, "eos_token_id": [151645, 151643], "pad_token_id": 151643, "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8}),
    "Gemma 1": ("gemma", CAUSAL, DERIVED | {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}),
    "Gemma 2": ("gemma2", CAUSAL, DERIVED | {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0, "cache_implementation": "hybrid"}),
    "Gemma 3": ("gemma3_text", CAUSAL, GEMMA3),
    "Gemma 3, chunked": ("gemma3_text", CAUSAL, GEMMA3 | {"cache_implementation": "hybrid_chunked"}),
    "Gemma 3, windows": ("gemma3_text", CAUSAL, GEMMA3 | {"cache_implementation": "sliding_window", "do_sample": False}),
    "Mistral 0.1": ("mistral", CAUSAL, DERIVED | {"bos_token_id": 1, "eos_token_id": 2}),
    "Mixtral": ("mixtral", CAUSAL, DERIVED | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}),
    "Phi 2": ("phi", CAUSAL, DERIVED | {"bos_token_id": 50256, "eos_token_id": 50256}),
    "Phi 3": ("phi3", CAUSAL, DERIVED | {"bos_token_id": 1, "eos_token_id": [32000, 32001, 32007], "pad_token_id": 32000}),
    "Phi 4": ("phi3", CAUSAL, DERIVED | {"bos_token_id": 100257, "eos_token_id": [100257, 100265], "pad_token_id": 100257}),
    "GPT-2": ("gpt2", CAUSAL, DERIVED | {"bos_token_id": 50256, "eos_token_id": 50256}),
    "GPT-J": ("gptj", CAUSAL, DERIVED | {"bos_token_id": 50256, "eos_token_id": 50256}),
    "GPT-Neo": ("gpt_neo", CAUSAL, DERIVED | {"bos_token_id": 50256, "eos_token_id": 50256}),
    "Pythia": ("gpt_neox", CAUSAL, DERIVED | {"bos_token_id": 0, "eos_token_id": 0}),
    "StarCoder": ("gpt_bigcode", CAUSAL, DERIVED | {"bos_token_id": 0, "eos_token_id": 0}),
    "StarCoder 2": ("starcoder2", CAUSAL, DERIVED | {"bos_token_id": 0, "eos_token_id": 0}),
    "CodeGen": ("codegen", CAUSAL, DERIVED | {"bos_token_id": 1, "eos_token_id": 50256}),
    "OPT": ("opt", CAUSAL, DERIVED | {"bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1}),
    "BLOOM": ("bloom", CAUSAL, DERIVED | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}),
    "Falcon": ("falcon", CAUSAL, DERIVED | {"bos_token_id": 11, "eos_token_id": 11}),
    "MPT": ("mpt", CAUSAL, DERIVED | {"eos_token_id": 0, "use_cache": False}),
    "StableLM": ("stablelm", CAUSAL, DERIVED | {"bos_token_id": 0, "eos_token_id": 0}),
    "OLMo": ("olmo", CAUSAL, DERIVED | {"eos_token_id": 50279, "pad_token_id": 1}),
    "OLMo 2": ("olmo2", CAUSAL, DERIVED | {"bos_token_id": 100257, "eos_token_id": 100257, "pad_token_id": 100277, "max_new_tokens": 256}),
    "Cohere": ("cohere", CAUSAL, DERIVED | {"bos_token_id": 5, "eos_token_id": 255001, "pad_token_id": 0}),
    "Cohere 2": ("cohere2", CAUSAL, DERIVED | {"bos_token_id": 5, "eos_token_id": 255001, "pad_token_id": 0, "cache_implementation": "hybrid"}),
    "Granite": ("granite", CAUSAL, DERIVED | {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}),
    "GLM 4": ("glm", CAUSAL, {"eos_token_id": [151329, 151336, 151338], "pad_token_id": 151329, "do_sample": True, "temperature": 0.8, "max_length": 128000, "top_p": 0.8}),
    "GPT-OSS": ("gpt_oss", CAUSAL, {"bos_token_id": 199998, "do_sample": True, "eos_token_id": [200002, 199999, 200012], "pad_token_id": 199999}),
    "ERNIE 4.5": ("ernie4_5", CAUSAL, {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "do_sample": True, "temperature": 0.8, "top_p": 0.8, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "max_new_tokens": 1024, "trust_remote_code": True}),
    "XGLM": ("xglm", CAUSAL, DERIVED | {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "decoder_start_token_id": 2}),
    "BioGPT": ("biogpt", CAUSAL, DERIVED | {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}),
    "Mamba 2": ("mamba2", CAUSAL, DERIVED | {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}),
    "Falcon H1": ("falcon_h1", CAUSAL, DERIVED | {"bos_token_id": 1, "eos_token_id": 11, "pad_token_id": 0}),
    "LFM2": ("lfm2", CAUSAL, DERIVED | {"bos_token_id": 1, "eos_token_id": 7, "pad_token_id": 0}),
    "T5": ("t5", SEQ2SEQ, DERIVED | {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}),
    "Flan-T5, with a decay": ("t5", SEQ2SEQ, {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "exponential_decay_length_penalty": [4, 1.1]}),
    "mT5": ("mt5", SEQ2SEQ, DERIVED | {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}),
    "BART": ("bart", SEQ2SEQ, {name: value for name, value in BART.items() if name != "num_beams"}),
    "BART CNN": ("bart", SEQ2SEQ, BART | {"length_penalty": 2.0, "max_length": 142, "min_length": 56}),
    "mBART 50": ("mbart", SEQ2SEQ, MBART | {"forced_eos_token_id": 2, "early_stopping": True}),
    "M2M100": ("m2m_100", SEQ2SEQ, MBART | {"early_stopping": True}),
    "Pegasus": ("pegasus", SEQ2SEQ, {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 0, "forced_eos_token_id": 1, "length_penalty": 0.6, "max_length": 64, "num_beams": 8}),
    "Marian": ("marian", SEQ2SEQ, {"bad_words_ids": [[58100]], "bos_token_id": 0, "decoder_start_token_id": 58100, "eos_token_id": 0, "pad_token_id": 58100, "forced_eos_token_id": 0, "max_length": 512, "num_beams": 4, "renormalize_logits": True}),
    "Blenderbot": ("blenderbot", SEQ2SEQ, {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1, "encoder_no_repeat_ngram_size": 3, "no_repeat_ngram_size": 3, "forced_eos_token_id": 2, "length_penalty": 0.65, "max_length": 60, "min_length": 20, "num_beams": 10}),
    "a Whisper's file": ("bart", SEQ2SEQ, WHISPER),
}  # fmt: skip
# With the argument that the refusal names as the way out.
LIMITS = {name: {"num_beams": 1} for name, (*_, file) in FILES.items() if file.get("num_beams", 1) > 1}
LIMITS |= {"MPT": {"use_cache": True}}


def fitted(value: Any, vocabulary: int, name: str = "") -> Any:
    """The same file with its token ids inside a vocabulary, ids apart from each other as before."""
    if isinstance(value, dict):
        return {key: fitted(its, vocabulary, key) for key, its in value.items()}
    if isinstance(value, list) and name.endswith(("ids", "tokens", "token_id")):
        return [fitted(its, vocabulary, name) for its in value]
    if name.endswith(("ids", "tokens", "token_id")) and name != "max_new_tokens" and isinstance(value, int):
        return value % vocabulary if value >= 0 else value
    return value
