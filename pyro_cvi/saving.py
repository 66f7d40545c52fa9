"""Files that are whole or not there: written beside, flushed, and put in the place of the old one."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

__all__ = ["write"]


def write(state: Any, file: Any) -> None:
    """Save with torch, to an open file or a path; whatever interrupts it leaves an old file as it was.

    A path keeps the permissions of the file that it replaces; a link is followed.
    """
    if not isinstance(file, str | os.PathLike):
        torch.save(state, file)
        return
    path = Path(os.path.realpath(file))
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as part:
            torch.save(state, part)
            part.flush()
            os.fsync(part.fileno())
        mode = path.stat().st_mode if path.exists() else 0o666 & ~_umask()
        os.chmod(name, mode & 0o7777)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
    _flush_folder(path.parent)


def _umask() -> int:
    """What the process takes from the permissions of new files; it can only be read by setting it."""
    found = os.umask(0o077)
    os.umask(found)
    return found


def _flush_folder(folder: Path) -> None:
    """Let the new name outlive a loss of power, where the system can do that."""
    with suppress(OSError, AttributeError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
