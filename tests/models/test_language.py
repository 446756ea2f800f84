"""LanguageModel: loss, metric and FLOPs of token batches with ignored targets."""

import torch
import torch.nn.functional as F
from torch import nn

from runner.models.language import LanguageModel


class Bigram(nn.Module):
    def __init__(self, vocab_size=6):
        super().__init__()
        self.logits = nn.Embedding(vocab_size, vocab_size)

    def forward(self, tokens):
        return self.logits(tokens)


def token_batch():
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randint(6, (2, 3, 4), generator=generator)
    targets[0, :3] = -100
    targets[2, 1] = -100
    return inputs, targets


def test_loss_is_torchs_mean_over_the_valid_targets():
    model, batch = LanguageModel(Bigram()), token_batch()
    outputs = model(batch)
    assert outputs.shape == (3, 4, 6)
    expected = F.cross_entropy(outputs.flatten(0, 1), batch[1].flatten(), ignore_index=-100)
    torch.testing.assert_close(model.loss(outputs, batch), expected)
    weight = model.loss_weight(batch)
    assert (weight.shape, weight.dtype, weight.item()) == ((), torch.int64, 8)
    assert (model.num_samples(batch), model.num_tokens(batch)) == (3, 12)


def test_weighted_microbatches_have_the_gradient_of_the_batch_even_if_one_has_no_valid_target():
    bigram, batch = Bigram(), token_batch()
    model = LanguageModel(bigram)
    batch[1][1] = -100
    model.loss(model(batch), batch).backward()
    whole = bigram.logits.weight.grad
    assert whole is not None
    model.zero_grad(set_to_none=True)
    for row in range(3):
        part = batch[0][row : row + 1], batch[1][row : row + 1]
        (model.loss(model(part), part) * model.loss_weight(part) / model.loss_weight(batch)).backward()
    torch.testing.assert_close(bigram.logits.weight.grad, whole)
    assert whole.isfinite().all() and whole.any()


def test_the_metric_is_the_loss_in_bits():
    model, batch = LanguageModel(Bigram(), metric_name="BitsPerByte"), token_batch()
    assert model.metrics(train=True) == {}
    metrics = model.metrics(train=False)
    assert list(metrics) == ["BitsPerByte"]
    outputs = model.eval_forward(batch)
    model.update_metric(batch, outputs, metrics["BitsPerByte"])
    bits = model.loss(outputs, batch) / torch.log(torch.tensor(2.0))
    torch.testing.assert_close(metrics["BitsPerByte"].compute(), bits)
    assert list(LanguageModel(Bigram()).metrics(train=False)) == ["BitsPerToken"]


def test_flops_per_batch_come_from_the_module():
    class WithFlops(Bigram):
        def flops_per_token(self, context):
            return 10.0 * context

    assert LanguageModel(Bigram()).flops_per_batch(token_batch()) is None
    assert LanguageModel(WithFlops()).flops_per_batch(token_batch()) == 12 * 40.0
