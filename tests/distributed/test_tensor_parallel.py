"""Layers split over ranks equal replicas, see the same samples, share checkpoints, and refuse other models."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from rank_runs import program_of
from safetensors.torch import load_file
from sharded_runs import CASES, NOT_SPLIT, OPTIMIZERS, SPLIT, Case, Overflow, difference, make_trainer, on_ranks, train
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import SumMetric

from runner import Callback, LanguageModel, Model, Trainer, get_global_rank, get_world_size
from runner.checkpoints.digest import read_digests
from runner.checkpoints.hashing import digest
from runner.data import Replicated, SampleOrder, Sharded, TensorLoader
from runner.distributed.ranks import get_data_parallel_rank, get_data_parallel_size
from runner.distributed.sharding import Layout, count_copies, is_sharded, local, whole
from runner.distributed.tensor_parallel import draw_apart, find_plan
from runner.models import GPT
from runner.training.dataloader import BatchStream
from runner.trials.sizes import measure, size_of

TWO: dict[str, Any] = {"tensor_parallel": 2}


def gpt(**sizes: Any) -> Model:
    return LanguageModel(GPT(**{"vocab_size": 11, "context": 12, "d_model": 16, "n_heads": 4, **sizes}))


def llama(kind: str = "llama", **overrides: Any) -> Model:
    from runner.models.hf.causal_lm import HFCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 24, "vocab_size": 11, "max_position_embeddings": 16, **overrides}
    return LanguageModel(HFCausalLM(kind, pretrained=False, overrides=sizes))


# Refusals


@pytest.mark.parametrize(
    ("arguments", "ranks", "message"),
    [
        ({"tensor_parallel": 0}, 4, "tensor_parallel=0: must be a number of ranks, at least 1"),
        ({"tensor_parallel": 2.0}, 4, "tensor_parallel=2.0: must be"),
        ({"tensor_parallel": 3}, 4, "tensor_parallel=3: must divide the 4 ranks"),
        ({**TWO, "parallel": "fsdp", "shard_size": 4}, 4, "shard_size=4: must divide the 2 ranks that see different"),
    ],
)
def test_an_invalid_layout_is_refused(arguments: dict[str, Any], ranks: int, message: str):
    with pytest.raises(ValueError, match=message):
        Layout(**arguments).check_ranks(ranks)


def test_automatic_microbatches_and_custom_training_steps_are_refused(monkeypatch: pytest.MonkeyPatch):
    class OwnStep(LanguageModel):
        def training_step(self, state):
            return None

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="microbatch_size='auto': not with tensor_parallel=2"):
        Layout(**TWO).check(gpt(), "auto")
    with pytest.raises(ValueError, match="tensor_parallel=2: OwnStep.training_step would see weights in shards; set 1"):
        Layout(**TWO).check(OwnStep(nn.Linear(1, 1)), None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda net: nn.Linear(2, 2),
            "only the GPT of runner.models, and Llama, Mistral .* can be split, not Linear",
        ),
        (lambda net: setattr(net.blocks[1].attention, "attend", nn.Softmax(-1)), "blocks.1.attention.attend .Soft"),
        (lambda net: setattr(net.blocks[0].attention, "q_norm", nn.RMSNorm(4)), "blocks.0.attention.q_norm .RMSN"),
        (lambda net: setattr(net.blocks[0].mlp, "up", nn.Identity()), "mlp.up .Identity. is not a plain linear layer"),
        (
            lambda net: setattr(net, "extra", nn.Linear(2, 2)),
            "extra .Linear. is not in the plan for GPT",
        ),
        (lambda net: setattr(net.token_embedding, "padding_idx", 0), "token_embedding has padding_idx=0"),
        (
            lambda net: setattr(net.blocks[0].mlp, "down", nn.Linear(63, 16)),
            "must divide the 63 features of .*down",
        ),
    ],
)
def test_a_model_without_a_plan_is_refused(change: Any, message: str):
    model = gpt()
    replacement = change(model.module)
    with pytest.raises(ValueError, match=f"tensor_parallel=2: .*{message}"):
        find_plan(model if replacement is None else replacement, 2)


def test_the_number_of_ranks_must_divide_the_heads_but_not_the_vocabulary():
    assert {style for name, style in find_plan(gpt(), 2).items() if "norm" in name} == {"whole"}
    with pytest.raises(ValueError, match="tensor_parallel=8: must divide the 4 heads of module.blocks.0.attention.qkv"):
        find_plan(gpt(), 8)
    with pytest.raises(ValueError, match="tensor_parallel=4: must divide the 2 heads of .*self_attn.k_proj"):
        find_plan(llama(), 4)


def test_one_process_with_tensor_parallel_trains_the_same(tmp_path: Path):
    plain, alone = (train(Case(), tmp_path, **more) for more in ({}, TWO))
    assert difference(plain, alone) == 0


def test_draw_apart_changes_random_numbers_only_inside_a_training_module():
    class Draw(nn.Module):
        def forward(self):
            return torch.rand(8)

    draws = []
    for rank in (0, 1):
        module = Draw()
        draw_apart(module, rank)
        torch.manual_seed(3)
        draws.append({"training": module(), "outside": torch.rand(8), "evaluation": module.eval()()})
    first, second = draws
    assert not torch.equal(first["training"], second["training"])
    assert all(torch.equal(first[place], second[place]) for place in ("outside", "evaluation"))


def test_give_same_samples_gives_pairs_of_ranks_the_order_of_half_as_many_ranks():
    orders = [SampleOrder(15, 8, seed=3, rank=rank, world_size=4) for rank in range(4)]
    for order in orders:
        order.give_same_samples(2)
    fewer = [SampleOrder(15, 8, seed=3, rank=rank, world_size=2) for rank in range(2)]
    for rank, order in enumerate(orders):
        for batch in range(2):
            assert torch.equal(order.indices(1, batch), fewer[rank // 2].indices(1, batch))
            assert order.counts(batch) == fewer[rank // 2].counts(batch)
    orders[3].give_same_samples(1)
    assert (orders[3].rank, orders[3].world_size) == (3, 4)


# Two ranks


def equal_replicas() -> None:
    """Train the cases in sys.argv with replicas and split layers, and resume each checkpoint in each layout. All ranks.

    On four ranks, the split layers are also sharded; those of the first tier have replicas too. Results must be equal
    up to rounding: weights are in float64, metrics in float32.
    """
    with on_ranks():
        for name in sys.argv[1:]:
            layouts: list[dict[str, Any]] = [TWO] if get_world_size() == 2 or name in FIRST_TIER else []
            layouts += [{**TWO, "parallel": "fsdp"}] if get_world_size() == 4 else []
            case, folder = CASES[name], Path(name.replace(": ", "-").replace(" ", "_"))
            plain = train(case, folder, save=folder / "ddp", exact=True)
            for layout in layouts:
                split = train(case, folder, save=folder / "split", exact=True, **layout)
                assert difference(plain, split) < 1e-6, name
                saved = [torch.load(folder / kind / "model.pt", weights_only=True) for kind in ("ddp", "split")]
                assert difference(*saved) < 1e-9, f"{name}: saved"
                again = train(case, folder, resume_path=folder / "split", exact=True, **layout)
                assert difference(split, again) == 0, f"{name}: resumed"
                to_ddp = train(case, folder, resume_path=folder / "split", exact=True)
                assert difference(plain, to_ddp) < 1e-6, f"{name}: to ddp"
                sharded = train(case, folder, save=folder / "sharded", sharded=True, exact=True, **layout)
                assert difference(split, sharded) == 0, f"{name}: saved in shards"
                resumed_layouts: list[dict[str, Any]] = [layout, {}, {"parallel": "fsdp"}]
                for resumed_layout in resumed_layouts:
                    again = train(case, folder, resume_path=folder / "sharded", exact=True, **resumed_layout)
                    limit = 1e-300 if resumed_layout == layout else 1e-6
                    assert difference(split, again) < limit, f"{name}: from shards"
                from_ddp = train(case, folder, resume_path=folder / "ddp", exact=True, **layout)
                assert difference(plain, from_ddp) < 1e-6, f"{name}: from ddp"


FIRST_TIER = ("text: ema",)


def test_split_layers_on_two_ranks_equal_replicas_and_resume_in_each_layout(run_ranks):
    run_ranks(program_of("distributed/test_tensor_parallel", "equal_replicas"), 2, *FIRST_TIER)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(6))
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_algorithm_and_optimizer_equals_replicas(run_ranks, ranks: int, start: int):
    names = [name for name in SPLIT if ranks == 4 or name not in FIRST_TIER]
    run_ranks(program_of("distributed/test_tensor_parallel", "equal_replicas"), ranks, *names[start::6])


class Counting(LanguageModel):
    """A language model whose metric counts targets."""

    def metrics(self, train):
        return {"seen": SumMetric()}

    def update_metric(self, batch, outputs, metric):
        metric.update(batch[1].numel())


class BatchRecorder(Callback):
    """Keeps the inputs of each batch."""

    def __init__(self):
        self.batches: list[torch.Tensor] = []

    def batch_end(self, state, logger):
        self.batches.append(state.batch[0].clone())


def make_counting(recorder: BatchRecorder, loaders: Any, **layout: Any) -> Trainer:
    return Trainer(
        model=Counting(GPT(vocab_size=11, context=12, d_model=16, n_heads=4, dropout=0.3)),
        train_dataloader=loaders[0],
        eval_dataloader=loaders[1],
        max_duration="2ep",
        optimizers=lambda params: torch.optim.AdamW(params, lr=0.01),
        callbacks=[recorder],
        device="cpu",
        run_dir="run",
        **layout,
    )


def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors of all ranks."""
    tensors = [torch.empty_like(tensor) for _ in range(get_world_size())]
    dist.all_gather(tensors, tensor)
    return tensors


def check_samples() -> None:
    """Train and evaluate with uneven batches, and check the samples of ranks, metrics and timestamps. All ranks."""
    tokens = (torch.arange(15)[:, None] + torch.arange(6)) % 11
    loaders = [TensorLoader(tokens, tokens, batch_size=size, shuffle=size < 8) for size in (8, 15)]
    with on_ranks():
        for layout in ({}, TWO, {}):  # each time, the same loaders are divided among the ranks again
            recorder = BatchRecorder()
            with make_counting(recorder, loaders, **layout) as trainer:
                trainer.fit()
                state = trainer.state
                group = layout.get("tensor_parallel", 1)
                size = get_world_size() // group
                assert get_data_parallel_size() == size
                assert state.seed == get_data_parallel_rank() == get_global_rank() // group
                assert (state.timestamp.sample, state.timestamp.token) == (30, 180)
                assert state.train_metric_values["seen"] == state.eval_metric_values["eval"]["seen"] == 90
                batches = gather(recorder.batches[0])
                assert all(torch.equal(batch, batches[rank - rank % group]) for rank, batch in enumerate(batches))
                assert len({digest(batch) for batch in batches}) == size
                if layout:  # with different dropout masks on each rank, the weights that are not split would differ
                    model = state.unwrapped_model
                    norms = [local(weight) for name, weight in model.named_parameters() if "norm" in name]
                    sums = gather(torch.stack([norm.double().sum() for norm in norms]))
                    assert all(torch.equal(sum_, sums[0]) for sum_ in sums)
                    assert count_copies(model) == size
                    trainer.save_checkpoint("saved")
                    plain = DataLoader(TensorDataset(tokens, tokens), batch_size=4)
                    assert trainer.eval(Replicated(plain))["eval"]["seen"] == 90
                    for loader in (plain, Sharded(plain)):
                        with pytest.raises(ValueError, match="2 ranks must see the same samples .*use runner.data"):
                            BatchStream(loader, state.device, state.precision, len, "train")


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_that_split_layers_see_the_same_samples(run_ranks, ranks: int):
    run_ranks(program_of("distributed/test_tensor_parallel", "check_samples"), ranks)


def overflow_on_one_part() -> None:
    """Overflow on one rank's part of a layer with the scaler of amp_fp16, and with NaNGuard. All ranks."""
    with on_ranks():
        for keys, precision in (((), "amp_fp16"), (("nan_guard",), "fp32")):
            overflow = Overflow()
            with make_trainer("text", *keys, overflow, folder=Path("run"), precision=precision, **TWO) as trainer:
                trainer.fit()
            assert overflow.stays == [False, True, False, False], precision


def test_an_overflow_in_one_part_skips_the_step_on_all_ranks(run_ranks):
    run_ranks(program_of("distributed/test_tensor_parallel", "overflow_on_one_part"))


def train_with_callbacks() -> None:
    """Train replicas and split layers with callbacks that read weights, in the folders `ddp` and `split`. All ranks."""
    from runner.callbacks import ExportForInference, Generate, InMemoryLogger, OptimizerMonitor, StateDigest

    with on_ranks():
        values: list[dict[str, list[Any]]] = []
        for name, layout in {"ddp": {}, "split": TWO}.items():
            memory = InMemoryLogger()
            callbacks = [
                StateDigest("1ba"),
                OptimizerMonitor(batch_log_interval=1),
                Generate(["\1\2"], max_new_tokens=3),
                ExportForInference("safetensors"),
            ]
            arguments = {"optimizers": OPTIMIZERS["adamw"], "callbacks": callbacks, "loggers": [memory], **layout}
            with make_trainer("text", "ema", folder=Path(name), exact=True, **arguments) as trainer:
                trainer.fit()
                model = trainer.state.unwrapped_model
                if layout:
                    assert is_sharded(model) and isinstance(model, LanguageModel)
                    torch.save(size_of([*map(local, model.parameters())]), f"{get_global_rank()}.pt")
                if get_global_rank() == 0:
                    values.append({key: [value for _, value in points] for key, points in memory.data.items()})
                    values[-1] |= {"texts": [memory.tables["generate"]]}
        if get_global_rank() == 0:
            plain, split = values
            assert plain.keys() == split.keys()
            norms = [key for key in plain if key.startswith("l2_norm")]
            assert len(norms) > 50
            for key in norms:
                assert split[key] == pytest.approx(plain[key], rel=1e-6), key
            assert split["texts"] == plain["texts"]


def test_callbacks_see_whole_tensors_and_a_rank_holds_the_predicted_size(run_ranks, tmp_path: Path):
    run_ranks(program_of("distributed/test_tensor_parallel", "train_with_callbacks"))
    plain, split = (read_digests(tmp_path / name) for name in ("ddp", "split"))
    for expected, actual in zip(plain, split, strict=True):
        assert expected["samples"] == actual["samples"]
        # Losses are left out, because rank 0 has different samples in both layouts.
        values = [{**line["values"], "loss": 0} for line in (expected, actual)]
        assert values[0] == pytest.approx(values[1], rel=1e-6)
    exported = [load_file(tmp_path / name / "model.safetensors") for name in ("ddp", "split")]
    assert difference(*exported) < 1e-9
    with make_trainer("text", folder=tmp_path, exact=True) as trainer:
        trainer.fit()
        predicted = measure(trainer.state, 1, 2)
    for rank in range(2):
        assert torch.load(tmp_path / f"{rank}.pt") == pytest.approx(predicted.weights, rel=0.02)


def refuse_on_ranks() -> None:
    """Check that algorithms and models that cannot be split are refused. All ranks."""
    with on_ranks():
        for key in sorted(NOT_SPLIT):
            with pytest.raises(ValueError, match="tensor_parallel=2: "):
                make_trainer("text", key, folder=Path("run"), **TWO)
        for key, message in {"sam": "SAM cannot be used", "ddp": "DDP: each rank has a part"}.items():
            with pytest.raises(ValueError, match=message):
                make_trainer("text", key, folder=Path("run"), **TWO)
        with pytest.raises(ValueError, match="can be split, not Sequential; set 1"):
            make_trainer("images", folder=Path("run"), **TWO)


def test_algorithms_and_models_that_cannot_be_split_are_refused(run_ranks):
    run_ranks(program_of("distributed/test_tensor_parallel", "refuse_on_ranks"))


# Transformers

QWEN2 = {"layer_types": ["full_attention"] * 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {},
    "qwen2": QWEN2,
}


def equal_families() -> None:
    """Train the models in sys.argv with replicas and with split layers, and compare their weights. All ranks."""
    tokens = torch.randint(0, 11, (16, 9), generator=torch.Generator().manual_seed(1))
    with on_ranks():
        for kind in sys.argv[1:]:
            results = []
            for layout in ({}, TWO, *([] if get_world_size() == 2 else [{**TWO, "parallel": "fsdp"}])):
                torch.manual_seed(0)
                with Trainer(
                    model=llama(kind, **FAMILIES[kind]).double(),
                    train_dataloader=TensorLoader(tokens[:, :-1], tokens[:, 1:], batch_size=4, shuffle=True),
                    optimizers=lambda params: torch.optim.AdamW(params, lr=0.01),
                    device="cpu",
                    run_dir="run",
                    **layout,
                ) as trainer:
                    trainer.fit()
                    parameters = trainer.state.unwrapped_model.named_parameters()
                    results.append({name: whole(parameter) for name, parameter in parameters})
            for result in results[1:]:
                assert difference(results[0], result) < 1e-6, kind


@pytest.mark.slow
def test_llama_equals_replicas(run_ranks):
    run_ranks(program_of("distributed/test_tensor_parallel", "equal_families"), 2, "llama")


@pytest.mark.slow
def test_llama_mistral_and_qwen2_equal_replicas_on_four_ranks(run_ranks):
    run_ranks(program_of("distributed/test_tensor_parallel", "equal_families"), 4, *FAMILIES)


# The command


@pytest.mark.slow
def test_a_split_run_is_evaluated_predicts_and_is_resumed_with_fsdp(run_app, tmp_path: Path):
    tiny = ("model=gpt", "data=stdlib_text", "algorithms=none", "scheduler=none", "optimizer=adamw")
    tiny += ("~callbacks.mlflow_logger", "trainer.max_duration=2ba", "launch.nproc_per_node=2")
    run_app(*tiny, "hydra.run.dir=plain")
    run_app(*tiny, "trainer.tensor_parallel=2", "hydra.run.dir=split")
    outputs = [run_app("eval", run, "--json").stdout for run in ("plain", "split")]
    plain, split = (json.loads(output)["result"]["metrics"] for output in outputs)
    assert plain == pytest.approx(split, rel=1e-4)
    run_app("predict", "split", "hydra.run.dir=predicted")
    assert pq.read_table(tmp_path / "predicted" / "predictions.parquet").num_rows == 1024
    run_app("resume", "split", "trainer.max_duration=3ba", "trainer.tensor_parallel=1", "trainer.parallel=fsdp")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("trainer.context_parallel=2",),
            "no such key; context parallelism is not supported",
        ),
        (("trainer.pipeline_parallel=2",), "no such key; pipeline parallelism is not supported"),
        (
            ("check", "model=mlp", "algorithms=none", "trainer.tensor_parallel=2", "launch.nproc_per_node=2"),
            "trainer.tensor_parallel=2: only the GPT of runner.models",
        ),
    ],
)
def test_unsupported_kinds_of_parallelism_are_refused(run_here, arguments: tuple[str, ...], message: str):
    assert message in run_here(*arguments, code=2).err


@pytest.mark.slow
def test_check_predicts_the_memory_of_a_rank(run_here):
    plain = ("check", "model=gpt", "data=stdlib_text", "algorithms=none", "launch.nproc_per_node=4")
    split = run_here(*plain, "trainer.tensor_parallel=2", "trainer.parallel=fsdp", code=0).out
    assert "weights 134 kB, gradients 134 kB, optimizer 134 kB" in split
