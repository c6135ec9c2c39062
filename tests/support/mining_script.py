"""Run as a process of its own, or by `torchrun`: mines a file of prompts."""

import os
import sys
from pathlib import Path

from hf_lossy_assist.methods.autojudge.mine import MineSettings, mine
from hf_lossy_assist.tasks.load import ExactTask
from support import small


def main() -> None:
    task, target = ExactTask(Path(sys.argv[1])), small.llama()
    draft, settings = small.near(target, 0.3), MineSettings(8)
    mine(target, draft, small.tokenizer(), task, task.problems(), Path(sys.argv[2]), settings, batch_size=4)
    if "RANK" in os.environ:
        from accelerate import PartialState

        # Each writes a file of its own: what two processes print on one pipe comes out mixed.
        state = PartialState()
        Path(f"part-{state.process_index}").write_text(str(state.num_processes))


if __name__ == "__main__":
    main()
