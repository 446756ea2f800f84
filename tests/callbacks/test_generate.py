from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_runs import tiny_trainer
from torch import Tensor, nn

from runner import Callback, ClassificationModel, LanguageModel, Trainer, save_checkpoint
from runner.algorithms import EMA
from runner.callbacks import Generate, InMemoryLogger
from runner.callbacks.generate import draw
from runner.data import TensorLoader

VOCABULARY = 128


class Successor(nn.Module):
    """Predicts each byte plus one, whatever the weights. Records the mode and the length of each call."""

    context = 4

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))
        self.calls: list[tuple[bool, bool, int]] = []

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls.append((self.training, torch.is_grad_enabled(), tokens.shape[1]))
        assert tokens.shape[1] <= self.context
        return 100.0 * F.one_hot((tokens + 1) % VOCABULARY, VOCABULARY) + 0.0 * self.bias


class Learner(nn.Module):
    """A bigram model, which is a table of logits, with dropout."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, VOCABULARY)
        self.dropout = nn.Dropout(0.5)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            nn.init.normal_(self.table.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.dropout(self.table(tokens))


def make_trainer(module: nn.Module, *callbacks: Callback, **arguments: Any) -> Trainer:
    tokens = torch.randint(VOCABULARY, (12, 5), generator=torch.Generator().manual_seed(0))
    inputs, targets = tokens[:, :4].contiguous(), tokens[:, 1:].contiguous()
    defaults: dict[str, Any] = {
        "model": LanguageModel(module),
        "train_dataloader": TensorLoader(inputs, targets, batch_size=4, shuffle=True),
        "optimizers": lambda params: torch.optim.SGD(params, lr=10.0),
        "max_duration": "4ep",
    }
    return tiny_trainer(*callbacks, **(defaults | arguments))


def table(memory: InMemoryLogger, name: str = "generate") -> list[list[Any]]:
    assert memory.tables[name]["columns"] == ["batch", "prompt", "text"]
    return memory.tables[name]["rows"]


def test_prompts_are_continued_at_the_interval_and_at_the_end():
    memory, module = InMemoryLogger(), Successor()
    generate = Generate(["abc", "0"], interval="5ba", max_new_tokens=6)
    with make_trainer(module, generate, loggers=[memory]) as trainer:
        trainer.fit()
    written = [["abc", "defghi"], ["0", "123456"]]
    assert table(memory) == [[batch, *texts] for batch in (5, 10, 12) for texts in written]
    assert memory.tables["generate"]["step"] == 12
    # Calls: a check at FIT_START, 12 training batches, and 3 times 2 texts of 6 tokens.
    assert module.calls.count((True, True, 4)) == 12
    assert [(mode, grad) for mode, grad, _ in module.calls if not mode] == [(False, False)] * 37
    assert max(length for *_, length in module.calls) == 4


def test_an_interval_may_be_in_epochs_or_0_for_the_end_only():
    for interval, batches in (("2ep", [6, 12]), (0, [12])):
        memory = InMemoryLogger()
        with make_trainer(Successor(), Generate(["a"], interval), loggers=[memory]) as trainer:
            trainer.fit()
        assert [row[0] for row in table(memory)] == batches


def test_texts_are_generated_with_averaged_weights():
    class ConstantPrediction(nn.Module):
        """Predicts the byte with the largest weight, whatever the text."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(F.one_hot(torch.tensor(ord("a")), VOCABULARY).float())

        def forward(self, tokens: Tensor) -> Tensor:
            return self.weight.expand(*tokens.shape, VOCABULARY)

    batches = [(torch.full((2, 3), 7), torch.full((2, 3), ord("z")))] * 3
    for algorithms, text in (([], "zz"), ([EMA("1000ba")], "aa")):
        memory, module = InMemoryLogger(), ConstantPrediction()
        generate = Generate(["x"], 0, max_new_tokens=2, temperature=0.0)
        arguments = {"train_dataloader": batches, "algorithms": algorithms, "max_duration": "1ep"}
        with make_trainer(module, generate, loggers=[memory], **arguments) as trainer:
            trainer.fit()
        assert table(memory) == [[3, "x", text]]
        assert module.weight.argmax() == ord("z")


def test_generation_does_not_change_training_and_is_reproducible():
    losses, texts = [], []
    for callbacks in ([], [Generate(["ab"], "2ba")], [Generate(["ab"], "2ba")]):
        memory = InMemoryLogger()
        with make_trainer(Learner(), *callbacks, loggers=[memory]) as trainer:
            trainer.fit()
            losses.append(memory.get_timeseries("loss/train/total"))
        texts += [table(memory)] if callbacks else []
    assert losses[0] == losses[1] == losses[2]
    assert texts[0] == texts[1]
    assert len({text for *_, text in texts[0]}) == 6


def test_a_resumed_run_generates_the_same_texts(tmp_path: Path):
    def run(duration: str, **arguments: Any) -> list[list[Any]]:
        memory = InMemoryLogger()
        trainer = make_trainer(Learner(), Generate(["ab"], "2ba"), loggers=[memory], max_duration=duration, **arguments)
        with trainer:
            trainer.fit()
            save_checkpoint(trainer.state, tmp_path / duration)
        return table(memory)

    whole = run("4ep")
    assert run("6ba") == whole[:3]
    assert run("12ba", resume_path=tmp_path / "6ba") == whole


def test_draws_follow_the_probabilities():
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0])
    for temperature, top_k, expected in (
        (1.0, None, logits.softmax(0)),
        (2.0, None, (logits / 2).softmax(0)),
        (1.0, 2, torch.cat([torch.zeros(2), logits[2:].softmax(0)])),
        (1.0, 9, logits.softmax(0)),
        (0.0, None, torch.tensor([0.0, 0.0, 0.0, 1.0])),
    ):
        tokens = draw(logits.expand(20_000, 4), temperature, top_k, generator)
        shares = torch.bincount(tokens[:, 0], minlength=4) / 20_000
        assert shares == pytest.approx(expected, abs=0.012)  # more than three standard deviations
    assert draw(torch.full((1, 4), torch.nan), 1.0, None, generator).item() in range(4)


class Words:
    """Tokens that are words."""

    words = ("one", "two", "three", "four", "five", "six")

    def encode(self, text: str) -> list[int]:
        return [self.words.index(word) for word in text.split()]

    def decode(self, tokens: list[int]) -> str:
        return " ".join(self.words[token] for token in tokens)


def test_a_custom_tokenizer_is_used():
    memory = InMemoryLogger()
    generate = Generate(["one two"], 0, max_new_tokens=3, tokenizer=Words())
    generate.config_key = "words"
    with make_trainer(Successor(), generate, loggers=[memory]) as trainer:
        trainer.fit()
    assert table(memory, "words") == [[12, "one two", "three four five"]]


def test_bytes_that_are_not_utf_8_become_replacement_characters():
    class InvalidBytes(Successor):
        def forward(self, tokens: Tensor) -> Tensor:
            return 100.0 * F.one_hot(torch.full_like(tokens, 0xE9), 300) + 0.0 * self.bias.sum()

    memory = InMemoryLogger()
    generate = Generate(["é"], 0, max_new_tokens=2)
    with make_trainer(InvalidBytes(), generate, loggers=[memory]) as trainer:
        trainer.fit()
    assert table(memory) == [[12, "é", "\ufffd\ufffd"]]


def test_a_prompt_with_tokens_outside_the_vocabulary_is_refused():
    trainer = make_trainer(Successor(), Generate(["a", "é"]))
    with pytest.raises(ValueError, match="prompts='é': has token 195, but the model has only 128 tokens"):
        trainer.fit()


def test_a_model_that_is_not_a_language_model_gives_one_warning(caplog):
    memory = InMemoryLogger()
    batches = [(torch.ones(2, 3), torch.zeros(2, dtype=torch.int64))] * 3
    model = ClassificationModel(nn.Linear(3, 2), 2)
    arguments = {"model": model, "train_dataloader": batches, "loggers": [memory]}
    with make_trainer(Successor(), Generate(["a"], "1ba"), **arguments) as trainer:
        trainer.fit()
    assert caplog.messages == ["generate does nothing: ClassificationModel is not a LanguageModel"]
    assert memory.tables == {}


@pytest.mark.parametrize(
    "arguments",
    [
        {"prompts": []},
        {"prompts": "abc"},
        {"prompts": ["a", ""]},
        {"max_new_tokens": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": 0},
        {"tokenizer": 3},
        {"interval": "often"},
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any]):
    ((name, value),) = arguments.items()
    defaults: dict[str, Any] = {"prompts": ["a"]}
    with pytest.raises(ValueError) as caught:
        Generate(**(defaults | arguments))
    assert str(caught.value).startswith(f"{name}={value!r}")
