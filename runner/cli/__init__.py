"""What is typed: the rows of modes, spelling, and the catalogue of choices. Neither Hydra nor torch is imported."""
