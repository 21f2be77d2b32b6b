"""Limits of the wire, kept by both sides: what is beyond them is refused before anything is made of it."""

# Tokens of a block.
MAX_LOOKAHEAD = 64
# Entries of one row of a draft law. Truncation to 64 is as good as none; a law of the whole vocabulary is megabytes.
MAX_LAW_TOP = 1_024
# What `law_top` of 0 means.
DEFAULT_LAW_TOP = 32
# Characters of a session's name.
MAX_SESSION_ID = 128
# Layers whose features one item asks for, and the bytes that they take.
MAX_FEATURE_LAYERS = 4
MAX_FEATURE_BYTES = 8 << 20
# Characters of a tenant's name between services: one proved by a token, and one that a proxy said.
MAX_TENANT = 256
# Commands, and events, of one message of the draft stream.
MAX_COMMANDS = 1_024
# Bytes of an event beside its laws.
EVENT_BYTES = 4_096
LAW_ENTRY_BYTES = 8
# The largest event: the longest block with the widest laws.
MAX_EVENT_BYTES = EVENT_BYTES + MAX_LOOKAHEAD * MAX_LAW_TOP * LAW_ENTRY_BYTES
