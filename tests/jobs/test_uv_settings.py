"""Checks that pip's settings reach uv, from files and variables, in pip's order; installs nothing."""

import pytest

from jobs.uv_settings import uv_settings


def test_settings_keep_pips_meaning() -> None:
    listed = """:env:.find-links='/wheels /more'
global.cert='/certs.pem'
global.disable-pip-version-check='true'
global.extra-index-url='\\nfile:///one\\nfile:///two'
global.find-links='/overridden'
install.constraint='limits.txt'
"""
    assert uv_settings(listed, {}) == {
        "SSL_CERT_FILE": "/certs.pem",
        "UV_INDEX": "file:///one file:///two",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_CONSTRAINT": "limits.txt",
        "UV_FIND_LINKS": "/wheels,/more",
    }


def test_variables_of_the_user_win() -> None:
    listed = "global.index-url='file:///pip'\n"
    assert uv_settings(listed, {"UV_DEFAULT_INDEX": "file:///uv"}) == {}


def test_other_commands_of_pip_do_not_matter() -> None:
    assert uv_settings("freeze.exclude='x'\ndownload.no-binary=':all:'\n", {}) == {}


def test_a_setting_without_a_counterpart_leaves_the_work_to_pip() -> None:
    with pytest.raises(KeyError, match="no-binary"):
        uv_settings("install.no-binary=':all:'\n", {})
