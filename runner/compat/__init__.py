"""Other libraries' interfaces: code that was written for them runs here with another import."""
