import sysconfig
import time
import zlib
from pathlib import Path

import pytest
import torch

from runner.data import load_stdlib_text
from runner.data.text import stdlib_text
from runner.data.text.windows import cut_windows, next_token


def source(path):
    return (Path(sysconfig.get_path("stdlib")) / path).read_bytes()


def test_files_are_split_by_the_checksum_of_their_path():
    texts = [bytes(text.numpy()) for text in stdlib_text._read_stdlib()]
    assert len(texts[0]) > 8 * len(texts[1]) > 1_000_000
    for path in ("abc.py", "json/decoder.py", "os.py", "queue.py", "random.py", "argparse.py", "asyncio/tasks.py"):
        evaluated = zlib.crc32(path.encode()) % 16 == 0
        assert source(path) in texts[evaluated], path
        assert source(path) not in texts[not evaluated], path
    assert b"lib2to3.fixer_base" not in texts[0]


@pytest.mark.parametrize("context", [1, 2, 128])
def test_every_byte_but_the_first_is_a_target_once(context):
    text = torch.arange(1000, dtype=torch.int64).to(torch.uint8)
    inputs, targets = next_token(cut_windows(text, context))
    count = 999 // context * context
    assert inputs.flatten().tolist() == text[:count].tolist()
    assert targets.flatten().tolist() == text[1 : count + 1].tolist()


def test_targets_are_the_inputs_shifted_by_one_byte():
    train, evaluation = load_stdlib_text(batch_size=4, context=16, eval_batch_size=8, eval_bytes=1000, seed=2)
    inputs, targets = next(iter(train))
    assert inputs.shape == targets.shape == (4, 16)
    assert inputs.dtype == targets.dtype == torch.int64
    assert 0 <= int(inputs.min()) <= int(inputs.max()) < 256
    torch.testing.assert_close(inputs[:, 1:], targets[:, :-1])
    assert train.order.seed == 2
    assert sum(targets.numel() for _, targets in evaluation) == 62 * 16  # the whole windows in 1000 bytes


def test_evaluation_windows_are_spread_evenly_for_any_seed():
    text = bytes(stdlib_text._read_stdlib()[1].numpy())
    (_, evaluation), (_, again) = load_stdlib_text(eval_bytes=4096), load_stdlib_text(eval_bytes=4096, seed=9)
    torch.testing.assert_close(evaluation.tensors[0], again.tensors[0])
    windows = evaluation.tensors[0]
    assert windows.shape == (32, 129)
    positions = [0]
    for window in windows:  # equal windows may occur twice
        positions.append(text.index(bytes(window.numpy()), positions[-1]))
    assert positions[1] == 0
    assert positions[-1] > 0.9 * len(text)


def test_a_limit_above_the_length_evaluates_each_window_once():
    _, evaluation = load_stdlib_text(eval_bytes=10**9)
    text = stdlib_text._read_stdlib()[1]
    torch.testing.assert_close(evaluation.tensors[0], cut_windows(text, 128))


def test_test_files_are_taken_from_the_training_text():
    whole, expected = stdlib_text._read_stdlib()
    train, evaluation, test = stdlib_text._read_stdlib(2)
    assert torch.equal(evaluation, expected) and len(train) + len(test) == len(whole) and len(test) > len(whole) // 40
    loaders = load_stdlib_text(test_bytes=4096)
    assert [loader.order.num_samples for loader in loaders[1:]] == [1024, 32]


def test_the_training_windows_are_views_of_the_text():
    train, _ = load_stdlib_text()
    windows = train.tensors[0]
    assert windows.untyped_storage().nbytes() < windows.numel()


def test_loading_is_fast():
    start = time.process_time()
    load_stdlib_text()
    assert time.process_time() - start < 5  # seconds; about 0.1 on an idle machine


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"context": 0}, "context=0: must be a number of bytes, at least 1"),
        ({"context": 64, "eval_bytes": 63}, "eval_bytes=63: must be at least one window of context=64"),
        ({"context": 10**9, "eval_bytes": 10**9}, "context=1000000000: must be shorter than the text, which has"),
    ],
)
def test_errors_name_the_wrong_argument(arguments, message):
    with pytest.raises(ValueError, match=message):
        load_stdlib_text(**arguments)


def test_a_python_without_sources_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(FileNotFoundError, match="contains no sources of the standard library"):
        load_stdlib_text()
