"""Pretrained weights of which each rank reads only its shards, compared with those that transformers loads."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import LLAMA, save_random_model
from rank_runs import program_of
from safetensors.torch import load_file, save_file
from sharded_runs import on_ranks

from runner import LanguageModel, Trainer, get_global_rank, get_world_size
from runner.checkpoints.files import find_checkpoint, read_file
from runner.data import TensorLoader
from runner.distributed.deferred import deferred_draws, fill_deferred
from runner.distributed.saved_tensor import SavedTensor
from runner.distributed.sharding import local, whole
from runner.libraries.targets import prepare_import
from runner.models.by_name import make_by_name
from runner.models.hf.causal_lm import HFCausalLM

prepare_import("transformers")
transformers: Any = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("extras")

CONFIGS = {
    "gpt2": ("GPT2Config", {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}),  # has a tied head
    "llama": ("LlamaConfig", LLAMA),
    "mixtral": ("MixtralConfig", {**LLAMA, "num_key_value_heads": 2, "num_local_experts": 2}),
}


def save(name: str, folder: Path, **options: Any) -> str:
    """Save a model with random weights, and return the folder."""
    config_class, sizes = CONFIGS[name]
    config = getattr(transformers, config_class)(vocab_size=257, bos_token_id=0, eos_token_id=0, **sizes)
    return str(save_random_model(config, folder, **options))


def load_deferred(folder: str) -> HFCausalLM:
    return make_by_name(lambda: HFCausalLM(folder), 3)


def assert_deferred_weights_equal_pretrained(folder: str) -> None:
    model = load_deferred(folder)
    assert len(deferred_draws(model)) == len([*model.parameters()])
    fill_deferred(model)
    torch.testing.assert_close(model.state_dict(), HFCausalLM(folder).state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_deferred_weights_equal_those_that_transformers_loads(name: str, tmp_path: Path):
    assert_deferred_weights_equal_pretrained(save(name, tmp_path))


def test_weights_may_be_in_several_files_and_in_bfloat16(tmp_path: Path):
    folder = save("llama", tmp_path, max_shard_size="30KB")
    files = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(files) > 2
    for file in files:
        save_file({key: weight.bfloat16() for key, weight in load_file(file).items()}, file, {"format": "pt"})
    assert_deferred_weights_equal_pretrained(folder)


def test_a_file_may_lack_the_prefix_and_have_unused_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = save("gpt2", tmp_path)
    file = tmp_path / "model.safetensors"
    weights = {key.removeprefix("transformer."): weight for key, weight in load_file(file).items()}
    # Older versions saved attn.bias, a mask.
    unused = {"h.0.attn.bias": torch.ones(2), "unused": torch.ones(2)}
    save_file({**weights, **unused}, file, {"format": "pt"})
    assert_deferred_weights_equal_pretrained(folder)
    assert "1 weights of" in caplog.text and "are not used, such as 'unused'" in caplog.text


def test_weights_that_transformers_would_convert_are_refused(tmp_path: Path):
    message = r"weights are missing or have another shape, such as .*set init_weights=in_order, which also converts"
    with pytest.raises(ValueError, match=message):
        load_deferred(save("mixtral", tmp_path))


def remove_norm(file: Path) -> None:
    save_file({key: weight for key, weight in load_file(file).items() if key != "model.norm.weight"}, file)


def cut_norm(file: Path) -> None:
    weights = load_file(file)
    save_file({**weights, "model.norm.weight": weights["model.norm.weight"][:5].clone()}, file)


UNFIT_NORM = "1 of the model's weights are missing or have another shape, such as 'model.norm.weight'"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_norm, UNFIT_NORM),
        (cut_norm, UNFIT_NORM),
        (lambda file: file.write_bytes(file.read_bytes()[:50]), "model.safetensors is not a safetensors file"),
        (Path.unlink, "has no model.safetensors, which init_weights='by_name' reads"),
    ],
    ids=["missing weight", "wrong shape", "truncated file", "missing file"],
)
def test_wrong_weight_files_are_refused(damage: Callable[[Path], object], message: str, tmp_path: Path):
    folder = save("llama", tmp_path)
    damage(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_deferred(folder)


def make_trainer(folder: str, **arguments: Any) -> Trainer:
    tokens = (torch.arange(8)[:, None] + torch.arange(6)) % 11
    return Trainer(
        model=LanguageModel(load_deferred(folder)),
        train_dataloader=TensorLoader(tokens, tokens, batch_size=4, shuffle=True),
        optimizers=lambda params: torch.optim.AdamW(params, lr=0.01),
        device="cpu",
        run_dir="run",
        **arguments,
    )


def train_layouts() -> None:
    """Train each layout, and check on each rank that it starts with the weights of the file, bit for bit."""
    layouts = [{}, {"parallel": "fsdp"}, {"tensor_parallel": 2}, {"tensor_parallel": 2, "parallel": "fsdp"}]
    with on_ranks():
        for name in ("gpt2", "llama"):
            expected = HFCausalLM(name).state_dict()
            for layout in layouts if name == "llama" and get_world_size() % 2 == 0 else layouts[:2]:
                with pytest.MonkeyPatch.context() as patch:
                    if layout == {"parallel": "fsdp"}:
                        patch.delattr(SavedTensor, "read")  # a rank may only read parts of a tensor
                    trainer = make_trainer(name, **layout)
                with trainer:
                    model: Any = trainer.state.unwrapped_model
                    weights = {key: whole(weight) for key, weight in model.module.state_dict().items()}
                    torch.testing.assert_close(weights, dict(expected), rtol=0, atol=0)
                    trainer.fit()


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_start_with_the_weights_of_the_file(ranks: int, run_ranks: Any, tmp_path: Path):
    for name in ("gpt2", "llama"):
        save(name, tmp_path / name)
    run_ranks(program_of("models/hf/test_deferred_weights", "train_layouts"), ranks)


def print_peak_memory() -> None:
    """Print by how many bytes this process grew at most, the bytes of its weights, and of the largest whole weight."""
    with on_ranks():
        make_trainer("llama", parallel="fsdp").close()  # imports modules before the measurement
        # Lift the peak before the measurement above the memory in use.
        torch.empty(1 << 26, dtype=torch.uint8).fill_(1)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with make_trainer("large", parallel="fsdp") as trainer:
            grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
            parameters = [*trainer.state.unwrapped_model.parameters()]
            held = sum(local(parameter).nbytes for parameter in parameters)
            largest = max(4 * parameter.numel() for parameter in parameters)
    print(grown, held, largest, file=sys.stderr if get_global_rank() else sys.stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the unit of a process's peak is the kilobyte on Linux")
def test_a_rank_needs_memory_for_its_shards_and_at_most_two_whole_weights(
    run_ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save("llama", tmp_path / "llama")
    wide = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 10, "num_attention_heads": 8}
    monkeypatch.setitem(CONFIGS, "llama", ("LlamaConfig", wide))
    save("llama", tmp_path / "large")
    first, *_ = run_ranks(program_of("models/hf/test_deferred_weights", "print_peak_memory"), 2)
    grown, held, largest = map(int, first.stdout.split())
    assert grown < held + 2 * largest, (grown, held, largest)


@pytest.mark.slow
def test_a_sharded_run_with_deferred_weights_equals_a_replicated_run(run_app: Any, tmp_path: Path):
    folder = save("gpt2", tmp_path / "gpt2")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "some.txt").write_text("Some text of which a model learns little. " * 50)
    run = ["model=hf_causal_lm", f"model.module.name={folder}", "data=text_files", "data.path=texts", "data.context=32"]
    run += ["model.module.overrides={attn_pdrop: 0.0, resid_pdrop: 0.0, embd_pdrop: 0.0}", "data.batch_size=8"]
    run += ["algorithms=none", "callbacks=checkpoint_saver", "trainer.max_duration=3ba", "trainer.eval_interval=0"]
    run += ["launch.nproc_per_node=2"]
    run_app(*run, "hydra.run.dir=whole")
    deferred = [*run, "trainer.parallel=fsdp", "init_weights=by_name"]
    run_app(*deferred, "hydra.run.dir=sharded")
    whole, sharded = (read_file(find_checkpoint(tmp_path / name), "model.pt") for name in ("whole", "sharded"))
    torch.testing.assert_close(sharded, whole, rtol=0, atol=0)
    run_app("check", *deferred)
    (tmp_path / "gpt2" / "model.safetensors").unlink()
    errors = run_app(*deferred, "hydra.run.dir=wrong", exit_code=2).stderr
    assert "has no model.safetensors" in errors and "Traceback" not in errors
