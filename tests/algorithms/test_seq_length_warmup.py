from __future__ import annotations

import pytest
import torch
from rank_runs import program_of

from runner import LanguageModel, Trainer, get_global_rank
from runner.algorithms import SeqLengthWarmup
from runner.algorithms._first_batch import first_batch
from runner.algorithms._sequences import cut_into_pieces
from runner.algorithms.seq_length_warmup import divisor_near, scheduled_length, truncate
from runner.data import DatasetLoader, TensorLoader
from runner.models import GPT

CONTEXT = 16


def make_model() -> LanguageModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = GPT(vocab_size=7, context=CONTEXT, d_model=8, n_layers=1, n_heads=2)
    return LanguageModel(net.double())


def make_tokens() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(7, (24, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


@pytest.fixture
def arguments() -> dict:
    loader = TensorLoader(*make_tokens(), batch_size=8, shuffle=True)
    return {"build": make_model, "train_dataloader": loader, "eval_dataloader": None, "max_duration": "10ba"}


def test_the_length_rises_linearly_in_steps():
    lengths = [scheduled_length(progress / 100, 0.5, 8, 128, 8) for progress in range(101)]
    assert lengths[0] == 8
    assert lengths[25] == 64  # (8 + 128) / 2 = 68, rounded down to a multiple of 8
    assert set(lengths[50:]) == {128}
    assert lengths == sorted(lengths)
    assert all(length % 8 == 0 for length in lengths)
    assert scheduled_length(0.1, 0.5, 10, 100, 64) == 10  # never below the initial length
    assert scheduled_length(0.0, 0.0, 8, 128, 8) == 128


@pytest.mark.parametrize("whole", [7, 12, 128, 1000])
def test_the_length_of_pieces_divides_that_of_the_sequence(whole: int):
    for shortest in range(1, whole + 1 if whole < 1000 else 2):
        divisors = [number for number in range(shortest, whole + 1) if whole % number == 0]
        for length in range(shortest, whole + 1):
            up_to_length = [number for number in divisors if number <= length]
            assert divisor_near(whole, length, shortest) == (up_to_length[-1] if up_to_length else divisors[0])


def test_truncation_keeps_the_first_tokens_and_leaves_other_tensors_whole():
    tokens, mask, labels = torch.arange(24).view(2, 12), torch.rand(2, 12, 3), torch.tensor([0, 1])
    batch = truncate({"tokens": tokens, "mask": mask, "labels": labels}, 12, 5)
    assert torch.equal(batch["tokens"], tokens[:, :5])
    assert torch.equal(batch["mask"], mask[:, :5])
    assert torch.equal(batch["labels"], labels)


def test_pieces_hold_all_tokens_in_order():
    tokens = torch.arange(24).view(2, 12)
    pieces, targets = cut_into_pieces((tokens, tokens + 1), 12, 4, "truncate=False", "set truncate=True")
    assert torch.equal(pieces, torch.arange(24).view(6, 4))
    assert torch.equal(targets, pieces + 1)
    with pytest.raises(ValueError, match="truncate=False"):
        cut_into_pieces((tokens, torch.tensor([0, 1])), 12, 4, "truncate=False", "set truncate=True")


@pytest.mark.parametrize("truncating", [True, False])
def test_training_uses_short_sequences_first(train, arguments, truncating: bool):
    algorithm = SeqLengthWarmup(duration=0.5, min_seq_length=4, step_size=2, truncate=truncating)
    shapes = [tuple(inputs.shape) for inputs, _ in train(algorithm, **arguments).batches]
    if truncating:
        assert shapes == [(8, 4), (8, 6), (8, 8), (8, 10), (8, 12)] + [(8, 16)] * 5
    else:
        assert shapes == [(32, 4), (32, 4), (16, 8), (16, 8), (16, 8)] + [(8, 16)] * 5


@pytest.mark.parametrize(("truncating", "tokens"), [(True, 8 * (4 + 6 + 8 + 10 + 12 + 5 * 16)), (False, 10 * 8 * 16)])
def test_only_trained_tokens_are_counted(make_trainer, arguments, truncating: bool, tokens: int):
    algorithm = SeqLengthWarmup(duration=0.5, min_seq_length=4, step_size=2, truncate=truncating)
    with make_trainer(algorithm, **arguments) as trainer:
        trainer.fit()
        assert trainer.state.timestamp.token == tokens
        assert trainer.state.timestamp.sample == 80


def test_gradients_are_those_of_the_short_sequences(train, make_trainer, arguments):
    whole = train(SeqLengthWarmup(min_seq_length=4, truncate=False), **arguments)
    split = train(SeqLengthWarmup(min_seq_length=4, truncate=False), **arguments, grad_accum=4)
    torch.testing.assert_close(split.gradients, whole.gradients)
    model = make_model()
    loader = iter(TensorLoader(*make_tokens(), batch_size=8, shuffle=True))
    inputs, targets = (part.reshape(32, 4) for part in next(loader))
    model.loss(model((inputs, targets)), (inputs, targets)).backward()
    torch.testing.assert_close(whole.gradients[0], [p.grad for p in model.parameters()])


def test_a_warmup_without_shorter_sequences_changes_nothing(train, arguments):
    plain = train(**arguments).gradients
    for algorithm in (SeqLengthWarmup(duration=0.0), SeqLengthWarmup(min_seq_length=CONTEXT)):
        torch.testing.assert_close(train(algorithm, **arguments).gradients, plain, rtol=0, atol=0)


def test_max_seq_length_applies_after_the_warmup_too(train, arguments):
    algorithm = SeqLengthWarmup(duration=0.2, min_seq_length=2, max_seq_length=6, step_size=1)
    shapes = [inputs.shape[1] for inputs, _ in train(algorithm, **arguments).batches]
    assert shapes == [2, 4] + [6] * 8


@pytest.mark.parametrize(
    "arguments", [{"duration": 1.5}, {"min_seq_length": 0}, {"max_seq_length": 4}, {"step_size": 0.5}]
)
def test_wrong_arguments_are_refused(arguments: dict):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"{name}={arguments[name]!r}"):
        SeqLengthWarmup(**arguments)


def test_inputs_that_are_not_tokens_are_refused(train):
    with pytest.raises(ValueError, match=r"needs tokens \(N, T\)"):
        train(SeqLengthWarmup(input_key=1))
    with pytest.raises(ValueError, match=r"needs tokens \(N, T\)"):
        train(SeqLengthWarmup())


def test_unsuitable_data_in_memory_are_refused_before_the_first_batch(train, arguments):
    with pytest.raises(ValueError, match="needs tokens") as caught:
        train(SeqLengthWarmup())
    assert any("at FIT_START" in note for note in caught.value.__notes__)
    tokens, _ = make_tokens()
    arguments["train_dataloader"] = TensorLoader(tokens, tokens[:, 0], batch_size=8, shuffle=True)
    with pytest.raises(ValueError, match="truncate=False: cannot cut") as caught:
        train(SeqLengthWarmup(truncate=False), **arguments)
    assert any("at FIT_START" in note for note in caught.value.__notes__)


def test_reading_the_first_batch_does_not_change_random_draws(train, arguments):
    drawn = []

    def drop_tokens(batch):
        drawn.append(torch.rand(8, 1))
        return tuple(part * (drawn[-1] < 0.5) for part in batch)

    data = TensorLoader(*make_tokens(), batch_size=8, shuffle=True, transform=drop_tokens)
    assert first_batch(data) is None and not drawn
    random_state = torch.get_rng_state()
    assert first_batch(arguments["train_dataloader"])[0].shape == (8, CONTEXT)
    assert torch.equal(torch.get_rng_state(), random_state)
    train(SeqLengthWarmup(), **arguments | {"train_dataloader": data})
    drawn_with_warmup, drawn[:] = drawn[:], []
    train(**arguments | {"train_dataloader": data})
    torch.testing.assert_close(drawn_with_warmup, drawn, rtol=0, atol=0)


def test_only_data_in_memory_are_read_before_training():
    class Unread:
        def __len__(self):
            return 8

        def __getitem__(self, index):
            raise AssertionError("the data were read")

    assert first_batch(DatasetLoader(Unread(), batch_size=4, shuffle=False)) is None
    assert first_batch(iter(())) is None


@pytest.mark.parametrize("truncating", [True, False])
def test_a_resumed_run_is_bit_identical(check_resume, arguments, truncating: bool):
    arguments |= {"max_duration": "6ba", "eval_dataloader": arguments["train_dataloader"]}
    check_resume(lambda: [SeqLengthWarmup(1.0, 4, 16, 1, truncating)], **arguments)


def train_on_a_rank() -> None:
    """Train with batches of 7 on this rank, and save the weights and the number of tokens."""
    model = make_model()
    with Trainer(
        model=model,
        train_dataloader=TensorLoader(*make_tokens(), batch_size=7, shuffle=True),
        optimizers=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        max_duration="10ba",
        algorithms=SeqLengthWarmup(0.5, 4, 16, 2, truncate=False),
        device="cpu",
    ) as trainer:
        trainer.fit()
        torch.save([model.state_dict(), trainer.state.timestamp.token], f"{get_global_rank()}.pt")


def test_two_ranks_train_like_one(run_ranks, arguments, make_trainer, tmp_path):
    run_ranks(program_of("algorithms/test_seq_length_warmup", "train_on_a_rank"))
    arguments["train_dataloader"] = TensorLoader(*make_tokens(), batch_size=7, shuffle=True)
    with make_trainer(SeqLengthWarmup(0.5, 4, 16, 2, truncate=False), **arguments) as trainer:
        trainer.fit()
    for rank in range(2):
        weights, tokens = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert tokens == trainer.state.timestamp.token
        torch.testing.assert_close(weights, trainer.state.unwrapped_model.state_dict())
