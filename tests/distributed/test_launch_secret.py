from __future__ import annotations

from collections.abc import Iterator

import pytest

from runner.distributed.launch_secret import signed, use_secret, verified


@pytest.fixture(autouse=True)
def secret() -> Iterator[None]:
    use_secret("ours")
    yield
    use_secret("")


@pytest.mark.parametrize("text", ["", "{}", "naïve\n" * 100])
def test_a_signed_message_is_verified_and_returned(text: str):
    assert verified("message/0", signed("message/0", text).encode()) == text


def test_a_message_with_a_wrong_signature_is_refused():
    ours = signed("message/0", "{}").encode()
    use_secret("theirs")
    theirs = signed("message/0", "{}").encode()
    use_secret("ours")
    for name, stored in [
        ("message/0", theirs),
        ("message/1", ours),  # our own signature, under another key
        ("message/0", ours + b" "),
        ("message/0", b"0" + ours[1:] if ours[:1] != b"0" else b"1" + ours[1:]),
        ("message/0", b"{}"),
        ("message/0", b""),
        ("message/0", b"\xff" * 80),
    ]:
        with pytest.raises(PermissionError, match=f"^{name} in the ranks' key-value store was written by"):
            verified(name, stored)
