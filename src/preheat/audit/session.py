"""One audited run: its private directory, the environment of the command, and the report."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from preheat.ahead.manifest import Unrecorded
from preheat.audit.events import EventLog, prepare_losses, read_events
from preheat.audit.images import read_loads
from preheat.audit.library import audited_environment, loadable_library
from preheat.audit.nested import announced_bundles, hand_over, outer_audit, outer_seal
from preheat.audit.origins import Origins
from preheat.audit.processes import read_processes, still_running
from preheat.audit.programs import list_compilers, static_program
from preheat.audit.report import Report, make_report
from preheat.audit.unrecorded import find_unrecorded
from preheat.build.builder import Builder
from preheat.build.opening import required_signers
from preheat.errors import InputError
from preheat.model.config import Config, SealMode
from preheat.store.bundle import Bundle

__all__ = ["AuditSession", "audit_session"]

#: Seconds in which the last processes of a command may end. Compile workers of torch look once a second
#: whether their parent still runs.
_LAST_PROCESSES = 3.0


class AuditSession:
    """Has the environment of a command, `env`, and makes the report when the command has ended."""

    def __init__(
        self,
        env: Mapping[str, str],
        directory: Path,
        library: Path,
        *,
        seal: SealMode,
        cupti: bool,
        reports: bool,
    ) -> None:
        self._config = Config.from_env(env)
        self._directory = directory
        prepare_losses(directory)
        list_compilers(directory, library, env)
        self._outer = outer_audit(env)
        if self._outer is not None and "PREHEAT_AUDIT_ONLY" not in env:  # The outer audit reports all.
            cupti = cupti if reports else "PREHEAT_AUDIT_CUPTI" in env
            reports = True
        seal = max(seal, outer_seal(env))
        self._seal = seal
        self.env, self._notes = audited_environment(
            env, directory, library, seal=seal, cupti=cupti, reports=reports
        )
        self._started = time.monotonic()
        self._since = time.time()

    def report(self, command: Sequence[str], status: int, allowed: Sequence[str] = ()) -> Report:
        """Read what the processes of the command have reported until now.

        `allowed` has the names of libraries whose compiles need not be seen.
        """
        seconds = time.monotonic() - self._started
        log = self._read()
        bundles, notes = [], list(self._notes)
        for path in (*self._config.bundles, *announced_bundles(log)):
            try:
                self._require(path)
                bundles.append(path)
            except InputError as error:
                notes.append(f"modules of a bundle: {error}")
        origins = self._origins(bundles, log)
        loads = read_loads(log, self._directory)
        return make_report(
            log, loads, origins, command=command, status=status, seconds=seconds, notes=notes,
            cupti="PREHEAT_AUDIT_CUPTI" in self.env, parent=os.getpid(),
            static=static_program(command, self.env), seal=self._seal, allowed=allowed,
        )  # fmt: skip

    def unrecorded(self) -> tuple[Unrecorded, ...]:
        """Return what the processes of the command have compiled that a recording does not have."""
        return find_unrecorded(self._read())

    def close(self) -> None:
        """Hand the reports over to an outer audit, if there is one."""
        if self._outer is not None:
            hand_over(self._directory, self._outer)

    def _require(self, path: Path) -> None:
        """Raise `InputError` for a bundle that the processes of the command do not use either."""
        load = required_signers(self._config)
        signers = None if load is None else load()
        Bundle.open(path, trust=self._config.trust_cache_dir, signers=signers).close()

    def _origins(self, bundles: Sequence[Path], log: EventLog) -> Origins:
        """Read bundles and the store, which is not opened for a command that does not use it."""
        if not log.preheat:
            return Origins(bundles, None, log, self._since, self.env)
        builder = Builder.open(replace(self._config, bundles=(), record=None))
        try:
            return Origins(bundles, builder, log, self._since, self.env)
        finally:
            builder.close()

    def _read(self) -> EventLog:
        """Read the events. Helpers of the command, such as compile workers, end shortly after it."""
        until = time.monotonic() + _LAST_PROCESSES
        while True:
            log = read_events(self._directory)
            if time.monotonic() >= until or not still_running(log, read_processes(log)):
                return log
            time.sleep(0.05)


@contextmanager
def audit_session(
    env: Mapping[str, str],
    *,
    seal: SealMode = SealMode.OFF,
    cupti: bool = True,
    reports: bool = True,
    keep: Path | None = None,
) -> Iterator[AuditSession]:
    """Yield a session with its own directory. It is removed in the end, unless `keep` names it.

    Without `reports`, the report has what was refused, and nothing else. Raises `InputError` if `keep`
    is not empty: the events of two runs cannot be told apart.
    """
    with _directory(keep) as directory, loadable_library() as library:
        session = AuditSession(env, directory, library, seal=seal, cupti=cupti, reports=reports)
        with closing(session):
            yield session


@contextmanager
def _directory(keep: Path | None) -> Iterator[Path]:
    """Yield the directory of an audit, which only its owner can read and write."""
    if keep is not None:
        _prepare_kept(keep)
        yield keep.resolve()
        return
    with TemporaryDirectory(prefix="preheat-audit-", ignore_cleanup_errors=True) as place:
        yield Path(place).resolve()


def _prepare_kept(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.chmod(0o700)
        used = any(directory.iterdir())
    except OSError as fault:
        reason = fault.strerror or str(fault)
        raise InputError(f"cannot keep events in {directory}: {reason}") from None
    if used:
        raise InputError(f"{directory} is not empty", hint="name a new directory with --keep")
