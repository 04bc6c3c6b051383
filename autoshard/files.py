"""Writing files so that nothing is lost: the old content stays until the new is whole."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_whole(path: str | Path, data: bytes) -> None:
    """Write `data` to `path`, by way of a new file in the same folder that then takes its place.

    A file that was there keeps its permissions; a symlink stays one, and what it points to is
    replaced. What is no regular file (`/dev/stdout`, a pipe) is written to directly.

    Raises:
        OSError: the folder is missing or may not be written to; `path` is then as it was.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file() and not target.is_dir():
        target.write_bytes(data)
        return
    if target.is_dir():
        raise IsADirectoryError(21, "Is a directory", str(path))
    partial = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            partial.chmod(target.stat().st_mode & 0o7777)
        partial.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
