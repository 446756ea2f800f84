import math

import pytest
import torch

from runner.data import load_synthetic_tokens
from runner.data.text.synthetic_tokens import entropy_rate, transition_matrix


def test_targets_are_the_inputs_shifted_by_one_token():
    train, evaluation = load_synthetic_tokens(
        num_samples=20, context=9, vocab_size=5, batch_size=4, eval_samples=7, eval_batch_size=3
    )
    inputs, targets = next(iter(train))
    assert inputs.shape == targets.shape == (4, 9)
    assert inputs.dtype == targets.dtype == torch.int64
    torch.testing.assert_close(inputs[:, 1:], targets[:, :-1])
    assert set(train.tensors[0].flatten().tolist()) == set(range(5))
    assert [len(inputs) for inputs, _ in evaluation] == [3, 3, 1]


def test_transitions_of_the_sequences_follow_the_chain():
    train, _ = load_synthetic_tokens(num_samples=4000, context=64, vocab_size=6, seed=3)
    pairs = torch.stack([tensor.flatten() for tensor in train.tensors])
    counts = torch.zeros(6, 6).index_put_((pairs[0], pairs[1]), torch.ones(pairs.shape[1]), accumulate=True)
    torch.testing.assert_close(counts / counts.sum(1, keepdim=True), transition_matrix(6, seed=3), atol=0.02, rtol=0)


def test_evaluation_has_the_same_chain_and_different_sequences():
    train, evaluation = load_synthetic_tokens(num_samples=500, eval_samples=500, vocab_size=6, seed=1)
    bits = -transition_matrix(6, seed=1).log2()
    measured = [bits[inputs, targets].mean().item() for inputs, targets in (train.tensors, evaluation.tensors)]
    assert measured == pytest.approx([entropy_rate(transition_matrix(6, seed=1))] * 2, rel=0.02)
    assert not (train.tensors[0][:, None] == evaluation.tensors[0]).all(-1).any()


def test_entropy_rates_equal_closed_forms():
    assert entropy_rate(torch.full((8, 8), 1 / 8)) == pytest.approx(3.0)
    assert entropy_rate(torch.eye(4).roll(1, 1)) == 0.0
    stay, leave = 0.9, 0.4  # two states, stationary probabilities 0.8 and 0.2

    def entropy(p):
        return -p * math.log2(p) - (1 - p) * math.log2(1 - p)

    chain = torch.tensor([[stay, 1 - stay], [leave, 1 - leave]])
    assert entropy_rate(chain) == pytest.approx(0.8 * entropy(0.9) + 0.2 * entropy(0.4), rel=1e-6)


def test_sequences_depend_on_the_seed():
    first, again, different = (load_synthetic_tokens(num_samples=10, seed=seed)[0].tensors[0] for seed in (0, 0, 1))
    torch.testing.assert_close(first, again)
    assert not torch.equal(first, different)


@pytest.mark.parametrize(
    "argument", [{"num_samples": 0}, {"context": 0}, {"vocab_size": 1}, {"eval_samples": 0}], ids=str
)
def test_errors_name_the_wrong_argument(argument):
    ((name, value),) = argument.items()
    with pytest.raises(ValueError, match=f"{name}={value}: must be a whole number, at least"):
        load_synthetic_tokens(**argument)
