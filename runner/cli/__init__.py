"""Parse the command line: verbs, options, spelling, and the catalog of choices. Needs neither Hydra nor torch."""
