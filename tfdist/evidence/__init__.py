"""Proof on the user's own machine: runs whose right results are known, and what came out."""
