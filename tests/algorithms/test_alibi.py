from __future__ import annotations

import math

import pytest
import torch
from observers import Shapes
from torch import Tensor

from runner import Callback, Evaluator, LanguageModel
from runner.algorithms import ALiBi
from runner.algorithms.alibi import alibi, slopes
from runner.data import TensorLoader
from runner.models.gpt import GPT, Attention


def slopes_of_the_paper(n: int) -> list[float]:
    """Return slopes as in the code of the paper's authors."""

    def of_a_power_of_two(n: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**index for index in range(n)]

    if math.log2(n).is_integer():
        return of_a_power_of_two(n)
    closest = 2 ** math.floor(math.log2(n))
    return of_a_power_of_two(closest) + slopes_of_the_paper(2 * closest)[0::2][: n - closest]


def test_slopes_are_those_of_the_paper():
    for n_heads in (*range(1, 18), 40):
        assert slopes(n_heads) == pytest.approx(slopes_of_the_paper(n_heads), rel=1e-12)


def test_biases_are_slope_times_distance_and_hide_later_tokens():
    biases = alibi(4, 6, torch.device("cpu"), torch.float64)
    for head, slope in enumerate([1 / 4, 1 / 16, 1 / 64, 1 / 256]):
        for query in range(6):
            for key in range(6):
                expected = -slope * (query - key) if key <= query else -math.inf
                assert biases[head, query, key].item() == expected


def attend(attention: Attention, x: Tensor) -> Tensor:
    """Return causal attention with linear biases, by its formula."""
    q, k, v = attention.qkv(x).view(*x.shape[:2], 3, attention.n_heads, -1).permute(2, 0, 3, 1, 4)
    scores = q @ k.mT / q.shape[-1] ** 0.5 + alibi(attention.n_heads, x.shape[1], x.device, x.dtype)
    return attention.out((scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))


def test_the_attention_of_a_gpt_sees_biases_and_no_learned_positions(make_trainer, language):
    with make_trainer(ALiBi(40), **language) as trainer:
        gpt = trainer.state.unwrapped_model.module
        assert gpt.position_embedding is None
        x = torch.randn(3, 10, 16, dtype=torch.float64)
        for block in gpt.blocks:
            torch.testing.assert_close(
                block.attention(x, torch.zeros(3, 10, dtype=torch.int64)), attend(block.attention, x)
            )
        assert gpt.context == 40
        assert gpt(torch.randint(11, (1, 40))).shape == (1, 40, 11)
        with pytest.raises(ValueError, match="41 tokens is longer than max_sequence_length=40"):
            gpt(torch.randint(11, (1, 41)))


@pytest.mark.parametrize(("scaling", "shape"), [(0.25, (32, 3)), (0.5, (16, 6)), (1, (8, 12))])
def test_training_uses_pieces_and_evaluation_whole_sequences(make_trainer, language, scaling: float, shape: tuple):
    shapes = Shapes()
    with make_trainer(ALiBi(12, scaling), **language, callbacks=[shapes], eval_interval="1ep") as trainer:
        trainer.fit()
        assert shapes.trained == {shape}
        assert shapes.evaluated == {(8, 12)}
        now = trainer.state.timestamp
        assert (now.batch, now.sample, now.token) == (6, 48, 48 * 12)


def test_pieces_keep_the_order_of_the_text(make_trainer, language):
    class Watch(Callback):
        def batch_start(self, state, logger):
            self.inputs, self.targets = state.batch

    watch = Watch()
    with make_trainer(ALiBi(12), **language, callbacks=[watch], max_duration="1ba") as trainer:
        trainer.fit()
    whole = torch.cat([torch.stack(batch, dim=1) for batch in language["eval_dataloader"]])
    assert torch.equal(watch.inputs[:, 1:], watch.targets[:, :-1])  # targets are the next tokens of the same piece
    sequences = torch.stack([watch.inputs.reshape(8, 12), watch.targets.reshape(8, 12)], dim=1)
    assert all((sequence == whole).flatten(1).all(dim=1).any() for sequence in sequences)


def test_attention_dropout_acts_in_training_only(make_trainer, language):
    model = LanguageModel(GPT(vocab_size=11, context=12, d_model=16, n_heads=4, dropout=0.5))
    with make_trainer(ALiBi(12), **language, model=model) as trainer:
        attention = trainer.state.unwrapped_model.module.blocks[0].attention.attend
        q, k, v = torch.randn(3, 1, 4, 6, 4)
        assert not torch.equal(attention.train()(q, k, v), attention(q, k, v))
        assert torch.equal(attention.eval()(q, k, v), attention(q, k, v))


@pytest.mark.parametrize("scaling", [0.4, 0.01])
def test_sequences_that_cannot_be_cut_evenly_are_refused(train, language, scaling: float):
    with pytest.raises(ValueError, match=f"train_sequence_length_scaling={scaling}: cannot cut"):
        train(ALiBi(12, scaling), **language)


def test_tensors_of_unequal_lengths_are_refused(train, language):
    batches = [(torch.zeros(2, 12, dtype=torch.int64), torch.zeros(2, 11, dtype=torch.int64))]
    with pytest.raises(ValueError, match=r"cannot cut tensors of shapes \(2, 12\), \(2, 11\) into pieces of 3 tokens"):
        train(ALiBi(12), **{**language, "train_dataloader": batches})


def refusal_at_the_start(train, *algorithms, **arguments) -> str:
    with pytest.raises(ValueError, match="tokens") as caught:
        train(*algorithms, **arguments)
    assert any("at FIT_START" in note for note in caught.value.__notes__)
    return str(caught.value)


def test_unsuitable_sequences_are_refused_before_training(train, language):
    assert "12 tokens is longer than max_sequence_length=6" in refusal_at_the_start(train, ALiBi(6), **language)
    assert "into pieces of 5 tokens" in refusal_at_the_start(train, ALiBi(12, 0.4), **language)
    long, short = language["eval_dataloader"], TensorLoader(*torch.zeros(2, 8, 6).long(), batch_size=8, shuffle=False)
    several = {**language, "eval_dataloader": [Evaluator("short", short), Evaluator("long", long)]}
    assert "12 tokens is longer" in refusal_at_the_start(train, ALiBi(6), **several)


def test_an_evaluator_that_never_runs_may_have_longer_sequences(train, language):
    train(ALiBi(6), **language, eval_interval=0)
    evaluators = [Evaluator("long", language["eval_dataloader"], eval_interval=0)]
    train(ALiBi(6), **{**language, "eval_dataloader": evaluators})


def test_an_unchanged_model_has_no_maximum_sequence_length(train):
    train(ALiBi(1, 1.0, allow_no_match=True), max_duration="1ba")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"max_sequence_length": 0}, "max_sequence_length=0"),
        ({"max_sequence_length": 8, "train_sequence_length_scaling": 0}, "train_sequence_length_scaling=0"),
        ({"max_sequence_length": 8, "train_sequence_length_scaling": 1.5}, "train_sequence_length_scaling=1.5"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict, match: str):
    with pytest.raises(ValueError, match=match):
        ALiBi(**arguments)
