"""Write the files of a run's folder, read them back and check them."""
