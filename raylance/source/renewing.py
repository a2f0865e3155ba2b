"""Renews storage options that expire, for Lance; imported only if a function gives the options."""

import uuid
from collections.abc import Callable
from typing import Any

from lance.namespace import DescribeTableRequest, DescribeTableResponse, LanceNamespace


class Renewing(LanceNamespace):  # type: ignore[misc] # Lance has no types
    """A Lance namespace with one dataset. Lance asks it for options to open the dataset, and before they expire."""

    def __init__(self, uri: str, options: Callable[[], Any]) -> None:
        """Takes the function that gives the present options."""
        self._uri, self._options = uri, options
        self._name = uuid.uuid4().hex  # unique, because Lance may share credentials under one name

    def namespace_id(self) -> str:
        """Returns the name of the namespace."""
        return self._name

    def describe_table(self, request: DescribeTableRequest) -> DescribeTableResponse:
        """Returns the location of the dataset and its present options."""
        return DescribeTableResponse(location=self._uri, storage_options=self._options())
