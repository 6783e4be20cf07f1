"""What runs in an engine's own interpreter or worker process. It imports as little of the project as it can."""
