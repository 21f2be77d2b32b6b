"""The same attention in torch's own operations: page by page what the tables say, and nothing that they do not list.

For a CPU, where it shows that the tables are right; there is quicker attention for serving.
"""

import torch

from outrider.lm.flex.tables import Scoring, Tables


def walk(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tables: Tables, scoring: Scoring, /
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A Kernel. Scores are float32."""
    entries, heads, height, _ = query.shape
    size = keys.shape[2] // len(tables.places)
    offsets = torch.arange(size, device=query.device)
    listed = torch.arange(tables.pages.shape[1], device=query.device) < tables.counts[:, None]  # [entries, pages]
    slots = (tables.pages[..., None] * size + offsets).flatten(1)  # [entries, keys]
    unlisted = ~listed.repeat_interleave(size, 1)[..., None]
    # [entries, kv_heads, keys, width]; what is not listed may be another session's NaN
    key, value = (it[0][:, slots].transpose(0, 1).masked_fill(unlisted[:, None], 0).float() for it in (keys, values))
    place = (tables.places[tables.pages][..., None] * size + offsets).flatten(1)[:, None]
    seen = (place >= tables.first[..., None]) & (place <= tables.last[..., None]) & ~unlisted.transpose(1, 2)
    folded = query.float().reshape(entries, key.shape[1], -1, query.shape[-1])  # heads of a group under one another
    scores = (folded @ key.transpose(2, 3)) * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    scores = scores.view(entries, heads, height, -1).masked_fill(~seen[:, None], float("-inf"))
    summed = scores.logsumexp(-1)
    weights = (scores - summed[..., None]).exp().masked_fill(~seen[:, None], 0)
    output = weights.view(entries, key.shape[1], -1, weights.shape[-1]) @ value
    output = output.view(entries, heads, height, -1).to(query.dtype)
    return output, summed if scoring.summed else None
