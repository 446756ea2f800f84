"""Checkpoints of adapters leave the base out, and every use of one finds the same base again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

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
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=256, bos_token_id=0, eos_token_id=0, **sizes)
    config.max_position_embeddings = 64
    transformers.utils.logging.disable_progress_bar()
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    transformers.utils.logging.enable_progress_bar()
    return folder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_llama(tmp_path / "llama", seed=1)


def command(*arguments: str, folder: str = "run", duration: str = "4ba") -> list[str]:
    return [
        *("model=hf_causal_lm", "model.module.name=./llama", "model.metric_name=BitsPerByte", "data=stdlib_text"),
        *(
            "model.module.lora={r: 2, lora_dropout: 0.1}",
            "data.context=32",
            "data.batch_size=4",
            "data.eval_bytes=1024",
        ),
        *("optimizer=adamw", "optimizer.lr=0.01", "scheduler=none", "algorithms=none", "callbacks=[checkpoint_saver]"),
        *(f"trainer.max_duration={duration}", f"hydra.run.dir={folder}", *arguments),
    ]


def weights_of(run: str) -> dict[str, torch.Tensor]:
    return read_file(find_checkpoint(run), "model.pt")


def assert_equal(one: str, other: str) -> None:
    first, second = weights_of(one), weights_of(other)
    assert first.keys() == second.keys() and all("lora_" in name for name in first)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_checkpoint_holds_adapters_alone_and_resumes_to_the_bit(run_here, llama: Path):
    ema = ["algorithms=[ema]", "algorithms.ema.half_life=1ba", "trainer.grad_accum=2"]
    run_here(*command(*ema), code=0)
    run_here(*command(*ema, folder="cut", duration="2ba"), code=0)
    run_here("resume", "cut", "trainer.max_duration=4ba", code=0)
    assert_equal("run", "cut")
    assert all("lora_" in name for name in read_file(find_checkpoint("run"), "state.pt")["model"])
    assert (find_checkpoint("run") / "model.pt").stat().st_size < (llama / "model.safetensors").stat().st_size / 10


@pytest.mark.parametrize(
    "layout",
    [
        (),
        pytest.param(
            ("trainer.parallel=fsdp", "init_weights=by_name", "trainer.precision=fp32"), marks=pytest.mark.slow
        ),
    ],
)
def test_two_ranks_resume_to_the_bit(run_app, monkeypatch, tmp_path: Path, llama: Path, layout: tuple[str, ...]):
    monkeypatch.chdir(tmp_path)
    two = ["launch.nproc_per_node=2", *layout]
    run_app(*command(*two))
    run_app(*command(*two, folder="cut", duration="2ba"))
    run_app("resume", "cut", "trainer.max_duration=4ba")
    assert_equal("run", "cut")
    recorded = json.loads((find_checkpoint("run") / "base.json").read_text())
    assert recorded["module"]["digest"] == bases_of(HFCausalLM(str(llama), lora=LORA))[""].digest


def test_a_base_that_moved_is_typed_and_another_one_is_refused(run_here, llama: Path, tmp_path: Path):
    run_here(*command(), code=0)
    before = run_here("eval", "run", "hydra.run.dir=before", code=0).out
    llama.rename("moved")
    missing = run_here("eval", "run", code=2).err
    assert "model.module.name='./llama': there is no such folder" in missing
    after = run_here("eval", "run", "model.module.name=./moved", "hydra.run.dir=after", code=0).out
    assert re.findall(r"BitsPerByte\s+\S+", before) == re.findall(r"BitsPerByte\s+\S+", after) != []
    save_llama(llama, seed=2)
    for words in (["eval", "run"], ["resume", "run", "trainer.max_duration=6ba"], ["export", "run", "out/"]):
        wrong = run_here(*words, code=2).err
        assert (
            "model.module.name='./llama': checkpoint " in wrong and "holds only what was trained on the base" in wrong
        )
    whole = ["model.module.pretrained=false", "--allow-changes=model.module.pretrained"]
    assert (
        "give model.module.pretrained=true" in run_here("resume", "run", "trainer.max_duration=6ba", *whole, code=2).err
    )


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
    wrong = run_here("export", "run", "one.pt", "--form", "adapter", code=2).err
    assert "--form='one.pt': is for folders" in wrong


def test_somebody_elses_run_names_no_base_to_read(run_here, llama: Path):
    run_here(*command(), code=0)
    for signature in Path("run").glob("*sig*"):
        signature.unlink()
    assert "--base='': this run was made elsewhere, with './llama'" in run_here("export", "run", "out/", code=2).err
    run_here("export", "run", "out/", "--base", "./llama", code=0)


def test_weights_that_were_trained_are_saved_even_if_they_are_frozen_again(llama: Path):
    model = HFCausalLM(str(llama), lora=LORA)
    name, weight = next(item for item in model.named_parameters() if not item[1].requires_grad)
    assert id(weight) in left_out(model)
    weight.requires_grad_(True)
    forget_changed(model)
    weight.requires_grad_(False)
    assert id(weight) not in left_out(model) and name not in bases_of(model)[""].weights


def test_adapters_that_change_the_base_keep_it_in_checkpoints(llama: Path):
    assert not bases_of(HFCausalLM(str(llama), lora={"r": 2, "init_lora_weights": "pissa"}))
    assert not bases_of(HFCausalLM(str(llama), pretrained=False, lora=LORA))


class Shift(Algorithm):
    """Changes frozen weights in place, as code from elsewhere may: one while the model is set up, another later."""

    def shift(self, state: Any, layer: int, factor: float) -> None:
        weight = state.unwrapped_model.get_parameter(f"{LAYERS}.{layer}.mlp.down_proj.weight")
        assert not weight.requires_grad
        weight.data.mul_(factor)

    def init(self, state: Any, logger: Any) -> None:
        self.shift(state, 0, 2.0)

    def fit_start(self, state: Any, logger: Any) -> None:
        self.shift(state, 1, -1.0)


LAYERS = "module.network.base_model.model.model.layers"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.filterwarnings("ignore:precision='bf16'")
def test_frozen_weights_that_were_changed_in_place_are_saved(
    llama: Path, tmp_path: Path, precision: str, caplog: pytest.LogCaptureFixture
):
    def make(algorithms: list[Algorithm]) -> Trainer:
        batches = [(torch.ones(2, 8, dtype=torch.int64), torch.ones(2, 8, dtype=torch.int64))]
        model = HFLanguageModel(HFCausalLM(str(llama), lora=LORA))
        adam = torch.optim.AdamW
        return Trainer(
            model=model, train_dataloader=batches, optimizers=adam, algorithms=algorithms, precision=precision
        )

    with make([Shift()]) as changed, make([]) as plain:
        changed.fit()
        save_checkpoint(changed.state, tmp_path / "saved")
        kept = {name for name in read_file(tmp_path / "saved", "model.pt") if "lora_" not in name}
        assert kept == {f"{LAYERS}.{layer}.mlp.down_proj.weight" for layer in (0, 1)}
        assert caplog.text.count("1 frozen weights are no longer those of") == 2
        load_weights(plain.state, tmp_path / "saved")
        expected = changed.state.unwrapped_model.state_dict()
        assert all(torch.equal(expected[key], value) for key, value in plain.state.unwrapped_model.state_dict().items())


def test_a_base_is_hashed_once_for_each_machine(llama: Path, monkeypatch: pytest.MonkeyPatch):
    network = transformers.AutoModelForCausalLM.from_pretrained(llama)
    expected = digest({name: digest(weight) for name, weight in network.named_parameters()})
    assert bases_of(HFCausalLM(str(llama), lora=LORA))[""].digest == expected
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert bases_of(HFCausalLM(str(llama), lora=LORA))[""].digest == ""


@pytest.mark.slow
def test_two_ranks_refuse_another_base(run_app, llama: Path):
    run_app(*command())
    save_llama(llama, seed=2)
    wrong = run_app("eval", "run", "launch.nproc_per_node=2", exit_code=2).stderr
    assert wrong.count("holds only what was trained on the base") == 1


def test_runs_show_the_base_and_the_adapters_that_they_evaluate(run_here, llama: Path):
    ema = ["algorithms=[ema]", "algorithms.ema.half_life=1ba"]
    run_here(*command(*ema, folder="a"), code=0)
    run_here(*command("seed=1", folder="b"), code=0)
    shared = json.loads((find_checkpoint("a") / "base.json").read_text())["module"]["digest"]
    results = [json.loads(Path(name, "result.json").read_text()) for name in "ab"]
    assert [result["base"] for result in results] == [shared, shared]
    assert [result["adapter"] for result in results] == [digest(weights_of(name)) for name in "ab"]
    same = run_here("compare", "a", "b", code=0).out
    assert re.search(rf"^base +{shared[:8]} +{shared[:8]}$", same, re.MULTILINE) and "different bases" not in same
    save_llama(llama, seed=2)
    run_here(*command("seed=1", folder="c"), code=0)
    assert "note: these runs trained adapters on different bases" in run_here("compare", "a", "c", code=0).out
    assert "different bases" in run_here("table", "b", "c", "--rows", "name", code=0).out
    rows = run_here("table", "b", "c", "--rows", "base", code=0).out
    assert f"| {shared} |" in rows
