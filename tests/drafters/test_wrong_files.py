"""Wrong, hostile and half-written files of every drafter format: each ends in one line that names the file, and the folder stays as it was."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import drafter_files, small
from support.drafter_files import CONFIG, WEIGHTS, changed, in_parts, relayered, reweighted
from support.eagle import refused
from support.refusals import contents

import hf_lossy_assist as hla


FORMS = ("eagle3", "plain", "deepspec", "dflash", "speculators' dflash", "dflash 2", "dspark", "recurrent dspark")


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    return drafter_files.write_forms(tmp_path_factory.mktemp("forms"), Path(__file__).parent)


def copied(source, folder):
    """Only what a repository would hold: golden files have more."""
    folder.mkdir()
    for name in (CONFIG, WEIGHTS):
        shutil.copyfile(source / name, folder / name)
    return folder


def written(name, data):
    return lambda folder: (folder / name).write_bytes(data)


def cut(name, share):
    def half(folder):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(len(data) * share)])

    return half


def weights(change):
    return lambda folder: reweighted(folder, change)


def turned(found):
    """Every matrix lies on its side."""
    found.update({name: tensor.mT.contiguous() for name, tensor in found.items() if tensor.dim() > 1})


def poisoned(found):
    name = max(name for name, tensor in found.items() if tensor.dim() > 1)
    found[name][-1, -1] = float("nan")


def config(**entries):
    return lambda folder: changed(folder, **entries)


def layer(**entries):
    return lambda folder: relayered(folder, **entries)


def pickled(change):
    def rewritten(folder):
        torch.save(change(load_file(folder / WEIGHTS)), folder / "pytorch_model.bin")
        (folder / WEIGHTS).unlink()

    return rewritten


HUGE = 10**9
DAMAGED = "is damaged or does not fit its config.json .*force_download=True"
# Wrong in every format.
ALL = {
    "no config": (lambda folder: (folder / CONFIG).unlink(), "config.json cannot be read"),
    "half a config": (cut(CONFIG, 0.5), "config.json is not JSON"),
    "an object of nothing": (written(CONFIG, b"{}"), "is of no known drafter"),
    "half the weights": (cut(WEIGHTS, 0.5), DAMAGED),
    "no tensors": (weights(dict.clear), "Missing key|holds no drafter"),
    "a tensor less": (weights(lambda found: found.pop(max(name for name in found if found[name].dim() == 2))), "Missing key"),
    "a tensor more": (weights(lambda found: found.update({"tree.weight": torch.zeros(2)})), "Unexpected key.*tree.weight"),
    "matrices that lie on their side": (weights(turned), "does not fit its config.json.*size mismatch"),
    "whole numbers": (weights(lambda found: found.update({name: tensor.to(torch.int8) for name, tensor in found.items()})), "Only Tensors of floating point"),
    "NaN": (weights(poisoned), "expected finite numbers"),
    "layers of another kind": (layer(model_type="mamba"), "'mamba' are not known here, which has .*qwen3"),
    "no width": (layer(hidden_size=None), "hidden_size is missing"),
    "widths without end": (layer(hidden_size=HUGE), "hidden_size: expected .*got 1000000000"),
    "true heads": (layer(num_attention_heads=True), "num_attention_heads: expected .*got True"),
    "no heads": (layer(num_attention_heads=0), "num_attention_heads: expected .*got 0"),
    "an activation that is none": (layer(hidden_act="x"), "KeyError: 'x'"),
    "angles of no known kind": (layer(rope_parameters={"rope_type": "zzz", "rope_theta": 1e4}), "zzz"),
    "angles without numbers": (layer(rope_parameters={"rope_type": "linear", "factor": 0, "rope_theta": 1e4}), "inv_freq: expected finite|ZeroDivisionError"),
    "windows of no size": (layer(layer_types=["sliding_attention"] * 2, num_hidden_layers=2, sliding_window=None), "sliding_window: expected"),
    "windows for other layers": (layer(layer_types=["sliding_attention"] * 5), "layer_types: expected . of"),
    "chunks": (layer(layer_types=["chunked_attention"]), "layer_types: expected . of"),
    "drafts without end": (config(speculators_config={"proposal_methods": [{"speculative_tokens": HUGE}]}), "speculative_tokens: expected"),
    "a tolerance below zero": (config(speculators_config={"proposal_methods": [{"accept_tolerance": -1}]}), "accept_tolerance: expected"),
    "states of another width": (config(target_hidden_size=64), "does not fit its config.json"),
    "states without width": (config(target_hidden_size=-1), "target_hidden_size: expected"),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("form", FORMS)
def test_files_of_every_form(forms, tmp_path, form):
    for case, (change, message) in ALL.items():
        refuse(forms, tmp_path / case, form, change, message)


def refuse(forms, folder, form, change, message, **kwargs):
    copied(forms[form], folder)
    change(folder)
    before = contents(folder)
    line = refused(folder, **kwargs)
    assert re.search(message, line), f"{form}, {folder.name}: {line}"
    assert str(folder) in line and len(line) < 600, f"{form}, {folder.name}: {line}"
    assert contents(folder) == before


def nested(**entries):
    """z-lab's own settings, which are the only ones of their kind that a file has."""

    def change(folder):
        spec = json.loads((folder / CONFIG).read_text())["dflash_config"] | entries
        changed(folder, dflash_config={name: value for name, value in spec.items() if value is not None})

    return change


def entry(name, change):
    """A tensor after `change`, which returns another or works in place."""

    def replaced(found):
        out = change(found[name])
        found[name] = found[name] if out is None else out

    return weights(replaced)


MORE = "model-00001-of-00002.safetensors"
SOME = {
    # no JSON (more in artifacts/test_damages.py)
    "a list as config": ("plain", written(CONFIG, b"[1]"), r"config.json: expected an object, got \[1\]"),
    # kinds
    "a DFlash in EAGLE's form": ("eagle3", config(speculators_model_type="dflash"), "layers of model_type 'llama' are not known here, which has qwen3"),
    "a DFlash that says it is the second": ("dflash", config(architectures=["DFlash2DraftModel"]), "conv_kernel_size: expected .*got None"),
    "a second DFlash that says it is the first": ("dflash 2", config(speculators_model_type="dflash"), "Unexpected key.*attention_conv"),
    "an ordinary model": ("plain", config(architectures=["Qwen2ForCausalLM"]), "is of no known drafter"),
    "SpecForge's DSpark": ("deepspec", config(architectures=["DSparkDraftModel"]), "is of no known drafter"),
    "no layers": ("eagle3", config(transformer_layer_config=None), "transformer_layer_config: expected an object"),
    # flags and sizes
    "a flag that is none": ("eagle3", config(norm_before_fc="yes"), "norm_before_fc: expected True or False, got 'yes'"),
    "causal as text": ("dflash", config(is_causal="yes"), "is_causal"),
    "a larger vocabulary than the target's": ("eagle3", config(draft_vocab_size=10**6), "draft_vocab_size: expected"),
    "another reduced vocabulary": ("plain", config(draft_vocab_size=39), "does not fit its config.json"),
    "no vocabulary": ("dspark", config(draft_vocab_size=0), "draft_vocab_size: expected"),
    "a cap below zero": ("dflash", nested(final_logit_softcapping=-20.0), "final_logit_softcapping: expected a number"),
    "a factor of nothing": ("dflash", nested(output_multiplier=0), "output_multiplier: expected a number"),
    "scaled embeddings": ("dflash", nested(input_embedding_scale=2.0), "input_embedding_scale is not supported"),
    "a cap of DSpark's": ("dspark", config(final_logit_softcapping=20.0), "a DSpark drafter has no output_multiplier"),
    # DFlash 2's convolutions and selector
    "no taps": ("dflash 2", config(conv_kernel_size=0), "conv_kernel_size: expected .*got 0"),
    "more taps than a block": ("dflash 2", config(conv_kernel_size=5), "conv_kernel_size: expected .*got 5"),
    "more candidates than tokens": ("dflash 2", config(selector_top_k=42), "selector_top_k: expected .*got 42"),
    "groups that do not divide the width": ("dflash 2", config(conv_group_size=3), "does not fit its config.json"),
    "no candidates": ("dflash 2", config(selector_top_k=True), "selector_top_k: expected .*got True"),
    "a reduced DFlash 2": ("dflash 2", config(draft_vocab_size=20), "draft_vocab_size: a DFlash 2 drafter has the whole vocabulary"),
    # layers of the target
    "layers as text": ("eagle3", config(eagle_aux_hidden_state_layer_ids="2, 3"), "expected a list of layers, got '2, 3'"),
    "a layer below none": ("eagle3", config(eagle_aux_hidden_state_layer_ids=[-1, 2]), "eagle_aux_hidden_state_layer_ids: expected .*got -1"),
    "a target of no layers": ("dflash", lambda folder: (nested(target_layer_ids=None)(folder), changed(folder, num_target_layers=0)), "num_target_layers"),
    "no layers of the target": ("dflash", nested(target_layer_ids=[]), r"target_layer_ids: expected a list of layers, got \[\]"),
    # blocks
    "a block of one": ("dflash", nested(block_size=1), "block_size: expected .*got 1$"),
    "no block": ("dspark", config(block_size=None), "block_size: expected .*got None"),
    "no mask": ("dspark", config(mask_token_id=None), "mask_token_id: expected .*got None"),
    "a mask below zero": ("dflash", nested(mask_token_id=-1), "mask_token_id: expected .*got -1"),
    "a mask without end": ("deepspec", config(mask_token_id=HUGE), "mask_token_id: expected"),
    "a window of nothing": ("dflash", nested(use_swa=True, swa_window_size=0), "swa_window_size: expected"),
    # DSpark's heads
    "another Markov head": ("dspark", config(markov_head_type="lstm"), "markov_head_type 'lstm' is not known here, which has vanilla, gated, rnn"),
    "a list of Markov heads": ("dspark", config(markov_head_type=["rnn"]), "markov_head_type .* is not known here"),
    "a rank below zero": ("dspark", config(markov_rank=-1), "markov_rank: expected"),
    "another rank": ("dspark", config(markov_rank=5), "does not fit its config.json"),
    "a head too few": ("dspark", config(markov_head_type="gated"), "does not fit its config.json"),
    "a recurrent head behind the anchor": ("recurrent dspark", config(sample_from_anchor=False), "'rnn' with sample_from_anchor false"),
    "a P-EAGLE drafter": ("eagle3", config(speculators_model_type="peagle"), "is of no known drafter .*'peagle'"),
    # the reduced vocabulary
    "tokens outside": ("dspark", entry("d2t", lambda tensor: tensor.fill_(10**6)), "d2t names tokens outside"),
    "tokens below zero": ("plain", entry("d2t", lambda tensor: tensor.fill_(-5)), "d2t names tokens outside"),
    "a map of two dimensions": ("dspark", entry("d2t", lambda tensor: tensor[None].repeat(2, 1)), "does not fit its config.json"),
    # files by an index
    "no weights": ("eagle3", lambda folder: (folder / WEIGHTS).unlink(), "has neither model.safetensors nor"),
    "complex numbers": ("dspark", entry("fc.weight", lambda tensor: tensor.to(torch.complex64)), "expected finite numbers of a float dtype, got torch.complex64"),
    "an index out of the folder": ("eagle3", lambda folder: in_parts(folder, lambda where: dict.fromkeys(where, "../other/model.safetensors")), "weight_map: expected names of .safetensors files"),
    "a part that is missing": ("dspark", lambda folder: (in_parts(folder) / MORE).unlink(), f"{MORE} {DAMAGED}"),
    "half a part": ("eagle3", lambda folder: cut(MORE, 0.5)(in_parts(folder)), f"{MORE} {DAMAGED}"),
}  # fmt: skip


def test_files_of_one_form(forms, tmp_path):
    for case, row in SOME.items():
        refuse(forms, tmp_path / case, *row)


PICKLES = {
    "a list": lambda found: [1, 2],
    "a state_dict in a dict": lambda found: {"state_dict": found},
    "sparse": lambda found: found | {"fc.weight": found["fc.weight"].to_sparse()},
    "without numbers": lambda found: found | {"fc.weight": found["fc.weight"].to("meta")},
}


def test_pickles_of_more_than_tensors(forms, tmp_path):
    for case, change in PICKLES.items():
        refuse(forms, tmp_path / case, "eagle3", pickled(change), "is damaged or does not fit", pickle=True)


TARGETS = {
    "a layer that the target lacks": ("eagle3", config(eagle_aux_hidden_state_layer_ids=[0, 1, 9]), {}, "layer 9 is asked for, and .* has 3 blocks"),
    "a block that the target lacks": ("deepspec", config(target_layer_ids=[0, 1, 3]), {}, "layer 4 is asked for, and .* has 3 blocks"),
    "states of another width": ("dspark", None, {"vocab": 41}, "reads states of 16 numbers, and the target's have 32: it is another target's"),
    "other tokens": ("eagle3", None, {"vocab": 40}, "knows token ids up to .*: it is another target's"),
    "a Markov head of other tokens": ("dspark", None, {"vocab": 50, "hidden_size": 16}, "has a Markov head of 41 tokens, and the target reads 50"),
    "a mask that the target lacks": ("dflash", None, {"vocab": 60, "hidden_size": 16}, "knows token ids that the target of 60 tokens has not"),
}  # fmt: skip


def test_drafters_of_another_target(forms, tmp_path):
    for case, (form, change, sizes, message) in TARGETS.items():
        folder = copied(forms[form], tmp_path / case)
        if change:
            change(folder)
        drafter, target = hla.load_drafter(folder), hla.enable(small.llama(layers=3, **sizes))
        with pytest.raises(ValueError, match=rf"^[^\n]*{message}[^\n]*$"):
            target.generate(**small.one(vocab=30), assistant_model=drafter, lossy_policy="strict", max_new_tokens=2)


def test_what_cannot_be_saved_leaves_nothing(forms, tmp_path):
    drafter, place = hla.load_drafter(forms["dspark"]), tmp_path / "place"
    place.mkdir()
    with torch.no_grad():
        next(drafter.network.parameters()).fill_(float("nan"))
    with pytest.raises(ValueError, match="expected finite numbers"):
        hla.save_drafter(drafter, place / "drafter")
    assert not contents(place) and not list(place.iterdir())
    (place / "file").write_text("there")
    with pytest.raises((ValueError, OSError)) as error:
        hla.save_drafter(hla.load_drafter(forms["eagle3"]), place / "file")
    assert "\n" not in str(error.value) and contents(place) == {"file": b"there"}
