"""Texts generated in evaluations and predictions, compared with `generate` of transformers."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from python_process import run_python
from random_models import save_random_model
from tiny_tokenizer import make_tokenizer
from torch import Tensor

from runner.libraries.targets import prepare_import
from runner.libraries.torchmetrics import import_torchmetrics
from runner.models.hf.causal_lm import HFCausalLM
from runner.models.hf.generation import Generator
from runner.models.hf.language import HFLanguageModel
from runner.models.hf.model import HFModel
from runner.models.hf.network import HFNetwork
from runner.models.hf.saving import save_pretrained
from runner.models.hf.text_scores import text_metrics, update_with_texts

transformers: Any = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("extras")

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "that", "dog", "sleeps"]
BART = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a BART and a GPT-2 with large random weights, and a tokenizer with a padding token each."""
    prepare_import("transformers")
    root = tmp_path_factory.mktemp("models")
    make_tokenizer(root / "tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(root / "tokenizer")
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    size = len(tokenizer)
    ends = {"vocab_size": size, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    configs = {
        "bart": transformers.BartConfig(
            **BART,
            **ends,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            max_position_embeddings=64,
            init_std=0.4,
            decoder_start_token_id=tokenizer.eos_token_id,
            bos_token_id=0,
            forced_eos_token_id=None,
        ),
        "gpt2": transformers.GPT2Config(
            **ends, n_positions=48, n_embd=16, n_layer=2, n_head=2, initializer_range=0.4, bos_token_id=0
        ),
    }
    for name, config in configs.items():
        tokenizer.save_pretrained(save_random_model(config, root / name, seed=0))
    return root


def make(folder: Path, **generation: Any) -> HFModel:
    task = "seq2seq_lm" if folder.name == "bart" else "causal_lm"
    options = {"max_new_tokens": 8, **generation}
    return HFModel(HFNetwork(str(folder), task), generation=options, tokenizer=str(folder)).eval()


def prompts_of(count: int = 6, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 290, (2 + 3 * number % 7,), generator=generator).tolist() for number in range(count)]


def batch_of(prompts: list[list[int]], answers: list[list[int]], is_causal: bool) -> dict[str, Tensor]:
    """Return a batch that is padded on the right, as in training."""
    rows = [prompt + answer if is_causal else prompt for prompt, answer in zip(prompts, answers, strict=True)]
    labels = [[-100] * len(prompt) * is_causal + answer for prompt, answer in zip(prompts, answers, strict=True)]
    pad: Any = torch.nn.utils.rnn.pad_sequence
    tensors = [[torch.tensor(row) for row in part] for part in (rows, [[1] * len(row) for row in rows], labels)]
    tokens, mask, targets = (pad(part, True, value) for part, value in zip(tensors, (0, 0, -100), strict=True))
    return {"input_ids": tokens, "attention_mask": mask, "labels": targets}


def generate_with_transformers(folder: Path, prompts: list[list[int]], **options: Any) -> list[str]:
    """Return the text that transformers generates for each prompt, one at a time."""
    auto_class = transformers.AutoModelForSeq2SeqLM if folder.name == "bart" else transformers.AutoModelForCausalLM
    model = auto_class.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = []
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        output = model.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens), do_sample=False, **options)
        new_tokens = output[0, 1 if folder.name == "bart" else len(prompt) :]
        texts.append(tokenizer.decode(new_tokens, skip_special_tokens=True).strip())
    return texts


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"repetition_penalty": 1.5}], ids=str)
@pytest.mark.parametrize("name", ["bart", "gpt2"])
def test_a_padded_batch_generates_like_transformers_row_by_row(models: Path, name: str, options: Any):
    model = make(models / name, **options)
    prompts = prompts_of()
    with torch.no_grad():
        texts = model.texts(batch_of(prompts, [[5, 6], [7], [8, 9, 10], [11], [12], [13]], name == "gpt2"))
    expected = generate_with_transformers(models / name, prompts, max_new_tokens=8, **options)
    assert texts.generated == expected and len({*expected}) > 3
    tokenizer = transformers.AutoTokenizer.from_pretrained(models / name)
    assert texts.inputs == [tokenizer.decode(prompt).strip() for prompt in prompts]
    assert texts.references[2] == tokenizer.decode([8, 9, 10]).strip()


def test_the_first_tokens_of_a_window_are_the_prompt_of_a_language_model(models: Path):
    module = HFCausalLM(str(models / "gpt2"), context=12)
    options = {"max_new_tokens": 4, "prompt_tokens": 5}
    model = HFLanguageModel(module, generation=options, tokenizer=str(models / "gpt2")).eval()
    rows = torch.tensor([prompts_of(1, seed)[0] * 6 + [7] for seed in range(3)])[:, :13]
    batch = (rows[:, :-1], rows[:, 1:])
    texts = model.texts(batch)
    assert texts.generated == generate_with_transformers(models / "gpt2", rows[:, :5].tolist(), max_new_tokens=4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(models / "gpt2")
    assert texts.references == [tokenizer.decode(row).strip() for row in rows[:, 5:9]]
    assert {*model.metrics(train=False)} == {"BitsPerToken", "ExactMatch", "ROUGE", "BLEU"}
    assert not model.metrics(train=True)


@pytest.mark.parametrize("name", ["bart", "gpt2"])
def test_a_sampled_text_depends_only_on_the_seed_and_the_row(models: Path, name: str):
    def generate(model: HFModel, prompts: list[list[int]]) -> list[str]:
        return model.texts(batch_of(prompts, [[5]] * len(prompts), name == "gpt2")).generated

    prompts = prompts_of()
    sampling = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.95}
    model = make(models / name, **sampling)
    texts = generate(model, prompts)
    assert texts == generate(model, prompts[::-1])[::-1]
    assert texts == [generate(model, [prompt])[0] for prompt in prompts]
    assert texts != generate(make(models / name, **sampling, seed=1), prompts)
    assert texts != generate(make(models / name), prompts)


@pytest.mark.slow
def test_sampled_tokens_follow_the_distribution_of_the_model(models: Path):
    counts = torch.zeros(302)
    prompt = [20, 30, 40]
    network = HFNetwork(str(models / "gpt2"), "causal_lm").eval()
    for seed in range(400):
        options = {"max_new_tokens": 1, "do_sample": True, "top_k": 3, "seed": seed}
        generator = Generator(network, options, str(models / "gpt2"))
        counts[generator.generate(network, [prompt])[0][:1] or [0]] += 1
    logits = network.base(input_ids=torch.tensor([prompt])).logits[0, -1]
    top = logits.topk(3)
    expected = top.values.softmax(-1)
    assert counts[top.indices].sum() >= 399  # an empty text is counted at index 0
    assert torch.allclose(counts[top.indices] / 400, expected, atol=0.1)


def test_a_long_prompt_loses_the_first_tokens_to_leave_room_for_new_ones(models: Path):
    prompt = torch.randint(3, 290, (46,), generator=torch.Generator().manual_seed(0)).tolist()
    texts = make(models / "gpt2").texts(batch_of([prompt], [[5]], True))
    assert texts.generated == generate_with_transformers(models / "gpt2", [prompt[-40:]], max_new_tokens=8)


def test_the_last_labeled_span_is_the_reference_which_is_empty_without_labels(models: Path):
    model = make(models / "gpt2")
    tokens = torch.tensor([[20, 21, 22, 23, 24, 25]])
    labels = torch.tensor([[-100, 21, -100, -100, 24, 25]])
    texts = model.texts({"input_ids": tokens, "labels": labels})
    decode = transformers.AutoTokenizer.from_pretrained(models / "gpt2").decode
    assert (texts.inputs, texts.references) == ([decode(tokens[0, :4])], [decode(tokens[0, 4:])])
    assert model.texts({"input_ids": tokens}).references == [""]
    with pytest.raises(ValueError, match="prompt_tokens=None: the labels of a row have no -100 before the answer"):
        model.texts({"input_ids": tokens, "labels": tokens})
    seq2seq = make(models / "bart")
    batch = {"input_ids": tokens}
    assert seq2seq.predictions(batch, seq2seq(batch))["reference"] == [""]


def test_scores_of_batches_equal_those_of_torchmetrics_on_all_texts():
    generated = ["the quick fox", "a dog sleeps", "brown", "the lazy dog jumps over the fox", ""]
    references = ["the quick brown fox", "a dog sleeps", "fox", "the lazy dog jumps over a fox", "that"]
    metrics = text_metrics()
    for metric in metrics.values():
        update_with_texts(metric, generated[:3], references[:3])
        update_with_texts(metric, generated[3:], references[3:])
    import_torchmetrics()
    from torchmetrics.text import BLEUScore, ROUGEScore

    rouge = ROUGEScore(rouge_keys=("rouge1", "rouge2", "rougeL"))(generated, references)
    values = metrics["ROUGE"].compute()
    assert all(math.isclose(values[name], rouge[f"{name}_fmeasure"], rel_tol=1e-5) for name in values)
    assert metrics["BLEU"].compute() == BLEUScore()(generated, [[text] for text in references]) > 0
    assert metrics["ExactMatch"].compute() == 0.2


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ({"max_tokens": 8}, "generation has no 'max_tokens'; did you mean 'max_"),
        ({"max_new_tokens": 0}, "max_new_tokens=0: must be a number of tokens"),
        ({"num_beams": 2, "do_sample": True}, "beams are not sampled; leave out num_beams or do_sample"),
        ({"max_new_tokens": 48}, "max_new_tokens=48: leaves no room for a prompt in the 48 positions"),
        ({"temperature": 0, "do_sample": True}, "temperature=0: "),
        ({"num_beams": 0}, "num_beams=0: must be a whole number, at least 1"),
        ({"top_k": 5}, "top_k needs do_sample: true"),
        ({"early_stopping": "x"}, "transformers refuses it: "),
    ],
)
def test_wrong_options_are_refused(models: Path, generation: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        make(models / "gpt2", **generation)


def test_generation_needs_a_tokenizer_and_a_task_that_generates(models: Path):
    with pytest.raises(ValueError, match="tokenizer=None: generation needs the model's tokenizer"):
        HFModel(HFNetwork(str(models / "gpt2"), "causal_lm"), generation={"max_new_tokens": 2})
    with pytest.raises(ValueError, match="needs the task causal_lm or seq2seq_lm, not sequence_classification"):
        HFModel(HFNetwork(str(models / "gpt2")), generation={"max_new_tokens": 2}, tokenizer="x")


@pytest.fixture
def pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a CSV file with 25 pairs of texts, of which 7 are evaluated: an odd number for two ranks."""
    datasets: Any = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "prepared")
    lines = [f"{' '.join(WORDS[: 2 + n % 9])},{' '.join(WORDS[n % 9 : 3 + n % 9])}" for n in range(25)]
    (tmp_path / "pairs.csv").write_text("\n".join(["question,answer", *lines]) + "\n")
    return tmp_path


def command(model: Path, *arguments: str, folder: str = "run", generation: str = "max_new_tokens: 6") -> list[str]:
    return [
        *("model=hf_model", f"model.module.name={model}", "model.module.task=seq2seq_lm", "data=hf_dataset"),
        *("data.name=csv", "data.data_files=pairs.csv", "data.eval_split=null", "data.eval_share=0.28"),
        *("data.inputs=question", "data.targets=answer", f"data.tokenizer={model}", "data.context=16"),
        *("data.batch_size=6", "data.eval_batch_size=4", "data.num_workers=0", "algorithms=none", "optimizer=adamw"),
        *("optimizer.lr=0.01", "scheduler=none", "trainer.max_duration=4ba", f"hydra.run.dir={folder}"),
        *(f"model.generation={{{generation}}}", "callbacks=[checkpoint_saver,json_lines_logger,text_examples]"),
        *arguments,
    ]


NAMES = ("ExactMatch", "BLEU", "ROUGE/rouge1", "ROUGE/rouge2", "ROUGE/rougeL", "BitsPerToken", "loss")


def metrics_in(folder: Path) -> dict[str, float]:
    metrics = json.loads((folder / "result.json").read_text())["metrics"]
    return {name: metrics[f"eval/{name}"] for name in NAMES}


def rows_in(path: Path) -> list[dict[str, str]]:
    import pyarrow.parquet

    return pyarrow.parquet.read_table(path).to_pylist()


@pytest.mark.slow
def test_training_eval_predict_and_resume_agree_on_texts_and_scores(run_here, models: Path, pairs: Path):
    run_here(*command(models / "bart", "trainer.eval_interval=2ba"), code=0)
    run_here("eval", "run", "hydra.run.dir=eval", code=0)
    run_here("predict", "run", "hydra.run.dir=predicted", code=0)
    trained = metrics_in(pairs / "run")
    assert metrics_in(pairs / "eval") == pytest.approx(trained, rel=1e-5)
    rows = rows_in(pairs / "predicted" / "predictions.parquet")
    folder = save_pretrained(pairs / "run", pairs / "bart", tokenizer=str(models / "bart"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer(row["input"])["input_ids"] for row in rows]
    assert [row["generated"] for row in rows] == generate_with_transformers(folder, prompts, max_new_tokens=6)
    import_torchmetrics()
    from torchmetrics.text import BLEUScore, ROUGEScore

    generated, references = ([row[name] for row in rows] for name in ("generated", "reference"))
    assert len(rows) == 7 and all(text in " ".join(WORDS) for text in references)
    rouge = ROUGEScore(rouge_keys=("rouge1", "rougeL"))(generated, references)
    assert trained["ROUGE/rougeL"] == pytest.approx(float(rouge["rougeL_fmeasure"]), abs=1e-6)
    assert trained["BLEU"] == pytest.approx(float(BLEUScore()(generated, [[text] for text in references])))

    lines = (pairs / "run" / "metrics.jsonl").read_text().splitlines()
    *_, table = [line for line in lines if "texts/eval" in line]
    assert table.count(json.dumps(rows[0]["reference"])) >= 2  # the table has rows of both evaluations

    run_here(*command(models / "bart", "trainer.max_duration=2ba", folder="cut"), code=0)
    run_here("resume", "cut", "trainer.max_duration=4ba", code=0)
    assert metrics_in(pairs / "cut") == trained


@pytest.mark.slow
def test_two_ranks_generate_each_text_once(run_here, models: Path, pairs: Path):
    sampled = "max_new_tokens: 6, do_sample: true, top_k: 20"
    run_here(*command(models / "bart", generation=sampled), code=0)
    run_here("eval", "run", "hydra.run.dir=eval", "data.eval_batch_size=7", code=0)
    run_here("predict", "run", "hydra.run.dir=predict", code=0)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "runner"]
    for verb in ("eval", "predict"):
        arguments = [*torchrun, verb, "run", f"hydra.run.dir={verb}-on-ranks", "data.eval_batch_size=4"]
        run_python(arguments, cwd=pairs, check=True)
    assert metrics_in(pairs / "eval-on-ranks") == pytest.approx(metrics_in(pairs / "eval"), rel=1e-5)
    rows, rows_of_ranks = (rows_in(pairs / run / "predictions.parquet") for run in ("predict", "predict-on-ranks"))
    assert rows_of_ranks == rows and len(rows) == 7


def test_a_wrong_option_of_generation_ends_the_command(run_here, models: Path, pairs: Path):
    ended = run_here(*command(models / "bart", generation="max_tokens: 6"), code=2)
    assert "; did you mean" in ended.err and "model.generation" in ended.err
    assert not (pairs / "run").exists()


@pytest.mark.slow
def test_the_generate_callback_loads_a_tokenizer_by_name(models: Path):
    from runner.callbacks import Generate

    generate = Generate(["the dog"], tokenizer=str(models / "gpt2"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(models / "gpt2")
    tokens = generate.tokenizer.encode("the dog")
    assert tokens == tokenizer("the dog", add_special_tokens=False)["input_ids"]
    assert generate.tokenizer.decode([*tokens, tokenizer.eos_token_id]) == "the dog"
    with pytest.raises(OSError, match="tokenizer='missing': transformers cannot load it"):
        Generate(["the dog"], tokenizer="missing")
    with pytest.raises(ValueError, match="tokenizer=7: must have encode"):
        Generate(["the dog"], tokenizer=7)


def test_generation_with_a_sharded_model_is_refused_before_training(run_app, models: Path, pairs: Path):
    words = command(models / "bart", "trainer.parallel=fsdp", "launch.nproc_per_node=2")
    for verb in ("check", "train"):
        errors = run_app(verb, *words, exit_code=2).stderr
        assert "generation=True: texts are not generated by a sharded model; set trainer.parallel=ddp" in errors
        assert errors.count("error: ") == 1
    assert not (pairs / "run" / "checkpoints").exists()
