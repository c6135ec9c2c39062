"""A faster generate in ten lines, on the embedded demo models.

python examples/generate.py
"""

import hf_lossy_assist as hla


target, draft, _, tokenizer = hla.demo.load()
hla.enable(target)

problem = hla.demo.problems(1, seed=7)[0]
inputs = tokenizer(problem.prompt, return_tensors="pt")
out = target.generate(
    **inputs, assistant_model=draft, lossy_policy="svip", max_new_tokens=64, return_dict_in_generate=True
)
text = tokenizer.decode(out.sequences[0], skip_special_tokens=True)
print(text)
print(f"stated {hla.demo.answer(text)}, right is {problem.answer}")
print(out.speculation)
