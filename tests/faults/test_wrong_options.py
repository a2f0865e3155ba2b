"""A wrong option of a storage, or a refusal, is an error at once that names its cause."""

import time
from typing import Any

import pytest

import raylance
from tests.helpers.faulty_store import FaultyStore, store_options

URI = "s3://wrong/data.lance"
AT_ONCE_S = 30.0  # a failure that may pass is tried for 60 s


@pytest.fixture
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def refusal(uri: str, options: Any = None) -> str:
    """The text of the error of an opening, which must come at once."""
    begin_s = time.monotonic()
    with pytest.raises(raylance.RaylanceError) as caught:
        raylance.dataset(uri, storage_options=options)
    assert time.monotonic() - begin_s < AT_ONCE_S
    text = str(caught.value)
    assert "manifest is damaged" not in text
    assert "Its storage fails" not in text
    return text


@pytest.mark.parametrize("status", ["400", "403"])
def test_a_hub_that_refuses(store: FaultyStore, status: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{store.port}")
    store.disturb(status)
    text = refusal("hf://datasets/org/repo/x.lance")
    assert status in text
    assert ("hf_token" in text) == (status == "403")


@pytest.mark.usefixtures("no_proxy")
@pytest.mark.parametrize(
    ("uri", "options", "named"),
    [
        ("oss://bucket/x.lance", {"oss_endpoint": "http://127.0.0.1:1"}, "request url is invalid"),
        (URI, {"aws_endpoint": "minio:9000"}, "aws_endpoint is 'minio:9000'"),
        (URI, {"aws_access_key_id": "key\n"}, "aws_access_key_id begins or ends"),
        (URI, {"aws_endpoint": "http://127.0.0.1:1\n"}, "aws_endpoint begins or ends"),
        (URI, {"timeout": "30"}, "timeout is '30'"),
        (URI, {"allow_http": "ja"}, "allow_http is 'ja'"),
        ("az://c/x.lance", {"account_name": "a", "account_key": "Zm9v", "azure_endpoint": "h:1"}, "azure_endpoint"),
    ],
)
def test_a_wrong_option_is_named(uri: str, options: dict[str, str], named: str) -> None:
    keys = {"oss": {"oss_access_key_id": "a", "oss_secret_access_key": "b"}, "s3": store_options(1)}
    given = {**keys.get(uri.partition(":")[0], {}), **options}
    text = refusal(uri, given)
    assert named in text
    assert "key\n" not in text
    if "timeout" in options:
        assert named in refusal(uri, lambda: given)


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret of Kubernetes that was made with `echo` ends with a line end."""
    for name, value in {"ACCESS_KEY_ID": "key\n", "SECRET_ACCESS_KEY": "secret", "REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    text = refusal(URI, {"aws_endpoint": "http://127.0.0.1:1", "allow_http": "true"})
    assert "AWS_ACCESS_KEY_ID begins or ends" in text


def test_a_secret_with_a_line_end_is_named_if_it_is_refused(store: FaultyStore) -> None:
    store.disturb("403")
    text = refusal(URI, {**store_options(store.port), "aws_secret_access_key": "secret\n"})
    assert "aws_secret_access_key begins or ends" in text
    assert "aws_skip_signature" in refusal(URI, store_options(store.port))


@pytest.mark.parametrize("name", [5, b"aws_region"])
def test_a_name_that_is_no_string(name: Any) -> None:
    assert f"the name {name!r}" in refusal(URI, {name: "x"})
