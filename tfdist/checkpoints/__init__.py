"""The files of checkpoints: written whole or not at all, and checked before they are used (docs/checkpoints.md)."""
