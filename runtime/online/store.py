"""The buffer of one runtime: in memory, or in the user's state folder and saved when it ends."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TypeAlias

from specrun.bindings.errors import SpecrunError
from specrun.bindings.kept_file import read_kept
from specrun.bindings.models.model import Model
from specrun.runtime.online.buffer_file import (
    BUFFER_NAME,
    MOST_BYTES,
    BufferKey,
    learn_folder,
    load_rejections,
    parse_rejections,
    require_same_target,
    save_rejections,
)
from specrun.runtime.online.rejections import RejectionBuffer

LearnFrom: TypeAlias = "bool | str | os.PathLike[str]"
"""False: nothing is kept; True: in memory, until the runtime is closed; "keep": in the user's state
folder; or the path of a file."""

KEEP = "keep"


class RejectionStore:
    """A buffer with the target that it belongs to, and the file where it is kept, if any."""

    def __init__(self, buffer: RejectionBuffer, key: BufferKey, path: Path | None = None) -> None:
        self.buffer, self.key, self.path = buffer, key, path
        self._saved = buffer.n_changes

    def save(self) -> None:
        """Write what is new, where the user asked for that."""
        now = self.buffer.n_changes
        if self.path is not None and now != self._saved:
            save_rejections(self.buffer, self.path, self.key)
            self._saved = now

    def close(self) -> None:
        """Save; the buffer stays usable."""
        self.save()


def open_rejections(learn: LearnFrom, target: Model) -> RejectionStore | None:
    """Return the store that `learn` asks for, with what is kept there of this target.

    What is damaged in the user's state folder is left out, with a warning in the log. Raises as
    `load_rejections`, and SpecrunError where the folder cannot be made.
    """
    if learn is False:
        return None
    key, buffer = BufferKey.of(target), RejectionBuffer()
    if learn is True:
        return RejectionStore(buffer, key)
    path = learn_folder(key) / BUFFER_NAME if learn == KEEP else Path(learn).expanduser()
    if learn == KEEP:
        buffer = _kept(path, key) or buffer
    elif path.exists():
        load_rejections(path, key, buffer)
    if not path.exists():
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise SpecrunError(
                f"{path.parent} cannot be made ({error.strerror}); name a file elsewhere"
            ) from error
    return RejectionStore(buffer, key, path)


def _kept(path: Path, key: BufferKey) -> RejectionBuffer | None:
    """Return what the user's state folder has of a target; None if that is nothing, or damaged.

    A damaged file is renamed, so that nothing overwrites it. Raises ModelError for a whole file of
    another target.
    """

    def parse(content: bytes) -> tuple[BufferKey, RejectionBuffer]:
        buffer = RejectionBuffer()
        return parse_rejections(path, content, None, buffer), buffer

    aside = path.with_suffix(".damaged")
    what, advice = (
        "what was kept of rejected drafts",
        f"it is now {aside}, and learning begins anew",
    )
    found = read_kept(path, parse, what=what, advice=advice, most=MOST_BYTES)
    if found is None:
        with contextlib.suppress(OSError):  # usually there is none
            path.replace(aside)
        return None
    require_same_target(path, found[0], key)
    return found[1]
