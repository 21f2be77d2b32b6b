"""What the services share. Imports none of them."""

import os

__version__ = "0.1.0"

# gRPC's core writes lines of its own to stderr, for example beside our one line about a busy port; what matters
# reaches us as exceptions. It reads the setting when it is first imported, which is after this.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
