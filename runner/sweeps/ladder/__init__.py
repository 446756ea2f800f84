"""`sweep=ladder`: sizes of a model trained with equal compute, and the power law of their losses."""
