"""Layers split over ranks: equal to replicas, the same samples and checkpoints, and what is refused."""

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
    ("arguments", "ranks", "said"),
    [
        ({"tensor_parallel": 0}, 4, "tensor_parallel=0: must be a number of ranks, at least 1"),
        ({"tensor_parallel": 2.0}, 4, "tensor_parallel=2.0: must be"),
        ({"tensor_parallel": 3}, 4, "tensor_parallel=3: must divide the 4 ranks"),
        ({**TWO, "parallel": "fsdp", "shard_size": 4}, 4, "shard_size=4: must divide the 2 ranks that see different"),
    ],
)
def test_a_wrong_layout_is_refused(arguments: dict[str, Any], ranks: int, said: str):
    with pytest.raises(ValueError, match=said):
        Layout(**arguments).check_ranks(ranks)


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch):
    class OwnStep(LanguageModel):
        def training_step(self, state):
            return None

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="microbatch_size='auto': not with tensor_parallel=2"):
        Layout(**TWO).check(gpt(), "auto")
    with pytest.raises(ValueError, match="tensor_parallel=2: OwnStep.training_step would see weights in shards; set 1"):
        Layout(**TWO).check(OwnStep(nn.Linear(1, 1)), None)


@pytest.mark.parametrize(
    ("change", "said"),
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
def test_a_model_without_a_plan_is_refused(change: Any, said: str):
    model = gpt()
    replaced = change(model.module)
    with pytest.raises(ValueError, match=f"tensor_parallel=2: .*{said}"):
        find_plan(model if replaced is None else replaced, 2)


def test_ranks_divide_heads_and_need_not_divide_a_vocabulary():
    assert {style for name, style in find_plan(gpt(), 2).items() if "norm" in name} == {"whole"}
    with pytest.raises(ValueError, match="tensor_parallel=8: must divide the 4 heads of module.blocks.0.attention.qkv"):
        find_plan(gpt(), 8)
    with pytest.raises(ValueError, match="tensor_parallel=4: must divide the 2 heads of .*self_attn.k_proj"):
        find_plan(llama(), 4)


def test_one_process_trains_the_same(tmp_path: Path):
    plain, alone = (train(Case(), tmp_path, **more) for more in ({}, TWO))
    assert difference(plain, alone) == 0


def test_draws_of_heads_differ_between_ranks_and_leave_all_others_alike():
    class Draw(nn.Module):
        def forward(self):
            return torch.rand(8)

    found = []
    for rank in (0, 1):
        module = Draw()
        draw_apart(module, rank)
        torch.manual_seed(3)
        found.append((module(), torch.rand(8), module.eval()()))
    assert not torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1]) and torch.equal(found[0][2], found[1][2])


def test_an_order_shared_alike_is_that_of_fewer_ranks():
    orders = [SampleOrder(15, 8, seed=3, rank=rank, world_size=4) for rank in range(4)]
    for one in orders:
        one.give_same_samples(2)
    fewer = [SampleOrder(15, 8, seed=3, rank=rank, world_size=2) for rank in range(2)]
    for rank, one in enumerate(orders):
        for batch in range(2):
            assert torch.equal(one.indices(1, batch), fewer[rank // 2].indices(1, batch))
            assert one.counts(batch) == fewer[rank // 2].counts(batch)
    orders[3].give_same_samples(1)
    assert (orders[3].rank, orders[3].world_size) == (3, 4)


# Two ranks


def equal_replicas() -> None:
    """Train the cases of the arguments with replicas and split, and resume both checkpoints in either layout."""
    with on_ranks():
        layouts = [TWO] if get_world_size() == 2 else [TWO, {**TWO, "parallel": "fsdp"}]
        for name in sys.argv[1:]:
            case, folder = CASES[name], Path(name.replace(": ", "-").replace(" ", "_"))
            plain = train(case, folder, save=folder / "ddp", exact=True)
            for layout in layouts:
                split = train(case, folder, save=folder / "split", exact=True, **layout)
                assert difference(plain, split) < 1e-6, name  # metrics have 32 bits
                saved = [torch.load(folder / one / "model.pt", weights_only=True) for one in ("ddp", "split")]
                assert difference(*saved) < 1e-9, f"{name}: saved"
                again = train(case, folder, resume_path=folder / "split", exact=True, **layout)
                assert difference(split, again) == 0, f"{name}: resumed"
                to_ddp = train(case, folder, resume_path=folder / "split", exact=True)
                assert difference(plain, to_ddp) < 1e-6, f"{name}: to ddp"
                sharded = train(case, folder, save=folder / "sharded", sharded=True, exact=True, **layout)
                assert difference(split, sharded) == 0, f"{name}: saved in shards"
                others: list[dict[str, Any]] = [layout, {}, {"parallel": "fsdp"}]
                for other in others:
                    again = train(case, folder, resume_path=folder / "sharded", exact=True, **other)
                    assert difference(split, again) < (1e-6 if other != layout else 1e-300), f"{name}: from shards"
                from_ddp = train(case, folder, resume_path=folder / "ddp", exact=True, **layout)
                assert difference(plain, from_ddp) < 1e-6, f"{name}: from ddp"


FIRST_TIER = ("text: ema",)


def test_two_ranks_equal_replicas_and_resume_in_either_layout(run_ranks):
    run_ranks(program_of("distributed/test_tensor_parallel", "equal_replicas"), 2, *FIRST_TIER)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(6))
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_algorithm_and_optimizer_equals_replicas(run_ranks, ranks: int, start: int):
    names = [one for one in SPLIT if ranks == 4 or one not in FIRST_TIER]
    run_ranks(program_of("distributed/test_tensor_parallel", "equal_replicas"), ranks, *names[start::6])


class Counting(LanguageModel):
    """Counts the targets that its metric has seen."""

    def metrics(self, train):
        return {"seen": SumMetric()}

    def update_metric(self, batch, outputs, metric):
        metric.update(batch[1].numel())


class Seen(Callback):
    """Keeps each batch."""

    def __init__(self):
        self.batches: list[torch.Tensor] = []

    def batch_end(self, state, logger):
        self.batches.append(state.batch[0].clone())


def make_counting(seen: Seen, loaders: Any, **more: Any) -> Trainer:
    return Trainer(
        model=Counting(GPT(vocab_size=11, context=12, d_model=16, n_heads=4, dropout=0.3)),
        train_dataloader=loaders[0],
        eval_dataloader=loaders[1],
        max_duration="2ep",
        optimizers=lambda params: torch.optim.AdamW(params, lr=0.01),
        callbacks=[seen],
        device="cpu",
        run_dir="run",
        **more,
    )


def on_each_rank(one: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.empty_like(one) for _ in range(get_world_size())]
    dist.all_gather(found, one)
    return found


def see_the_same_samples() -> None:
    """Train and evaluate with uneven batches, and count what ranks, metrics and time have seen."""
    tokens = (torch.arange(15)[:, None] + torch.arange(6)) % 11
    loaders = [TensorLoader(tokens, tokens, batch_size=size, shuffle=size < 8) for size in (8, 15)]
    with on_ranks():
        for more in ({}, TWO, {}):  # the loaders are shared out anew each time
            seen = Seen()
            with make_counting(seen, loaders, **more) as trainer:
                trainer.fit()
                state = trainer.state
                group = more.get("tensor_parallel", 1)
                size = get_world_size() // group
                assert get_data_parallel_size() == size
                assert state.seed == get_data_parallel_rank() == get_global_rank() // group
                assert (state.timestamp.sample, state.timestamp.token) == (30, 180)
                assert state.train_metric_values["seen"] == state.eval_metric_values["eval"]["seen"] == 90
                first = on_each_rank(seen.batches[0])
                assert all(torch.equal(one, first[rank - rank % group]) for rank, one in enumerate(first))
                assert len({digest(one) for one in first}) == size
                if more:  # with other masks on each rank, what all of them hold would have drifted apart
                    model = state.unwrapped_model
                    norms = [local(one) for name, one in model.named_parameters() if "norm" in name]
                    sums = on_each_rank(torch.stack([one.double().sum() for one in norms]))
                    assert all(torch.equal(one, sums[0]) for one in sums)
                    assert count_copies(model) == size
                    trainer.save_checkpoint("saved")
                    plain = DataLoader(TensorDataset(tokens, tokens), batch_size=4)
                    assert trainer.eval(Replicated(plain))["eval"]["seen"] == 90
                    for loader in (plain, Sharded(plain)):
                        with pytest.raises(ValueError, match="2 ranks must see the same samples .*use runner.data"):
                            BatchStream(loader, state.device, state.precision, len, "train")


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_that_split_layers_see_the_same_samples(run_ranks, ranks: int):
    run_ranks(program_of("distributed/test_tensor_parallel", "see_the_same_samples"), ranks)


def overflow_on_one_part() -> None:
    """Overflow on one rank's part of a layer with the scaler of amp_fp16, and with NaNGuard."""
    with on_ranks():
        for keys, precision in (((), "amp_fp16"), (("nan_guard",), "fp32")):
            seen = Overflow()
            with make_trainer("text", *keys, seen, folder=Path("run"), precision=precision, **TWO) as trainer:
                trainer.fit()
            assert seen.stays == [False, True, False, False], precision


def test_an_overflow_in_one_part_skips_the_step_on_all_ranks(run_ranks):
    run_ranks(program_of("distributed/test_tensor_parallel", "overflow_on_one_part"))


def watched() -> None:
    """Train replicas and split layers with the callbacks that look at weights, into folders of the layout's name."""
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
                    values.append({key: [one for _, one in its] for key, its in memory.data.items()})
                    values[-1] |= {"texts": [memory.tables["generate"]]}
        if get_global_rank() == 0:
            plain, split = values
            assert plain.keys() == split.keys()
            norms = [key for key in plain if key.startswith("l2_norm")]
            assert len(norms) > 50
            for key in norms:
                assert split[key] == pytest.approx(plain[key], rel=1e-6), key
            assert split["texts"] == plain["texts"]


def test_callbacks_see_whole_tensors_of_which_a_rank_holds_what_was_predicted(run_ranks, tmp_path: Path):
    run_ranks(program_of("distributed/test_tensor_parallel", "watched"))
    plain, split = (read_digests(tmp_path / one) for one in ("ddp", "split"))
    for one, other in zip(plain, split, strict=True):
        assert one["samples"] == other["samples"]
        its = [{**line["values"], "loss": 0} for line in (one, other)]  # that of other samples on rank 0
        assert its[0] == pytest.approx(its[1], rel=1e-6)
    exported = [load_file(tmp_path / one / "model.safetensors") for one in ("ddp", "split")]
    assert difference(*exported) < 1e-9
    with make_trainer("text", folder=tmp_path, exact=True) as trainer:
        trainer.fit()
        predicted = measure(trainer.state, 1, 2)
    for rank in range(2):
        assert torch.load(tmp_path / f"{rank}.pt") == pytest.approx(predicted.weights, rel=0.02)


def refuse_on_ranks() -> None:
    """See what is refused once ranks split the layers, and that a model of another family is."""
    with on_ranks():
        for key in sorted(NOT_SPLIT):
            with pytest.raises(ValueError, match="tensor_parallel=2: "):
                make_trainer("text", key, folder=Path("run"), **TWO)
        for key, said in {"sam": "SAM cannot be used", "ddp": "DDP: each rank has a part"}.items():
            with pytest.raises(ValueError, match=said):
                make_trainer("text", key, folder=Path("run"), **TWO)
        with pytest.raises(ValueError, match="can be split, not Sequential; set 1"):
            make_trainer("images", folder=Path("run"), **TWO)


def test_what_is_not_split_is_refused(run_ranks):
    run_ranks(program_of("distributed/test_tensor_parallel", "refuse_on_ranks"))


# Transformers

QWEN2 = {"layer_types": ["full_attention"] * 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {},
    "qwen2": QWEN2,
}


def equal_families() -> None:
    """Train the models of the arguments with replicas and split."""
    tokens = torch.randint(0, 11, (16, 9), generator=torch.Generator().manual_seed(1))
    with on_ranks():
        for kind in sys.argv[1:]:
            found = []
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
                    found.append({key: whole(one) for key, one in trainer.state.unwrapped_model.named_parameters()})
            for other in found[1:]:
                assert difference(found[0], other) < 1e-6, kind


def test_llama_equals_replicas(run_ranks):
    run_ranks(program_of("distributed/test_tensor_parallel", "equal_families"), 2, "llama")


@pytest.mark.slow
def test_the_family_of_llama_equals_replicas_on_four_ranks(run_ranks):
    run_ranks(program_of("distributed/test_tensor_parallel", "equal_families"), 4, *FAMILIES)


# The command


@pytest.mark.slow
def test_a_split_run_is_resumed_evaluated_and_predicts_like_any_other(run_app, tmp_path: Path):
    tiny = ("model=gpt", "data=stdlib_text", "algorithms=none", "scheduler=none", "optimizer=adamw")
    tiny += ("~callbacks.mlflow_logger", "trainer.max_duration=2ba", "launch.nproc_per_node=2")
    run_app(*tiny, "hydra.run.dir=plain")
    run_app(*tiny, "trainer.tensor_parallel=2", "hydra.run.dir=split")
    plain, split = (run_app("eval", one, "--json").stdout for one in ("plain", "split"))
    its = [json.loads(one)["result"]["metrics"] for one in (plain, split)]
    assert its[0] == pytest.approx(its[1], rel=1e-4)
    run_app("predict", "split", "hydra.run.dir=predicted")
    assert pq.read_table(tmp_path / "predicted" / "predictions.parquet").num_rows == 1024
    run_app("resume", "split", "trainer.max_duration=3ba", "trainer.tensor_parallel=1", "trainer.parallel=fsdp")


@pytest.mark.parametrize(
    ("arguments", "said"),
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
def test_a_wrong_command_is_one_message(run_here, arguments: tuple[str, ...], said: str):
    assert said in run_here(*arguments, code=2).err


def test_check_predicts_what_a_rank_will_hold(run_here):
    plain = ("check", "model=gpt", "data=stdlib_text", "algorithms=none", "launch.nproc_per_node=4")
    split = run_here(*plain, "trainer.tensor_parallel=2", "trainer.parallel=fsdp", code=0).out
    assert "weights 134 kB, gradients 134 kB, optimizer 134 kB" in split
