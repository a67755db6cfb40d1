"""Which declared function the header of a call means."""

from __future__ import annotations

from collections.abc import Collection

from engine.call_ids import NAMESPACE

MAX_HEADER = 256  # characters; a name has at most 64
DIGITS = "0123456789"


def called_function(header: str, names: Collection[str]) -> str | None:
    """The declared name, or None if the header means none of `names` or may mean several.

    The form is `functions.NAME:n`. `functions.` and `:n` may be missing; where no name fits so, their punctuation may
    be missing too, as in `functionsNAME5`.
    """
    header = header.strip()
    stems = [header.removeprefix(NAMESPACE), header]
    for counted in (True, False):
        for stem in stems:
            name = _without_number(stem) if counted else stem
            if name in names:
                return name
    stems.append(header.removeprefix(NAMESPACE.rstrip(".")))
    found = {name for stem in stems for name in _readings(stem) if name in names}
    return found.pop() if len(found) == 1 else None


def _without_number(stem: str) -> str | None:
    """`NAME` of `NAME:n`."""
    name, colon, digits = stem.rpartition(":")
    return name if colon and digits and not digits.strip(DIGITS) else None


def _readings(stem: str) -> list[str]:
    """Each NAME for which the stem is NAME, a number behind it or not, a colon between them or not."""
    shortest = len(stem.rstrip(DIGITS))
    names = [stem[:size] for size in range(len(stem), shortest - 1, -1)]
    return [*names, names[-1].removesuffix(":")]
