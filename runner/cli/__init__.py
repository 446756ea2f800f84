"""What is typed: verbs and their options, spelling, and the catalogue of choices; needs neither Hydra nor torch."""
