"""Sharded models train bit for bit like replicas, share checkpoints with them, and refuse what cannot be sharded."""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import program_of
from safetensors.torch import load_file
from sharded_runs import CASES, OPTIMIZERS, REFUSED, ROUNDED, Case, Overflow, difference, make_trainer, on_ranks, train
from torch import nn

from runner import Algorithm, LanguageModel, Model, Trainer, get_global_rank, get_world_size
from runner.algorithms import StochasticDepth
from runner.checkpoints.digest import read_digests
from runner.checkpoints.files import read_file, verify
from runner.checkpoints.hashing import digest
from runner.distributed.blocks import find_units
from runner.distributed.sharding import Layout, check_parameters, count_copies, is_sharded, local, whole
from runner.models import GPT, ResNet8
from runner.trials.sizes import measure, size_of


def gpt(**sizes: Any) -> Model:
    return LanguageModel(GPT(vocab_size=11, context=12, d_model=16, n_heads=4, **sizes))


# Refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"parallel": "fsdpp"}, "parallel='fsdpp': must be 'ddp' .* or 'fsdp'"),
        ({"parallel": "fsdp", "shard_size": 1}, "shard_size=1: must be a number of ranks, at least 2, or None"),
        ({"parallel": "fsdp", "shard_size": 2.0}, "shard_size=2.0: must be"),
        ({"parallel": "fsdp", "gather_dtype": "fp8"}, "gather_dtype='fp8': must be one of None, 'bfloat16'"),
        ({"shard_size": 2}, "shard_size=2: does nothing with parallel='ddp'"),
        ({"gather_dtype": "bfloat16"}, "gather_dtype='bfloat16': does nothing with parallel='ddp'"),
    ],
)
def test_an_invalid_layout_is_refused(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Layout(**arguments)


def test_a_layout_that_does_not_fit_the_ranks_or_the_model_is_refused(monkeypatch: pytest.MonkeyPatch):
    class OwnStep(LanguageModel):
        def training_step(self, state):
            return None

    model = gpt()
    monkeypatch.setenv("WORLD_SIZE", "4")
    Layout("fsdp", 2).check(model, None)
    with pytest.raises(ValueError, match="shard_size=3: must divide the 4 ranks"):
        Layout("fsdp", 3).check(model, None)
    with pytest.raises(ValueError, match="microbatch_size='auto': not with parallel='fsdp'"):
        Layout("fsdp").check(model, "auto")
    with pytest.raises(ValueError, match="parallel='fsdp': OwnStep.training_step"):
        Layout("fsdp").check(OwnStep(nn.Linear(1, 1)), None)
    Layout().check(OwnStep(nn.Linear(1, 1)), "auto")


def test_a_parameter_that_cannot_be_sharded_is_named():
    model = nn.ModuleDict({"first": nn.Linear(2, 2), "second": nn.Conv2d(2, 2, 3)})
    check_parameters(model)
    model["second"].to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="parallel='fsdp': second.weight is not contiguous"):
        check_parameters(model)
    model["first"].scale = nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match=r"parallel='fsdp': first.scale is a scalar.* make it \(1,\)"):
        check_parameters(model)


def test_fsdp_in_one_process_trains_the_same_and_logs_that_it_has_no_effect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "runner")
    plain, sharded = (train(Case(), tmp_path, parallel=parallel) for parallel in ("ddp", "fsdp"))
    assert difference(plain, sharded) == 0
    assert [record.getMessage() for record in caplog.records if "fsdp" in record.getMessage()] == [
        "parallel='fsdp': a single process has no other ranks to share its weights with"
    ]


# Units


def test_a_unit_includes_the_module_that_wraps_its_block(tmp_path: Path):
    assert [*find_units(gpt(n_layers=3))] == ["module.blocks.0", "module.blocks.1", "module.blocks.2"]
    model = gpt(n_layers=2)
    with Trainer(model=model, algorithms=[StochasticDepth("TransformerBlock")], device="cpu", run_dir=tmp_path):
        units = find_units(model)
    assert {type(unit).__name__ for unit in units.values()} == {"StochasticBlock"}


def test_a_block_that_shares_a_weight_with_another_module_is_not_a_unit():
    net = ResNet8(in_channels=3, num_classes=3, width=4)
    net.head_copy = nn.Module()  # pyright: ignore[reportAttributeAccessIssue]
    net.head_copy.weight = next(net.blocks[1].parameters())  # pyright: ignore
    assert [*find_units(net)] == ["blocks.0", "blocks.2"]


# Two ranks


def equal_replicas() -> None:
    """Train the cases in sys.argv as replicas and as shards, and resume each checkpoint in both layouts. All ranks.

    All results must be bit-identical, except in cases where shards round differently.
    """
    with on_ranks():
        for name in sys.argv[1:]:
            case, folder = CASES[name], Path(name.replace(": ", "-").replace(" ", "_"))
            plain = train(case, folder, save=folder / "ddp")
            sharded = train(case, folder, save=folder / "fsdp", parallel="fsdp")
            assert difference(plain, sharded) == 0 or (name in ROUNDED and difference(plain, sharded) < 1e-6), name
            resumed = train(case, folder, parallel="fsdp", resume_path=folder / "fsdp")
            assert difference(sharded, resumed) == 0, f"{name}: resumed"
            if name not in ROUNDED:
                saved = [
                    [torch.load(folder / parallel / file, weights_only=True) for file in ("model.pt", "state.pt")]
                    for parallel in ("ddp", "fsdp")
                ]
                for file, parts in ((0, [*saved[0][0]]), (1, ["model", "optimizers", "scaler"])):
                    for part in parts:
                        assert digest(saved[0][file][part]) == digest(saved[1][file][part]), f"{name}: {part}"
                sizes = [(folder / parallel / "model.pt").stat().st_size for parallel in ("ddp", "fsdp")]
                assert sizes[0] == sizes[1], f"{name}: padding must not be saved"
                assert difference(plain, train(case, folder, resume_path=folder / "fsdp")) == 0, f"{name}: to ddp"
                resharded = train(case, folder, parallel="fsdp", resume_path=folder / "ddp")
                assert difference(plain, resharded) == 0, f"{name}: from ddp"


FIRST_TIER = ("text: adamw", "text: muon", "text: ema")


def test_shards_on_two_ranks_equal_replicas_bit_for_bit_and_resume_in_either_layout(run_ranks):
    run_ranks(program_of("distributed/test_sharding", "equal_replicas"), 2, *FIRST_TIER)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(4))
def test_each_algorithm_and_optimizer_equals_replicas(run_ranks, start: int):
    names = [name for name in CASES if name not in FIRST_TIER]
    run_ranks(program_of("distributed/test_sharding", "equal_replicas"), 2, *names[start::4])


def check_parts() -> None:
    """Check the shards that each rank holds, and save their sizes. All ranks."""
    with on_ranks():
        with make_sharded() as trainer:
            trainer.fit()
            model = trainer.state.unwrapped_model
            assert is_sharded(model) and count_copies(model) == 1
            assert type(model).__name__ == "FSDPLanguageModel" and isinstance(model, LanguageModel)
            parameters = [*model.parameters()]
            held = sum(local(parameter).numel() for parameter in parameters)
            assert held < 0.6 * sum(parameter.numel() for parameter in parameters)
            kinds = {"weights": parameters, "gradients": [parameter.grad for parameter in parameters]}
            sizes = {kind: size_of([*map(local, tensors)]) for kind, tensors in kinds.items()}
            torch.save(sizes, f"{get_global_rank()}.pt")
            momenta = [entry["exp_avg"] for entry in trainer.state.optimizers[0].state.values()]
            assert all(
                local(momentum).untyped_storage().nbytes() < whole(momentum).nbytes
                for momentum in momenta
                if len(momentum) > 1
            )
            trainer.save_checkpoint("here")
            trained = whole_weights(model)
            assert not any(weight.requires_grad for weight in trained.values())  # they hold no graph
            trainer.fit("1ba")
            later = whole_weights(model)
            trainer.eval(checkpoint="here")
            assert difference(later, whole_weights(model)) == 0
            assert difference(trained, later) > 0
        with make_sharded(gather_dtype="bfloat16") as trainer:
            trainer.fit()
            rounded = whole_weights(trainer.state.unwrapped_model)
            assert trainer.state.outputs.dtype == torch.float32
        exact = torch.load("here/model.pt", weights_only=True)
        assert all(weight.dtype == torch.float32 for weight in rounded.values())
        assert 1e-5 < difference(rounded, {name: exact[name] for name in rounded}) < 0.1
        with make_sharded(resume_path="here") as trainer:  # a shard that is a view keeps the whole tensor in memory
            for optimizer in trainer.state.optimizers:
                for entry in optimizer.state.values():
                    part = local(entry["exp_avg"])
                    assert part.untyped_storage().nbytes() == part.nbytes


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gather the whole parameters of a sharded model on each rank. All ranks."""
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def make_sharded(**arguments: Any) -> Trainer:
    options = {"parallel": "fsdp", "optimizers": lambda params: torch.optim.AdamW(params, lr=0.01), **arguments}
    return make_trainer("text", folder=Path("run"), **options)


def refuse_on_ranks() -> None:
    """Check that algorithms and optimizers that do not support sharded models are refused. All ranks."""
    with on_ranks():
        for key, message in REFUSED.items():
            task = "images" if key == "channels_last" else "text"
            with pytest.raises(ValueError, match=message):
                make_trainer(task, key, folder=Path("run"), parallel="fsdp")
        model = gpt()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match="are not in the model .*parallel='fsdp'"):
            Trainer(model=model, optimizers=optimizer, device="cpu", parallel="fsdp", run_dir="run")


def overflow_on_one_shard() -> None:
    """Check that all ranks skip the step if one shard overflows, in amp_fp16 and with NaNGuard. All ranks."""
    with on_ranks():
        for keys, precision in (((), "amp_fp16"), (("nan_guard",), "fp32")):
            overflow = Overflow()
            arguments = {"precision": precision, "parallel": "fsdp"}
            with make_trainer("text", *keys, overflow, folder=Path("run"), **arguments) as trainer:
                trainer.fit()
            assert overflow.stays == [False, True, False, False], precision
            backoff = 0.5 if precision == "amp_fp16" else 1
            assert [scale / overflow.scales[0] for scale in overflow.scales] == [1, backoff, backoff, backoff]


def test_each_rank_holds_a_shard_of_the_predicted_size(run_ranks, tmp_path: Path):
    run_ranks(program_of("distributed/test_sharding", "check_parts"))
    held = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    with make_sharded() as trainer:
        trainer.fit()
        whole, predicted = (measure(trainer.state, shards) for shards in (1, 2))
    for kind in ("weights", "gradients"):
        assert max(sizes[kind] for sizes in held) == pytest.approx(getattr(predicted, kind), rel=0.02)
    assert predicted.optimizer == pytest.approx(whole.optimizer / 2, rel=0.02)
    assert predicted.checkpoint == whole.checkpoint


def test_algorithms_that_need_whole_weights_are_refused(run_ranks):
    run_ranks(program_of("distributed/test_sharding", "refuse_on_ranks"))


def test_an_overflow_on_one_shard_skips_the_step_on_all_ranks(run_ranks):
    run_ranks(program_of("distributed/test_sharding", "overflow_on_one_shard"))


def uneven_microbatches() -> None:
    """Train a batch of four samples on one rank (two microbatches) and three on the other (one). All ranks."""
    with on_ranks():
        case = Case(arguments={"microbatch_size": 3})
        plain, sharded = (train(case, Path(parallel), parallel=parallel) for parallel in ("ddp", "fsdp"))
        assert difference(plain, sharded) < 1e-6


def test_ranks_with_different_numbers_of_microbatches_do_not_deadlock(run_ranks):
    run_ranks(program_of("distributed/test_sharding", "uneven_microbatches"), timeout=60)


def train_with_callbacks() -> None:
    """Train replicas and shards with callbacks that read weights, in the folders `ddp` and `fsdp`. All ranks."""
    from runner.callbacks import ExportForInference, Generate, InMemoryLogger, OptimizerMonitor, StateDigest

    with on_ranks():
        values: list[dict[str, list[Any]]] = []
        for parallel in ("ddp", "fsdp"):
            memory = InMemoryLogger()
            callbacks = [
                StateDigest("1ba"),
                OptimizerMonitor(batch_log_interval=1),
                Generate(["\1\2"], max_new_tokens=3),
                ExportForInference("safetensors"),
            ]
            arguments = {"optimizers": OPTIMIZERS["adamw"], "callbacks": callbacks, "loggers": [memory]}
            with make_trainer("text", "ema", folder=Path(parallel), parallel=parallel, **arguments) as trainer:
                trainer.fit()
                if get_global_rank() == 0:
                    values.append({key: [value for _, value in points] for key, points in memory.data.items()})
                    values[-1] |= {"texts": [memory.tables["generate"]]}
        if get_global_rank() == 0:
            plain, sharded = values
            assert plain.keys() == sharded.keys()
            norms = [key for key in plain if key.startswith("l2_norm")]
            assert len(norms) > 50
            for key in norms:  # a sum over shards rounds differently
                assert sharded[key] == pytest.approx(plain[key], rel=1e-5), key
            assert sharded["texts"] == plain["texts"]


def test_callbacks_see_whole_tensors(run_ranks, tmp_path: Path):
    run_ranks(program_of("distributed/test_sharding", "train_with_callbacks"))
    plain, sharded = (read_digests(tmp_path / parallel) for parallel in ("ddp", "fsdp"))
    assert len(plain) == 4
    for expected, actual in zip(plain, sharded, strict=True):  # norms among the values round differently
        assert actual.pop("values") == pytest.approx(expected.pop("values"), rel=1e-5)
    assert plain == sharded
    assert (tmp_path / "ddp/model.safetensors").read_bytes() == (tmp_path / "fsdp/model.safetensors").read_bytes()


def test_check_predicts_the_memory_of_a_rank(run_here):
    command = ("check", "model=mlp", "algorithms=none", "launch.nproc_per_node=2")
    whole, half = (run_here(*command, *layout, code=0).out for layout in ((), ("trainer.parallel=fsdp",)))
    matches = [re.search(r"weights ([\d.]+) kB, gradients ([\d.]+) kB", text) for text in (whole, half)]
    weights, gradients = zip(*(map(float, match.groups()) for match in matches if match), strict=True)
    assert weights == pytest.approx((2 * weights[1], weights[1]), rel=0.02)
    assert gradients == pytest.approx((2 * gradients[1], gradients[1]), rel=0.02)


# More ranks


def train_hybrid() -> None:
    """Train two sharded copies on four ranks, resume in other layouts, and detect a copy that drifts. All ranks."""
    from runner.callbacks import ReplicaMonitor

    class Drift(Algorithm):
        """Changes a weight in the shard of the last rank, so that it differs from the copy on rank 1."""

        def batch_end(self, state, logger):
            if get_global_rank() == 3 and state.timestamp.batch == 2:
                block: Any = state.unwrapped_model.get_submodule("module.blocks.0")
                local(block.mlp.up.weight)[0, 0] += 1

    with on_ranks():
        case = CASES["text: sgd"]
        plain = train(case, Path("run"), save=Path("plain"))
        hybrid = train(case, Path("run"), save=Path("hybrid"), parallel="fsdp", shard_size=2)
        assert difference(plain, hybrid) < 1e-6
        resumed = train(case, Path("run"), parallel="fsdp", shard_size=2, resume_path="hybrid")
        assert difference(hybrid, resumed) == 0
        options: Any = {"parallel": "fsdp", "shard_size": 2}
        train(case, Path("run"), save=Path("shards"), sharded=True, **options)
        if get_global_rank() == 0:  # only one of the two copies is written
            assert len([*Path("shards").glob("*.safetensors")]) == 2
        assert difference(hybrid, train(case, Path("run"), resume_path="shards", **options)) == 0
        assert difference(plain, train(case, Path("run"), parallel="fsdp", resume_path="hybrid")) < 1e-6
        options["callbacks"] = [ReplicaMonitor("1ba")]
        with make_trainer("text", folder=Path("run"), **options) as trainer:
            assert count_copies(trainer.state.unwrapped_model) == 2
            trainer.fit()
        message = r"ranks \[3\] differ .* starting with 'module.blocks.0.mlp.up.weight'"
        drifting = make_trainer("text", Drift(), folder=Path("run"), **options)
        with pytest.raises(RuntimeError, match=message), drifting:
            drifting.fit()


def load_in_each_layout() -> None:
    """Resume the checkpoint sys.argv[1] in each layout, save it again, and save the weights on each rank. All ranks."""
    with on_ranks():
        for parallel in ("ddp", "fsdp"):
            with make_sharded(parallel=parallel, resume_path=sys.argv[1]) as trainer:
                trainer.save_checkpoint(f"{parallel}-{get_world_size()}", sharded=sys.argv[2] == "sharded")
            with make_sharded(parallel=parallel, load_path=sys.argv[1]) as trainer:
                state_dict = trainer.state.unwrapped_model.state_dict()
                loaded = {name: whole(tensor) for name, tensor in state_dict.items()}
                torch.save(loaded, f"{parallel}-{get_world_size()}.{get_global_rank()}.pt")


def save_in_the_middle() -> None:
    """Save a sharded model in the middle of the second epoch, once gathered and once in shards. All ranks."""
    with on_ranks():
        train(CASES["text: adamw"], Path("run"), save=Path("gathered"), parallel="fsdp")
        train(CASES["text: adamw"], Path("run"), save=Path("sharded"), sharded=True, parallel="fsdp")


@pytest.mark.slow
def test_two_sharded_copies_on_four_ranks_train_and_resume_like_replicas(run_ranks):
    run_ranks(program_of("distributed/test_sharding", "train_hybrid"), 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "resaved"), [("gathered", "gathered"), ("sharded", "sharded"), ("sharded", "gathered")]
)
def test_a_checkpoint_loads_the_same_on_any_number_of_ranks(run_ranks, tmp_path: Path, saved: str, resaved: str):
    run_ranks(program_of("distributed/test_sharding", "save_in_the_middle"), 2)
    first = {file: read_file(tmp_path / saved, file) for file in ("model.pt", "state.pt")}
    for ranks in (1, 2, 3, 4):
        run_ranks(program_of("distributed/test_sharding", "load_in_each_layout"), ranks, saved, resaved)
        for parallel in ("ddp", "fsdp"):
            name = f"{parallel}-{ranks}"
            assert verify(tmp_path / name) is None
            has_shards = any((tmp_path / name).glob("*.safetensors"))
            assert has_shards == (resaved == "sharded" and parallel == "fsdp" and ranks > 1)
            second = {file: read_file(tmp_path / name, file) for file in first}
            assert digest(second["model.pt"]) == digest(first["model.pt"]), name
            for part in ("optimizers", "schedulers", "timestamp", "order"):
                assert digest(second["state.pt"][part]) == digest(first["state.pt"][part]), f"{name}: {part}"
            for rank in range(ranks):
                assert digest(torch.load(tmp_path / f"{name}.{rank}.pt")) == digest(first["model.pt"]), name


# The command


@pytest.mark.slow
def test_every_verb_accepts_a_sharded_run(run_app, tmp_path: Path):
    tiny = ("model=gpt", "data=stdlib_text", "algorithms=none", "scheduler=none", "optimizer=adamw")
    tiny += (
        "~callbacks.mlflow_logger",
        "+callbacks=state_digest",
        "callbacks.state_digest.interval=1ba",
        "launch.nproc_per_node=2",
    )
    run_app(*tiny, "trainer.max_duration=4ba", "hydra.run.dir=plain")
    shards = "callbacks.checkpoint_saver.sharded=true"
    sharded = ("trainer.parallel=fsdp", "hydra.run.dir=sharded")
    run_app(*tiny, *sharded, shards, "trainer.max_duration=2ba")
    assert any((tmp_path / "sharded/checkpoints/latest").glob("*.safetensors"))
    run_app("resume", "sharded", "trainer.max_duration=4ba", "trainer.parallel=ddp", f"{shards[:-4]}null")
    run_app("compare", "plain", "sharded")
    run_app(*tiny, "trainer.parallel=fsdp", shards, "trainer.max_duration=4ba", "hydra.run.dir=whole")
    run_app("compare", "plain", "whole")  # exit code 0 means bit-identical
    plain, whole = (run_app("eval", run, "--json").stdout for run in ("plain", "whole"))
    assert json.loads(plain)["result"]["metrics"] == json.loads(whole)["result"]["metrics"]
    run_app("rerun", "whole", "hydra.run.dir=again")
    assert read_digests(tmp_path / "again") == read_digests(tmp_path / "whole")
    run_app("predict", "whole", "hydra.run.dir=predicted")
    assert (tmp_path / "predicted" / "predictions.parquet").exists()
    run_app("replay", "whole", "3")
    run_app("export", "whole", "model.pt")
    run_app("export", "whole", "model.safetensors")
    exported = torch.load(tmp_path / "model.pt", weights_only=True)
    assert digest(exported) == digest(load_file(tmp_path / "model.safetensors"))
    saved = read_file(tmp_path / "plain/checkpoints/latest", "model.pt")
    assert digest(exported) == digest({name.removeprefix("module."): value for name, value in saved.items()})
    prove = ("prove", "--batches=4", "--kills=1", "--save-interval=1ba")
    run_app(*prove, *tiny, "trainer.parallel=fsdp", shards, "~callbacks.state_digest")


def test_check_refuses_a_shard_size_that_does_not_divide_the_ranks(run_here):
    finished = run_here("check", "trainer.parallel=fsdp", "trainer.shard_size=3", "launch.nproc_per_node=4", code=2)
    assert "trainer.shard_size=3: must divide the 4 ranks" in finished.err
