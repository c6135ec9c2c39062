"""Train the demo's draft to draft in parallel, as PARD: a block of tokens in one forward. Minutes on a CPU.

python examples/pard.py [--steps N] [--out FOLDER]
"""

import argparse

import torch

import hf_lossy_assist as hla


BLOCK, PLACES, MASK = 8, 12, 0  # tokens of a block, blocks of a text, and a token that texts do not have: the padding


def make_batch(tokenizer, problems):
    """The texts, and behind them the masks of blocks from random places: each sees the text up to there, and its block's masks before it."""
    texts = tokenizer([p.prompt + p.solution + "<eos>" for p in problems], return_tensors="pt", padding=True, padding_side="right")  # fmt: skip
    begins = torch.tensor([len(tokenizer(p.prompt).input_ids) for p in problems])[:, None]  # of the solutions
    last, width = texts.attention_mask.sum(dim=1, keepdim=True) - 1, texts.input_ids.shape[1]
    places = begins - 1 + (torch.rand(len(problems), PLACES) * (last - begins + 1)).long()
    text = torch.arange(width).expand(len(problems), -1)
    masks = (places[..., None] + torch.arange(1, BLOCK)).flatten(1)
    positions = torch.cat([text, masks], dim=1)
    reach = torch.cat([text, places.repeat_interleave(BLOCK - 1, dim=1)], dim=1)  # the last token that each sees
    block = torch.cat([torch.zeros(width), torch.arange(1, PLACES + 1).repeat_interleave(BLOCK - 1)])
    seen = (block == 0) & (positions[:, None] <= reach[..., None])  # (B, query, key)
    seen |= (block == block[:, None]) & (block > 0) & (positions[:, None] <= positions[..., None])
    labels = torch.nn.functional.pad(texts.input_ids, (0, BLOCK)).gather(1, positions + 1)
    labels = labels.masked_fill((positions + 1 < begins) | (positions + 1 > last), -100)
    ids = torch.nn.functional.pad(texts.input_ids, (0, masks.shape[1]), value=MASK)
    inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": (~seen[:, None]).float() * -1e9}
    return inputs, labels


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=700)
parser.add_argument("--out", help="folder for the draft")
args = parser.parse_args()
torch.manual_seed(0)
target, draft, _, tokenizer = hla.demo.load()
draft.get_input_embeddings().padding_idx = None  # else the mask's embedding stays as it is
optimizer = torch.optim.AdamW(draft.parameters(), lr=5e-3, betas=(0.9, 0.98))
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, args.steps, pct_start=0.05)
for step in range(args.steps):
    inputs, labels = make_batch(tokenizer, hla.demo.problems(32, seed=step, split="train"))
    torch.nn.functional.cross_entropy(draft(**inputs).logits.flatten(0, 1), labels.flatten()).backward()
    torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
draft.config.pard_token = MASK
if args.out:
    draft.save_pretrained(args.out)
inputs = tokenizer([p.prompt for p in hla.demo.problems(48, seed=7)], return_tensors="pt", padding=True)
for name, model in (("the demo's draft", hla.demo.load().draft), ("in parallel", draft)):
    out = hla.enable(target).generate(**inputs, assistant_model=model, lossy_policy=hla.Constant(5), max_new_tokens=96, return_dict_in_generate=True)  # fmt: skip
    print(f"{name}: {out.speculation.mean_acceptance_length:.2f} tokens a target call, {out.speculation.forwards}")
