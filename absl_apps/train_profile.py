"""The profile of some steps of absl_apps.train."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence

import jax


@dataclasses.dataclass
class Profile:
    """Which steps to profile, and where to.

    Each process writes `<directory>/plugins/profile/<session>/<host>.xplane.pb`: one session of
    all hosts, which XProf shows together, if they share the directory. Processes of one host
    would write one file: there each has a session of its own.
    """

    directory: str
    steps: range
    hosts: Sequence[str]  # by process
    running: bool = False
    written: bool = False

    @property
    def session(self) -> str:
        name = f"steps_{self.steps.start}_{self.steps.stop}"
        alone = len(set(self.hosts)) == len(self.hosts)
        return name if alone else f"{name}_process_{jax.process_index()}"

    def start(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.session_id = self.session
        jax.profiler.start_trace(self.directory, profiler_options=options)
        self.running = True

    def stop(self) -> None:
        """Write it, if it has begun and is not written."""
        if self.running:
            self.running, self.written = False, True
            jax.profiler.stop_trace()

    def told(self) -> str:
        """Return lines for the end of a run: where the profile is, and what shows it."""
        if not self.written:
            return (
                f"\nno profile of steps {self.steps.start} to {self.steps.stop - 1}: the first was "
                "taken before this start"
            )
        where = ", on each host" if len(set(self.hosts)) > 1 else ""
        return (
            f"\nprofile of steps {self.steps.start} to {self.steps.stop - 1}: {self.directory}"
            f"{where}; to see it: pip install xprof && xprof --logdir={shlex.quote(self.directory)}"
        )
