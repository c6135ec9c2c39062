"""Heads and profiles on disk with damaged JSON, tensors and files, with and without a matching checksum."""

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

import hf_lossy_assist as hla
from hf_lossy_assist.artifacts.sv_profile import PROFILE, TABLES
from hf_lossy_assist.policy.policy import make_head_policy

from .made import copied
from .models import HIDDEN, checked, pair, prompts, short
from .values import Random, damaged_bytes, damaged_text, mutated, replaced_file, shown, written
from .verdicts import Case, Wrong


TYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int8,
    torch.bool,
    torch.float32,
]


def changed_tensors(random: Random, data: bytes) -> bytes:
    """Return a valid safetensors file in which one tensor has other values, another type, shape or name, or is missing."""
    tensors = safetensors.torch.load(data)
    name = random.choice(sorted(tensors))
    how, tensor = random.randrange(8), tensors[name]
    if how == 0:
        del tensors[name]
    elif how == 1:
        tensors[random.choice(["x", "linear.weight2", "bins.x", "a\nb"])] = tensor.clone()
    elif how == 2:
        tensors[name] = random.choice(
            [tensor.flatten(), tensor[None], tensor[:0], torch.cat([tensor, tensor]), tensor.sum()]
        ).contiguous()
    elif how in (3, 4):
        tensors[name] = tensor.to(random.choice(TYPES))
    else:
        wrong = random.choice([float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 1e30, 1e300, 5.0])
        changed = (
            tensor.double().flatten() if tensor.is_floating_point() or not np.isfinite(wrong) else tensor.flatten()
        )
        if changed.numel():
            changed[random.randrange(changed.numel())] = (
                wrong if changed.is_floating_point() else int(min(wrong, 2.0**62))
            )
        tensors[name] = changed.reshape(tensor.shape).to(tensor.dtype if tensor.is_floating_point() else changed.dtype)
    return safetensors.torch.save(tensors)


def damage(random: Random, folder: Path, config: str, weights: str, checksum: str) -> str:
    """Damage one of the two files; return how. Sometimes the checksum in `config` is updated to match."""
    how = random.choice(["json", "json", "text", "tensors", "tensors", "tensors", "bytes", "file"])
    text, data = (folder / config).read_text(encoding="utf-8"), (folder / weights).read_bytes()
    if how == "json":
        spec = json.loads(text)
        key = random.choice(sorted(spec))  # one entry: the first wrong one hides the others
        spec = mutated(random, spec) if random.random() < 0.3 else spec | {key: _one(mutated(random, [spec[key]]))}
        (folder / config).write_text(written(spec))
        return f"{config}: {shown(spec.get(key) if isinstance(spec, dict) else spec)} at {key}"
    if how == "text":
        (folder / config).write_bytes(damaged_text(random, text))
        return f"{config}: text"
    if how == "file":
        name = random.choice([config, weights])
        return f"{name}: {replaced_file(random, folder / name)}"
    data = changed_tensors(random, data) if how == "tensors" else damaged_bytes(random, data)
    (folder / weights).write_bytes(data)
    fits = random.random() < 0.8
    if fits:
        spec = json.loads(text) | {checksum: hashlib.sha256(data).hexdigest()}
        (folder / config).write_text(json.dumps(spec))
    return f"{weights}: {how}, {len(data)} bytes{', with its checksum' if fits else ''}"


def _one(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else value


def head_case(random: Random, folder: Path) -> Case:
    kind = random.choice(["head", "mlp", "judge_head"])
    made = copied(kind, folder)
    what = damage(random, made, "config.json", "model.safetensors", "weights_sha256")
    inputs = prompts(random, random.choice([1, 2]))
    return Case(f"{kind}: {what}", lambda: _load_head(made, inputs))


def _load_head(folder: Path, inputs: dict[str, Any]) -> None:
    head = hla.Head.from_pretrained(folder)
    if not all(weight.float().isfinite().all() for weight in head.parameters()):
        raise Wrong("a head whose weights are not finite")
    logit = head.logit(torch.ones(2, HIDDEN))
    if logit.shape != (2,) or not logit.isfinite().all():
        raise Wrong(f"its logits are {logit}")
    if not head.card().content.strip():
        raise Wrong("its card is empty")
    policy = make_head_policy(head)
    lossless = hla.LossyPolicy(stop=policy.stop)  # a stop alone changes no text
    for one in (policy, lossless):
        checked("llama", partial(_call, one, inputs))
    again = hla.LossyPolicy.from_dict(json.loads(json.dumps(policy.to_dict())))
    if again != policy:
        raise Wrong("its JSON form reads back to another policy")


def _call(policy: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    return {"lossy_policy": policy, "max_new_tokens": 8, "do_sample": False, "stopping_criteria": short()} | inputs


def profile_case(random: Random, folder: Path) -> Case:
    made = copied("profile", folder)
    what = damage(random, made, PROFILE, TABLES, "tables_sha256")
    inputs = prompts(random, random.choice([1, 2]))
    return Case(f"profile: {what}", lambda: _load_profile(made, inputs))


def _load_profile(folder: Path, inputs: dict[str, Any]) -> None:
    profile = hla.Profile.from_pretrained(folder)
    tables = [profile.pays, *vars(profile.latency).values(), profile.bins.accept, profile.bins.accept_by_s]
    if not all(np.isfinite(table).all() for table in tables if isinstance(table, np.ndarray)):
        raise Wrong("tables with gaps")
    if not ((profile.bins.accept >= 0) & (profile.bins.accept <= 1)).all():
        raise Wrong("an acceptance that is no probability")
    policy = hla.SpeculativeVerification(profile, pair()[1], fallback=False)
    checked("llama", partial(_call, policy, inputs))
