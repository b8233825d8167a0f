"""Settings of other frameworks, read and written: one table per framework says what each key means, and serves both directions."""
