"""Tiny random encoder-decoders in float64 whose texts vary: of text (`tools/tiny_models.py`) and of sound, with inputs for each."""

import copy
from functools import cache
from typing import Any

import tiny_models
import torch
from transformers import AutoConfig, AutoModelForSpeechSeq2Seq, PreTrainedModel, WhisperForCausalLM


VOCABULARY, PAD, EOS, START = 97, 0, 3, 2
SEEDS = {"umt5": 2, "bart": 2, "marian": 2}  # whose texts vary; 0 for the others
SPECIAL = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": EOS, "decoder_start_token_id": START}  # fmt: skip
SIZES = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "encoder_layers": 2, "decoder_layers": 2,
         "encoder_attention_heads": 4, "decoder_attention_heads": 4}  # fmt: skip
BASE = {"hidden_size": 32, "intermediate_size": 64, "encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2,
        "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4, "max_position_embeddings": 64}  # fmt: skip
SOUND = {
    # 30 seconds are 100 frames here, and the tokens of its timestamps are those from 60 on.
    "whisper": SIZES | {"num_mel_bins": 8, "max_source_positions": 50, "max_target_positions": 64, "suppress_tokens": None, "begin_suppress_tokens": None},
    "speech_to_text": SIZES | {"input_feat_per_channel": 8, "conv_channels": 32, "max_source_positions": 64, "max_target_positions": 64},
    "moonshine": BASE,
}  # fmt: skip


def build(name: str, seed: int | None = None, **changes: Any) -> PreTrainedModel:
    """A tiny model whose texts vary, in float64; the same for the same arguments."""
    seed = SEEDS.get(name, 0) if seed is None else seed
    if name not in SOUND:
        model = tiny_models.tiny_model(name, "encoder-decoder", "sdpa", seed, **changes)
        model.generation_config.decoder_start_token_id = START  # else T5's and UMT5's is that of the beginning
    else:
        config = AutoConfig.for_model(name, **SPECIAL | SOUND[name] | changes)
        torch.manual_seed(seed)
        model = spread(AutoModelForSpeechSeq2Seq.from_config(config).eval(), name, seed)
    return model.double()


@torch.no_grad()
def spread(model: Any, name: str, seed: int) -> Any:
    """Weights that make texts vary: matrices wide, and nothing in the output weights that all places have in common."""
    generator = torch.Generator().manual_seed(seed)
    for key, weight in model.named_parameters():
        if weight.dim() > 1:
            fan = weight[0].numel()
            gain = 0.75 if "encoder_attn" in key else 1.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * gain / fan**0.5)
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.weight.copy_(torch.randn(module.weight.shape, generator=generator))
    ids = torch.randint(4, VOCABULARY, (4, 24), generator=generator)
    heard = inputs(name, 4, seed)
    states = model(**{k: v.float() if v.is_floating_point() else v for k, v in heard.items()}, decoder_input_ids=ids,
                   output_hidden_states=True).decoder_hidden_states[-1]  # fmt: skip
    states = states.reshape(-1, states.shape[-1])
    common = torch.nn.functional.normalize(states.mean(dim=0), dim=0)
    head = model.get_output_embeddings()
    weight = torch.randn(head.weight.shape, generator=generator)
    weight = weight - (weight @ common)[:, None] * common
    head.weight = torch.nn.Parameter(weight * 3 / (states @ weight.T).std())
    return model


@cache
def shared(name: str) -> PreTrainedModel:
    """`build`, once for all tests: for tests that do not change the model."""
    return build(name)


def inputs(name: str, rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return inputs for the encoder of `name`: `rows` texts or sounds of different length, with a mask where it takes one."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([14, 9, 4, 11, 6, 13, 3, 8] * (rows // 8 + 1))[:rows]
    if name == "whisper":
        return {"input_features": torch.randn(rows, 8, 100, generator=generator).double()}
    if name == "speech_to_text":
        mask = (torch.arange(56) < 4 * lengths[:, None]).long()
        return {"input_features": torch.randn(rows, 56, 8, generator=generator).double() * mask[..., None], "attention_mask": mask}  # fmt: skip
    if name == "moonshine":
        mask = (torch.arange(5600) < 400 * lengths[:, None]).long()
        return {"input_values": torch.randn(rows, 5600, generator=generator).double() * mask, "attention_mask": mask}
    ids = torch.randint(4, VOCABULARY - 8, (rows, 14), generator=generator)
    mask = (torch.arange(14) < lengths[:, None]).long()  # these encoders count from the left
    return {"input_ids": ids * mask + PAD * (1 - mask), "attention_mask": mask}


@torch.no_grad()
def draft_of(model: Any, kind: str) -> Any:
    """A draft for `model` that is right "often", "rarely" or "never"."""
    out = copy.deepcopy(model)
    if kind == "never":
        head = tiny_models.output_layer(out)
        head.weight = torch.nn.Parameter(head.weight.roll(1, dims=0))
        return out
    generator = torch.Generator().manual_seed(1)
    for weight in out.parameters():
        if weight.dim() > 1:
            noise = torch.randn(weight.shape, generator=generator) * weight.std()
            weight.add_(noise * {"often": 0.02, "rarely": 0.2}[kind])
    return out


@torch.no_grad()
def distilled(model: Any, kind: str = "often", layers: int = 2) -> Any:
    """A `WhisperForCausalLM` that reads what `model`, a Whisper, heard: the first `layers` of a draft's decoder."""
    assistant = draft_of(model, kind)
    config = copy.deepcopy(assistant.config)
    config.decoder_layers = layers
    out = WhisperForCausalLM(config).double().eval()
    weights = assistant.model.decoder.state_dict()
    out.model.decoder.load_state_dict({k: weights[k] for k in out.model.decoder.state_dict()})
    out.proj_out.weight = torch.nn.Parameter(assistant.proj_out.weight.clone())
    return out
