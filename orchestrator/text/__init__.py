"""Text and tokens: prompts in, incremental text out, and where a generation ends."""
