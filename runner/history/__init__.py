"""Runs made before that begin again: found, resumed, rerun and forked."""
