"""Transformers models in MLflow take tables of texts and return classes or texts, also through a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import stores
import torch
from served_models import load, model_folder, serving
from tiny_tokenizer import make_tokenizer

from runner.libraries.targets import prepare_import
from runner.models.hf.saving import save_pretrained

transformers: Any = pytest.importorskip("transformers")
pandas: Any = pytest.importorskip("pandas")

WORDS = ["the", "film", "was", "plot", "very", "good", "great", "bad", "awful"]
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
TEXTS = ["the film was good", "bad", "very " * 40 + "good", "the plot was awful"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a BERT and a GPT-2 of random weights, each with its tokenizer."""
    prepare_import("transformers")
    root = tmp_path_factory.mktemp("models")
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    (root / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    config = transformers.BertConfig(**SIZES, vocab_size=5 + len(WORDS), max_position_embeddings=24)
    transformers.BertModel(config).save_pretrained(root / "bert")
    transformers.BertTokenizer(str(root / "vocab.txt")).save_pretrained(root / "bert")
    make_tokenizer(root / "gpt2")
    vocab_size = len(transformers.AutoTokenizer.from_pretrained(root / "gpt2"))
    sizes = {"n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    config = transformers.GPT2Config(
        **sizes, vocab_size=vocab_size, initializer_range=0.4, eos_token_id=0, bos_token_id=0
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(root / "gpt2")
    transformers.utils.logging.enable_progress_bar()
    return root


@pytest.fixture
def classifier(run_here: Any, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a run that logged a classifier of reviews."""
    datasets: Any = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "prepared")
    lines = [f"the film was {('good', 'bad')[n % 2]},{('positive', 'negative')[n % 2]}" for n in range(20)]
    (tmp_path / "reviews.csv").write_text("\n".join(["review,verdict", *lines]) + "\n")
    run_here(
        *("model=hf_model", f"model.module.name={models / 'bert'}", "model.module.num_labels=2", "data=hf_dataset"),
        *("data.name=csv", "data.data_files=reviews.csv", "data.eval_split=null", "data.inputs=review"),
        *("data.targets=verdict", f"data.tokenizer={models / 'bert'}", "data.context=16", "data.num_workers=0"),
        *("algorithms=none", "optimizer=adamw", "optimizer.lr=0.03", "trainer.max_duration=12ep", "scheduler=none"),
        *("hydra.run.dir=run", "callbacks=[mlflow_logger,checkpoint_saver]", "callbacks.mlflow_logger.log_model=last"),
        *("callbacks.mlflow_logger.close_timeout=200", "callbacks.mlflow_logger.register_model=reviews"),
        code=0,
    )
    return tmp_path


def test_a_classifier_returns_the_labels_and_scores_of_a_transformers_pipeline(classifier: Path, models: Path):
    from mlflow.exceptions import MlflowException

    model = load(classifier)
    predictions = model.predict(pandas.DataFrame({"review": TEXTS}))
    saved = save_pretrained(classifier / "run", classifier / "saved", tokenizer=str(models / "bert"))
    pipeline = transformers.pipeline("text-classification", str(saved))
    expected = [pipeline(text, truncation=True, max_length=16)[0] for text in TEXTS]
    assert predictions["label"].tolist() == [row["label"] for row in expected]
    assert {*predictions["label"]} <= {"negative", "positive"}
    assert predictions["score"].tolist() == pytest.approx([row["score"] for row in expected], abs=1e-5)
    for label, score, probabilities in predictions[["label", "score", "probabilities"]].itertuples(index=False):
        assert {*probabilities} == {"negative", "positive"} and sum(probabilities.values()) == pytest.approx(1)
        assert max(probabilities, key=probabilities.get) == label and probabilities[label] == score
    assert not [path for path in model_folder(classifier).rglob("*") if path.suffix in (".pkl", ".bin", ".pt")]
    sql = "select name, version from model_versions"
    assert stores.query(classifier / "outputs" / "mlflow.db", sql) == [("reviews", 1)]

    with pytest.raises(ValueError, match="the table has no rows: give at least one, with the text in 'review'"):
        model.predict(pandas.DataFrame({"review": pandas.Series([], dtype=str)}))
    with pytest.raises(MlflowException, match="missing inputs \\['review'\\]"):
        model.predict(pandas.DataFrame({"text": TEXTS}))


def test_a_language_model_returns_what_transformers_generates(run_here: Any, models: Path, tmp_path: Path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("The quick brown fox jumps over the lazy dog. " * 60)
    run_here(
        *("model=hf_causal_lm", f"model.module.name={models / 'gpt2'}", "data=text_files", "data.path=texts"),
        *(f"data.tokenizer={models / 'gpt2'}", "data.context=16", "data.batch_size=4", "algorithms=none"),
        *("model.module.context=null", "model.generation={max_new_tokens: 5, prompt_tokens: 4, num_beams: 2}"),
        *("optimizer=adamw", "trainer.max_duration=2ba", "callbacks=[mlflow_logger]", "hydra.run.dir=run"),
        *("callbacks.mlflow_logger.log_model=last", "callbacks.mlflow_logger.close_timeout=200", "data.cache=null"),
        code=0,
    )
    prompts = ["The quick", "The lazy dog jumps over the", "fox " * 60]
    predictions = load(tmp_path).predict(pandas.DataFrame({"text": prompts}))
    folder = model_folder(tmp_path) / "artifacts" / "transformers"
    network = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    expected = []
    for prompt in prompts:
        tokens = torch.tensor([tokenizer(prompt)["input_ids"][-27:]])  # 32 positions, less 5 for new tokens
        generated = network.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=5, num_beams=2)
        expected.append(tokenizer.decode(generated[0, tokens.shape[1] :], skip_special_tokens=True).strip())
    assert predictions["generated"].tolist() == expected and any(expected)


@pytest.mark.slow
def test_a_server_returns_the_predictions_of_the_loaded_model(classifier: Path):
    with serving(classifier) as ask:
        status, answer = ask({"dataframe_split": {"columns": ["review"], "data": [[text] for text in TEXTS]}})
        expected = load(classifier).predict(pandas.DataFrame({"review": TEXTS}))
        assert status == 200 and answer["predictions"] == expected.to_dict("records")
        status, answer = ask({"dataframe_split": {"columns": ["text"], "data": [["good"]]}})
        assert status == 400 and "review" in json.dumps(answer)
