"""The proof of a plan on a user's own module: `code` finds what the user wrote, `step` trains it on a rank, `prove` compares the two sides."""
