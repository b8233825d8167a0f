"""Gradient compression: what each scheme sends, and how its error is fed back into the next step."""
