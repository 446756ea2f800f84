"""What a run writes into its folder, and how it is read back and checked."""
