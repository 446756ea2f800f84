"""Float8. Skipped without torchao: pip install --no-deps torchao."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

from runner import Algorithm, Callback, LanguageModel
from runner.algorithms import Float8
from runner.algorithms.float8 import RECIPES
from runner.models import GPT

pytest.importorskip("torchao")


def gpt(d_model: int = 16) -> LanguageModel:
    """Return a GPT of two blocks with four linear layers each, and a head; all sizes are multiples of 16."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LanguageModel(GPT(vocab_size=16, context=12, d_model=d_model, n_layers=2, n_heads=2))


class Losses(Callback):
    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def batch_end(self, state, logger):
        self.seen.append(state.total_loss)


@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_in_blocks_round_to_float8_and_losses_stay_close(make_trainer, language, recipe: str):
    def run(*algorithms: Algorithm) -> tuple[Tensor, LanguageModel]:
        losses = Losses()
        with make_trainer(*algorithms, callbacks=[losses], **{**language, "build": gpt}) as trainer:
            trainer.fit()
        return torch.stack(losses.seen), trainer.state.unwrapped_model

    rounded, model = run(Float8(recipe, emulate=True))
    exact, plain = run()
    torch.testing.assert_close(rounded, exact, rtol=1e-2, atol=0)
    assert not torch.equal(rounded, exact)
    names = [name for name, layer in model.named_modules() if type(layer).__name__ == "Float8Linear"]
    assert len(names) == 8 and all("blocks" in name for name in names)
    assert [*model.state_dict()] == [*plain.state_dict()]  # checkpoints fit with and without


def test_float8_training_resumes_bit_for_bit(check_resume, language):
    check_resume(lambda: [Float8(emulate=True)], **{**language, "build": gpt})


def test_unsupported_devices_and_models_are_refused(make_trainer, language, monkeypatch: pytest.MonkeyPatch):
    for algorithm, options, message in (
        (Float8(), {}, "Float8 needs a CUDA device of capability 8.9 or more, not cpu: leave it out, or"),
        (
            Float8(emulate=True),
            {"build": lambda: gpt(12)},
            "found no linear layer with sizes that are multiples",
        ),
        (
            Float8(exclude=["*blocks.1*", "*atention*"], emulate=True),
            {},
            r"'\*atention\*' matches no linear layer; there are .*attention\.qkv, ",
        ),
        (
            Float8(RECIPES[-1], emulate=True),
            {"precision": "amp_fp16"},
            "ignores autocast on cpu: set",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make_trainer(algorithm, **{**language, "build": gpt, **options})
    with pytest.raises(ValueError, match="recipe='blockwise': must be one of 'tensorwise'"):
        Float8("blockwise")
    with pytest.raises(ValueError, match="exclude='head': must be a list of patterns"):
        Float8(exclude="head")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="Float8 needs torchao, not installed here: pip install"):
        Float8()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:torch.get_autocast_gpu_dtype:DeprecationWarning")  # torchao calls it
def test_products_on_a_gpu_are_close_to_emulated_products(make_trainer, language):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU that multiplies in float8")

    def run(emulate: bool) -> Tensor:
        losses, options = Losses(), {**language, "build": gpt, "device": "cuda", "precision": "amp_bf16"}
        with make_trainer(Float8(emulate=emulate), callbacks=[losses], **options) as trainer:
            trainer.fit()
        return torch.stack(losses.seen)

    torch.testing.assert_close(run(False), run(True), rtol=1e-2, atol=0)
