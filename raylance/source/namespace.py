"""A table of a Lance namespace in place of a URI: where it lies, and the credentials that the namespace vends."""

import dataclasses
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

from raylance.errors import ConfigError, DatasetError
from raylance.secrets import holds_secret, public_uri
from raylance.source.lance_errors import Failure, failure_of, readable_text
from raylance.source.retrying import patiently
from raylance.source.storage_options import StorageOptions, current

_PLACES = "uri", "root"  # properties of "rest" and "dir" that errors may show, because they say where
_LEAST_SECRET = 6  # characters; shorter words, as "true", are not hidden in errors
# Refusals, which the client of "rest" reports as internal errors of the service. As in `lance_errors`, 408, 425 and 429
# may pass.
_LASTING = re.compile(r"\bstatus=4(?!08|25|29)\d\d|RelativeUrlWithoutBase")


@dataclasses.dataclass(frozen=True, slots=True)
class NamespaceTable:
    """A table of a Lance namespace, which `raylance.dataset` takes in place of a URI. The arguments have the names that
    lance-ray gives them.

    The namespace is asked where the table lies. Checkpoints and records keep this place, the URI, and not the name of
    the table. If the namespace vends options of the object store, such as credentials, each process that opens the
    dataset asks for its own, and asks again before they expire.

    Attributes:
        table_id: Name of the table, or a list of names, the outermost namespace first.
        namespace_impl: "rest", "dir", or the import path of a class, as for `lance_namespace.connect`. Each process
            that opens the dataset must be able to import the class.
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
                    "header.Authorization of 'rest' or storage.aws_secret_access_key of 'dir'."
                )
        object.__setattr__(self, "table_id", tuple(names))
        object.__setattr__(self, "namespace_properties", dict(properties))

    def __str__(self) -> str:
        return f"table {'.'.join(self.table_id)!r} of the namespace {self.namespace_impl!r}"

    def locate(
        self, options: StorageOptions | None = None, *, newest: bool = False
    ) -> tuple[str, StorageOptions | None]:
        """Returns the URI of the table, and the options of its store: `options`, of which the namespace's own replace
        those of the same names. For functions that do not take a `NamespaceTable`, such as `raylance.prove_run`.

        Args:
            options: Options of the object store, see `raylance.dataset`.
            newest: Whether the newest version will be opened.

        Raises:
            ConfigError: If no client of the namespace can be made of the properties; with `newest`, if the namespace
                keeps the versions of the table.
            DatasetError: If the table does not exist, or the namespace refuses the request, or gives no answer for
                about a minute.
        """
        try:
            found = patiently(self.describe)
        except (ConnectionError, TimeoutError) as error:
            raise DatasetError(
                f"the {self} cannot be found ({readable_text(error)}); nothing was started. Check the properties of "
                "the namespace, and try again when its service is back."
            ) from error
        if newest and found.managed_versioning:
            raise ConfigError(
                f"the {self} has versions that the namespace itself keeps, so the newest one in its folder need not "
                "be valid. Nothing was opened. Name a version of the table, version=…."
            )
        return found.location, VendedOptions(self, found.location, options) if found.storage_options else options

    def describe(self) -> Any:
        """Asks the namespace once; returns its `DescribeTableResponse`, which has a location.

        Raises:
            ConfigError, DatasetError: As `locate`.
            ConnectionError: If the service does not answer, or is busy.
        """
        # Imported here, because the imports take a second, which other runs save.
        import lance_namespace
        from lance_namespace.errors import ErrorCode, LanceNamespaceError

        passing = ErrorCode.SERVICE_UNAVAILABLE, ErrorCode.THROTTLING, ErrorCode.INTERNAL
        # Errors have no cause from here on, because the cause may show the values of properties.
        try:
            client = lance_namespace.connect(self.namespace_impl, dict(self.namespace_properties))
        except Exception as error:
            what = self._without_values(error)
            if isinstance(error.__context__, OSError) or failure_of(error) is Failure.PASSING:
                raise ConnectionError(f"the namespace fails: {what}") from None
            raise ConfigError(
                f"no client of the namespace {self.namespace_impl!r} can be made ({what}); nothing was opened. It has "
                f"the properties {sorted(self.namespace_properties)}."
            ) from None
        try:
            request = lance_namespace.DescribeTableRequest(id=list(self.table_id), vend_credentials=True)
            found = client.describe_table(request)
        except Exception as error:
            what = self._without_values(error)
            may_pass = error.code in passing if isinstance(error, LanceNamespaceError) else isinstance(error, OSError)
            if may_pass and not _LASTING.search(what):
                raise ConnectionError(f"the namespace fails: {what}") from None
            raise DatasetError(f"the {self} cannot be read ({what}). Check its name and the properties.") from None
        if found is None or not found.location:
            raise DatasetError(f"the {self} was declared, and has no location yet. Write it first.")
        return found

    def _without_values(self, error: BaseException) -> str:
        """Returns class and text of an error without the words of properties, but for those that name places."""
        text = f"{type(error).__name__}: {readable_text(error)}"
        for name, value in self.namespace_properties.items():
            for word in (value.strip(), *value.split()) if name not in _PLACES else ():
                if len(word) >= _LEAST_SECRET:
                    text = text.replace(word, "…").replace(urllib.parse.quote(word, safe=""), "…")
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
        found = self.table.describe()
        if found.location != self.location:
            raise DatasetError(
                f"the {self.table} was at {self.location!r} when it was opened, and is at {found.location!r} now. What "
                "the namespace vends is for the new place, so nothing more is read. Open it again, and begin a new run."
            )
        return {**(current(self.others) or {}), **(found.storage_options or {})}
