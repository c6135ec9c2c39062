"""Callers of `generate` that nobody can change: rollouts as TRL makes them, and the Trainer's predictions."""

import itertools

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from support.distributions import REJECT
from support.small import PAD, llama, near, one, t5
from transformers import GenerationConfig, Seq2SeqTrainer, Seq2SeqTrainingArguments

import hf_lossy_assist as hla


VOCAB, NEW = 5, 3


def law(model, prompt, temperature):
    """The probability of each text of NEW tokens behind `prompt` (1, n), (VOCAB ** NEW,)."""
    texts = torch.tensor(list(itertools.product(range(VOCAB), repeat=NEW)))
    with torch.no_grad():
        logits = model(torch.cat([prompt.expand(len(texts), -1), texts], dim=1)).logits[:, -NEW - 1 : -1]
    chosen = (logits.double() / temperature).log_softmax(-1).gather(2, texts[:, :, None])
    return chosen[:, :, 0].sum(1).exp()


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("draws", [2_000, pytest.param(20_000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("policy", ["strict", "svip"])
def test_rollouts_have_the_distribution_of_the_weights_of_the_moment(draws, policy):
    """As TRL's trainers call it, in training mode, with gradient checkpointing, before and behind a step of the optimizer."""
    target, prompt, temperature = llama(vocab=VOCAB), torch.tensor([[1, 4, 2, 3]]), 1.3
    config = GenerationConfig(max_new_tokens=NEW, do_sample=True, temperature=temperature, top_k=0, pad_token_id=PAD)
    with torch.no_grad():
        target.lm_head.weight.mul_(0.3)  # no text is all but certain
    hla.enable(target, assistant_model=near(target, 0.5), lossy_policy=policy, strict=True)
    target.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(target.train().parameters(), lr=0.05)
    laws = []
    for _ in range(2):
        counts = torch.zeros(VOCAB**NEW, dtype=torch.float64)
        inputs = {"input_ids": prompt.expand(500, -1), "attention_mask": torch.ones(500, 4, dtype=torch.long)}
        for _ in range(draws // 500):
            with torch.no_grad():
                texts = target.generate(**inputs, generation_config=config)[:, -NEW:]
            places = texts @ torch.tensor([VOCAB**2, VOCAB, 1])
            counts += places.bincount(minlength=VOCAB**NEW)
        laws.append(law(target, prompt, temperature))
        expected = laws[-1] * draws
        cells = torch.where(expected < 5, 0, torch.arange(1, VOCAB**NEW + 1))  # the rare ones are one cell
        seen, wanted = (cells.bincount(weights=each).numpy() for each in (counts, expected))
        seen, wanted = seen[wanted > 0], wanted[wanted > 0]
        assert len(seen) > 20 and chisquare(seen, wanted * (draws / wanted.sum())).pvalue > REJECT
        target(prompt, labels=prompt).loss.backward()
        optimizer.step()
    assert (laws[0] - laws[1]).abs().sum() > 0.2, "the step changed too little to be seen"
    accepted = sum(report.num_accepted_draft_tokens for report in hla.reports(target))
    assert 0 < accepted < sum(report.num_draft_tokens for report in hla.reports(target))


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
