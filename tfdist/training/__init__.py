"""The trainer: one training step, run the same way on every synchronous backend."""
