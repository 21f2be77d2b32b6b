"""Between the target's vocabulary and that of a draft model with another tokenizer.

Words of this package: *own* is the draft model's, ids without that word are the target's. What the target committed is
the truth: own ids are read from the text of the target's tokens, again and again, and are never the record of anything.
"""
