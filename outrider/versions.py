"""What processes side by side must have in common; docs/operations.md (Upgrade) says what another number means."""

from outrider import __version__
from outrider.law.params import LAW_VERSION

# The package of the protos.
PROTOCOL = "outrider.v1"
# Of what the session store's scripts write. A store may hold sessions of several; each is served by those that know it.
RECORD_VERSION = "1"


def versions() -> str:
    """One line, for people."""
    return f"outrider {__version__}, law {LAW_VERSION}, protocol {PROTOCOL}, session records {RECORD_VERSION}"
