"""Several prompts in one batch, sampled, several outputs each, with statistics per row.

python examples/batches.py
"""

import torch

import hf_lossy_assist as hla


target, draft, _, tokenizer = hla.demo.load()
hla.enable(target)
torch.manual_seed(0)

problems = hla.demo.problems(4, seed=11)
inputs = tokenizer([p.prompt for p in problems], return_tensors="pt", padding=True)
out = target.generate(
    **inputs,
    assistant_model=draft,
    lossy_policy={"stop": {"name": "svip", "h": 0.4}},
    do_sample=True,
    temperature=0.8,
    num_return_sequences=2,
    max_new_tokens=64,
    return_dict_in_generate=True,
)
for i, row in enumerate(out.speculation.rows):
    text = tokenizer.decode(out.sequences[i], skip_special_tokens=True)
    stats = out.speculation.summary(row)
    print(
        f"problem {i // 2}, text {i % 2}: answer {hla.demo.answer(text)} (right: {problems[i // 2].answer}), "
        f"{stats['num_new_tokens']} tokens in {stats['num_spec_steps']} rounds, "
        f"{stats['draft_acceptance_rate']:.0%} of the drafted tokens accepted"
    )
