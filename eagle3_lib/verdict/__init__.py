"""What the project exists for: replay, the fault catalogue, acceptance, and the verdict. Needs no engine."""
