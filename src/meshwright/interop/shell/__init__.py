"""Launch scripts of the shell, read as bash would run them, without starting anything."""
