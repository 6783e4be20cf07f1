"""The target's features for training: backends that compute them, and the sharded store that keeps them."""
