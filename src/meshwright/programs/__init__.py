"""Everything that moves, as plain data: collectives and pipeline schedules, built by pure functions, read by small interpreters."""
