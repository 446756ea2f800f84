from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runner.algorithms import CudnnBenchmark

ON_GPU: Any = SimpleNamespace(device=torch.device("cuda", 0))  # the only field of State that the algorithm reads


def test_the_setting_is_on_during_a_run_and_restored_afterwards(caplog: pytest.LogCaptureFixture):
    before = torch.backends.cudnn.benchmark
    algorithm = CudnnBenchmark()
    algorithm.init(ON_GPU, ON_GPU)
    assert torch.backends.cudnn.benchmark and "may differ in the last bits" in caplog.text
    algorithm.close(ON_GPU, ON_GPU)
    assert torch.backends.cudnn.benchmark is before


def test_a_cpu_is_refused_and_the_setting_stays(make_trainer):
    before = torch.backends.cudnn.benchmark
    with pytest.raises(ValueError, match="CudnnBenchmark needs a CUDA device, not cpu: leave it out"):
        make_trainer(CudnnBenchmark())
    assert torch.backends.cudnn.benchmark is before


def test_a_deterministic_run_is_refused():
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(ValueError, match=r"leave it out, or trainer\.deterministic"):
            CudnnBenchmark().init(ON_GPU, ON_GPU)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
def test_a_convolution_trains_with_the_benchmark(train, resnet):
    options = {"build": resnet, "device": "cuda", "max_duration": "2ba"}
    torch.testing.assert_close(train(CudnnBenchmark(), **options).gradients, train(**options).gradients)
