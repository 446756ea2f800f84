from pathlib import Path
from typing import Any

import pytest
import torch

from runner.data import TensorLoader
from runner.data.text import windows
from runner.data.text.synthetic_tokens import load_synthetic_tokens
from runner.data.text.text_files import load_text_files
from runner.data.text.windows import WindowSizes, next_token, spread_windows, window_loaders

SIZES = WindowSizes(context=8, batch_size=4, eval_batch_size=3, eval_tokens=None)


@pytest.mark.parametrize("largest", [255, 65_535, 70_000])
def test_windows_keep_tokens_of_every_width(largest: int):
    tokens = torch.randint(largest, (100,)).index_fill(0, torch.tensor([3, 98]), largest)
    stored = {255: torch.uint8, 65_535: torch.int16, 70_000: torch.int32}[largest]  # uint16 as the bits of int16
    inputs, targets = next_token(windows.cut_windows(tokens.to(stored), 9))
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.flatten().tolist() == tokens[:99].tolist()
    assert targets.flatten().tolist() == tokens[1:].tolist()


def test_loaders_of_windows_declare_equal_targets(tmp_path: Path):
    tokens = torch.arange(100, dtype=torch.uint8)
    declared = [window_loaders((tokens, tokens), 3, SIZES)[0], load_synthetic_tokens(num_samples=8, eval_samples=2)[0]]
    assert all(loader.equal_targets for loader in declared)
    (tmp_path / "a.txt").write_text("some words, and some more\n" * 9)
    packed, *_ = load_text_files(str(tmp_path), context=8, eval_share=0.2, cache=None, pack_documents=True)
    plain = TensorLoader(torch.zeros(4, 3), torch.zeros(4, 3), batch_size=2, shuffle=False)
    assert not packed.equal_targets and not plain.equal_targets


def test_windows_for_evaluation_are_spread_evenly():
    cut = windows.cut_windows(torch.arange(101), 10)
    assert spread_windows(cut, None) is cut and spread_windows(cut, 1000) is cut
    assert spread_windows(cut, 39)[:, 0].tolist() == [0, 30, 60]


def test_data_that_stays_on_the_host_yields_the_same_batches(monkeypatch: pytest.MonkeyPatch):
    tokens = torch.arange(500, dtype=torch.int16)
    resident: Any = window_loaders((tokens[:400], tokens[400:]), 3, SIZES)
    monkeypatch.setattr(windows, "RESIDENT_BYTES", 0)
    on_host: Any = window_loaders((tokens[:400], tokens[400:]), 3, SIZES)
    assert [loader.resident for loader in (*resident, *on_host)] == [True, True, False, False]
    assert on_host[0].to("meta").tensors[0].device.type == "cpu"
    for loaders in zip(resident, on_host, strict=True):
        for loader in loaders:
            loader.seek(1, 2)
        torch.testing.assert_close([*loaders[0]], [*loaders[1]], rtol=0, atol=0)
