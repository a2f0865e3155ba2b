"""A table of a Lance namespace in place of a URI: where it lies, and the credentials that the namespace vends."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from raylance.errors import ConfigError, DatasetError
from raylance.secrets import holds_secret, public_uri
from raylance.source.lance_errors import readable_text
from raylance.source.retrying import patiently
from raylance.source.storage_options import StorageOptions, current

_PLACES = "uri", "root"  # properties that errors may show
_LEAST_SECRET = 6  # characters; shorter values, as "true", are not hidden in errors


@dataclasses.dataclass(frozen=True, slots=True)
class NamespaceTable:
    """A table of a Lance namespace, which `raylance.dataset` takes in place of a URI. The arguments have the names that
    lance-ray gives them.

    The namespace is asked where the table lies. Checkpoints and records keep this place, the URI, and not the name of
    the table. If the namespace vends options of the object store, such as credentials, each process that opens the
    dataset asks for its own, and asks again before they expire.

    Attributes:
        table_id: Name of the table, or a list of names, the outermost namespace first.
        namespace_impl: "rest", "dir", or the import path of a class: what `lance_namespace.connect` takes. The class
            must be importable in each process that opens the dataset.
        namespace_properties: Properties of the namespace, strings by name, which are never shown; such as {"uri":
            "http://catalog:2333", "header.Authorization": "Bearer …"} of "rest", or {"root": "s3://bucket/lake"} of
            "dir".
    """

    table_id: str | Sequence[str]
    namespace_impl: str
    namespace_properties: Mapping[str, str] = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        names = [self.table_id] if isinstance(self.table_id, str) else self.table_id
        if (
            not isinstance(names, list | tuple)
            or not names
            or not all(isinstance(each, str) and each for each in names)
        ):
            raise ConfigError(
                f"NamespaceTable(table_id={self.table_id!r}): give the name of a table, or a list of names, the "
                "outermost namespace first. Nothing was opened."
            )
        if not isinstance(self.namespace_impl, str) or not self.namespace_impl:
            raise ConfigError(
                f"NamespaceTable(namespace_impl={self.namespace_impl!r}): give 'rest', 'dir', or the import path of a "
                "class. Nothing was opened."
            )
        properties = self.namespace_properties
        if not isinstance(properties, Mapping) or not all(
            isinstance(each, str) for item in properties.items() for each in item
        ):
            raise ConfigError("NamespaceTable(namespace_properties=…): give strings by name. Nothing was opened.")
        for name, value in properties.items():
            if name in _PLACES and holds_secret(value):  # errors and records show it
                raise ConfigError(
                    f"NamespaceTable(namespace_properties=…): {name!r} is {public_uri(value)!r}, with a password or a "
                    "key, which errors would show. Nothing was opened. Give it in a property of its own, such as "
                    "header.Authorization."
                )
        object.__setattr__(self, "table_id", tuple(names))
        object.__setattr__(self, "namespace_properties", dict(properties))

    def __str__(self) -> str:
        return f"table {'.'.join(self.table_id)!r} of the namespace {self.namespace_impl!r}"

    def locate(self, options: StorageOptions | None = None) -> tuple[str, StorageOptions | None]:
        """Returns the URI of the table, and options of its store: `options`, with what the namespace vends in place of
        equal names. For functions of raylance that take no `NamespaceTable`, such as `raylance.prove_run`.

        Raises:
            ConfigError: If no client of the namespace can be made of the properties.
            DatasetError: If there is no such table, the namespace refuses it, or it does not answer for too long.
        """
        try:
            location, vended = patiently(self.describe)
        except (ConnectionError, TimeoutError) as error:
            raise DatasetError(
                f"the {self} cannot be found ({readable_text(error)}); nothing was started. Check the properties of "
                "the namespace, and try again when its service is back."
            ) from error
        return location, options if vended is None else VendedOptions(self, location, options)

    def describe(self) -> tuple[str, dict[str, str] | None]:
        """Asks the namespace once; returns the table's URI, and the options of its store that are vended, or None.

        Raises:
            ConfigError, DatasetError: As `locate`.
            ConnectionError: If the service does not answer, or is busy.
        """
        # Imported here, because the imports take a second, which other runs save.
        import lance_namespace
        from lance_namespace.errors import ErrorCode, LanceNamespaceError

        passing = ErrorCode.SERVICE_UNAVAILABLE, ErrorCode.THROTTLING, ErrorCode.INTERNAL
        try:
            client = lance_namespace.connect(self.namespace_impl, dict(self.namespace_properties))
        except ValueError as error:
            raise ConfigError(
                f"no client of the namespace {self.namespace_impl!r} can be made ({self._without_values(error)}); "
                f"nothing was opened. It has the properties {sorted(self.namespace_properties)}."
            ) from None  # the cause may show the values
        request = lance_namespace.DescribeTableRequest(id=list(self.table_id), vend_credentials=True)
        try:
            found = client.describe_table(request)
        except LanceNamespaceError as error:
            what = self._without_values(error)
            if error.code in passing:
                raise ConnectionError(f"the namespace fails: {what}") from None
            raise DatasetError(f"the {self} cannot be read ({what}). Check its name and the properties.") from None
        if not found.location:
            raise DatasetError(f"the {self} was declared, and has no location yet. Write it first.")
        return found.location, found.storage_options or None

    def _without_values(self, error: BaseException) -> str:
        """Returns the text of an error without the values of properties, but for those that name places."""
        text = readable_text(error)
        for name, value in self.namespace_properties.items():
            if name not in _PLACES and len(value.strip()) >= _LEAST_SECRET:
                text = text.replace(value.strip(), "…")
        return text


@dataclasses.dataclass(frozen=True, slots=True)
class VendedOptions:
    """Returns the options of a table's store that its namespace vends now, each time that it is called."""

    table: NamespaceTable
    location: str
    others: StorageOptions | None = dataclasses.field(default=None, repr=False)

    def __call__(self) -> dict[str, str]:
        """Returns the options, with those of the user that the namespace does not vend.

        Raises:
            ConfigError, DatasetError, ConnectionError: As `NamespaceTable.describe`; also if the table has moved.
        """
        location, vended = self.table.describe()
        if location != self.location:
            raise DatasetError(
                f"the {self.table} was at {self.location!r} when it was opened, and is at {location!r} now. What the "
                "namespace vends is for the new place, so nothing more is read. Open it again, and begin a new run."
            )
        given: Any = current(self.others) or {}
        return {**given, **(vended or {})}


def located(
    uri: str | os.PathLike[str] | NamespaceTable, options: StorageOptions | None
) -> tuple[str | os.PathLike[str], StorageOptions | None]:
    """Returns the URI and the options of a `NamespaceTable`; those given for anything else."""
    return uri.locate(options) if isinstance(uri, NamespaceTable) else (uri, options)
