"""Sizes that make a default config tiny, by field name, and exceptions to these rules, by model type."""

from typing import Any


VOCABULARY, PAD = 97, 0
WINDOW = 8
NEVER_EMITTED = VOCABULARY + 5  # as end token: every text runs to its full length

# What a field is called → its tiny value; the first pattern that fits counts. Everything else keeps its default.
SIZES = {
    r"type_vocab_size|segment_types|prompt_types": 2,
    r"num_key_value_heads|num_kv_heads|kv_n_heads|num_query_groups|multi_query_group_num": 2,
    r"(num_|n_|_)?mamba_(n_|num_)?heads|n_mamba_heads": None, r".*vocab_size(_per_layer_input)?|.*_vocab": VOCABULARY,
    r"vocab_size_base": VOCABULARY,
    r"sliding_window(_size)?|attention_window_size|window_size|local_attention(_window_len)?": WINDOW,
    r"attention_chunk_size|keep_window_size|attention_window|conf_attention_chunk_size": WINDOW,
    r"max_window_layers": 0,
    r"hidden_size|d_model|n_embd|dim|embedding_size|word_embed_proj_dim|embed_dim|lru_width": 32,
    r"attention_hidden_size|hidden_size_global|backbone_hidden_size|output_proj_dims|mm_embed_dim": 32,
    r".*(ffn|ff|mlp|intermediate|feed_forward|inner).*(dim|size)": 64,
    r"d_ff|dff|dim_ff|ffn_hidden_size|n_inner|.*intermediate_size": 64,
    r"head_dim|global_head_dim|d_kv|dim_head|kv_channels|d_head|attention_head_size|swa_head_dim": 8,
    r"v_head_dim|qk_rope_head_dim|qk_nope_head_dim|index_head_dim|linear_.*head_dim|indexer_head_dim": 8,
    r"rotary_dim": 8, r"qk_head_dim": 16, r".*lora_rank|.*lowrank|gated_norm_rank|laurel_rank|d_rel": 8,
    r"index_topk|indexer_budget": 4,
    r"(num_|n_|encoder_|decoder_|speech_encoder_|t2u_|num_encoder_|num_decoder_|conf_num_)*(attention_)?heads?": 4,
    r"(n_|num_|encoder_|decoder_|t2u_.*|speech_encoder_|num_encoder_|num_decoder_)(hidden_)?layers?|depth": 2,
    r"(num|n|moe_num)_(local_|routed_)?experts": 4, r"num_experts_per_tok|moe_topk|moe_top_k|moe_k|top_k_experts": 2,
    r"n_group|topk_group|num_expert_group": 1,
    r".*(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_(source|target)_positions|max_sequence_length)": 256,
    r"image_size|crop_size": 16, r"patch_size": 8,
}  # fmt: skip

# Fields that the rules get wrong, by model type; nested ones as dictionaries. A callable is given the shrunk fields.
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}  # heads × size = twice the hidden size
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": MAMBA | {"num_hidden_layers": 2, "attn_layer_indices": [1]},
    "granitemoehybrid": MAMBA | {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64}, "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2},
    "kimi_linear": {"linear_num_heads": 4}, "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "dots1": {"num_local_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "hunyuan_v1_dense": {"head_dim": 8}, "hunyuan_v1_moe": {"head_dim": 8}, "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "cohere_compass_text": {"rope_parameters": {kind: dict(ROPE) for kind in ("full_attention", "sliding_attention")}},
    "cpmant": {"segment_types": 4, "prompt_types": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "zamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "num_dense_layers": 1},
    "gemma3n_text": {"num_kv_shared_layers": 0}, "xmod": {"default_language": "en_XX"},
    "xlstm": {"num_blocks": 2, "embedding_dim": 32},
    "reformer": {"axial_pos_embds_dim": [8, 24], "axial_pos_shape": [16, 16]},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}}, "fsmt": {"scale_embedding": False},
    "deepseek_v2": {"num_experts_per_tok": 2}, "hrm_text": {"num_layers_per_stack": None},
    "encoder-decoder": {"decoder": {"is_decoder": True, "add_cross_attention": True}},
}  # fmt: skip


# Settings that change what a token sees, of models whose default config is without them: name → model type and changes.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    f"llama+{kind}": ("llama", {"max_position_embeddings": 16, "rope_parameters": ROPE | {"rope_type": kind} | more})
    for kind, more in {
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
        "llama3": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    }.items()
}
VARIANTS |= {
    "llama4_text+temperature": ("llama4_text", {"floor_scale": 4, "attn_temperature_tuning": True}),
    "qwen2+window": ("qwen2", {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}),
    "falcon+alibi": ("falcon", {"alibi": True}),
}

SPECIAL = {"pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 3, "decoder_start_token_id": 2, "forced_eos_token_id": None,
           "forced_bos_token_id": None, "sep_token_id": 3, "cls_token_id": 1}  # fmt: skip
