"""The store's user as docs/reliability.md describes it."""

import re
from pathlib import Path

PASSWORD = "not-to-be-seen"
_PAGE = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text()


def _written(pattern: str) -> str:
    found = re.search(pattern, _PAGE)
    assert found is not None, pattern
    return found[1]


# Words of ACL SETUSER.
RIGHTS = _written(r"(~outrider:\* .*)").split()
CLUSTER_RIGHTS = [*RIGHTS, *_written(r"in a cluster also `(.*?)`").split()]
