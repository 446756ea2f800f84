"""Pretrained weights of which each rank reads its parts: they equal those that transformers loads, in less memory."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import program_of
from safetensors.torch import load_file, save_file
from sharded_runs import on_ranks

from runner import LanguageModel, Trainer, get_global_rank, get_world_size
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

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIGS = {
    "gpt2": ("GPT2Config", {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}),  # the head is tied
    "llama": ("LlamaConfig", SIZES),
    "mixtral": ("MixtralConfig", {**SIZES, "num_key_value_heads": 2, "num_local_experts": 2}),
}


def save(name: str, folder: Path, **options: Any) -> str:
    """Save a model that was drawn at random, and return its folder."""
    kind, sizes = CONFIGS[name]
    torch.manual_seed(1)
    transformers.utils.logging.disable_progress_bar()
    config = getattr(transformers, kind)(vocab_size=257, bos_token_id=0, eos_token_id=0, **sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder, **options)
    transformers.utils.logging.enable_progress_bar()
    return str(folder)


def load_deferred(folder: str) -> HFCausalLM:
    return make_by_name(lambda: HFCausalLM(folder), 3)


def assert_loaded_alike(folder: str) -> None:
    model = load_deferred(folder)
    assert len(deferred_draws(model)) == len([*model.parameters()])
    fill_deferred(model)
    expected = HFCausalLM(folder).state_dict()
    found = model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_weights_are_those_that_transformers_loads(name: str, tmp_path: Path):
    assert_loaded_alike(save(name, tmp_path))


def test_they_may_lie_in_several_files_and_in_16_bits(tmp_path: Path):
    folder = save("llama", tmp_path, max_shard_size="30KB")
    files = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(files) > 2
    for file in files:
        save_file({key: one.bfloat16() for key, one in load_file(file).items()}, file, {"format": "pt"})
    assert_loaded_alike(folder)


def test_a_file_may_leave_out_the_prefix_and_have_more_than_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = save("gpt2", tmp_path)
    file = tmp_path / "model.safetensors"
    weights = {key.removeprefix("transformer."): one for key, one in load_file(file).items()}
    more = {"h.0.attn.bias": torch.ones(2), "more": torch.ones(2)}  # the first is a mask that older versions saved
    save_file({**weights, **more}, file, {"format": "pt"})
    assert_loaded_alike(folder)
    assert "1 weights of" in caplog.text and "are not used, such as 'more'" in caplog.text


@pytest.mark.parametrize("wrong", ["converted", "shape", "missing", "damaged", "no safetensors"])
def test_what_cannot_be_read_is_one_message(wrong: str, tmp_path: Path):
    folder = save("mixtral" if wrong == "converted" else "llama", tmp_path)
    file = tmp_path / "model.safetensors"
    said = r"weights are missing or have another shape, such as .*set init_weights=in_order, which also converts"
    if wrong in ("shape", "missing"):
        weights = load_file(file)
        last = weights.pop("model.norm.weight")
        save_file({**weights, **({"model.norm.weight": last[:5].clone()} if wrong == "shape" else {})}, file)
        said = "1 of the model's weights are missing or have another shape, such as 'model.norm.weight'"
    elif wrong == "damaged":
        file.write_bytes(file.read_bytes()[:50])
        said = "model.safetensors is not a safetensors file"
    elif wrong == "no safetensors":
        file.rename(tmp_path / "pytorch_model.bin")
        said = "has no model.safetensors, which init_weights='by_name' reads"
    with pytest.raises(ValueError, match=said):
        load_deferred(folder)


def make_trainer(folder: str, **more: Any) -> Trainer:
    tokens = (torch.arange(8)[:, None] + torch.arange(6)) % 11
    return Trainer(
        model=LanguageModel(load_deferred(folder)),
        train_dataloader=TensorLoader(tokens, tokens, batch_size=4, shuffle=True),
        optimizers=lambda params: torch.optim.AdamW(params, lr=0.01),
        device="cpu",
        run_dir="run",
        **more,
    )


def begin() -> None:
    """Check on each rank that every layout begins with the weights of the file, bit for bit."""
    layouts = [{}, {"parallel": "fsdp"}, {"tensor_parallel": 2}, {"tensor_parallel": 2, "parallel": "fsdp"}]
    with on_ranks():
        for name in ("gpt2", "llama"):
            expected = HFCausalLM(name).state_dict()
            for layout in layouts if name == "llama" and get_world_size() % 2 == 0 else layouts[:2]:
                with pytest.MonkeyPatch.context() as patch:
                    if layout == {"parallel": "fsdp"}:
                        patch.delattr(SavedTensor, "read")  # each rank reads parts
                    trainer = make_trainer(name, **layout)
                with trainer:
                    model: Any = trainer.state.unwrapped_model
                    found = {key: whole(one) for key, one in model.module.state_dict().items()}
                    assert found.keys() == expected.keys()
                    assert all(torch.equal(found[key], expected[key]) for key in expected), (name, layout)
                    trainer.fit()


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_begin_with_the_weights_of_the_file(ranks: int, run_ranks: Any, tmp_path: Path):
    for name in ("gpt2", "llama"):
        save(name, tmp_path / name)
    run_ranks(program_of("models/hf/test_deferred_weights", "begin"), ranks)


def peak() -> None:
    """Print by how many bytes the memory of this process grew at most, what it holds, and its largest weight."""
    with on_ranks():
        make_trainer("llama", parallel="fsdp").close()  # what is imported on the way
        torch.empty(1 << 26, dtype=torch.uint8).fill_(1)  # so that the peak so far is no less than what is held now
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with make_trainer("large", parallel="fsdp") as trainer:
            grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
            parameters = [*trainer.state.unwrapped_model.parameters()]
            held = sum(local(one).nbytes for one in parameters)
            largest = max(4 * one.numel() for one in parameters)
    print(grown, held, largest, file=sys.stderr if get_global_rank() else sys.stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the unit of a process's peak is the kilobyte on Linux")
def test_a_rank_holds_its_shard_and_one_weight_at_most(run_ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save("llama", tmp_path / "llama")
    wide = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 10, "num_attention_heads": 8}
    monkeypatch.setitem(CONFIGS, "llama", ("LlamaConfig", {**wide}))
    save("llama", tmp_path / "large")
    first, *_ = run_ranks(program_of("models/hf/test_deferred_weights", "peak"), 2)
    grown, held, largest = map(int, first.stdout.split())
    assert grown < held + 2 * largest, (grown, held, largest)


@pytest.mark.slow
def test_a_sharded_run_of_the_command_line_equals_one_that_loads_everything(run_app: Any, tmp_path: Path):
    from runner.checkpoints.files import find_checkpoint
    from runner.checkpoints.snapshot import read_file

    folder = save("gpt2", tmp_path / "gpt2")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "some.txt").write_text("Some text of which a model learns little. " * 50)
    run = ["model=hf_causal_lm", f"model.module.name={folder}", "data=text_files", "data.path=texts", "data.context=32"]
    run += ["model.module.overrides={attn_pdrop: 0.0, resid_pdrop: 0.0, embd_pdrop: 0.0}", "data.batch_size=8"]
    run += ["algorithms=none", "callbacks=checkpoint_saver", "trainer.max_duration=3ba", "trainer.eval_interval=0"]
    run += ["launch.nproc_per_node=2"]
    run_app(*run, "hydra.run.dir=whole")
    run_app(*run, "trainer.parallel=fsdp", "init_weights=by_name", "hydra.run.dir=parts")
    one, other = (read_file(find_checkpoint(tmp_path / name), "model.pt") for name in ("whole", "parts"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    run_app("check", *run, "trainer.parallel=fsdp", "init_weights=by_name")
    (tmp_path / "gpt2" / "model.safetensors").unlink()
    wrong = run_app(*run, "trainer.parallel=fsdp", "init_weights=by_name", "hydra.run.dir=wrong", exit_code=2).stderr
    assert "has no model.safetensors" in wrong and "Traceback" not in wrong
