"""Diagnoses that only alerts find, in the metrics of a running cluster."""

from raylance.observe.diagnoses.diagnosis import Diagnosis

ALARMS = (
    Diagnosis(
        cause="inflight_limit",
        means="bytes in flight are at their limit while the trainers wait",
        changes=(
            "raise `inflight_bytes=`, as far as the object store has room for that much of each rank and dataset",
            "lower `num_decoders=` or batch sizes, if it has not",
        ),
    ),
    Diagnosis(
        cause="crash_loop",
        means="helpers die or hang again and again",
        changes=(
            "memory, mostly: lower `reader_bytes=` (shard actors), `inflight_bytes=` or `num_decoders=`, or "
            "give the nodes more",
            "a row that crashes its decoder, or nodes that are taken away: `ray list actors --filter state=DEAD "
            "--detail` gives the causes of death, and the run's log the rows",
        ),
    ),
    Diagnosis(
        cause="no_progress",
        means="no batch for 15 minutes, though the run's workers live",
        changes=(
            "training hangs (a collective of which one rank is missing; a compilation; a checkpoint that does not "
            "end): `ray stack` on the workers' nodes shows where",
            "the loader waits for a helper, storage or CPUs: the log names what it waits for, and `ray status` what "
            "has found no place",
        ),
    ),
    Diagnosis(
        cause="bad_rows",
        means="rows could not be decoded, and were handed out as zeros",
        changes=(
            "repair the rows in the dataset: `loader.stats()` and the log name rows and reasons",
            "leave them out with `filter=`",
            "mask the loss with `_valid`, which is False for them, or the model trains on black images",
        ),
    ),
)
