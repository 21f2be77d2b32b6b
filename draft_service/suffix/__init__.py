"""Blocks from an index of what was said before: in the request, and in earlier outputs of its tenant."""
