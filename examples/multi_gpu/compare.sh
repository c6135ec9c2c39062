#!/bin/sh
# Compares policies in several processes, each on a GPU of its own (on CPU cores they share the memory, which shows in the figures).
#   examples/multi_gpu/compare.sh found                                       # the demo pair, two processes on the CPU
#   PROCESSES=8 examples/multi_gpu/compare.sh found --model M --assistant D --prompts questions.jsonl --chat
set -eu
out=$1
shift
resume=
[ ! -d "$out.partial" ] || resume=--resume
torchrun --standalone --nproc-per-node "${PROCESSES:-2}" -m hf_lossy_assist.cli compare --out "$out" $resume "$@"
hf-lossy report "$out" --out "$out.html"
