"""Drafts that others have published, by the target's name: what `hf-lossy suggest` shows, without a network."""

import re
from collections.abc import Sequence


MODEL, EAGLE, PICKLE, DSPARK = "draft model", "EAGLE-3 drafter", "EAGLE-3 drafter, a pickle", "DSpark drafter"
PARALLEL, DFLASH = "parallel draft model (PARD)", "DFlash drafter"
DEEPSPEC = "https://github.com/deepseek-ai/DeepSpec"
LM_STUDIO = "https://lmstudio.ai/docs/advanced/speculative-decoding"
MISTRAL_RS = "https://ericlbuehler.github.io/mistral.rs/guides/perf/speculative-decoding/"
VLLM = "https://docs.vllm.ai/en/v0.5.1/models/spec_decode.html"
HUB = "https://huggingface.co/"
PARD = "https://github.com/AMD-AGI/PARD"
Z_LAB = "https://github.com/z-lab/dflash"


# A pattern for the target's name; the draft, with parts of that name; what it is; the source.
_CHAT = r"(-Instruct)?"
_TABLE: Sequence[tuple[str, str, str, str]] = (
    (rf"Llama-3\.[13]-(?:8|70|405)B{_CHAT}", r"meta-llama/Llama-3.2-1B\1", MODEL, LM_STUDIO),
    (r"Llama-3\.(?:1-8|3-70)B-Instruct", "amd/PARD-Llama-3.2-1B", PARALLEL, PARD),
    (r"Llama-3\.1-8B-Instruct", "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3", EAGLE, ""),
    (r"Llama-3\.3-70B-Instruct", "RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3", EAGLE, ""),
    (r"Llama-3\.1-8B-Instruct", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", PICKLE, ""),
    (r"Llama-3\.3-70B-Instruct", "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B", PICKLE, ""),
    (r"Vicuna-13B-v1\.3", "yuhuili/EAGLE3-Vicuna1.3-13B", PICKLE, ""),
    (r"(?:Llama-2-(?:7|13|70)b|Vicuna-(?:7|13|33)B)", "JackFram/llama-68m", MODEL, ""),
    (r"Llama-2-(?:13|70)b", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", MODEL, "https://github.com/jzhang38/TinyLlama"),
    (rf"Qwen2\.5-(?:3|7|14|32|72)B{_CHAT}", r"Qwen/Qwen2.5-0.5B\1", MODEL, LM_STUDIO),
    (r"Qwen2\.5-7B-Instruct", "amd/PARD-Qwen2.5-0.5B", PARALLEL, PARD),
    (rf"Qwen2\.5-Coder-(?:1\.5|3|7|14|32)B{_CHAT}", r"Qwen/Qwen2.5-Coder-0.5B\1", MODEL, ""),
    (r"DeepSeek-R1-Distill-Qwen-(?:7|14|32)B", "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", MODEL, LM_STUDIO),
    (r"DeepSeek-R1-Distill-Qwen-7B", "amd/PARD-DeepSeek-R1-Distill-Qwen-1.5B", PARALLEL, PARD),
    (r"Qwen3-(?:4|8|14|32)B", "Qwen/Qwen3-0.6B", MODEL, MISTRAL_RS),
    (r"Qwen3-8B", "amd/PARD-Qwen3-0.6B", PARALLEL, PARD),
    (r"Qwen3-(8|14|32)B", r"RedHatAI/Qwen3-\1B-speculator.eagle3", EAGLE, ""),
    (r"Qwen3-(4|8|14)B", r"deepseek-ai/dspark_qwen3_\1b_block7", DSPARK, DEEPSPEC),
    (r"Qwen3-(4|8)B", r"z-lab/Qwen3-\1B-DFlash-b16", DFLASH, Z_LAB),
    (r"Qwen3-Coder-(30B-A3B|Next)(?:-Instruct)?", r"z-lab/Qwen3-Coder-\1-DFlash", DFLASH, Z_LAB),
    (r"Qwen3\.5-(?:4|9|27)B", "Qwen/Qwen3.5-0.8B", MODEL, ""),
    (r"Qwen3\.(5-4B|5-9B|5-122B-A10B|[56]-27B|[56]-35B-A3B)", r"z-lab/Qwen3.\1-DFlash", DFLASH, Z_LAB),
    (r"Qwen3\.8-27B", "z-lab/Qwen3.8-27B-DFlash2", DFLASH, ""),
    (r"gpt-oss-(20|120)b", r"RedHatAI/gpt-oss-\1b-speculator.eagle3", EAGLE, ""),
    (r"gpt-oss-(20|120)b", r"z-lab/gpt-oss-\1b-DFlash", DFLASH, Z_LAB),
    (r"gemma-2-(?:9|27)b(-it)?", r"google/gemma-2-2b\1", MODEL, ""),
    (r"SmolLM2-1\.7B(-Instruct)?", r"HuggingFaceTB/SmolLM2-135M\1", MODEL, ""),
    (r"pythia-(?:1\.4|2\.8|6\.9|12)b", "EleutherAI/pythia-160m", MODEL, ""),
    (r"opt-(?:1\.3|2\.7|6\.7|13|30|66)b", "facebook/opt-125m", MODEL, VLLM),
)


def find_published(target: str) -> list[dict[str, str]]:
    """Return the drafts in the table for a target's Hub id or folder, whose name may have more behind it, as quantised copies do.

    Each has `draft`, a Hub id; `kind`: a model, or a drafter on the target's states; `source`: the page that pairs
    them, or the draft's; and `line`: how to use it. Tokenizers are compared when both models are loaded.
    """
    name, drafts = target.rstrip("/").rpartition("/")[2], list[dict[str, str]]()
    for pattern, draft, kind, source in _TABLE:
        match = re.search(rf"(?<![\w.]){pattern}(?![\w.]|-base)", name, re.IGNORECASE)
        if match is not None:
            repository = match.expand(draft)
            line = f"--{'assistant' if kind in (MODEL, PARALLEL) else 'drafter'} {repository}"
            if kind == PICKLE:
                line = f'assistant_model=hla.load_drafter("{repository}", pickle=True)'
            drafts.append({"draft": repository, "kind": kind, "source": source or HUB + repository, "line": line})
    return drafts
