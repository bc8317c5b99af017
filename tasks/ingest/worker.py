"""The program of a process that parses chunks; see `tasks.ingest.pool`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

import pyarrow as pa


class _NoPandas(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("not needed here", name=fullname)


def _settle_without_pandas() -> None:
    """Let Arrow find no pandas.

    It looks for it once, when it first makes an array, and importing pandas takes as long as all
    else that a worker needs.
    """
    finder = _NoPandas()
    sys.meta_path.insert(0, finder)
    try:
        pa.array([""])
    finally:
        sys.meta_path.remove(finder)


if __name__ == "__main__":
    _settle_without_pandas()
    from tasks.ingest.pool import serve_parent

    serve_parent(int(sys.argv[1]))
