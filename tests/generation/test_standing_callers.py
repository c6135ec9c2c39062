"""Callers of `generate` that nobody can change: rollouts as TRL makes them, and the Trainer's predictions."""

import numpy as np
import pytest
import torch
from support.small import PAD, llama, near, one, ragged, t5
from transformers import GenerationConfig, Seq2SeqTrainer, Seq2SeqTrainingArguments

import hf_lossy_assist as hla


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*in training mode:UserWarning")
def test_rollouts_are_of_the_weights_of_the_moment():
    """As TRL's trainers call it: in training mode, with gradient checkpointing, before and behind steps."""
    target, prompts, texts = llama(), ragged(), []
    config = GenerationConfig(max_new_tokens=12, do_sample=True, top_k=1, pad_token_id=PAD)
    hla.enable(target, assistant_model=near(target), lossy_policy="svip", strict=True)
    target.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(target.train().parameters(), lr=0.01)
    for _ in range(3):
        with torch.no_grad():
            texts.append(target.generate(**prompts, generation_config=config).tolist())
        alone = llama()
        alone.load_state_dict(target.state_dict())
        assert texts[-1] == alone.generate(**prompts, generation_config=config).tolist()
        assert target.training and all(module.gradient_checkpointing for module in target.model.layers)
        target(**prompts, labels=prompts["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert texts[0] != texts[1] != texts[2]
    assert hla.reports(target)[0].num_accepted_draft_tokens and len(hla.reports(target)) == 3


def test_the_trainer_of_encoder_decoders_predicts_with_it(tmp_path):
    target = t5()
    data = [
        {
            "input_ids": one(6, seed=n)["input_ids"][0],
            "attention_mask": torch.ones(6),
            "labels": torch.tensor([5, 6, 7]),
        }
        for n in range(2)
    ]
    arguments = Seq2SeqTrainingArguments(
        tmp_path,
        predict_with_generate=True,
        per_device_eval_batch_size=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Seq2SeqTrainer(target, arguments, eval_dataset=data)
    settings = {"max_new_tokens": 12, "do_sample": False}
    expected = trainer.predict(data, **settings).predictions
    with hla.using(target, assistant_model=near(target), strict=True):
        got = trainer.predict(data, **settings).predictions
    assert np.array_equal(got, expected) and [len(report.rows) for report in hla.reports(target)] == [1] * 2
    with hla.using(target, assistant_model=near(target)), pytest.warns(UserWarning, match="beam search"):
        trainer.predict(data, **settings, num_beams=2)
