"""Checkpoints of adapters leave out the base model, and are only used with the same base."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import LLAMA, save_random_model

from runner.checkpoints.base import bases_of, forget_changed, left_out
from runner.checkpoints.files import find_checkpoint, read_file
from runner.checkpoints.hashing import digest
from runner.checkpoints.snapshot import load_weights, save_checkpoint
from runner.core.hooks import Algorithm
from runner.models.hf.causal_lm import HFCausalLM
from runner.models.hf.language import HFLanguageModel
from runner.training.trainer import Trainer

transformers: Any = pytest.importorskip("transformers")
peft: Any = pytest.importorskip("peft")

pytestmark = pytest.mark.usefixtures("extras")

LORA = {"r": 2, "lora_dropout": 0.1}


def save_llama(folder: Path, seed: int) -> Path:
    options = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0, "max_position_embeddings": 64}
    return save_random_model(transformers.LlamaConfig(**LLAMA, **options), folder, seed)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_llama(tmp_path / "llama", seed=1)


def command(*arguments: str, folder: str = "run", duration: str = "4ba") -> list[str]:
    return [
        *("model=hf_causal_lm", "model.module.name=./llama", "model.metric_name=BitsPerByte", "data=stdlib_text"),
        *("model.module.lora={r: 2, lora_dropout: 0.1}", "data.context=32"),
        *("data.batch_size=4", "data.eval_bytes=1024"),
        *("optimizer=adamw", "optimizer.lr=0.01", "scheduler=none", "algorithms=none", "callbacks=[checkpoint_saver]"),
        *(f"trainer.max_duration={duration}", f"hydra.run.dir={folder}", *arguments),
    ]


def weights_of(run: str) -> dict[str, torch.Tensor]:
    return read_file(find_checkpoint(run), "model.pt")


def assert_same_adapters(run: str, expected_run: str) -> None:
    weights = weights_of(run)
    assert all("lora_" in name for name in weights)
    torch.testing.assert_close(weights, weights_of(expected_run), rtol=0, atol=0)


def test_a_checkpoint_contains_only_adapters_and_resumes_bit_for_bit(run_here, llama: Path):
    ema = ["algorithms=[ema]", "algorithms.ema.half_life=1ba", "trainer.grad_accum=2"]
    run_here(*command(*ema), code=0)
    run_here(*command(*ema, folder="cut", duration="2ba"), code=0)
    run_here("resume", "cut", "trainer.max_duration=4ba", code=0)
    assert_same_adapters("cut", "run")
    assert all("lora_" in name for name in read_file(find_checkpoint("run"), "state.pt")["model"])
    assert (find_checkpoint("run") / "model.pt").stat().st_size < (llama / "model.safetensors").stat().st_size / 10


FSDP = ("trainer.parallel=fsdp", "init_weights=by_name", "trainer.precision=fp32")


@pytest.mark.parametrize("layout", [(), pytest.param(FSDP, marks=pytest.mark.slow)], ids=["ddp", "fsdp"])
def test_adapters_on_two_ranks_resume_bit_for_bit(
    run_app, monkeypatch, tmp_path: Path, llama: Path, layout: tuple[str, ...]
):
    monkeypatch.chdir(tmp_path)
    two = ["launch.nproc_per_node=2", *layout]
    run_app(*command(*two))
    run_app(*command(*two, folder="cut", duration="2ba"))
    run_app("resume", "cut", "trainer.max_duration=4ba")
    assert_same_adapters("cut", "run")
    base = json.loads((find_checkpoint("run") / "base.json").read_text())
    assert base["module"]["digest"] == bases_of(HFCausalLM(str(llama), lora=LORA))[""].digest


@pytest.mark.slow
def test_a_moved_base_is_used_from_the_new_path_and_another_base_is_refused(run_here, llama: Path, tmp_path: Path):
    run_here(*command(), code=0)
    before = run_here("eval", "run", "hydra.run.dir=before", code=0).out
    llama.rename("moved")
    missing = run_here("eval", "run", code=2).err
    assert "model.module.name='./llama': there is no such folder" in missing
    after = run_here("eval", "run", "model.module.name=./moved", "hydra.run.dir=after", code=0).out
    assert re.findall(r"BitsPerByte\s+\S+", before) == re.findall(r"BitsPerByte\s+\S+", after) != []
    save_llama(llama, seed=2)
    resume = ["resume", "run", "trainer.max_duration=6ba"]
    for words in (["eval", "run"], resume, ["export", "run", "out/"]):
        error = run_here(*words, code=2).err
        assert "model.module.name='./llama': checkpoint " in error
        assert "holds only what was trained on the base" in error
    random_base = ["model.module.pretrained=false", "--allow-changes=model.module.pretrained"]
    assert "give model.module.pretrained=true" in run_here(*resume, *random_base, code=2).err


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks transformers
def test_adapters_are_exported_alone_or_merged_as_peft_and_transformers_load_them(run_here, llama: Path):
    run_here(*command(), code=0)
    run_here("export", "run", "adapter/", "--form", "adapter", code=0)
    run_here("export", "run", "merged/", code=0)
    run_here("export", "run", "half/", "--dtype", "bfloat16", code=0)
    run_here("export", "run", "all.safetensors", code=0)
    tokens = torch.arange(32)[None]
    base = transformers.AutoModelForCausalLM.from_pretrained(llama)
    expected = peft.PeftModel.from_pretrained(base, "adapter").eval()(input_ids=tokens).logits
    ours = HFCausalLM(str(llama), lora=LORA).eval()
    ours.load_state_dict(
        {name.removeprefix("module."): weight for name, weight in weights_of("run").items()}, strict=False
    )
    assert torch.equal(ours(tokens), expected)
    merged = transformers.AutoModelForCausalLM.from_pretrained("merged").eval()(input_ids=tokens).logits
    torch.testing.assert_close(merged, expected)
    assert transformers.AutoModelForCausalLM.from_pretrained("half", dtype="auto").dtype == torch.bfloat16
    from safetensors.torch import load_file

    ours.load_state_dict(load_file("all.safetensors"))
    error = run_here("export", "run", "adapter.pt", "--form", "adapter", code=2).err
    assert "--form='adapter.pt': is for folders" in error


def test_a_run_made_elsewhere_is_exported_only_with_an_explicit_base(run_here, llama: Path):
    run_here(*command(), code=0)
    for signature in Path("run").glob("*sig*"):
        signature.unlink()
    assert "--base='': this run was made elsewhere, with './llama'" in run_here("export", "run", "out/", code=2).err
    run_here("export", "run", "out/", "--base", "./llama", code=0)


def test_base_weights_that_were_trainable_are_saved_even_after_they_are_frozen_again(llama: Path):
    model = HFCausalLM(str(llama), lora=LORA)
    name, weight = next((name, weight) for name, weight in model.named_parameters() if not weight.requires_grad)
    assert id(weight) in left_out(model)
    weight.requires_grad_(True)
    forget_changed(model)
    weight.requires_grad_(False)
    assert id(weight) not in left_out(model) and name not in bases_of(model)[""].weights


def test_checkpoints_keep_a_base_that_adapters_change_or_that_is_not_pretrained(llama: Path):
    assert not bases_of(HFCausalLM(str(llama), lora={"r": 2, "init_lora_weights": "pissa"}))
    assert not bases_of(HFCausalLM(str(llama), pretrained=False, lora=LORA))


LAYERS = "module.network.base_model.model.model.layers"


class ScaleFrozenWeights(Algorithm):
    """Scales frozen weights in place, one at INIT and another at the start of training."""

    def scale(self, state: Any, layer: int, factor: float) -> None:
        weight = state.unwrapped_model.get_parameter(f"{LAYERS}.{layer}.mlp.down_proj.weight")
        assert not weight.requires_grad
        weight.data.mul_(factor)

    def init(self, state: Any, logger: Any) -> None:
        self.scale(state, 0, 2.0)

    def fit_start(self, state: Any, logger: Any) -> None:
        self.scale(state, 1, -1.0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.filterwarnings("ignore:precision='bf16'")
def test_frozen_weights_that_an_algorithm_changes_in_place_are_saved(
    llama: Path, tmp_path: Path, precision: str, caplog: pytest.LogCaptureFixture
):
    def make_trainer(*algorithms: Algorithm) -> Trainer:
        return Trainer(
            model=HFLanguageModel(HFCausalLM(str(llama), lora=LORA)),
            train_dataloader=[(torch.ones(2, 8, dtype=torch.int64), torch.ones(2, 8, dtype=torch.int64))],
            optimizers=torch.optim.AdamW,
            algorithms=algorithms,
            precision=precision,
        )

    with make_trainer(ScaleFrozenWeights()) as changed, make_trainer() as plain:
        changed.fit()
        save_checkpoint(changed.state, tmp_path / "saved")
        saved = {name for name in read_file(tmp_path / "saved", "model.pt") if "lora_" not in name}
        assert saved == {f"{LAYERS}.{layer}.mlp.down_proj.weight" for layer in (0, 1)}
        assert caplog.text.count("1 frozen weights are no longer those of") == 2
        load_weights(plain.state, tmp_path / "saved")
        weights = [trainer.state.unwrapped_model.state_dict() for trainer in (plain, changed)]
        torch.testing.assert_close(*weights, rtol=0, atol=0)


def test_only_the_first_process_of_a_machine_hashes_the_base(llama: Path, monkeypatch: pytest.MonkeyPatch):
    network = transformers.AutoModelForCausalLM.from_pretrained(llama)
    expected = digest({name: digest(weight) for name, weight in network.named_parameters()})
    assert bases_of(HFCausalLM(str(llama), lora=LORA))[""].digest == expected
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert bases_of(HFCausalLM(str(llama), lora=LORA))[""].digest == ""


@pytest.mark.slow
def test_two_ranks_refuse_another_base(run_app, llama: Path):
    run_app(*command())
    save_llama(llama, seed=2)
    errors = run_app("eval", "run", "launch.nproc_per_node=2", exit_code=2).stderr
    assert errors.count("holds only what was trained on the base") == 1


def test_results_and_comparisons_show_the_digests_of_base_and_adapters(run_here, llama: Path):
    ema = ["algorithms=[ema]", "algorithms.ema.half_life=1ba"]
    run_here(*command(*ema, folder="a"), code=0)
    run_here(*command("seed=1", folder="b"), code=0)
    base = json.loads((find_checkpoint("a") / "base.json").read_text())["module"]["digest"]
    results = [json.loads(Path(name, "result.json").read_text()) for name in "ab"]
    assert [result["base"] for result in results] == [base, base]
    assert [result["adapter"] for result in results] == [digest(weights_of(name)) for name in "ab"]
    comparison = run_here("compare", "a", "b", code=0).out
    assert re.search(rf"^base +{base[:8]} +{base[:8]}$", comparison, re.MULTILINE)
    assert "different bases" not in comparison
    save_llama(llama, seed=2)
    run_here(*command("seed=1", folder="c"), code=0)
    assert "note: these runs trained adapters on different bases" in run_here("compare", "a", "c", code=0).out
    assert "different bases" in run_here("table", "b", "c", "--rows", "name", code=0).out
    assert f"| {base} |" in run_here("table", "b", "c", "--rows", "base", code=0).out
