"""Several processes as one run: joined before the first device query, and ended together.

`join` tells JAX of the other processes, from flags or from what the cluster says of itself.
`exchange` gives every process the words of all: by it they agree before they compute, since
processes that disagree would wait for each other for ever. Where there is one process, it is a
run like any other.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import os
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from absl import flags
from jax.experimental import multihost_utils

from absl_apps import meshes

FLAGS = (
    "multihost",
    "coordinator_address",
    "num_processes",
    "process_id",
    "initialization_timeout",
    "heartbeat_timeout",
)

# How long one that fails waits for the others to fail too, for then all can take leave in peace.
_LEAVE_SECONDS = 5

_CLUSTERS = "a TPU pod, a Kubernetes Job or JobSet with jax[k8s], Slurm or Open MPI"


############################################# Flags ##############################################


def define(values: flags.FlagValues) -> None:
    """Define the flags of a program that may be several processes, and their checks."""
    flags.DEFINE_bool(
        "multihost",
        False,
        "Whether this process is one of several that make one run, each with devices of its own. "
        f"Without the next three flags, the cluster says which: {_CLUSTERS}.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "coordinator_address",
        None,
        "HOST:PORT of process 0, with a port that is free there.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "num_processes", None, "Processes of the run.", lower_bound=1, flag_values=values
    )
    flags.DEFINE_integer(
        "process_id", None, "Which of them this one is, from 0.", lower_bound=0, flag_values=values
    )
    flags.DEFINE_integer(
        "initialization_timeout",
        300,
        "Seconds to wait for all processes at the start.",
        lower_bound=1,
        flag_values=values,
    )
    flags.DEFINE_integer(
        "heartbeat_timeout",
        40,
        "Seconds of silence after which a process counts as dead, and ends all others.",
        lower_bound=2,
        flag_values=values,
    )

    @flags.multi_flags_validator(FLAGS[:4], flag_values=values)
    def _given(given: dict[str, Any]) -> bool:
        try:
            check(**given)
        except ValueError as error:
            raise flags.ValidationError(str(error)) from None
        return True

    del _given  # registered


def check(
    multihost: bool,
    coordinator_address: str | None,
    num_processes: int | None,
    process_id: int | None,
) -> None:
    """Raise ValueError where the flags contradict each other."""
    given = {
        "coordinator_address": coordinator_address,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    written = " ".join(f"--{name}={value}" for name, value in given.items() if value is not None)
    if written and not multihost:
        raise ValueError(f"{written}: says how several processes join; add --multihost.")
    if coordinator_address is not None:
        host, _, port = coordinator_address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(
                f"--coordinator_address={coordinator_address}: is not HOST:PORT; "
                "write for example 10.0.0.1:8476."
            )
    if (num_processes is None) != (process_id is None):
        missing = "process_id" if process_id is None else "num_processes"
        raise ValueError(f"{written}: --{missing} is missing; give both, or neither.")
    if num_processes is not None and process_id is not None and process_id >= num_processes:
        raise ValueError(
            f"--process_id={process_id}: the {num_processes} processes count from 0 to "
            f"{num_processes - 1}."
        )


############################################ Joining #############################################


def join(program: str, values: flags.FlagValues, notices: bool = False) -> None:
    """Make this process one of the run's; no device may have been asked for before.

    Exits with one line where there is no cluster to ask, where it says no, and where not all
    processes come in time (JAX itself would abort, with a stack trace).

    Args:
      program: whose errors these are.
      values: the flags that `define` defined.
      notices: whether SIGTERM to one process is a notice to all, which the program heeds
        (`stopping.Signals`). Else it ends that process.
    """
    given = {name: values[name].value for name in FLAGS[1:4]}  # None: the cluster knows
    jax.config.update("jax_enable_preemption_service", notices)
    watch = threading.Timer(values.initialization_timeout, _late, (program, values))
    watch.daemon = True
    watch.start()
    try:
        if given["process_id"] == 0 and given["coordinator_address"]:
            _check_port(given["coordinator_address"])
        jax.distributed.initialize(
            **given,
            # What is said in full is not looked up: that could take minutes.
            cluster_detection_method=None if None in given.values() else "deactivate",
            initialization_timeout=2 * values.initialization_timeout + 60,  # the watch is first
            heartbeat_timeout_seconds=values.heartbeat_timeout,
        )
        watch.cancel()  # which the next line may silence; who is missing now, heartbeats tell
        meshes.first_query()
        devices = collections.Counter(device.process_index for device in jax.devices())
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        sys.exit(f"{program}: --multihost: {_reason(error, given)}")
    finally:
        watch.cancel()
    if len(set(devices.values())) > 1:
        counts = ", ".join(f"{n} in process {i}" for i, n in sorted(devices.items()))
        sys.exit(f"{program}: --multihost: all need as many devices; found {counts}.")
    exchange("joined")  # while all are here: what they talk over is set up


def _check_port(address: str) -> None:
    """Raises OSError where another process listens, say of an earlier run: JAX would crash."""
    port = int(address.rpartition(":")[2])
    if "JAX_COORDINATOR_BIND_ADDRESS" not in os.environ:
        socket.create_server(("", port)).close()


def _late(program: str, values: flags.FlagValues) -> None:
    at = f" at {values.coordinator_address}" if values.coordinator_address else ""
    print(
        f"{program}: --multihost: not all {values.num_processes or 'its'} processes have joined"
        f"{at} in --initialization_timeout={values.initialization_timeout} s; start all of them, "
        "with one address that all can reach.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


def _reason(error: Exception, given: Mapping[str, object]) -> str:
    """Returns why this process could not join, in one line."""
    told = " ".join(str(error).split())
    if not isinstance(error, ValueError) or "defined" not in told:
        return told
    examples = {
        "coordinator_address": "--coordinator_address=HOST:PORT",
        "num_processes": "--num_processes=N",
        "process_id": "--process_id=I",
    }
    missing = [example for name, example in examples.items() if given[name] is None]
    return f"there is no cluster to ask here ({_CLUSTERS}); give {' '.join(missing)}."


############################################ Agreeing ############################################


def exchange(text: str) -> list[str]:
    """Return the texts of all processes, by their index; all must call it, in the same order."""
    if jax.process_count() == 1:
        return [text]
    mine = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(mine.size)).reshape(-1)
    if not sizes.any():
        return [""] * len(sizes)
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: mine.size] = mine
    rows = multihost_utils.process_allgather(padded)
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


@contextlib.contextmanager
def failing_together() -> Iterator[None]:
    """Let a user's mistake that one process meets be an error in all; all must come here.

    Raises:
      ValueError: with this process's own message, or else with that of the first that failed.
    """
    message = ""
    try:
        yield
    except (ValueError, OSError) as error:
        message = str(error) or type(error).__name__
    told = exchange(message)
    for index, other in enumerate(told):
        if other:
            raise ValueError(message or f"process {index}: {other}")


def agree(facts: Mapping[str, object]) -> list[dict[str, object]]:
    """Return the facts of all processes, which must be the same.

    Args:
      facts: values by name, of JSON. A name that begins with `_` is only told, and may differ.

    Raises:
      ValueError: in all processes, with what differs, and how.
    """
    everyone = [json.loads(text) for text in exchange(json.dumps(facts))]
    first = everyone[0]
    for index, other in enumerate(everyone[1:], start=1):
        names = [name for name in {**first, **other} if not name.startswith("_")]
        differing = [
            f"{name} is {json.dumps(first.get(name))} in process 0, "
            f"{json.dumps(other.get(name))} in process {index}"
            for name in names
            if first.get(name) != other.get(name)
        ]
        if differing:
            raise ValueError(f"the processes differ: {'; '.join(differing)}; start all alike.")
    return everyone


def agree_on_program(lowered: jax.stages.Lowered) -> None:
    """Raise ValueError in all processes unless all have traced the same program."""
    if jax.process_count() > 1:
        agree({"the traced step": hashlib.sha256(lowered.as_text().encode()).hexdigest()[:16]})


############################################# Ending #############################################


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """End this process at an error so that the others end too, and none waits for another.

    Python's own end of a process waits for all others to end as well, and these may be waiting
    for this one in the middle of a step.
    """
    try:
        yield
    except BaseException as error:
        code = 1
        if not isinstance(error, SystemExit):
            traceback.print_exc()
        elif isinstance(error.code, int) or error.code is None:
            code = error.code or 0
        else:
            print(error.code, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        leave = threading.Thread(target=_leave, daemon=True)
        leave.start()
        leave.join(_LEAVE_SECONDS)  # where all fail alike, all leave in peace
        os._exit(code)


def _leave() -> None:
    with contextlib.suppress(Exception):  # of a cluster that is no more
        jax.distributed.shutdown()
