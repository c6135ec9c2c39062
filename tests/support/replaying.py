"""A backend of torch.compile that does on a CPU what CUDA graphs do: results stand in the same tensors at every call of a graph, and
whatever graph is called next overwrites them; what it is handed for keys and values has to stay where it was.
"""

import torch


class Replaying:
    """`moved`: of how many calls keys or values were elsewhere than when the graph was recorded."""

    def __init__(self):
        self.results, self.calls, self.moved = [], 0, 0

    def __call__(self, graph, inputs):
        own, places = [], {}

        def replay(*given):
            self.calls += 1
            with torch.inference_mode():  # where tensors of both modes may be written to
                for result in self.results:
                    spoil(result)
            for i, tensor in enumerate(given):
                if isinstance(tensor, torch.Tensor) and tensor.dim() == 4:
                    self.moved += places.setdefault(i, tensor.data_ptr()) != tensor.data_ptr()
            found = graph(*given)
            if not own:
                own.extend(out.clone() if isinstance(out, torch.Tensor) else out for out in found)
                self.results += [out for out in own if isinstance(out, torch.Tensor)]
            for place, out in zip(own, found, strict=True):
                if isinstance(out, torch.Tensor):
                    place.copy_(out)
            return own

        return replay


def spoil(tensor):
    """What another graph may have written there: nothing that can be used."""
    if tensor.dtype == torch.bool:
        tensor.logical_not_()
    else:
        tensor.fill_(float("nan") if tensor.dtype.is_floating_point else -(10**6))
