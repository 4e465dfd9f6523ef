"""Texts of a run for a page that is passed on: no secret, no host name, no absolute path of the machine."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ..utils.redaction import redact

_QUOTED = re.compile(r"""(['"`])(?:file://)?~?(/(?!/)[^'"`\n]*)\1""")
_PATH = re.compile(r"""(?<![\w./~])(?:file://)?(?:~[\w.-]*)?(/[\w.@%+-][^\s'"`,;:()\[\]{}<>|*?]*)""")


class PublicText:
    """Redact texts of a run.

    Args:
        hosts: names of the machines of the run.
        folders: absolute paths that may hold spaces, such as that of the run.
    """

    def __init__(self, hosts: Iterable[str] = (), folders: Iterable[Path] = ()) -> None:
        names = sorted({name for host in hosts for name in (host, host.partition(".")[0]) if name}, key=len)[::-1]
        pattern = "|".join(map(re.escape, names))
        self._hosts = re.compile(rf"(?<![\w.-])(?:{pattern})(?![\w-])") if pattern else None
        known = {str(path): path.name for path in folders if len(path.parts) > 1}
        self._folders = [
            (re.compile(rf"{re.escape(path)}(?![\w-])"), f".../{name}")
            for path, name in sorted(known.items(), key=lambda item: -len(item[0]))
        ]

    def __call__(self, text: str, limit: int = 500) -> str:
        """Return a text without secrets, paths and hosts, of at most `limit` characters."""
        text = redact(text[: 4 * limit])
        for path, shown in self._folders:
            text = path.sub(lambda _, shown=shown: shown, text)
        text = _QUOTED.sub(lambda found: f"{found[1]}{_last_part(found[2])}{found[1]}", text)
        text = _PATH.sub(lambda found: _last_part(found[1]), text)
        if self._hosts is not None:
            text = self._hosts.sub("(host)", text)
        return text if len(text) <= limit else text[: limit - 3] + "..."


def _last_part(path: str) -> str:
    return f".../{path.rstrip('/').rpartition('/')[2]}"
