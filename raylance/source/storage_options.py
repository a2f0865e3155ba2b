"""The options of an object store, which a user gives directly or as a function, and which are never shown."""

from collections.abc import Callable, Mapping

import lance

from raylance.errors import ConfigError, RaylanceError
from raylance.secrets import holds_secret, public_uri
from raylance.source.limits import with_limits

StorageOptions = Mapping[str, str] | Callable[[], Mapping[str, str]]
"""Options of an object store, by Lance's names; or a function that returns them, called in each process that opens the
dataset. If the options have "expires_at_millis", the time at which the credentials expire, in milliseconds since 1970,
Lance calls the function again a minute before this time, or "refresh_offset_millis" before it if they have that, too.
"""


def current(options: StorageOptions | None) -> dict[str, str] | None:
    """Returns the present options, by a call of the function if there is one; None without options. Raises ConfigError
    as `check_options`, or if the function raises an error that is neither an OSError, which may pass, nor raylance's.
    """
    try:
        given = options() if callable(options) else options
    except (OSError, RaylanceError):
        raise
    except Exception as error:
        raise ConfigError(
            f"the function given as storage_options raised {type(error).__name__}: {error}. It runs in each process "
            "that opens the dataset; for a failure that may pass, let it raise a ConnectionError."
        ) from error
    check_options(given)
    return None if given is None else dict(given)


def check_options(options: object) -> None:
    """Raises ConfigError, without values, if names or values are not strings, or an endpoint's URL holds a secret."""
    if options is None:
        return
    if not isinstance(options, Mapping):
        raise ConfigError(
            f"storage_options is a {type(options).__name__}: nothing was opened. Give a dict of names and strings, or "
            "a function that returns one."
        )
    for name, value in options.items():
        for what, given in ((f"name {name!r}", name), (f"value of {name!r}", value)):
            if not isinstance(given, str):
                raise ConfigError(
                    f"storage_options: the {what} is a {type(given).__name__}. Nothing was opened. Give names and "
                    'values as strings, such as {"allow_http": "true"}.'
                )
        if "endpoint" in name.lower() and holds_secret(value):  # errors of the storage show it
            raise ConfigError(
                f"storage_options: {name!r} is {public_uri(value)!r}, with a password or a key, which errors of the "
                "storage would show. Nothing was opened. Give credentials in options of their own, such as "
                "aws_access_key_id."
            )


def open_dataset(
    uri: str, options: StorageOptions | None, limit_s: float, version: int | str | None = None
) -> lance.LanceDataset:
    """Opens a dataset with requests limited to fit into `limit_s`. Lance calls a function before its options expire."""

    def give() -> dict[str, str] | None:
        return with_limits(uri, current(options), limit_s)

    if callable(options):
        from raylance.source.renewing import Renewing  # its imports take a second, which other runs save

        return lance.dataset(namespace_client=Renewing(uri, give), table_id=[uri], version=version)
    return lance.dataset(uri, version=version, storage_options=give())
