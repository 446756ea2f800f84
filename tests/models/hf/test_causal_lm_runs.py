"""Runs of causal language models of transformers from the command line."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import LLAMA, save_random_model
from tiers import fast

from runner.checkpoints.files import find_checkpoint
from runner.checkpoints.snapshot import read_file
from runner.models.hf.causal_lm import HFCausalLM
from runner.models.hf.saving import save_pretrained

transformers: Any = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("extras")

NO_DROPOUT = "model.module.overrides={attn_pdrop: 0.0, resid_pdrop: 0.0, embd_pdrop: 0.0}"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a GPT-2 (tied), a Llama (untied), both with dropout, and a tokenizer of 256 tokens."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers.models import BPE

    root = tmp_path_factory.mktemp("models")
    common = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0}
    gpt2 = transformers.GPT2Config(**common, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    save_random_model(gpt2, root / "gpt2")
    llama = transformers.LlamaConfig(**common, **LLAMA, max_position_embeddings=64, attention_dropout=0.1)
    save_random_model(llama, root / "llama")
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:200]
    trainer = trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["import os\ndef find(path):\n    return os.path.join(path, 'x')\n"] * 9, trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(root / "tokenizer")
    return root


def command(model: Path, *arguments: str, folder: str = "run", callbacks: str = "checkpoint_saver") -> list[str]:
    """Return the arguments of a short run on bytes."""
    return [
        *("model=hf_causal_lm", f"model.module.name={model}", "model.metric_name=BitsPerByte", "data=stdlib_text"),
        *("data.context=32", "data.batch_size=4", "data.eval_bytes=1024", "optimizer=adamw", "optimizer.lr=0.003"),
        *("scheduler=none", "algorithms=none", f"callbacks=[{callbacks}]", "trainer.max_duration=4ba"),
        *(f"hydra.run.dir={folder}", *arguments),
    ]


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return read_file(find_checkpoint(run), "model.pt")


def assert_same_weights(run: Path, expected_run: Path) -> None:
    torch.testing.assert_close(weights_of(run), weights_of(expected_run), rtol=0, atol=0)


@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=pytest.mark.slow), "llama"])
def test_a_run_with_dropout_resumes_and_reruns_bit_for_bit(run_here, models: Path, tmp_path: Path, name: str):
    run_here(*command(models / name, "trainer.grad_accum=2"), code=0)
    run_here(*command(models / name, "trainer.grad_accum=2", "trainer.max_duration=2ba", folder="cut"), code=0)
    # A resumed run does not need the pretrained weights.
    not_pretrained = ["model.module.pretrained=false", "--allow-changes=model.module.pretrained"]
    run_here("resume", "cut", "trainer.max_duration=4ba", *not_pretrained, code=0)
    assert_same_weights(tmp_path / "cut", tmp_path / "run")
    run_here("rerun", "run", "hydra.run.dir=again", code=0)
    assert_same_weights(tmp_path / "again", tmp_path / "run")


def test_tied_weights_are_saved_once_and_remain_tied(run_here, models: Path, tmp_path: Path):
    run_here(*command(models / "gpt2"), code=0)
    weights = weights_of(tmp_path / "run")
    tied = [weights[f"module.network.{name}.weight"] for name in ("lm_head", "transformer.wte")]
    assert tied[0].data_ptr() == tied[1].data_ptr()
    model = HFCausalLM(str(save_pretrained(tmp_path / "run", tmp_path / "saved")))
    assert model.network.lm_head.weight is model.network.transformer.wte.weight


@pytest.mark.slow
def test_eval_and_predict_agree_with_the_evaluation_of_training(run_here, models: Path, tmp_path: Path):
    trained = run_here(*command(models / "llama", callbacks="checkpoint_saver,console_summary"), code=0)
    evaluated = run_here("eval", "run", "hydra.run.dir=eval", code=0)
    values = [line.split() for line in (trained.out + evaluated.out).splitlines() if "BitsPerByte" in line]
    assert len(values) == 2 and float(values[1][1]) == pytest.approx(float(values[0][1]), abs=0.01)
    run_here("predict", "run", "--format=pt", "hydra.run.dir=predict", code=0)
    predicted = torch.load(tmp_path / "predict" / "predictions.pt", weights_only=True)
    assert predicted["loss"].shape == (32, 32)
    assert float(predicted["loss"].mean()) / 0.6931 == pytest.approx(float(values[1][1]), rel=1e-3)


def test_transformers_loads_the_saved_model(run_here, models: Path, tmp_path: Path):
    ema = ["algorithms=[ema]", "algorithms.ema.half_life=1ba", "trainer.precision=fp32"]
    run_here(*command(models / "gpt2", *ema), code=0)
    folder = save_pretrained(tmp_path / "run", tmp_path / "saved", tokenizer=str(models / "tokenizer"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ours = HFCausalLM(str(models / "gpt2")).eval()
    weights = weights_of(tmp_path / "run")
    ours.load_state_dict({key.removeprefix("module."): weight for key, weight in weights.items()})
    tokens = torch.arange(40)[None]
    assert torch.equal(theirs(input_ids=tokens).logits, ours(tokens))
    assert transformers.AutoTokenizer.from_pretrained(folder).decode([40, 41])
    # The saved model can also be the start of another run.
    assert torch.equal(HFCausalLM(str(folder)).eval()(tokens), ours(tokens))


def test_adapters_are_trained_resumed_evaluated_and_merged(run_here, models: Path, tmp_path: Path):
    pytest.importorskip("peft")
    lora = ["model.module.lora={r: 2, lora_dropout: 0.1}", "optimizer.lr=0.01"]
    run_here(*command(models / "llama", *lora), code=0)
    run_here(*command(models / "llama", *lora, "trainer.max_duration=2ba", folder="cut"), code=0)
    before = weights_of(tmp_path / "cut")
    run_here("resume", "cut", "trainer.max_duration=4ba", code=0)
    assert_same_weights(tmp_path / "cut", tmp_path / "run")
    trained = weights_of(tmp_path / "run")
    changed = {key for key, weight in trained.items() if not torch.equal(weight, before[key])}
    assert changed and all("lora_" in key for key in changed)

    evaluated = run_here("eval", "run", "hydra.run.dir=eval", code=0)
    assert "eval/BitsPerByte" in evaluated.out
    folder = save_pretrained(tmp_path / "run", tmp_path / "saved")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ours = HFCausalLM(str(models / "llama"), lora={"r": 2, "lora_dropout": 0.1}).eval()
    ours.load_state_dict({key.removeprefix("module."): weight for key, weight in trained.items()}, strict=False)
    tokens = torch.arange(32)[None]
    torch.testing.assert_close(theirs(input_ids=tokens).logits, ours(tokens))


@pytest.mark.slow
def test_a_model_with_adapters_is_exported(run_here, models: Path, tmp_path: Path):
    pytest.importorskip("peft")
    lora = "model.module.lora={r: 2, lora_dropout: 0.1}"
    short = ("trainer.max_duration=1ba", "optimizer.lr=0.01")
    run_here(*command(models / "llama", lora, *short, callbacks="export_for_inference", folder="out"), code=0)
    tokens = torch.arange(32)[None]
    assert torch.export.load(tmp_path / "out" / "model.pt2").module()(tokens).shape == (1, 32, 256)


@pytest.mark.slow
def test_models_that_transformers_cannot_load_are_not_saved(run_here, models: Path, tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        save_pretrained(tmp_path / "run", tmp_path / "saved")
    run_here("model=gpt", *(word for word in command(models) if not word.startswith("model")), code=0)
    with pytest.raises(ValueError, match=r"run='.*run.*': its model is neither model=hf_model nor model=hf_causal_lm"):
        save_pretrained(tmp_path / "run", tmp_path / "saved")
    factorize = [f"algorithms.factorize.{option}" for option in ("min_features=8", "latent_features=4")]
    run_here(*command(models / "llama", "algorithms=[factorize]", *factorize, folder="changed"), code=0)
    message = "of its weights do not belong to transformers. model.*an algorithm has changed"
    with pytest.raises(ValueError, match=message):
        save_pretrained(tmp_path / "changed", tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "file").touch()
    with pytest.raises(FileExistsError, match="folder='.*saved': already exists"):
        save_pretrained(tmp_path / "run", tmp_path / "saved")


@pytest.mark.slow
def test_two_ranks_train_like_one_without_messages_of_transformers(run_here, run_app, models: Path, tmp_path: Path):
    run_here(*command(models / "gpt2", NO_DROPOUT), code=0)
    two = run_app(*command(models / "gpt2", NO_DROPOUT, "launch.nproc_per_node=2", folder="two"))
    torch.testing.assert_close(weights_of(tmp_path / "two"), weights_of(tmp_path / "run"), rtol=1e-3, atol=1e-5)
    assert two.stderr == "" and "transformers" not in two.stdout


@pytest.mark.filterwarnings("ignore:precision='amp_bf16'")
@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=pytest.mark.slow), "llama"])
def test_algorithms_and_callbacks_work_with_models_of_transformers(run_here, models: Path, tmp_path: Path, name: str):
    block = {"gpt2": "*Block", "llama": "*DecoderLayer"}[name]
    algorithms = "ema,activation_checkpointing,gradient_clipping,seq_length_warmup,layer_freezing"
    callbacks = "json_lines_logger,generate,activation_monitor,optimizer_monitor,nan_monitor,speed_monitor"
    run_here(
        *command(models / name, callbacks=callbacks),
        *(f"algorithms=[{algorithms}]", f"algorithms.activation_checkpointing.modules={block}"),
        *("algorithms.ema.half_life=1ba", "algorithms.layer_freezing.freeze_start=0.0"),
        *("trainer.precision=amp_bf16", "trainer.grad_accum=2", "callbacks.activation_monitor.interval=1ba"),
        "callbacks.optimizer_monitor.batch_log_interval=1",
        # The prompt and the new tokens need more positions than the model has, so the first tokens are dropped.
        *("callbacks.generate.max_new_tokens=40", "callbacks.generate.prompts=['import os']"),
        "callbacks.generate.tokenizer={_target_: transformers.AutoTokenizer.from_pretrained, "
        f"pretrained_model_name_or_path: {models / 'tokenizer'}}}",
        code=0,
    )
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    for key in ("activations/l2_norm/module.network.", "BitsPerByte", "import os", "l2_norm/grad/module.network."):
        assert key in text, key


@pytest.mark.parametrize("save_format", fast(["safetensors", "torch_export", "torchscript"], "safetensors"))
@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=pytest.mark.slow), "llama"])
def test_a_model_is_exported_in_each_format(run_here, models: Path, tmp_path: Path, name: str, save_format: str):
    export = f"callbacks.export_for_inference.save_format={save_format}"
    run_here(*command(models / name, export, "trainer.max_duration=1ba", callbacks="export_for_inference"), code=0)
    assert [*(tmp_path / "run").glob("model.*")]


@pytest.mark.parametrize("verb", ["check", "explain"])
def test_check_and_explain_accept_a_model_of_transformers(run_here, models: Path, verb: str):
    ended = run_here(verb, *command(models / "gpt2"), code=0)
    assert ended.err == "" and (verb != "check" or "LanguageModel(HFCausalLM)" in ended.out)


def test_check_keeps_a_large_model_on_the_meta_device(run_here, models: Path):
    large = ["model.module.pretrained=false", "model.module.overrides={n_embd: 1024, n_layer: 4}"]
    ended = run_here("check", *command(models / "gpt2", *large), code=0)
    assert "on the meta device" in ended.out


def test_a_wrong_context_is_refused_before_data_are_read(run_here, models: Path):
    data = "data._target_=own.load"  # takes the arguments of data=stdlib_text
    Path("own.py").write_text(
        "def load(batch_size, context, eval_batch_size, eval_bytes, test_bytes, seed):\n"
        "    raise RuntimeError('data were read')\n"
    )
    ended = run_here(*command(models / "gpt2", data, "data.context=65"), code=2)
    assert len(ended.err.splitlines()) == 1
    assert re.match("error: model.module.context=65: '.*gpt2' has 64 positions", ended.err), ended.err
    sys.modules.pop("own", None)
