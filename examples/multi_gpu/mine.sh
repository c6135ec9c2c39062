#!/bin/sh
# Mines AutoJudge's important tokens in several processes, and fits a head to them.
#   examples/multi_gpu/mine.sh mined head                                     # the demo pair, two processes on the CPU
#   PROCESSES=8 examples/multi_gpu/mine.sh mined head --model M --assistant D --task gsm8k --data train.jsonl
set -eu
out=$1 head=$2
shift 2
resume=
[ ! -d "$out.partial" ] || resume=--resume
torchrun --standalone --nproc-per-node "${PROCESSES:-2}" -m hf_lossy_assist.cli mine --out "$out" $resume "$@"
hf-lossy fit autojudge "$out" --out "$head"
