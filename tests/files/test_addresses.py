from __future__ import annotations

import pytest

from runner.files.addresses import has_hidden, hidden_everywhere, without_credentials, without_credentials_of


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("http://bob:pw@host:5000/a", "http://***@host:5000/a"),
        ("http://bob@host", "http://***@host"),
        (r"https\://me\:pw@host/a", r"https\://***@host/a"),
        ("http://bob:p@w@host", "http://***@host"),
        ("postgresql+psycopg://bob:p/w?x#y@host/db", "postgresql+psycopg://***@host/db"),
        ("http://host/?token=abc&user=bob", "http://host/?token=***&user=***"),
        ("http://host?abc", "http://host?***"),
        ("uri='http://host?a=b': is wrong", "uri='http://host?a=***': is wrong"),
        ("http://bob:pw@[::1]:5000", "http://***@[::1]:5000"),
        ("key=[http://a:b@c,http://d:e@f]", "key=[http://***@f]"),
        ("MlflowClient('http://bob:pw@host') failed", "MlflowClient('http://***@host') failed"),
        ("sqlite:////home/me@work/x.db", "sqlite:////home/me@work/x.db"),
        ("http://host:5000/#/experiments/1", "http://host:5000/#/experiments/1"),
        ("write to me@work, or see http://host", "write to me@work, or see http://host"),
    ],
)
def test_credentials_in_an_address_are_hidden(address: str, shown: str):
    assert without_credentials(address) == shown == without_credentials(shown)
    assert has_hidden(shown) is (shown != address)


def test_credentials_of_an_address_are_hidden_wherever_they_appear():
    address = "http://bob:s3cr@t@host/?token=a/b c"
    text = f"{address}; url: /?token=a/b%20c/api; user bob:s3cr%40t; s3cr@t; a%2Fb%20c"
    assert without_credentials_of(address, text) == "http://***@host/?*** url: /?token=***/api; user bob:***; ***; ***"
    assert without_credentials_of("http://host", "host http://a:b@c") == "host http://***@c"
    assert without_credentials_of("", "a") == "a"


def test_credentials_in_nested_values_are_hidden():
    value = {"a": ["http://b:c@d", 1, None, {"e": ("http://f:g@h",)}], "lr": 0.1}
    assert hidden_everywhere(value) == {"a": ["http://***@d", 1, None, {"e": ["http://***@h"]}], "lr": 0.1}
