"""What fits what, told before anything starts: drafter and engine version, engine and GPU, run and disk."""
