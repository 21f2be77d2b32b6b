"""The orchestrator: drafts, verifies, accepts, commits, emits."""
