"""Documents are packed into windows, in which they do not attend to each other."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from main_runs import run_folders
from tiny_tokenizer import make_tokenizer

from runner import LanguageModel, Trainer
from runner.algorithms import ALiBi, RotaryEmbedding
from runner.data.text.packing import PackedWindows, best_fit, document_ends, split_ends
from runner.data.text.text_files import load_text_files
from runner.data.text.token_cache import TokenCache
from runner.models import GPT

CONTEXT = 16
LENGTHS = [5, 17, 2, 40, 1, 9, 12, 3, 8]  # tokens of each document


def tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, 64, (sum(LENGTHS),), generator=generator, dtype=torch.uint8)


def make_windows(cache: Path | None = None) -> PackedWindows:
    folder = TokenCache(None if cache is None else str(cache))
    return PackedWindows(tokens(), numpy.cumsum(LENGTHS), CONTEXT, folder, "key")


def naive_best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Put each piece, longest first, into the fullest window that has room for it."""
    windows: list[list[int]] = []
    for piece in sorted(range(len(lengths)), key=lambda piece: -lengths[piece]):
        free = [capacity - sum(lengths[member] for member in window) for window in windows]
        fitting = [(room, number) for number, room in enumerate(free) if room >= lengths[piece]]
        if fitting:
            windows[min(fitting)[1]].append(piece)
        else:
            windows.append([piece])
    return windows


@pytest.mark.parametrize("capacity", [1, 7, 64])
def test_best_fit_equals_a_search_of_all_windows(capacity: int):
    lengths = numpy.random.default_rng(0).integers(1, capacity + 1, 300).tolist()
    windows = best_fit(lengths, capacity)
    assert sorted(piece for window in windows for piece in window) == [*range(300)]

    def sizes(windows: list[list[int]]) -> list[int]:
        return sorted(sum(lengths[piece] for piece in window) for window in windows)

    assert max(sizes(windows)) <= capacity
    assert sizes(windows) == sizes(naive_best_fit(lengths, capacity))


def test_every_pair_of_adjacent_tokens_in_a_document_appears_once():
    windows = make_windows()
    inputs, targets, positions = windows.read_batch(range(len(windows)))
    counted = targets != -100
    pairs = sorted(zip(inputs[counted].tolist(), targets[counted].tolist(), strict=True))
    expected = []
    for document in tokens().long().split(LENGTHS):
        expected += zip(document[:-1].tolist(), document[1:].tolist(), strict=True)
    assert pairs == sorted(expected)
    assert len(windows) == -(-len(expected) // CONTEXT)  # with these lengths, best fit wastes no window
    assert positions.max() < CONTEXT and bool((positions.diff(dim=1) <= 1).all())


def documents(windows: PackedWindows) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the inputs and targets of each piece of a document, `(1, tokens)` each."""
    pieces = []
    for inputs, targets, positions in windows:
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(inputs)]
        for start, stop in pairwise(starts):
            if targets[start] != -100:
                pieces.append((inputs[None, start:stop], targets[None, start:stop]))
    return pieces


def gpt() -> torch.nn.Module:
    return GPT(vocab_size=64, context=CONTEXT, d_model=16, n_heads=2)


def hf_network(config: str) -> Callable[[], torch.nn.Module]:
    def make() -> torch.nn.Module:
        pytest.importorskip("transformers")
        from runner.models.hf.causal_lm import HFCausalLM

        sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}
        if config == "gpt2":
            sizes = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
            sizes |= {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        return HFCausalLM(config, pretrained=False, overrides=sizes, context=CONTEXT)

    return make


@pytest.mark.parametrize(
    ("make", "algorithms"),
    [
        (gpt, []),
        (gpt, [RotaryEmbedding()]),
        (gpt, [ALiBi(CONTEXT, 1.0)]),
        (hf_network("llama"), []),
        (hf_network("gpt2"), []),
    ],
    ids=["gpt", "rotary", "alibi", "llama", "gpt2"],
)
def test_loss_and_gradients_equal_those_of_separate_documents(make: Any, algorithms: Any):
    torch.manual_seed(0)
    model = LanguageModel(make())
    windows = make_windows()
    batch = windows.read_batch(range(len(windows)))
    with Trainer(
        model=model,
        train_dataloader=[batch],
        optimizers=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        max_duration="1ba",  # the algorithms change the model; with lr=0, training does not
        algorithms=algorithms,
        device="cpu",
    ) as trainer:
        trainer.fit()
    model.train()
    model.zero_grad()
    packed_loss = model.loss(model(batch), batch)
    packed_loss.backward()
    gradients = [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
    model.zero_grad()
    separate_loss = torch.zeros(())
    for document in documents(windows):
        loss = model.loss(model(document), document) * (model.loss_weight(document) / model.loss_weight(batch))
        loss.backward()
        separate_loss += loss.detach()
    torch.testing.assert_close(packed_loss.detach(), separate_loss, rtol=1e-6, atol=1e-6)
    expected = [weight.grad for weight in model.parameters() if weight.grad is not None]
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-6)
    with pytest.raises(AssertionError):  # without positions, documents attend to each other
        torch.testing.assert_close(model.loss(model(batch[:2]), batch), packed_loss, rtol=1e-6, atol=1e-6)


def test_the_assignment_to_windows_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = make_windows(tmp_path)
    monkeypatch.setattr("runner.data.text.packing.best_fit", None)  # not called again
    again = make_windows(tmp_path)
    torch.testing.assert_close(again.read_batch([0, 1, 2]), first.read_batch([0, 1, 2]))


def test_documents_end_at_the_end_token_and_at_the_end_of_a_part():
    assert document_ends(torch.tensor([5, 9, 1, 1, 9, 2], dtype=torch.int16), 9).tolist() == [2, 5, 6]
    assert [ends.tolist() for ends in split_ends(numpy.array([2, 5, 9]), [4, 5])] == [[2, 4], [1, 5]]


@pytest.mark.parametrize("bytes_only", [True, False])
def test_each_file_is_a_document(bytes_only: bool, tmp_path: Path):
    folder = tmp_path / "texts"
    folder.mkdir()
    texts = ("some words", "more words, " * 9, "the last words, and others, " * 9)
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text)
    tokenizer = None if bytes_only else make_tokenizer(tmp_path / "tokenizer")
    options = {"context": 24, "batch_size": 2, "eval_batch_size": 2, "cache": None, "pack_documents": True}
    train, evaluation = load_text_files(str(folder), tokenizer=tokenizer, eval_share=0.3, **options)
    inputs, targets, positions = next(iter(train))
    assert inputs.shape == targets.shape == positions.shape == (2, 24)
    assert len([*evaluation]) >= 1
    if bytes_only:
        pieces = {bytes(inputs[0].tolist()) for inputs, _ in documents(vars(train)["dataset"])}
        text = texts[1].encode()
        assert {b"some word", text[:24], text[24:48], text[96:107]} <= pieces
    fake = vars(load_text_files)["fake"](str(folder), tokenizer=tokenizer, eval_share=0.3, **options)
    batch = next(iter(fake[0]))
    assert [tensor.shape for tensor in batch] == [(2, 24)] * 3


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path: Path):
    (tmp_path / "a.txt").write_text("some words " * 50)
    name = make_tokenizer(tmp_path / "tokenizer", end=None)
    with pytest.raises(ValueError, match="pack_documents=True: needs a tokenizer with an end-of-text token"):
        load_text_files(str(tmp_path / "a.txt"), tokenizer=name, context=8, cache=None, pack_documents=True)


def test_each_row_of_a_data_set_is_a_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "prepared"))
    from runner.data.hf.dataset import load_hf_dataset

    rows = "".join(f'{{"text": "{"some words, " * (1 + number % 5)}"}}\n' for number in range(40))
    (tmp_path / "rows.jsonl").write_text(rows)
    name = make_tokenizer(tmp_path / "tokenizer")
    options = {"name": "json", "data_files": str(tmp_path / "rows.jsonl"), "eval_split": None, "text": "text"}
    options |= {"context": 96, "batch_size": 2, "cache": None, "pack_documents": True}
    train, _ = load_hf_dataset(**options, tokenizer=name)
    pieces = documents(vars(train)["dataset"])
    assert len(pieces) == 36 and len({tuple(targets[0].tolist()) for _, targets in pieces}) == 5
    with pytest.raises(ValueError, match="pack_documents=True: needs a tokenizer"):
        load_hf_dataset(**options)


@pytest.mark.slow
def test_a_resumed_run_on_packed_documents_is_bit_identical(tmp_path: Path, run_here: Any):
    (tmp_path / "texts").mkdir()
    for number in range(30):
        (tmp_path / "texts" / f"{number:02}.txt").write_text("words and more words; " * (1 + number % 7))
    command = (
        *("data=text_files", "data.path=texts", "data.pack_documents=true", "data.context=32", "model=gpt"),
        *("model.module.context=32", "model.module.d_model=16", "model.module.n_heads=2", "data.cache=kept"),
        *("algorithms=none", "scheduler=constant", "callbacks=[checkpoint_saver]", "trainer.eval_interval=1ep"),
    )
    assert "ok batch" in run_here("check", *command, code=0).out
    run_here(*command, "trainer.max_duration=9ba", code=0)
    run_here(*command, "trainer.max_duration=4ba", code=0)
    run_here("resume", str(run_folders(tmp_path)[1]), "trainer.max_duration=9ba", code=0)
    whole, resumed = (
        torch.load(run / "checkpoints" / "latest" / "model.pt", weights_only=True) for run in run_folders(tmp_path)
    )
    torch.testing.assert_close(whole, resumed, rtol=0, atol=0)
    assert [*(tmp_path / "kept").glob("*.int32")]
