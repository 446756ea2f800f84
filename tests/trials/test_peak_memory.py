"""The peak memory that `runner check` predicts, compared with the allocator of torch in a real run."""

from __future__ import annotations

import functools
import json
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
from composed_configs import composed
from rank_runs import program_of
from sharded_runs import on_ranks
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from runner import Callback, Model, get_global_rank
from runner.config import build
from runner.config.experiment import Experiment
from runner.trials import dry_run
from runner.trials.peak_memory import _drop_values
from runner.verbs.check import report

TOKENS = ("data=synthetic_tokens", "data.num_samples=64", "data.batch_size=16", "optimizer=adamw")
GPT = ("model=gpt", *TOKENS, "model.module.d_model=64", "algorithms=none")
HF = ("model=hf_causal_lm", "model.module.name=gpt2", "model.module.pretrained=false")


class TwoBatches(Callback):
    """Ends training after two batches."""

    def batch_end(self, state: Any, logger: Any) -> None:
        if state.timestamp.batch == 2:
            state.stop_training()


@functools.cache  # several tests compare the same prediction
def predicted(*overrides: str) -> dry_run.Findings:
    config = composed(*overrides)
    build.check(Experiment(config))
    return dry_run.try_out(Experiment(config))


def allocated(folder: Path, *overrides: str) -> int:
    """Train two batches, and return the peak of allocated bytes, without the data."""
    config = composed(*overrides)
    train, _ = build.make_data(Experiment(config))
    parts = build.make_parts(Experiment(config)) | {"callbacks": [TwoBatches()], "schedulers": None}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        model = build.make_model(Experiment(config))
        model.metrics = lambda train: {}
        with build.assemble(
            Experiment(config), folder / "run", "run", model=model, train_dataloader=train, **parts
        ) as trainer:
            trainer.fit()
    watched.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    live: dict[int, int] = {}
    peak = 0
    for event in sorted((event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"]):
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        if size > 0:
            live[address] = size
            peak = max(peak, sum(live.values()))
        else:
            live.pop(address, None)  # it may have been allocated before profiling
    return peak


CASES = [
    ("model=mlp", "data.batch_size=600", "optimizer=adamw", "algorithms=ema"),
    ("model=mlp", "model.module.hidden=[512,512]", "algorithms=none", "trainer.microbatch_size=16"),
    ("model=resnet8",),
    GPT,
    (*GPT, "trainer.precision=amp_bf16"),
    (*GPT, "trainer.precision=bf16"),
    (*GPT, "trainer.grad_accum=4"),
    (*GPT[:-1], "algorithms=activation_checkpointing"),
    (*HF, *TOKENS, "algorithms=none", "model.module.overrides={vocab_size:256,n_embd:32,n_layer:2,n_head:2}"),
]
FIRST_TIER = [case for case in CASES if case in (("model=resnet8",), GPT) or "data.batch_size=600" in case]


@pytest.mark.parametrize(
    "overrides",
    [pytest.param(case, marks=[] if case in FIRST_TIER else pytest.mark.slow) for case in CASES],
    ids=" ".join,
)
def test_the_predicted_peak_is_that_of_the_allocator(overrides: tuple[str, ...], tmp_path: Path):
    findings = predicted(*overrides)
    assert findings.unpredicted == ""
    assert findings.sizes.peak == pytest.approx(allocated(tmp_path, *overrides), rel=0.1)


def test_activations_scale_with_the_batch_and_shrink_with_checkpointing():
    layouts = (GPT, (*GPT, "trainer.grad_accum=4"), (*GPT[:-1], "algorithms=activation_checkpointing"))
    plain, quarter, checkpointed = (predicted(*layout).sizes.activations for layout in layouts)
    assert quarter == pytest.approx(plain / 4, rel=0.01)
    assert checkpointed < 0.4 * plain


DEEP = (*GPT, "model.module.n_layers=4")
SHARDED = "trainer.parallel=fsdp"
WIDE = (*DEEP, "model.module.d_model=128")
SPLIT = "trainer.tensor_parallel=2"
RANKED = {
    2: [
        DEEP,
        (*DEEP, SHARDED),
        (*WIDE, SHARDED, "data.batch_size=4"),
        (*WIDE, SHARDED, "data.batch_size=4", "trainer.gather_dtype=bfloat16"),
        (*WIDE, "trainer.grad_accum=2"),
        (*WIDE, "trainer.grad_accum=2", SHARDED),
        (*WIDE, "trainer.precision=bf16", SHARDED),
        (*WIDE, "algorithms=ema", SHARDED),
        (*WIDE, "algorithms=activation_checkpointing", SHARDED),
        (*WIDE, "data.batch_size=4", SPLIT),
        ("model=mlp", "model.module.hidden=[512,512]", "optimizer=adamw", "algorithms=none", SHARDED),
        ("model=resnet8", "data.batch_size=256"),
        ("model=resnet8", "data.batch_size=256", SHARDED),
    ],
    4: [
        (*WIDE, SHARDED),
        (*WIDE, SHARDED, "trainer.shard_size=2"),
        (*WIDE, SHARDED, "data.batch_size=8", SPLIT),
        ("model=mlp", "model.module.hidden=[512,512]", "optimizer=adamw", "algorithms=none", SHARDED),
        ("model=resnet8", "data.batch_size=256", SHARDED),
    ],
}


@pytest.mark.slow
def test_ranks_and_shards_divide_the_predicted_memory():
    alone, replica, shard = (
        predicted(*DEEP, *more).sizes
        for more in ((), ("launch.nproc_per_node=2",), (SHARDED, "launch.nproc_per_node=2"))
    )
    assert alone.gathered == replica.gathered == 0
    assert replica.activations == shard.activations == pytest.approx(alone.activations / 2, rel=0.01)
    assert shard.peak < replica.peak < alone.peak
    blocks = [
        4 * sum(weight.numel() for weight in block.parameters())
        for block in build.make_model(Experiment(composed(*DEEP))).module.blocks
    ]
    assert shard.gathered == replica.weights - sum(blocks[2:])


def measure_ranks() -> None:
    """Write the allocated peak of this rank to a file, for each layout in `layouts.json`."""
    folder = Path(f"rank{get_global_rank()}")
    folder.mkdir(exist_ok=True)
    with on_ranks():
        peaks = [allocated(folder, *overrides) for overrides in json.loads(Path("layouts.json").read_text())]
    (folder / "peaks.json").write_text(json.dumps(peaks))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKED)
def test_the_predicted_peak_of_a_rank_is_that_of_its_allocator(run_ranks: Any, tmp_path: Path, ranks: int):
    def measure(layouts: list[tuple[str, ...]]) -> dict[tuple[str, ...], int]:
        """Return the peak of each layout on the rank with the lowest."""
        (tmp_path / "layouts.json").write_text(json.dumps(layouts))
        run_ranks(program_of("trials/test_peak_memory", "measure_ranks"), ranks)
        peaks = [json.loads((tmp_path / f"rank{rank}" / "peaks.json").read_text()) for rank in range(ranks)]
        return dict(zip(layouts, map(min, *peaks), strict=True))

    findings = {overrides: predicted(*overrides, f"launch.nproc_per_node={ranks}") for overrides in RANKED[ranks]}
    measured = measure(RANKED[ranks])
    # The profiler sometimes misses that a thread of gloo frees memory, and then measures too much.
    too_large = [overrides for overrides, peak in measured.items() if 0.9 * peak > findings[overrides].sizes.peak]
    if too_large:
        again = measure(too_large)
        measured |= {overrides: min(measured[overrides], again[overrides]) for overrides in too_large}
    for overrides, prediction in findings.items():
        assert prediction.unpredicted == ""
        assert prediction.sizes.peak == pytest.approx(measured[overrides], rel=0.1), overrides
        assert bool(prediction.sizes.gathered) == (SHARDED in overrides)


def test_tied_weights_stay_tied_without_values():
    network = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False))
    network[1].weight = network[0].weight
    with FakeTensorMode():
        _drop_values(network, None)
    assert network[1].weight is network[0].weight and len([*network.parameters()]) == 1


def test_predicting_a_large_model_allocates_no_memory():
    """The model has almost 10 billion weights, 39 GB."""
    large = ("model.module.d_model=16384", "model.module.n_layers=3", "init_weights=by_name", "trainer.parallel=fsdp")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    findings = predicted("model=gpt", *TOKENS, "algorithms=none", *large, "launch.nproc_per_node=8")
    assert findings.sizes.parameters > 9e9 and findings.sizes.peak > 20e9
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1_000_000  # kB


class Reading(Model):
    """A model whose forward pass reads a value of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 10)

    def forward(self, batch: Any) -> Any:
        outputs = self.inner(batch[0].flatten(1))
        return outputs if float(outputs.detach().sum()) < 1e9 else outputs / 2

    def loss(self, outputs: Any, batch: Any) -> Any:
        return nn.functional.cross_entropy(outputs, batch[1])


def test_a_model_that_reads_values_gets_no_figure_and_says_why(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "peaks_here", sys.modules[__name__])
    own = ("algorithms=none", "~model.num_classes", "~model.module", "model._target_=peaks_here.Reading")
    config = composed("model=mlp", *own)
    findings = dry_run.try_out(Experiment(config))
    assert findings.sizes.peak == 0 and "DataDependent" in findings.unpredicted
    rows = dict(report(Experiment(config), findings))
    assert "without activations" in rows["memory"] and "DataDependent" in rows["no figure"]


@pytest.mark.parametrize("reads", ["nan_guard", "channels_last", "info_batch"])
def test_an_algorithm_that_reads_values_is_left_out_of_the_prediction(reads: str):
    findings = predicted("model=resnet8", f"algorithms={reads}")
    assert findings.sizes.peak > findings.sizes.activations > 0
    assert (reads in findings.unpredicted) == (reads == "nan_guard")


@pytest.mark.slow
def test_tensor_parallel_ranks_have_fewer_activations():
    alone, split = (predicted(*GPT, *more).sizes.activations for more in ((), (SPLIT, "launch.nproc_per_node=2")))
    assert 0.5 * alone < split < 0.9 * alone  # activations between the blocks and outputs are not split
