"""When something happens: the events of a run, and lengths and positions of training."""
