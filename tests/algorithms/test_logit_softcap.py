from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from runner import ClassificationModel
from runner.algorithms import LogitSoftcap
from runner.algorithms.logit_softcap import softcap


def test_softcap_has_the_values_and_slopes_of_its_formula():
    logits = torch.linspace(-100, 100, 41, dtype=torch.float64, requires_grad=True)
    capped = softcap(logits, 15.0)
    expected = [15 * (1 - 2 / (math.exp(2 * x / 15) + 1)) for x in logits.tolist()]
    torch.testing.assert_close(capped, torch.tensor(expected, dtype=torch.float64))
    (slope,) = torch.autograd.grad(capped.sum(), logits)
    torch.testing.assert_close(slope, 1 - (capped / 15).square())


def test_a_large_cap_changes_nothing():
    logits = torch.randn(100, dtype=torch.float64)
    torch.testing.assert_close(softcap(logits, 1e6), logits)


def test_training_evaluation_and_the_model_itself_see_capped_logits(make_trainer, language):
    plain = language["build"]().module
    tokens, targets = map(torch.cat, zip(*language["eval_dataloader"], strict=True))
    capped = 0.5 * torch.tanh(plain(tokens) / 0.5)
    with make_trainer(LogitSoftcap(0.5), **language, max_duration="1ba") as trainer:
        torch.testing.assert_close(trainer.state.unwrapped_model.module(tokens), capped)
        loss = trainer.eval()["eval"]["loss"]
        expected = F.cross_entropy(capped.flatten(0, 1), targets.flatten())
        torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)
        trainer.fit()
        inputs, targets = trainer.state.batch
        expected = F.cross_entropy(0.5 * torch.tanh(plain(inputs) / 0.5).flatten(0, 1), targets.flatten())
        torch.testing.assert_close(trainer.state.total_loss, expected.detach())


def test_a_tied_head_stays_tied_and_keeps_its_name(make_trainer, language):
    names = [*language["build"]().state_dict()]
    with make_trainer(LogitSoftcap(), **language) as trainer:
        model = trainer.state.unwrapped_model
        assert model.module.head.weight is model.module.token_embedding.weight
        assert [*model.state_dict()] == names
        trainer.fit()


@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers_are_chosen_by_name(make_trainer, bias: bool):
    net = nn.Sequential(nn.Flatten(), nn.Linear(32, 3, bias=bias)).double()
    images = torch.randn(2, 2, 4, 4, dtype=torch.float64)
    expected = softcap(net(images), 0.2)
    with make_trainer(LogitSoftcap(0.2, head="module.1"), model=ClassificationModel(net, 3)) as trainer:
        torch.testing.assert_close(net(images), expected)
        trainer.fit()


def test_unsuitable_arguments_and_models_are_refused(make_trainer, language):
    with pytest.raises(ValueError, match="cap=0"):
        LogitSoftcap(0)
    with pytest.raises(ValueError, match="LogitSoftcap found no linear layer with a name like 'tail'"):
        make_trainer(LogitSoftcap(head="tail"), **language)
    make_trainer(LogitSoftcap(head="tail", allow_no_match=True), **language).close()
