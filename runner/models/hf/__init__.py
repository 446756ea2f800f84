"""Causal language models of Hugging Face's library `transformers`."""
