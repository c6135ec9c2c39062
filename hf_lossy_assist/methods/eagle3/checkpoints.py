"""Checkpoints of a training: weights and the optimizer's moments as safetensors, so that a killed run goes on exactly."""

from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from ...training.resumable import SEAL, name_shard, read_part, write_part


class Checkpoints:
    """Those in one folder; the latest alone is kept."""

    def __init__(self, folder: Path, key: str):
        """`key`: what the run is of (`jobs.key_of`), with which its files are sealed."""
        self.folder, self.key = folder, key

    def save(self, network: torch.nn.Module, optimizer: Any, step: int) -> None:
        """Write the state behind `step` steps."""
        state = dict(network.named_parameters())
        tensors = {f"weight.{name}": its.detach().cpu().contiguous() for name, its in state.items()}
        for name, parameter in state.items():
            for moment in ("exp_avg", "exp_avg_sq"):
                tensors[f"{moment}.{name}"] = optimizer.state[parameter][moment].cpu().contiguous()
        before = self._all()
        write_part(self.folder / name_shard(step, "safetensors"), safetensors.torch.save(tensors), self.key)
        for file in before:
            file.unlink()
            file.with_name(file.name + SEAL).unlink(missing_ok=True)

    def load(self, network: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Go on from the latest. Returns: how many steps are done. Raises: `ValueError`, one line, for a damaged file."""
        for file in reversed(self._all()):
            data = read_part(file, self.key)
            if data is None:  # it was not finished
                continue
            tensors, step = safetensors.torch.load(data), int(file.stem)
            with torch.no_grad():
                for name, parameter in network.named_parameters():
                    parameter.copy_(tensors[f"weight.{name}"])
                    moments = {moment: tensors[f"{moment}.{name}"].to(parameter.device) for moment in ("exp_avg", "exp_avg_sq")}  # fmt: skip
                    optimizer.state[parameter] = {"step": torch.tensor(float(step)), **moments}
            return step
        return 0

    def _all(self) -> list[Path]:
        return sorted(self.folder.glob("[0-9]*.safetensors"))
