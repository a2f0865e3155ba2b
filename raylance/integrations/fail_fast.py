"""The callback that ends a run at an error which every further start would repeat."""

from typing import Any

import ray.train

from raylance.errors import ConfigError, DatasetError, StateError


class FailFast(ray.train.UserCallback):
    """Ends a run of Ray Train at an error that no restart can repair: `RunConfig(callbacks=[raylance.FailFast()])`.

    After an error in the training function, Ray Train starts the ranks again, `max_failures` times, whatever the error
    is. With this callback, a `ConfigError`, such as a global batch that is larger than the dataset, ends the run at
    once. A `DatasetError` or a `StateError`, whose cause may be a storage that recovers, ends the run if the next start
    fails with the same words; so does a `ConfigError` in elastic training, where the next start may have another number
    of ranks. All other failures are left to `FailureConfig`. `fit()` then raises `ray.train.ControllerError`, whose
    `controller_failure` is the error.
    """

    def __init__(self) -> None:
        self._last = ""

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Raises the first of the errors that no restart can repair. Ray Train calls this method when ranks failed.

        Args:
            run_context: What Ray Train knows of the run.
            worker_exceptions: The exception of each rank that failed.

        Raises:
            ConfigError, DatasetError, StateError: If the run is to end here; Ray Train ends it at any error.
        """
        pairs = ((found, error) for error in worker_exceptions.values() for found in (error, *error.args))
        found, error = next(
            (it for it in pairs if isinstance(it[0], ConfigError | DatasetError | StateError)), (None, None)
        )
        before, self._last = self._last, "" if found is None else f"{type(found).__name__}: {found}"
        if found is None:
            return
        is_certain = isinstance(found, ConfigError) and not run_context.scaling_config.elasticity_enabled
        if is_certain or before == self._last:
            raise found from error
