"""cuDNN's benchmark mode: cuDNN times its algorithms for each new shape of a convolution, and keeps the fastest."""

from __future__ import annotations

import logging

import torch

from runner import Algorithm, Logger, State, get_global_rank

log = logging.getLogger("runner")


class CudnnBenchmark(Algorithm):
    """Lets cuDNN time its algorithms for each new shape of a convolution, and use the fastest.

    Timing takes a moment at each new shape, so it pays off if shapes recur. The choice may differ from run to run: two
    equal runs, or a resumed and an uninterrupted one, then differ in the last bits.

    Raises:
        ValueError: at INIT, the device is not a GPU, or the run is deterministic.

    Evidence: some, for the speed of convolutions (PyTorch's Performance Tuning Guide). The trained model is the same.
    """

    def __init__(self) -> None:
        self._before: bool | None = None

    def init(self, state: State, logger: Logger) -> None:
        if state.device.type != "cuda":
            raise ValueError(f"CudnnBenchmark needs a CUDA device, not {state.device}: leave it out")
        if torch.are_deterministic_algorithms_enabled():
            raise ValueError("CudnnBenchmark may change bits from run to run: leave it out, or trainer.deterministic")
        if get_global_rank() == 0:
            log.warning("CudnnBenchmark: identical runs and resumed runs may differ in the last bits")
        self._before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = True

    def close(self, state: State, logger: Logger) -> None:
        if self._before is not None:
            torch.backends.cudnn.benchmark = self._before
            self._before = None
