"""The causal-LM runtime: load, paged KV, ragged forward."""
