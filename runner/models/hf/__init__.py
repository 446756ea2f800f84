"""Models of Hugging Face's library `transformers`, and adapters of its library `peft`."""
