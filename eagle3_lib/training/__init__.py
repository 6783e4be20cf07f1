"""Training of a drafter on stored features."""
