"""Acceptance: pure functions of a block, its rows and the noise.

Words: an *accepted* token is a draft token that was kept; a *recovered* token is drawn from the residual law after the
first rejection; a *bonus* token is drawn after a block accepted whole; *plain* is the token of a round without a block.
`target_probs` is the target's law, `draft_probs` the law that the draft token was drawn from.
"""
