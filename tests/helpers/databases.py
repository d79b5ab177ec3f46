"""Databases for tests: SQLite always, PostgreSQL if it is installed."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_POSTGRES = sorted(Path("/usr/lib/postgresql").glob("*/bin"))


@contextmanager
def postgres_cluster(address: str = "") -> Iterator[str | None]:
    """Yields the URL of a temporary PostgreSQL server; None if PostgreSQL is not installed.

    Args:
        address: Address that the server listens on; if empty, it uses only a Unix socket.
    """
    if not _POSTGRES or shutil.which("runuser") is None:
        yield None
        return
    binaries = _POSTGRES[-1]
    with tempfile.TemporaryDirectory(prefix="slipstream-pg-") as folder:
        shutil.chown(folder, "postgres")
        data = f"{folder}/data"
        _as_postgres(binaries / "initdb", "-D", data, "-A", "trust", "--no-sync")
        with Path(data, "pg_hba.conf").open("a", encoding="utf-8") as rules:
            rules.write("host all all all trust\n")
        options = (
            f"-c listen_addresses='{address}' -c unix_socket_directories={folder} -c fsync=off"
        )
        _as_postgres(
            binaries / "pg_ctl", "-D", data, "-w", "-l", f"{folder}/log", "-o", options, "start"
        )
        try:
            yield f"postgresql+psycopg://postgres@/postgres?host={address or folder}"
        finally:
            _as_postgres(binaries / "pg_ctl", "-D", data, "-m", "immediate", "stop")


def _as_postgres(*command: object) -> None:
    subprocess.run(
        ["runuser", "-u", "postgres", "--", *map(str, command)],
        check=True,
        capture_output=True,
        cwd="/",
    )
