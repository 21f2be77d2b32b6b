"""`outrider doctor`: looks at a running installation from where it is called, and says what to put right."""
